"""A disk that hangs costs a request its stored prefix, not its answer, and what it says late spoils nobody's rows."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvd.worker import arrival, fetch, restore
from kvd.worker.assemble import READERS
from kvd.worker.scheduler import Limits
from tests.worker.gate import Gate
from tests.worker.rig import PATIENCE, Answer, B, Rig, counts, ids, same, until

CHUNK = 4 * B
KEPT = 4
"""blocks that come before the disk hangs: up to the grid, so that what is computed behind them has the same bits"""


class Hanging(Gate):
    """Of the shards in `held` the reads hang, of all if it is None. `late`: what they say in the end is garbage."""

    def __init__(self) -> None:
        super().__init__()
        self.opened.set()
        self.held: set[int] | None = None
        self.late = False
        self.waiting = threading.Semaphore(0)
        self.read: list[int] = []
        """shards whose rows were read, since `hang`"""

    def holds(self, fd: int, offset: int) -> bool:
        return offset > 0 and (self.held is None or os.fstat(fd).st_ino in self.held)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset > 0:
            self.read.append(os.fstat(fd).st_ino)
        hangs = not self.opened.is_set() and self.holds(fd, offset)
        if hangs:
            self.waiting.release()
        got = super().preadv(fd, buffers, offset)
        for view in buffers if hangs and self.late else ():
            view[:] = b"\xff" * view.nbytes
        return got

    def wait(self, reads: int = READERS) -> None:
        """Until so many more reads hang."""
        for _ in range(reads):
            assert self.waiting.acquire(timeout=PATIENCE)


@pytest.fixture
def gate() -> Hanging:
    return Hanging()


@pytest.fixture(params=["in place", "staged"])
def rig(request: pytest.FixtureRequest, gate: Hanging, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    if request.param == "staged":
        monkeypatch.setattr("kvd.cache.pool.addressable", lambda: False)
    with Rig(files=lambda: gate, limits=Limits(chunk=CHUNK), pool_blocks=40) as rig:
        yield rig
        gate.opened.set()


def hang(
    rig: Rig, gate: Hanging, tokens: list[int], first: int = 0, stop: int | None = None, *, reads: int = READERS,
    **body: Any,
) -> Answer:
    """Memory is gone, and the shards of a prompt's blocks from `first` on hang, below `stop` if that is given: asked
    for it, so many reads do."""
    rig.on_engine(rig.cache.clear)
    gate.held = {os.stat(rig.shard(tokens, at)).st_ino for at in range(first, stop or len(tokens) // B)}
    gate.read.clear()
    gate.opened.clear()
    running = rig.send(tokens=tokens, logprobs=True, top_logprobs=5, **body)
    gate.wait(reads)
    return running


def ordered(rig: Rig) -> int:
    """Restores that are waited for."""
    return len(rig.engine._admission.fetcher._open)


def run_out(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that hang now have done so for the limit."""
    with monkeypatch.context() as time:
        time.setattr(restore, "HUNG_S", 0.0)
        until(lambda: not rig.on_engine(lambda: ordered(rig)))


def answers(rig: Rig, gate: Hanging) -> None:
    """The disk is back, and every read with it."""
    gate.opened.set()
    until(lambda: not rig.on_engine(lambda: len(rig.engine._admission.fetcher._left)))


def near(a: Answer, b: Answer) -> None:
    """Blocks that are held may lie where a sequence would have gone on: it then has two runs, and other products."""
    assert a.text == b.text
    pairs = zip(a.logprobs, b.logprobs, strict=True)
    assert all(one["logprob"] == pytest.approx(other["logprob"], abs=1e-3) for one, other in pairs)


def live(rig: Rig) -> int:
    return int(rig.on_engine(lambda: rig.cache.stats.blocks_live))


def test_a_request_computes_what_has_not_come_and_keeps_what_has(
    rig: Rig, gate: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ids((KEPT + READERS) * B, 1)
    cold = rig.ask(asked)
    running = hang(rig, gate, asked, KEPT)
    assert not running.ended.is_set()
    run_out(rig, monkeypatch)
    same(cold, running.end())
    assert counts(running) == (READERS * B, 0, KEPT * B, 0)
    assert running.stats["miss_reason"] == "read_failed"
    answers(rig, gate)
    rig.on_engine(rig.cache.clear)
    again = rig.ask(asked)
    assert counts(again) == (1, 0, len(asked) - 1, 0)
    same(cold, again)


def test_a_late_read_finds_its_block_where_it_left_it(
    rig: Rig, gate: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool is small: others take every block there is."""
    asked, other = ids((KEPT + READERS) * B, 2), ids(20 * B, 3)
    cold, alone = rig.ask(asked), rig.ask(other, max_tokens=3 * B, logit_bias={2: -100})
    gate.late = True
    running = hang(rig, gate, asked, KEPT)
    run_out(rig, monkeypatch)
    same(cold, running.end())
    assert live(rig) == READERS
    stream = rig.send(tokens=other, max_tokens=3 * B, logit_bias={2: -100}, logprobs=True, top_logprobs=5)
    rig.ask(ids(12 * B, 4))
    answers(rig, gate)
    same(alone, stream.end())
    assert live(rig) == 0
    assert rig.ask(other, max_tokens=3 * B, logit_bias={2: -100}).text == alone.text
    same(cold, rig.ask(asked))


def test_where_every_reader_hangs_others_compute_at_once_until_the_disk_is_back(
    rig: Rig, gate: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, other = ids(READERS * B, 5), ids(5 * B, 6)
    cold, alone = rig.ask(asked), rig.ask(other)
    running = hang(rig, gate, asked)
    with monkeypatch.context() as time:
        time.setattr(restore, "HUNG_S", 0.0)
        again = rig.ask(other)
        assert rig.on_engine(rig.engine.stats)["reads_hung"] == READERS
    assert not rig.engine.readers._pieces
    same(alone, again)
    assert counts(again) == (len(other), 0, 0, 0) and again.stats["miss_reason"] == "read_failed"
    same(cold, running.end())
    answers(rig, gate)
    rig.on_engine(rig.cache.clear)
    assert counts(rig.ask(other)) == (1, 0, len(other) - 1, 0)
    assert counts(rig.ask(asked)) == (1, 0, len(asked) - 1, 0)
    assert rig.on_engine(rig.engine.stats)["reads_hung"] == 0


def test_one_file_that_hangs_holds_one_reader_and_costs_only_those_who_want_it(
    rig: Rig, gate: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival, "GROUP_BYTES", 1)
    asked, also, other = ids((KEPT + 2) * B, 16), ids((KEPT + 1) * B, 16) + ids(B, 17), ids(5 * B, 18)
    cold, with_it, alone = rig.ask(asked), rig.ask(also), rig.ask(other)
    rig.restart()
    assert len(rig.engine._admission.fetcher._groups) > 1
    running = hang(rig, gate, asked, KEPT, KEPT + 1, reads=1)
    bad = next(iter(gate.held))

    def restored() -> None:
        again = rig.ask(other)
        same(alone, again)
        assert counts(again) == (1, 0, len(other) - 1, 0)
        rig.on_engine(rig.cache.clear)

    restored()
    restored()
    assert not running.ended.is_set()
    with monkeypatch.context() as time:
        time.setattr(restore, "HUNG_S", 1.0)
        until(lambda: rig.on_engine(running.ended.is_set))  # asked, the engine looks at the limit anew
        same(cold, running.end())
        assert counts(running) == (2 * B, 0, KEPT * B, 0) and running.stats["miss_reason"] == "read_failed"
        rig.on_engine(rig.cache.clear)
        restored()
        second = rig.ask(also)
        same(with_it, second)
        assert counts(second) == (2 * B, 0, KEPT * B, 0) and second.stats["miss_reason"] == "read_failed"
        restored()
        assert rig.on_engine(rig.engine.stats)["reads_hung"] == 1
    assert gate.read.count(bad) == 1
    answers(rig, gate)
    rig.on_engine(rig.cache.clear)
    assert counts(rig.ask(also)) == (1, 0, len(also) - 1, 0)


def test_one_read_that_hangs_is_enough_where_none_has_come_back_since(
    rig: Rig, gate: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, other = ids(B, 14), ids(B, 15)
    cold, alone = rig.ask(asked), rig.ask(other)
    running = hang(rig, gate, asked, reads=1)
    run_out(rig, monkeypatch)
    same(cold, running.end())
    with monkeypatch.context() as time:
        submitted: list[object] = []
        time.setattr(restore, "HUNG_S", 0.0)
        time.setattr(rig.engine.readers, "submit", submitted.append)
        again = rig.ask(other)
    assert not submitted
    same(alone, again)
    assert counts(again) == (B, 0, 0, 0) and again.stats["miss_reason"] == "read_failed"
    answers(rig, gate)
    rig.on_engine(rig.cache.clear)
    assert counts(rig.ask(other)) == (1, 0, B - 1, 0)


def test_a_disk_of_which_one_file_hangs_is_found_well_without_anybody_waiting_for_it(
    rig: Rig, gate: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, other = ids(B, 19), ids(3 * B, 20)
    cold, alone = rig.ask(asked), rig.ask(other)
    running = hang(rig, gate, asked, reads=1)
    with monkeypatch.context() as time, capture_logs() as logs:
        time.setattr(restore, "HUNG_S", 0.0)
        until(lambda: not rig.on_engine(lambda: ordered(rig)))
        same(cold, running.end())
        first = rig.ask(other)
        assert counts(first) == (3 * B, 0, 0, 0) and first.stats["miss_reason"] == "read_failed"
        until(lambda: not rig.engine.readers.silent)
        rig.on_engine(rig.cache.clear)
    again = rig.ask(other)
    assert counts(again) == (1, 0, 3 * B - 1, 0)
    same(alone, again)
    assert [one["reads_hung"] for one in logs if one["event"] == "the disk answers again"] == [1]
    answers(rig, gate)


def test_a_restore_that_waits_behind_reads_that_hang_is_given_up_with_them(
    rig: Rig, gate: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, other = ids(READERS * B, 7), ids(3 * B + 5, 8)
    cold, alone = rig.ask(asked), rig.ask(other)
    running = hang(rig, gate, asked)
    behind = rig.send(tokens=other, logprobs=True, top_logprobs=5)
    until(lambda: rig.on_engine(lambda: ordered(rig)) == 2)
    with capture_logs() as logs:
        run_out(rig, monkeypatch)
        same(cold, running.end())
        same(alone, behind.end())
        assert counts(behind) == (len(other), 0, 0, 0) and behind.stats["miss_reason"] == "read_failed"
        assert live(rig) == READERS
        answers(rig, gate)
    assert [(one["log_level"], one["event"].split(":")[0]) for one in logs] == [
        ("warning", "the disk hangs"), ("info", "the disk answers again"),
    ]  # fmt: skip


def test_a_front_that_is_computed_meanwhile_goes_on_through_what_hangs(
    rig: Rig, gate: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = CHUNK
    asked = ids(front + (KEPT + READERS) * B, 9)
    cold = rig.ask(asked)
    monkeypatch.setattr(fetch, "meet", lambda rates, start, cuts, both: front if both and start < front else start)
    running = hang(rig, gate, asked, front // B + KEPT)
    running.wait_rows(front)
    run_out(rig, monkeypatch)
    near(cold, running.end())
    assert counts(running) == (front + READERS * B, 0, KEPT * B, 0)
    assert running.stats["miss_reason"] == "read_failed"
    assert live(rig) == READERS
    answers(rig, gate)
    assert live(rig) == 0


def test_the_engine_gives_up_without_being_woken(
    rig: Rig, gate: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ids(READERS * B, 10)
    cold = rig.ask(asked)
    rig.on_engine(rig.cache.clear)
    monkeypatch.setattr(restore, "HUNG_S", 0.1)
    gate.opened.clear()
    same(cold, rig.ask(asked))


def test_of_a_request_that_has_gone_only_the_blocks_being_read_are_held(
    rig: Rig, gate: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, other = ids(3 * READERS * B, 11), ids(B, 13)
    rig.ask(asked)
    rig.ask(other)
    running = hang(rig, gate, asked)
    rig.engine.cancel(running.id, "asked")
    running.end()
    assert live(rig) == 3 * READERS
    run_out(rig, monkeypatch)
    assert live(rig) == READERS
    gate.opened.set()
    until(lambda: not rig.heart.pulse.stats["blocks_live"])  # of itself: the engine is not asked
    assert counts(rig.ask(other)) == (1, 0, B - 1, 0)
    assert len(gate.read) == READERS + 1


def test_a_stop_does_not_wait_for_reads_that_hang(
    rig: Rig, gate: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ids(READERS * B, 12)
    cold = rig.ask(asked)
    hang(rig, gate, asked)
    with monkeypatch.context() as time:
        time.setattr(restore, "HUNG_S", 0.0)
        rig.stop()
    assert sum(thread.name.startswith("reader-") for thread in threading.enumerate()) >= READERS
    gate.opened.set()
    rig.start()
    same(cold, rig.ask(asked))
