"""F18: SIGKILL at random moments and at every named point; the store's folder lives on through all of them."""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import tempfile
import time

from kvd.store.base import Limits, Reservation
from kvd.store.files import POINTS, RealFiles
from kvd.store.shard import offer_of, store_shard
from kvd.store.store import Store
from torments.actor import Actor
from torments.blocks import payload
from torments.oracle import Outcome, aftermath, du, leftovers, room

LIMIT = room(1_200_000)
HELD = 6
"""prompts that are pinned at a time: the oracle's; all others may be evicted"""
PASSAGES = (1, 2, 7, 30)
"""at a kill point: which passage through it is the last"""
OVER, KEPT, FREE, SAMPLED = b"O", b"K", b"F", b"S"


class Deadly(RealFiles):
    """Kills its process at a named point, at the Nth passage through it; "" for never."""

    def __init__(self, point: str, passage: int = 1) -> None:
        self._point = point
        self._passages = passage

    def point(self, name: str) -> None:
        if name == self._point:
            self._passages -= 1
            if not self._passages:
                os.kill(os.getpid(), signal.SIGKILL)


class Watched(Deadly):
    """Measures the folder at every named point, from inside: no file moves meanwhile."""

    def __init__(self, folder: str, pipe: int, point: str, passage: int) -> None:
        super().__init__(point, passage)
        self._folder = folder
        self._pipe = pipe

    def point(self, name: str) -> None:
        os.write(self._pipe, (OVER if du(self._folder) > LIMIT else SAMPLED) + b"\n")
        super().point(name)


def victim(folder: str, pipe: int, seed: int, files: RealFiles) -> None:
    """Store prompts for ever, pin every fourth; say which are acknowledged and held (`K seed`), and, before it lets
    go of one, which are not any more (`F seed`)."""
    store = Store.open(folder, Limits(LIMIT), files)
    while store.tend():
        pass
    actor = Actor(store, files)
    rng = random.Random(seed)
    held: list[int] = []
    for number in range(100_000):
        name = seed * 1_000_000 + number * 4 + rng.randrange(4)
        tokens = prompt(name)
        durable = actor.put(tokens, group=rng.random() < 0.5) == len(tokens)
        if durable and number % 4 == 0:
            store.pin(actor.namespace, [block.chain for block in actor.blocks(tokens)])
            os.write(pipe, KEPT + b" %d\n" % name)
            held.append(name)
        if len(held) > HELD // 2:
            _free(actor, pipe, held.pop(0))
        actor.get(prompt(name - rng.randrange(20)))
        if rng.random() < 0.2:
            store.tend()
        if store.core.counters["evicted.full_pinned"]:
            raise RuntimeError("a pinned block was evicted although the limit was never lowered")


def _free(actor: Actor, pipe: int, name: int) -> None:
    os.write(pipe, FREE + b" %d\n" % name)
    for block in actor.blocks(prompt(name)):
        actor.store.unpin(block.chain)


def prompt(name: int) -> list[int]:
    """Token ids that some prompts share: a common root, a branch, an own end."""
    rng = random.Random(name)
    return [1, 2, 3, 4, name // 64 % 8, 5, 5, 5, *(rng.randrange(50_000) for _ in range(2 + name % 9))]


def run(quick: bool = False, kills: int = 300) -> Outcome:
    outcome = Outcome("SIGKILL")
    with tempfile.TemporaryDirectory(prefix="kvd") as base:
        folder = os.path.join(base, "store")
        kept: set[int] = set()
        rng = random.Random(4)
        seed = 0
        for seed in range(1, (6 if quick else kills) + 1):
            with outcome.run(f"kill {seed}"):
                outcome.counts["killed at a random moment"] += 1
                _once(outcome, folder, kept, seed, "", 0, 0.004 + rng.random() ** 2 * 0.25)
        for point in POINTS:
            for passage in PASSAGES[: 1 if quick else None]:
                seed += 1
                with outcome.run(f"{point} #{passage}"):
                    outcome.counts[f"killed {point}"] += 1
                    _once(outcome, folder, kept, seed, point, passage, 10.0)
        for point in POINTS[:3]:
            with outcome.run(f"worker {point}"):
                outcome.counts[f"worker killed {point}"] += 1
                _worker(outcome, os.path.join(base, f"worker-{point}"), point)
    return outcome


def _worker(outcome: Outcome, folder: str, point: str) -> None:
    """Only the writer dies, in a process of its own; the owner is told and goes on."""
    with Store.open(folder, Limits(LIMIT)) as store:
        actor = Actor(store)
        actor.put(prompt(1))
        block = actor.blocks(prompt(2))[-1]
        place = store.reserve(offer_of(block))
        assert isinstance(place, Reservation)
        child = os.fork()
        if child == 0:
            store_shard(Deadly(point), place.temp, place.final, block, payload(block))
            os._exit(1)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            outcome.fail(f"the worker was not killed {point}")
        store.abandon(place.id, "worker_lost")
        leftovers(outcome, store, f"worker {point}")
        if actor.put(prompt(2)) != len(prompt(2)):
            outcome.fail(f"not stored by the next worker: {actor.reasons}")
    aftermath(outcome, folder, Limits(LIMIT), [prompt(1), prompt(2)], f"worker {point}")


def _once(
    outcome: Outcome, folder: str, kept: set[int], seed: int, point: str, passage: int, seconds: float
) -> None:
    """One victim, from its start to the check behind its death. It lives for `seconds` from its first word on, or to
    its kill point."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _be_victim(folder, writing, seed, Watched(folder, writing, point, passage))
    os.close(writing)
    died = _listen(outcome, reading, kept, child, seconds)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
        outcome.fail(f"victim {seed} ended by itself with status {status}")
    if point and not died:
        outcome.fail(f"victim {seed} was never killed {point} #{passage}")
    outcome.sample(folder, LIMIT)
    aftermath(outcome, folder, Limits(LIMIT), [prompt(name) for name in sorted(kept)], f"victim {seed} {point}")
    _trim(folder, kept)


def _be_victim(folder: str, pipe: int, seed: int, files: RealFiles) -> None:
    try:
        victim(folder, pipe, seed, files)
    except BaseException as problem:  # noqa: BLE001  a forked child must not return into its parent's code
        print(f"victim {seed}: {problem!r}", file=sys.stderr, flush=True)
    os._exit(1)


def _listen(outcome: Outcome, pipe: int, kept: set[int], child: int, seconds: float) -> bool:
    """Take down what the victim says, kill it when its time is over; True if it died before."""
    text = b""
    end = None
    killed = False
    while True:
        wait = 30.0 if end is None else max(0.0, end - time.monotonic())
        ready = select.select([pipe], [], [], wait)[0]
        if not ready and not killed:
            os.kill(child, signal.SIGKILL)
            killed = True
            end = time.monotonic() + 30
            continue
        piece = os.read(pipe, 1 << 16)
        if not piece:
            break
        text += piece
        end = end or time.monotonic() + seconds
    for line in text[: text.rfind(b"\n") + 1].splitlines():
        _heard(outcome, line, kept)
    return not killed


def _heard(outcome: Outcome, line: bytes, kept: set[int]) -> None:
    if line[:1] == KEPT:
        kept.add(int(line[2:]))
    elif line[:1] == FREE:
        kept.discard(int(line[2:]))
    else:
        outcome.samples += 1
        if line[:1] == OVER:
            outcome.over_limit += 1
            outcome.fail("du over the limit while writing")


def _trim(folder: str, kept: set[int]) -> None:
    """Let go of the oldest prompts, so that pins do not fill the store over many victims."""
    with Store.open(folder, Limits(LIMIT)) as store:
        actor = Actor(store)
        for name in sorted(kept)[: max(0, len(kept) - HELD)]:
            kept.discard(name)
            for block in actor.blocks(prompt(name)):
                store.unpin(block.chain)
        known = {block.chain for name in kept for block in actor.blocks(prompt(name))}
        for pin in list(store.core.pins):
            if pin.chain not in known:
                store.unpin(pin.chain)
