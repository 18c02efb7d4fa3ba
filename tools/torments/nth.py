"""F20: the Nth call fails. For every call and every error, N = 1, 2, … until N passes the number of calls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from kvclient.errors import StoreError
from kvd.store.base import Limits
from kvd.store.faults import FILE_CALLS, FILE_ERRORS, KV_CALLS, KV_ERRORS, Faults, FaultyFiles, FaultyKeyValue
from kvd.store.kv import LmdbKeyValue
from kvd.store.store import Store
from torments.actor import Actor
from torments.oracle import Outcome, aftermath, fds, place, room

LIMIT = room(800_000)
"""bytes: room for about 12 blocks beside the headroom"""
KEPT = [list(range(100, 110)), list(range(100, 108)) + [7, 7, 7, 7, 7]]


def scenario(folder: str, faults: Faults, outcome: Outcome, kept: list[list[int]]) -> None:
    """A short life of a store: start, pin, write, evict, read, housekeeping, end. `kept` gets what must be there
    afterwards: acknowledged and held by a pin."""
    limits = Limits(LIMIT, free_space=1)
    clock = iter(range(10**9, 10**10, 4000))
    try:
        store = Store.open(
            folder, limits, FaultyFiles(faults), clock=lambda: float(next(clock)),
            open_kv=lambda path, sync: FaultyKeyValue(faults, lambda: LmdbKeyValue(path, sync=sync)),
        )
    except StoreError:
        return
    actor = Actor(store, FaultyFiles(faults))
    for tokens in KEPT:
        if actor.put(tokens) == len(tokens) and _pinned(actor, tokens):
            kept.append(tokens)
    for number in range(10):
        actor.put([1000 + number, 1, 2, 3, number], group=True)
        outcome.sample(folder, LIMIT)
    for tokens in [*KEPT, [1009, 1, 2, 3, 9], [5, 5]]:
        actor.get(tokens)
    store.tend()
    store.stats()
    _settings(actor, limits)
    outcome.sample(folder, LIMIT)
    store.close()


def _settings(actor: Actor, limits: Limits) -> None:
    """Off and on again, then only what is used twice is written: first uses are noted in a file."""
    store = actor.store
    for changed in (replace(limits, limit=0), replace(limits, admission="second"), limits):
        store.set_limits(changed)
        actor.put([6, 6])
        actor.get(KEPT[0])
        store.tend()
        store.departed()
        store.gone()


def _pinned(actor: Actor, tokens: list[int]) -> bool:
    try:
        actor.store.pin(actor.namespace, [block.chain for block in actor.blocks(tokens)])
    except StoreError:
        return False
    return True


def cases(quick: bool) -> Iterator[tuple[str, str, bool]]:
    for call in FILE_CALLS:
        for error in FILE_ERRORS:
            if error == "short" and call not in ("preadv", "pwritev"):
                continue
            yield from ((call, error, forever) for forever in ((False,) if quick else (False, True)))
    for call in KV_CALLS:
        for error in KV_ERRORS:
            yield from ((call, error, forever) for forever in ((False,) if quick else (False, True)))


def run(quick: bool = False) -> Outcome:
    outcome = Outcome("Nth call fails")
    with place() as base:
        _warm(base)
        for number, (call, error, forever) in enumerate(cases(quick)):
            nth = 1
            while True:
                faults = Faults(call, nth, error, forever)
                what = f"{call} #{nth} {error}{' for good' if forever else ''}"
                before = fds()
                folder = os.path.join(base, f"{number}-{nth}")
                with outcome.run(what):
                    kept: list[list[int]] = []
                    scenario(folder, faults, outcome, kept)
                    aftermath(outcome, folder, Limits(LIMIT), kept, what)
                    if fds() > before:
                        outcome.leaks += 1
                        outcome.fail(f"{what}: {fds() - before} descriptors leaked")
                if not faults.fired:
                    break
                outcome.counts["faults"] += faults.fired
                nth = next_n(nth, quick)
    return outcome


def next_n(nth: int, quick: bool) -> int:
    """Every N, or in the quick form ever wider steps."""
    return max(nth + 1, nth * 4) if quick else nth + 1


def _warm(base: str) -> None:
    """Descriptors that stay open for the life of a process are opened before any are counted."""
    Store.open(os.path.join(base, "warm"), Limits(LIMIT)).close()
