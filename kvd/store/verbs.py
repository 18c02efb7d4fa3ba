"""The verbs of `kvd cache`, the same with a daemon and without: fields in, plain values out.

`steps` is a generator that yields `(done, total)` between small steps, so that the owner's thread can serve others
meanwhile; its value is the answer. `perform` runs one to its end. Both raise BadRequest, StoreError.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Mapping
from string import hexdigits
from typing import Any, Final

from kvclient.errors import BadRequest, StoreError
from kvd.store import transfer, upkeep
from kvd.store.base import Report
from kvd.store.kv import IndexFailed
from kvd.store.listing import tree
from kvd.store.store import Store
from kvd.store.table import Slot

Answer = dict[str, Any]
Steps = Generator[tuple[int, int], None, Answer]
SHORTEST: Final = 6
"""hex digits that name a block, if no other begins with them"""


def perform(store: Store, verb: str, fields: Mapping[str, Any]) -> Answer:
    """Run one verb to its end and give its answer."""
    work = steps(store, verb, fields)
    while not isinstance(at := advance(work), dict):
        pass
    return at


def advance(work: Steps, budget_s: float = 0.02) -> Answer | tuple[int, int]:
    """Go on with a verb for about `budget_s` seconds: its answer if it came to its end, else `(done, total)`."""
    end = time.monotonic() + budget_s
    try:
        while True:
            at = next(work)
            if time.monotonic() >= end:
                return at
    except StopIteration as finished:
        answer: Answer = finished.value
        return answer


def steps(store: Store, verb: str, fields: Mapping[str, Any]) -> Steps:
    """See the module. Fields: chain (hex), file (absolute path), model (a name, repeated in the answer), ttl_s
    (seconds)."""
    if verb not in VERBS:
        raise BadRequest(f"cache {verb} is not known (known: {', '.join(VERBS)})", verb=verb)
    try:
        answer = yield from VERBS[verb](store, fields)
    except (OSError, IndexFailed) as problem:
        raise StoreError(f"cache {verb}: {problem}", verb=verb) from None
    return {**answer, "model": fields["model"]} if "model" in fields else answer


def names(store: Store) -> set[str]:
    """What the field `model` may hold: names of models, those that were removed included, and namespaces."""
    return {name for n in _namespaces(store) for name in (*store.core.owners(n), n.hex())}


def _namespaces(store: Store) -> set[bytes]:
    return set(store.core.table.by_namespace) | set(store.core.models) | store.core.namespaces


def _stats(store: Store, fields: Mapping[str, Any]) -> Steps:
    yield from ()
    return store.stats()


def _ls(store: Store, fields: Mapping[str, Any]) -> Steps:
    nodes = yield from tree(store.core, fields.get("model"))
    return {"prefixes": [dataclasses.asdict(n) for n in nodes]}


def _verify(store: Store, fields: Mapping[str, Any]) -> Steps:
    report = yield from upkeep.verify(store.core)
    damaged = sum(n for reason, n in report.counts.items() if reason not in ("ok", "unreadable"))
    return {"checked": report.checked, "freed": report.freed, "damaged": damaged, "counts": report.counts}


def _gc(store: Store, fields: Mapping[str, Any]) -> Steps:
    return _reported((yield from upkeep.gc(store.core)))


def _clear(store: Store, fields: Mapping[str, Any]) -> Steps:
    model = fields.get("model")
    if not model:
        return {**_reported((yield from upkeep.clear(store.core))), "namespaces": []}
    core = store.core
    namespaces = {n for n in _namespaces(store) if model in (*core.owners(n), n.hex())}
    if not namespaces:
        raise BadRequest(f"nothing is stored for a model {model!r}", model=model)
    report = yield from upkeep.clear(core, namespaces)
    shared = {name for n in namespaces for name in core.models.get(n, ())} - {model}
    return {**_reported(report), "namespaces": sorted(n.hex() for n in namespaces), "shared_with": sorted(shared)}


def _rebuild(store: Store, fields: Mapping[str, Any]) -> Steps:
    return _reported((yield from upkeep.rebuild(store.core)))


def _export(store: Store, fields: Mapping[str, Any]) -> Steps:
    slot = find(store, _needed(fields, "chain"))
    report = yield from transfer.export(store, slot.chain, _needed(fields, "file"))
    return {
        "file": str(fields["file"]), "blocks": report.checked, "tokens": report.counts["tokens"],
        "bytes": report.counts["bytes"],
    }


def _import(store: Store, fields: Mapping[str, Any]) -> Steps:
    report = yield from transfer.import_(store, _needed(fields, "file"))
    return {"file": str(fields["file"]), "blocks": report.checked, **report.counts}


def _pin(store: Store, fields: Mapping[str, Any]) -> Steps:
    yield from ()
    slot = find(store, _needed(fields, "chain"))
    pin = store.pin(slot.namespace, [slot.chain], fields.get("ttl_s"))
    return {"chain": pin.chain.hex(), "expires": pin.expires}


def _unpin(store: Store, fields: Mapping[str, Any]) -> Steps:
    yield from ()
    text = _needed(fields, "chain").lower()
    chains = [p.chain for p in store.core.pins if p.chain.hex().startswith(text)]
    chain = chains[0] if len(chains) == 1 else find(store, text).chain
    return {"chain": chain.hex(), "unpinned": store.unpin(chain)}


def _needed(fields: Mapping[str, Any], name: str) -> str:
    """Raises BadRequest for a field that is missing or no text: clients of any kind may ask."""
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"cache: {name} is missing", field=name)
    return value


def find(store: Store, text: str) -> Slot:
    """The block whose chain begins with the hex digits `text`. Raises BadRequest: none, several, too short, not hex."""
    text = text.lower()
    if set(text) - set(hexdigits):
        named = "a prefix is named by its last block, CHAIN in `kvd cache ls`"
        raise BadRequest(f"{text!r} is not hexadecimal: {named}", chain=text)
    if len(text) < SHORTEST:
        raise BadRequest(f"{text!r} is too short to name a block: {SHORTEST} digits or more", chain=text)
    found = [slot for chain, slot in store.core.table.slots.items() if chain.hex().startswith(text)]
    if len(found) != 1:
        raise BadRequest(f"{len(found) or 'no'} stored blocks are named {text}", chain=text, found=len(found))
    return found[0]


def _reported(report: Report) -> Answer:
    return {"checked": report.checked, "freed": report.freed, "counts": report.counts}


VERBS: Final[dict[str, Callable[[Store, Mapping[str, Any]], Steps]]] = {
    "stats": _stats, "ls": _ls, "verify": _verify, "gc": _gc, "clear": _clear, "rebuild": _rebuild,
    "export": _export, "import": _import, "pin": _pin, "unpin": _unpin,
}
