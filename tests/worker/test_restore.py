"""Reading a prefix: whatever fails in it is a miss, never another answer."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Sequence

import pytest

from kvd.store.faults import Faults, FaultyFiles
from kvd.store.files import RealFiles
from kvd.worker import arrival, fetch
from kvd.worker.scheduler import Limits
from tests.worker.rig import B, Rig, counts, ids, same


@pytest.mark.parametrize(
    ("call", "error"), [("open", "EMFILE"), ("stat", "EIO"), ("preadv", "EIO"), ("preadv", "short")]
)
def test_whichever_call_fails_the_answer_is_the_same(call: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "GROUP_BYTES", 1)
    faults = Faults()
    with Rig(files=lambda: FaultyFiles(faults)) as rig:
        prompt = ids(3 * B, 40)
        asked = prompt + ids(9, 41)
        rig.ask(prompt)
        cold = rig.ask(asked, cache="off")
        missed = False
        for nth in range(1, 100):
            rig.on_engine(rig.cache.clear)
            faults.calls.clear()
            faults.fired, faults.call, faults.error, faults.nth = 0, call, error, nth
            again = rig.ask(asked, cache="read")
            faults.call = ""
            same(cold, again)
            if not faults.fired:
                break
            assert (counts(again)[0] - 9) % B == 0
            missed |= counts(again)[0] > 9
        assert missed == (error != "short")
        assert counts(again)[:3] == (9, 0, 3 * B)


class Rough(RealFiles):
    """Rows come late, some not at all."""

    def __init__(self, source: random.Random) -> None:
        super().__init__()
        self._source = source

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        fate = self._source.random()
        if offset and fate < 0.3:
            time.sleep(fate / 50)
        if offset and fate > 0.995:
            raise OSError(errno.EIO, "a bad sector")
        return super().preadv(fd, buffers, offset)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_whoever_comes_and_goes_gets_what_is_right(seed: int, staged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes that part anywhere, in any order, with cancels, restarts and a small pool, from one end or from both."""
    source = random.Random(seed)
    monkeypatch.setattr(arrival, "GROUP_BYTES", 1)
    monkeypatch.setattr(
        fetch, "meet", lambda rates, start, cuts, both: source.choice(cuts)[0] if source.random() < 0.5 else start
    )
    if staged:
        monkeypatch.setattr("kvd.cache.pool.addressable", lambda: False)
    trunks = [ids(12 * B + 5, number) for number in range(3)]
    prompts = [trunk[: source.randrange(B, len(trunk))] + ids(source.randrange(90), 9) for trunk in 4 * trunks] + trunks
    options = {"max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    with Rig(files=lambda: Rough(source), model={"layers": 4}, limits=Limits(chunk=64), pool_blocks=60) as rig:
        for trunk in trunks:
            rig.ask(trunk)
        alone = [rig.send(tokens=prompt, cache="off", **options).end() for prompt in prompts]
        for _ in range(60):
            if source.random() < 0.5:
                rig.on_engine(rig.cache.clear)
            if source.random() < 0.1:
                rig.restart()
            running = []
            for _ in range(source.randrange(1, 5)):
                which = source.randrange(len(prompts))
                cache = source.choice(["use", "read"])
                running.append((which, rig.send(tokens=prompts[which], cache=cache, **options)))
                if source.random() < 0.2:
                    rig.engine.cancel(running[-1][1].id, "asked")
            for which, answer in running:
                answer.end().check()
                for said, right in zip(answer.logprobs, alone[which].logprobs, strict=False):
                    if said["id"] != right["id"]:
                        best, second = (one["logprob"] for one in right["top"])
                        assert best - second < 2e-3
                        break
                    assert said["logprob"] == pytest.approx(right["logprob"], abs=1e-3)


class Hung(RealFiles):
    """Reads that do not come back while the gate is shut, of shards and of their headers alike."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def open(self, path: str) -> int:
        self.gate.wait(60)
        return super().open(path)


def test_a_disk_that_hangs_stops_only_those_who_wait_for_it() -> None:
    """Not even where a prompt leaves what is stored is looked up on it."""
    files = Hung()
    with Rig(files=lambda: files) as rig:
        prompt = ids(2 * B, 50)
        rig.ask(prompt + ids(70, 51))
        rig.on_engine(rig.cache.clear)
        files.gate.clear()
        waiting = rig.send(tokens=prompt + ids(20, 51) + ids(9, 52), max_tokens=2)
        other = rig.ask(ids(30, 53))
        assert other.stats["first_divergence"]["token"] == 0 and counts(other)[0] == 30
        files.gate.set()
        assert counts(waiting.end())[0] == 9
