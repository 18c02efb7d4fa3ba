"""The first pass behind a restore runs while later layers are still being read, and never on anything unchecked.

The reads of every block's last layer are held until the test lets them go: whatever ends before has not waited for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest

from kvclient.errors import Cancelled
from kvd.worker import arrival
from tests.worker.gate import Gate
from tests.worker.rig import PATIENCE, B, Rig, counts, ids, same

LAYERS = 4


class LastLayer(Gate):
    """Holds the reads in the last layer of a shard."""

    def holds(self, fd: int, offset: int) -> bool:
        size = os.fstat(fd).st_size
        return offset > 0 and offset >= size - (size - 4096) // LAYERS


class Watched:
    """A layer of the model that says, once, when its rows have really been computed."""

    def __init__(self, layer: Any, computed: Callable[[], object]) -> None:
        self._layer = layer
        self._computed = [computed]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        out = self._layer(*given, **named)
        mx.eval(out)
        if self._computed:
            self._computed.pop()()
        return out


@pytest.fixture(params=["in place", "staged"])
def addressable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "staged":
        monkeypatch.setattr("kvd.cache.pool.addressable", lambda: False)
    return str(request.param)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = LastLayer()
    gate.opened.set()
    yield gate
    gate.opened.set()


@pytest.fixture
def rig(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(arrival, "GROUP_BYTES", 1)
    with Rig(files=lambda: gate, model={"layers": LAYERS}) as rig:
        yield rig
        gate.opened.set()


def restart(rig: Rig, gate: Gate, then: Callable[[], object]) -> None:
    """Memory is gone and the last layer's reads are held; `then` is called when all layers but that are computed."""
    rig.restart()
    watch(rig, then)
    gate.reached.clear()
    gate.opened.clear()


def watch(rig: Rig, then: Callable[[], object]) -> None:
    def install() -> None:
        layers = rig.engine._computer._model.model.layers
        layers[-2] = Watched(layers[-2], then)

    rig.on_engine(install)


@pytest.mark.parametrize("kv", ["native", "k8v8"])
@pytest.mark.parametrize(
    ("stored", "kept", "new"),
    [(4 * B, 4 * B, 0), (4 * B + 5, 4 * B + 5, 0), (4 * B, 4 * B, 20), (3 * B + 5, 3 * B + 5, 1),
     (4 * B, 2 * B + 3, 20), (4 * B, 2 * B + 3, 150), (B, B - 1, 9)],
)  # fmt: skip
def test_compute_begins_before_the_last_layer_is_read_and_gives_the_same_bits(
    rig: Rig, gate: Gate, addressable: str, kv: str, stored: int, kept: int, new: int
) -> None:
    rig.kv = kv
    rig.restart()
    first = ids(stored, 7)
    asked = first[:kept] + ids(new, 8)
    said = rig.ask(first)
    cold = rig.ask(asked, cache="off")
    restart(rig, gate, gate.opened.set)
    again = rig.ask(asked)
    assert counts(again) == (max(new, 1), 0, len(asked) - max(new, 1), 0)
    assert (again.stats["first_divergence"] or {}).get("token") == (kept if new else None)
    same(cold, again)
    same(cold, rig.ask(asked))
    same(said, rig.ask(first))


def test_rows_fed_are_those_reported(rig: Rig, gate: Gate) -> None:
    prompt = ids(4 * B, 9)
    rig.ask(prompt)
    restart(rig, gate, gate.opened.set)
    assert counts(rig.ask(prompt + ids(30, 10), max_tokens=1)) == (30, 0, 4 * B, 0)
    assert rig.engine._computer.rows_fed == 30


def test_a_flipped_bit_in_the_last_layer_is_found_while_the_pass_waits(rig: Rig, gate: Gate, addressable: str) -> None:
    prompt, asked = ids(4 * B, 22), ids(4 * B, 22) + ids(20, 23)
    rig.ask(prompt)
    cold = rig.ask(asked, cache="off")
    shard = rig.shard(prompt, 1)

    def damage() -> None:
        data = bytearray(shard.read_bytes())
        data[-5] ^= 1
        with open(shard, "r+b") as file:
            file.write(data)
        gate.opened.set()

    restart(rig, gate, damage)
    again = rig.ask(asked)
    assert counts(again) == (len(asked) - B, 0, B, 19)
    assert again.stats["miss_reason"] == "checksum"
    same(cold, again)
    same(cold, rig.ask(asked))
    gate.opened.set()
    rig.restart()
    after = rig.ask(asked)
    assert counts(after) == (1, 0, len(asked) - 1, 0)
    same(cold, after)


def test_a_shard_that_vanishes_while_the_pass_waits_is_a_miss_from_there_on(rig: Rig, gate: Gate) -> None:
    prompt = ids(6 * B, 24)
    cold = rig.ask(prompt)
    restart(rig, gate, lambda: (rig.shard(prompt, 5).unlink(missing_ok=True), gate.opened.set()))
    again = rig.ask(prompt)
    assert counts(again) == (B, 0, 5 * B, 1)
    assert again.stats["miss_reason"] == "vanished"
    same(cold, again)


def test_a_read_error_in_the_last_layer_is_a_miss_and_no_damage(rig: Rig, gate: Gate, addressable: str) -> None:
    prompt = ids(4 * B, 25)
    cold = rig.ask(prompt)
    broken = os.stat(rig.shard(prompt, 2)).st_ino
    gate.fails = lambda fd: os.fstat(fd).st_ino == broken
    restart(rig, gate, gate.opened.set)
    again = rig.ask(prompt)
    assert counts(again) == (2 * B, 0, 2 * B, 1)
    assert again.stats["miss_reason"] == "read_failed"
    same(cold, again)
    gate.fails = lambda fd: False
    rig.restart()
    assert counts(rig.ask(prompt))[0] == 1


def test_a_failure_of_the_model_in_such_a_pass_ends_one_request(rig: Rig, gate: Gate) -> None:
    prompt = ids(4 * B, 26)
    cold = rig.ask(prompt)

    def fail() -> None:
        raise RuntimeError("device lost")

    restart(rig, gate, fail)
    failed = rig.send(tokens=prompt).end()
    assert failed.problem().code == "internal"
    gate.opened.set()
    again = rig.ask(prompt)
    assert counts(again)[0] == 1
    same(cold, again)


def test_a_cancel_ends_a_pass_that_waits(rig: Rig, gate: Gate, addressable: str) -> None:
    prompt, asked = ids(4 * B, 30), ids(4 * B, 30) + ids(20, 31)
    rig.ask(prompt)
    cold = rig.ask(asked, cache="off")
    waiting = threading.Event()
    restart(rig, gate, waiting.set)
    running = rig.send(tokens=asked)
    assert waiting.wait(PATIENCE)
    rig.engine.cancel(running.id, "asked")
    assert running.end().body["choices"][0]["finish_reason"] == "cancelled"
    gate.opened.set()
    again = rig.ask(asked)
    assert counts(again)[0] == 20
    same(cold, again)


def test_whoever_comes_while_a_pass_waits_is_served(rig: Rig, gate: Gate) -> None:
    prompt, other = ids(4 * B, 32), ids(40, 33)
    cold, alone = rig.ask(prompt), rig.ask(other, cache="off")
    waiting = threading.Event()
    restart(rig, gate, waiting.set)
    running = rig.send(tokens=prompt, logprobs=True, top_logprobs=5)
    assert waiting.wait(PATIENCE)
    same(alone, rig.ask(other, cache="off"))
    assert not running.ended.is_set()
    gate.opened.set()
    same(cold, running.end())
    assert counts(running) == (1, 0, len(prompt) - 1, 1)


def test_a_pass_that_was_left_spoils_no_block_it_wrote_into(rig: Rig, gate: Gate, addressable: str) -> None:
    prompt = ids(4 * B, 42)
    asked = prompt[: 2 * B + 3] + ids(20, 43)
    said = rig.ask(prompt)
    cold, alone = rig.ask(asked, cache="off"), rig.ask(ids(40, 44), cache="off")
    waiting = threading.Event()
    restart(rig, gate, waiting.set)
    running = rig.send(tokens=asked, logprobs=True, top_logprobs=5)
    assert waiting.wait(PATIENCE)
    same(alone, rig.ask(ids(40, 44), cache="off"))
    gate.opened.set()
    same(cold, running.end())
    assert counts(running) == (20, 0, 2 * B + 3, 19)
    same(said, rig.ask(prompt))
    same(cold, rig.ask(asked))


def test_streams_go_on_while_a_prefix_is_read(rig: Rig, gate: Gate) -> None:
    prompt, other = ids(4 * B, 34), ids(40, 35)
    cold = rig.ask(prompt)
    gate.reached.clear()
    rig.restart()
    stream = rig.send(tokens=other, max_tokens=200, logit_bias={2: -100})
    stream.wait_for("text")
    gate.opened.clear()
    running = rig.send(tokens=prompt, logprobs=True, top_logprobs=5)
    assert stream.end().stats["completion_tokens"] == 200
    assert not running.ended.is_set()
    gate.opened.set()
    same(cold, running.end())


def test_two_requests_that_restore_one_prefix_both_get_it(rig: Rig, gate: Gate, addressable: str) -> None:
    prompt = ids(4 * B, 36)
    asked = [prompt + ids(20, 37), prompt + ids(30, 38), prompt]
    rig.ask(prompt)
    cold = [rig.ask(one, cache="off") for one in asked]
    waiting = threading.Event()
    restart(rig, gate, waiting.set)
    running = [rig.send(tokens=asked[0], logprobs=True, top_logprobs=5)]
    assert waiting.wait(PATIENCE)
    running += [rig.send(tokens=one, logprobs=True, top_logprobs=5) for one in asked[1:]]
    running[-1].wait_for("queued")
    gate.opened.set()
    for one, alone in zip(running, cold, strict=True):
        assert one.end().text == alone.text
    assert [counts(one)[0] for one in running] == [20, 30, 1]


def test_a_stop_in_the_middle_ends_the_request_and_the_threads(rig: Rig, gate: Gate) -> None:
    prompt = ids(4 * B, 39)
    cold = rig.ask(prompt)
    waiting = threading.Event()
    restart(rig, gate, waiting.set)
    running = rig.send(tokens=prompt)
    assert waiting.wait(PATIENCE)
    rig.engine.stop(0.0)
    assert isinstance(running.end().problem(), Cancelled)
    gate.opened.set()
    rig.stop()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader-")]
    rig.start()
    same(cold, rig.ask(prompt))
