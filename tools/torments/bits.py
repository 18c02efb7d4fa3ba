"""F21: damaged shards: a flipped bit in every part, zeroed pages, every truncation, swapped names, absurd headers."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from kvd.store.base import Limits
from kvd.store.store import Store
from torments.actor import Actor
from torments.oracle import Outcome, crash, place, room

LIMIT = room(4_000_000)
TOKENS = list(range(1, 15))
OTHER = list(range(1, 9)) + [90, 91, 92]
PAGE = 4096
MEMORY_LIMIT = 64 * 1024 * 1024
"""bytes that the peak of this process may rise by over the campaign"""
Damage = Callable[[Path], None]


def run(quick: bool = False) -> Outcome:
    outcome = Outcome("damaged shards")
    before = _peak()
    with place() as base:
        folder = os.path.join(base, "store")
        with Store.open(folder, Limits(LIMIT)) as store:
            actor = Actor(store, layers=4)
            actor.put(TOKENS)
            actor.put(OTHER)
            paths = [store.core.tree.shard(b.namespace, b.chain) for b in actor.blocks(TOKENS)]
        good = {path: Path(path).read_bytes() for path in paths}
        for index, path in enumerate(paths):
            if quick and index != 1:
                continue
            for number, (what, damage) in enumerate(damages(good[path], quick)):
                for restart in (False, True) if not quick else (number % 4 == 0,):
                    with outcome.run(f"block {index}: {what}{', then a restart' if restart else ''}"):
                        _once(outcome, folder, path, index, damage, what, restart)
        with outcome.run("swapped names"):
            _swapped(outcome, folder, paths)
    if _peak() - before > MEMORY_LIMIT:
        outcome.fail(f"memory rose by {_peak() - before} bytes")
    return outcome


def damages(good: bytes, quick: bool) -> Iterator[tuple[str, Damage]]:
    length = int.from_bytes(good[:8], "little")
    text = len(good[8 : 8 + length].rstrip())
    data = range(8 + length, len(good))
    spots = {
        "length": range(8), "json": range(8, 8 + text), "padding": range(8 + text, 8 + length), "data": data,
    }
    for part, where in spots.items():
        for at in where[:: max(1, len(where) // (3 if quick else 64))]:
            yield f"bit in {part} at {at}", _flip(at)
    for at in range(0, len(good), PAGE):
        yield f"zeroed page at {at}", _zero(at)
        yield f"truncated at {at}", _truncate(at)
    for name, header in _headers(json.loads(good[8 : 8 + length])):
        yield name, _replace(_with_header(good, length, header))
    yield "length of 2^50", _replace((1 << 50).to_bytes(8, "little") + good[8:])
    yield "empty", _replace(b"")
    yield "gone", lambda path: path.unlink()


def _headers(table: dict[str, dict[str, object]]) -> Iterator[tuple[str, bytes]]:
    """Headers that lie."""
    for name, changed in (
        ("2^50 elements", {"shape": [1 << 50]}), ("offsets beyond the file", {"data_offsets": [0, 1 << 50]}),
        ("negative shape", {"shape": [-1, -1]}), ("unknown type", {"dtype": "F7"}),
    ):
        first = next(key for key in table if key != "__metadata__")
        yield name, json.dumps({**table, first: {**table[first], **changed}}).encode()
    older = {**table["__metadata__"], "format": "kvd-shard-0"}
    yield "old format", json.dumps({**table, "__metadata__": older}).encode()
    yield "no metadata", json.dumps({k: v for k, v in table.items() if k != "__metadata__"}).encode()
    yield "deep nesting", b"[" * 4000
    yield "not utf-8", b"\xff" * 100


def _with_header(good: bytes, length: int, header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + good[8 + length :]


def _flip(at: int) -> Damage:
    def damage(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[at] ^= 1 << at % 8
        path.write_bytes(raw)

    return damage


def _zero(at: int) -> Damage:
    def damage(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        hole = min(PAGE, len(raw) - at)
        raw[at : at + hole] = bytes(hole) if any(raw[at : at + hole]) else b"\xff" * hole
        path.write_bytes(raw)

    return damage


def _truncate(at: int) -> Damage:
    return lambda path: os.truncate(path, at)


def _replace(raw: bytes) -> Damage:
    def damage(path: Path) -> None:
        path.write_bytes(raw)

    return damage


def _once(
    outcome: Outcome, folder: str, path: str, index: int, damage: Damage, what: str, restart: bool
) -> None:
    """Damage one block; it must be a miss, set aside and counted, and storable again."""
    store = Store.open(folder, Limits(LIMIT))
    actor = Actor(store, layers=4)
    if actor.get(TOKENS) != len(TOKENS):
        outcome.fail("the undamaged store is not whole")
    damage(Path(path))
    if restart:
        crash(store)
        store = Store.open(folder, Limits(LIMIT))
        store.tend()
        actor = Actor(store, layers=4)
    rows = actor.get(TOKENS)
    if rows > index * 4:
        outcome.wrong_bytes += 1
        outcome.fail(f"{what}: {rows} tokens served although block {index} is damaged")
    if rows < index * 4:
        outcome.lost += 1
        outcome.fail(f"{what}: only {rows} tokens served")
    noticed = ("quarantined.", "vanished", "missing_file", "old_format")
    seen = sum(n for k, n in store.core.counters.items() if k.startswith(noticed))
    outcome.counts["set aside or missing"] += bool(seen)
    if not seen:
        outcome.fail(f"{what}: not counted")
    if actor.put(TOKENS) != len(TOKENS) or actor.get(TOKENS) != len(TOKENS):
        outcome.lost += 1
        outcome.fail(f"{what}: not whole again after storing anew ({actor.reasons})")
    outcome.acknowledged += len(TOKENS)
    outcome.sample(folder, LIMIT)
    store.close()


def _swapped(outcome: Outcome, folder: str, paths: list[str]) -> None:
    for restart in (False, True):
        store = Store.open(folder, Limits(LIMIT))
        actor = Actor(store, layers=4)
        os.rename(paths[0], paths[0] + "x")
        os.rename(paths[1], paths[0])
        os.rename(paths[0] + "x", paths[1])
        if restart:
            crash(store)
            store = Store.open(folder, Limits(LIMIT))
            actor = Actor(store, layers=4)
        if actor.get(TOKENS):
            outcome.wrong_bytes += 1
            outcome.fail("swapped: something was served")
        for _ in paths:
            actor.put(TOKENS)
            actor.get(TOKENS)
        if actor.get(TOKENS) != len(TOKENS):
            outcome.fail(f"swapped: not whole again ({actor.reasons})")
        store.close()


def _peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
