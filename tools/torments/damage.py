"""F22: the index deleted, cut short, scribbled over, of another schema, its map full, its owner killed inside a write:
the same hits and pins afterwards, eviction by the files' times."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

from kvd.store import kv
from kvd.store.base import Limits
from kvd.store.kv import KeyValueTable, LmdbKeyValue
from kvd.store.store import Store
from torments.actor import Actor
from torments.kills import prompt
from torments.oracle import PAGE, Outcome, aftermath, crash, place, room

LIMIT = room(4_000_000)
PROMPTS = 12
Damage = Callable[[str], None]


def run(quick: bool = False) -> Outcome:
    outcome = Outcome("damaged index")
    with place() as base:
        folder = os.path.join(base, "store")
        store = Store.open(folder, Limits(LIMIT))
        actor = Actor(store)
        for name in range(PROMPTS):
            actor.put(prompt(name))
        store.pin(actor.namespace, [b.chain for b in actor.blocks(prompt(0))])
        store.close()
        pages = os.path.getsize(os.path.join(folder, "index/data.mdb")) // PAGE
        for what, damage in damages(pages, quick):
            for unclean in (False, True):
                with outcome.run(f"{what}{' after a kill' if unclean else ''}"):
                    _once(outcome, folder, what, damage, unclean)
        with outcome.run("map full"):
            _map_full(outcome, base)
        with outcome.run("eviction order after a rebuild"):
            _order(outcome, base)
    return outcome


def damages(pages: int, quick: bool) -> Iterator[tuple[str, Damage]]:
    yield "deleted", lambda data: os.unlink(data)
    yield "emptied", lambda data: os.truncate(data, 0)
    yield "older schema", _schema
    yield "killed inside a write", _killed
    yield "not LMDB at all", lambda data: _write(data, 0, b"x" * PAGE * pages)
    for page in range(0, pages, max(1, pages // 4) if quick else 1):
        yield f"cut at page {page}", _cut(page)
        yield f"random page {page}", _scribble(page)
        yield f"zeroed page {page}", _zeroed(page)
    for at in range(0, pages * PAGE, -(-pages * PAGE // (4 if quick else 150))):
        yield f"bit flipped at {at}", _flip(at)


def _cut(page: int) -> Damage:
    return lambda data: os.truncate(data, page * PAGE + 17)


def _scribble(page: int) -> Damage:
    return lambda data: _write(data, page * PAGE, random.Random(page).randbytes(PAGE))


def _zeroed(page: int) -> Damage:
    return lambda data: _write(data, page * PAGE, bytes(PAGE))


def _flip(at: int) -> Damage:
    def damage(data: str) -> None:
        raw = Path(data).read_bytes()
        _write(data, at % len(raw), bytes([raw[at % len(raw)] ^ 1 << at % 8]))

    return damage


def _write(data: str, at: int, raw: bytes) -> None:
    with open(data, "r+b") as file:
        file.seek(at)
        file.write(raw)


def _schema(data: str) -> None:
    env = LmdbKeyValue(os.path.dirname(data))
    with env.write() as writer:
        writer.put(KeyValueTable.META, b"schema", b"0")
    env.close()


def _killed(data: str) -> None:
    """A child opens the index, writes a lot without committing, and is killed."""
    child = os.fork()
    if child == 0:
        env = LmdbKeyValue(os.path.dirname(data))
        with env.write() as writer:
            for number in range(2000):
                writer.put(KeyValueTable.META, b"%d" % number, bytes(500))
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def _once(outcome: Outcome, folder: str, what: str, damage: Damage, unclean: bool) -> None:
    data = os.path.join(folder, "index/data.mdb")
    if unclean:
        crash(Store.open(folder, Limits(LIMIT)))
    damage(data)
    aftermath(outcome, folder, Limits(LIMIT), [prompt(name) for name in range(PROMPTS)], what)
    with Store.open(folder, Limits(LIMIT)) as store:
        if len(store.core.pins) != 1 or not all(store.core.table.slots.get(p.chain) for p in store.core.pins):
            outcome.fail(f"{what}: the pin is lost")
        if store.core.counters["index.rebuilt"]:
            outcome.fail(f"{what}: rebuilt twice")


def _map_full(outcome: Outcome, base: str) -> None:
    """The map starts tiny and grows while blocks are stored."""
    with patch.object(kv, "MAP_FIRST", 16 * PAGE), Store.open(os.path.join(base, "tiny"), Limits(LIMIT)) as store:
        actor = Actor(store)
        for name in range(60):
            if actor.put(prompt(name)) != len(prompt(name)):
                outcome.lost += 1
                outcome.fail(f"map full: {actor.reasons}")
    aftermath(outcome, os.path.join(base, "tiny"), Limits(LIMIT), [prompt(n) for n in range(60)], "map full")


def _order(outcome: Outcome, base: str) -> None:
    """Files' times decide who leaves first once hits and last uses are lost."""
    folder = os.path.join(base, "order")
    with Store.open(folder, Limits(LIMIT)) as store:
        actor = Actor(store)
        prompts = [[1000 + n, 2, 3] for n in range(6)]
        for tokens in prompts:
            actor.put(tokens)
        for age, tokens in enumerate(prompts):
            block = actor.blocks(tokens)[0]
            os.utime(store.core.tree.shard(block.namespace, block.chain), (2000 - age, 2000 - age))
    os.unlink(os.path.join(folder, "index/data.mdb"))
    with Store.open(folder, Limits(LIMIT)) as store:
        actor = Actor(store)
        store.core.evict(3 * 12_288, store.core.table.slots.values(), "test", ())
        if left := [actor.get(tokens, touch=False) for tokens in prompts]:
            outcome.acknowledged += 3
            if left != [3, 3, 3, 0, 0, 0]:
                outcome.fail(f"eviction order after a rebuild: {left}")
