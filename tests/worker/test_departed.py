"""Blocks that leave the store do not count as stored any more, and are written again when they are next used."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Any

from kvd.cache.chain import Chain, chains
from kvd.cache.prefix import PrefixIndex, make_entry
from kvd.messages import Clear, Cleared, Departed
from kvd.worker.clear import clear
from kvd.worker.spill import State
from tests.worker.rig import PATIENCE, B, Rig, ids


class Telling(Rig):
    """As the front does, this one tells the engine what left the store."""

    def evict(self, found: Sequence[bytes]) -> None:
        """Drop blocks, on the store's thread, and tell."""
        done: queue.SimpleQueue[bool] = queue.SimpleQueue()

        def drop() -> None:
            core = self.store.core
            core.drop([core.table.slots[chain] for chain in found], "evicted.full")
            for one in self.store.departed():
                self.tell(Departed(one.chains, one.parents, one.namespace is None))
            done.put(True)

        self._errands.put(drop)
        self._wakes.put(True)
        done.get(timeout=PATIENCE)

    def tell(self, message: Departed) -> None:
        self.engine.on_cache(lambda cache: self.engine.spill.departed(message, cache.index))

    def states(self, found: Sequence[bytes]) -> list[State]:
        """After everything that was told has been taken in."""
        states: Callable[[], Any] = lambda: [self.engine.spill.state(chain) for chain in found]  # noqa: E731
        return list(self.on_engine(states))


def test_what_the_store_evicts_while_a_request_runs_is_written_again_at_its_end() -> None:
    prompt = ids(4 * B, 1)
    with Telling() as rig:
        known = chains(rig.cache.namespace, prompt, B)
        assert rig.ask(prompt).stats["stored_tokens"] >= len(prompt)
        running = rig.send(tokens=prompt, max_tokens=300)
        running.wait_for("text")
        assert rig.states(known) == [State.DURABLE] * 4
        rig.evict([slot.chain for slot in rig.store._core.table.path(known[3])])
        assert rig.states(known) == [State.UNKNOWN] * 4
        assert not running.ended.is_set(), "it was to end after the eviction"
        assert running.end().stats["stored_tokens"] >= len(prompt)
        assert all(rig.shard(prompt, index).exists() for index in range(4))


def test_when_nothing_is_known_to_be_stored_the_next_use_writes_all_of_it() -> None:
    prompt = ids(2 * B + 5, 2)
    with Telling() as rig:
        rig.ask(prompt)
        rig.tell(Departed((), (), everything=True))
        assert rig.states(chains(rig.cache.namespace, prompt, B)) == [State.UNKNOWN] * 2
        assert rig.ask(prompt).stats["stored_tokens"] >= len(prompt)


def test_a_tail_that_counted_as_stored_for_being_in_a_longer_block_leaves_with_it() -> None:
    with Telling() as rig:
        parent, spill = rig.cache.namespace, rig.engine.spill
        memory = PrefixIndex(B)
        made = [make_entry(0, parent, Chain(parent), ids(n, seed), 0, B) for n, seed in ((3, 1), (B, 2), (9, 1))]
        tail, full, longer = made
        for entry in (tail, full):
            memory.add(entry)
        spill.known([tail.chain, full.chain], 2)
        spill.departed(Departed((longer.chain,), (bytes(parent),)), memory)
        assert [spill.state(entry.chain) for entry in (tail, full)] == [State.UNKNOWN, State.DURABLE]


def test_what_a_clear_forgets_is_computed_again_and_what_a_request_uses_stays() -> None:
    prompt, other = ids(3 * B, 3), ids(2 * B, 4)
    with Telling() as rig:

        def forget(*namespaces: bytes) -> Cleared:
            done: queue.SimpleQueue[Cleared] = queue.SimpleQueue()
            rig.engine.on_cache(lambda cache: done.put(clear(cache, Clear(1, namespaces))))
            return done.get(timeout=PATIENCE)

        rig.ask(prompt)
        rig.clear_store()
        assert forget(b"x" * 16).blocks == 0
        found = forget(rig.cache.namespace)
        assert (found.blocks, found.in_use) == (4, 0) and found.nbytes == 4 * rig.cache.pool.block_bytes
        assert rig.ask(prompt).stats["computed_tokens"] == len(prompt)
        running = rig.send(tokens=other, max_tokens=300)
        running.wait_for("text")
        assert forget().in_use >= 2
        assert running.end().kind == "done"
        assert rig.ask(other).stats["cached_memory_tokens"] == len(other) - 1
