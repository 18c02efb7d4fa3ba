"""Whatever order blocks are put, read, evicted, pinned and lost in: the store says what a small dict says."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvd.cache.chain import common_prefix
from kvd.store.base import Limits
from kvd.store.store import Store
from torments.actor import BLOCK, Actor
from torments.blocks import NAMESPACE
from torments.oracle import Outcome, crash, du, leftovers, room

LIMIT = room(900_000)
STEM = list(range(1, 3 * BLOCK + 3))
BRANCHES = [STEM, [*STEM[:2], 9, *STEM[3:]], [*STEM[:5], 8, *STEM[6:]], [*STEM[:9], 7, *STEM[10:]], [6, *STEM[1:]]]
prompts = st.builds(lambda whole, n: whole[:n], st.sampled_from(BRANCHES), st.integers(1, len(STEM)))
"""Prompts that share stems and diverge inside blocks and at their borders."""


class StoreAgainstDict(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.base = tempfile.mkdtemp(prefix="kvd")
        self.now = 2_000_000_000.0
        self.model: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}
        """chain -> parent and tokens of every block that was acknowledged and has not left"""
        self.held: set[bytes] = set()
        self.believed: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}
        """what a worker takes for stored: all it was told so of, less what it was told has left"""
        self.open()

    def open(self) -> None:
        self.store = Store.open(
            os.path.join(self.base, "store"), Limits(LIMIT, durable=False), clock=lambda: self.now
        )
        self.actor = Actor(self.store, durable=False)
        self.believed.clear()

    @rule(tokens=prompts)
    def put(self, tokens: list[int]) -> None:
        self.now += 1
        stored = self.actor.put(tokens)
        self.left()
        for block in self.actor.blocks(tokens[:stored]):
            if self.store.core.table.get(NAMESPACE, block.chain):
                self.model[block.chain] = block.parent, block.tokens
            self.believed[block.chain] = block.parent, block.tokens
        assert stored == len(tokens) or "full" in self.actor.reasons

    @rule(tokens=prompts)
    def get(self, tokens: list[int]) -> None:
        self.now += 1
        assert self.actor.get(tokens) == self.expected(tokens)

    @rule(tokens=prompts, ttl=st.sampled_from([None, 5.0]))
    def pin(self, tokens: list[int], ttl: float | None) -> None:
        chains = [b.chain for b in self.actor.blocks(tokens)]
        if any(c in self.model for c in chains):
            pin = self.store.pin(NAMESPACE, chains, ttl)
            assert pin.chain in self.model
            self.held.discard(pin.chain)
            if ttl is None:
                self.held.add(pin.chain)

    @precondition(lambda self: self.held)
    @rule()
    def unpin(self) -> None:
        assert self.store.unpin(self.held.pop())

    @rule(need=st.integers(1, 200_000))
    def evict(self, need: int) -> None:
        core = self.store.core
        core.evict(need, core.table.slots.values(), "test", core.held())
        self.left()

    @rule(wait=st.sampled_from([1.0, 10.0, 4000.0]))
    def tend(self, wait: float) -> None:
        self.now += wait
        self.store.tend()
        assert not self.left()

    @rule(lost_index=st.booleans())
    def kill(self, lost_index: bool) -> None:
        crash(self.store)
        if lost_index:
            os.unlink(os.path.join(self.base, "store/index/data.mdb"))
        self.open()
        assert not self.left()

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.open()
        assert not self.left()

    @rule(tokens=prompts)
    def damage(self, tokens: list[int]) -> None:
        """Flip a bit of one shard: it and what is behind it cannot be reached until it is stored anew."""
        for block in self.actor.blocks(tokens[: len(tokens) // BLOCK * BLOCK]):
            if block.chain not in self.model:
                return
            if block.chain not in self.held:
                path = self.store.core.tree.shard(NAMESPACE, block.chain)
                with open(path, "r+b") as file:
                    file.seek(-1, os.SEEK_END)
                    last = file.read(1)[0]
                    file.seek(-1, os.SEEK_END)
                    file.write(bytes([last ^ 1]))
                self.actor.get(tokens, touch=False)
                del self.model[block.chain]
                assert block.chain not in self.store.core.table.slots
                return

    def left(self) -> set[bytes]:
        """Take out of the model what left the store; nothing pinned may, nor what a pinned block stands on."""
        gone = self.model.keys() - self.store.core.table.slots.keys()
        superseded = {c for c in gone if self.superseded(c)}
        moved = superseded & self.held
        self.held = (self.held - moved) | {p.chain for p in self.store.core.pins if p.expires is None}
        for chain in self.held:
            while chain in self.model:
                assert chain not in gone - superseded
                chain = self.model[chain][0]
        for chain in gone:
            del self.model[chain]
        return set(gone)

    @invariant()
    def no_worker_takes_for_stored_what_is_not(self) -> None:
        for departure in self.store.departed() if hasattr(self, "store") else ():
            for chain in departure.chains:
                self.believed.pop(chain, None)
            for chain, (parent, tokens) in list(self.believed.items()):
                if parent in departure.parents and len(tokens) < BLOCK:
                    del self.believed[chain]
        for chain, block in getattr(self, "believed", {}).items():
            assert chain in self.store.core.table.slots or self.covered(*block)

    def superseded(self, chain: bytes) -> bool:
        return self.covered(*self.model[chain])

    def covered(self, parent: bytes, tokens: tuple[int, ...]) -> bool:
        """A longer stored block begins with these tokens."""
        table = self.store.core.table
        siblings = (self.store.core.index.tokens(c) for c in table.children.get(parent, ()))
        return any(len(s) > len(tokens) and s[: len(tokens)] == tokens for s in siblings)

    def expected(self, tokens: Sequence[int]) -> int:
        parent, rows = NAMESPACE, 0
        for block in self.actor.blocks(tokens[: len(tokens) // BLOCK * BLOCK]):
            if block.chain not in self.model:
                break
            parent, rows = block.chain, rows + BLOCK
        children = [t for p, t in self.model.values() if p == parent]
        return rows + max((common_prefix(t, tokens[rows:]) for t in children), default=0)

    @invariant()
    def limit_holds_and_ledger_is_right(self) -> None:
        if hasattr(self, "store"):
            core = self.store.core
            assert core.table.slots.keys() == self.model.keys()
            assert core.ledger.shards == core.table.bytes and not core.ledger.reserved
            assert core.by_chain == {place.chain: number for number, place in core.pending.items()}
            chains = [*core.table.slots, *core.orphans, *core.by_chain]
            assert len(chains) == len(set(chains))
            assert du(self.base) <= LIMIT

    def teardown(self) -> None:
        if hasattr(self, "store"):
            outcome = Outcome("property")
            leftovers(outcome, self.store, "end")
            self.store.close()
            shutil.rmtree(self.base)
            assert outcome.failures == []


TestStoreAgainstDict = StoreAgainstDict.TestCase
TestStoreAgainstDict.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
