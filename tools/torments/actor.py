"""What a worker does with the store, on small blocks: store a prompt block by block, restore it, check every byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvd.cache.chain import chains, next_chain
from kvd.messages import Entry, Written
from kvd.store.base import Refusal
from kvd.store.files import Files, RealFiles
from kvd.store.shard import Expected, ShardDamaged, ShardHeader, offer_of, read_shard, store_shard
from kvd.store.store import Store
from torments.blocks import NAMESPACE, empty_like, header, payload

BLOCK = 4
"""tokens per block"""


class WrongBytes(AssertionError):
    """The one thing that must never happen."""


@dataclass(slots=True)
class Actor:
    """Stores and restores through `store` with its own door to the files."""

    store: Store
    files: Files = field(default_factory=RealFiles)
    namespace: bytes = NAMESPACE
    layers: int = 2
    durable: bool = True
    reasons: list[str] = field(default_factory=list)

    def blocks(self, tokens: Sequence[int]) -> list[ShardHeader]:
        """Full blocks of a prompt and its partial tail."""
        found = []
        parent = self.namespace
        for start in range(0, len(tokens), BLOCK):
            part = tokens[start : start + BLOCK]
            found.append(header(part, parent, namespace=self.namespace, start=start, layers=self.layers))
            parent = next_chain(parent, part)
        return found

    def put(self, tokens: Sequence[int], *, group: bool = False) -> int:
        """Store what is not stored yet; returns the leading tokens that are acknowledged as durable.

        group: one commit for all blocks, else one each."""
        written: list[Written] = []
        kept = []
        for block in self.blocks(tokens):
            done = self._write(block)
            if isinstance(done, Written):
                written.append(done)
                kept.append((block, done.reservation))
            else:
                kept.append((block, 0 if done else -1))
            if written and not group:
                kept = self._settle(kept, written)
                written = []
        kept = self._settle(kept, written)
        stored = 0
        for block, mark in kept:
            if mark != 0:
                break
            stored += len(block.tokens)
        return stored

    def _settle(self, kept: list[tuple[ShardHeader, int]], written: list[Written]) -> list[tuple[ShardHeader, int]]:
        if not written:
            return kept
        answers = {item.reservation: item for item in self.store.commit(written)}
        self.reasons += [item.reason for item in answers.values() if not item.ok]
        return [(b, (0 if answers[m].ok else -1) if m in answers else m) for b, m in kept]

    def _write(self, block: ShardHeader) -> Written | bool:
        """Written; else whether it is durable already."""
        place = self.store.reserve(offer_of(block))
        if isinstance(place, Refusal):
            self.reasons.append(place.reason)
            return place.stored
        try:
            size, checksum = store_shard(
                self.files, place.temp, place.final, block, payload(block), durable=self.durable
            )
        except OSError as problem:
            self.reasons.append(type(problem).__name__)
            self.store.abandon(place.id, "io_error")
            return False
        return Written(place.id, checksum, size)

    def get(self, tokens: Sequence[int], *, touch: bool = True) -> int:
        """Restore as much as is stored; returns tokens restored. Raises WrongBytes unless every byte is right."""
        found = self.store.lookup(self.namespace, self.full_chains(tokens), self.namespace, tokens)
        rows = 0
        used = []
        parent = self.namespace
        for entry in found.hits:
            part = tokens[rows : rows + entry.tokens]
            if not self._restore(entry, part, parent, rows):
                return rows
            rows += entry.tokens
            parent = entry.chain
            used.append(entry.chain)
        if found.child and self._restore(found.child, tokens[rows : rows + found.child_rows], parent, rows):
            rows += found.child_rows
            used.append(found.child.chain)
        if touch:
            self.store.touched(self.namespace, used)
        return rows

    def full_chains(self, tokens: Sequence[int]) -> list[bytes]:
        return list(chains(self.namespace, tokens, BLOCK))

    def _restore(self, entry: Entry, part: Sequence[int], parent: bytes, start: int) -> bool:
        """A failed block is a miss, quarantined if it is damaged."""
        if entry.parent != parent:
            raise WrongBytes("an entry with another parent")
        try:
            header_of, into = self._read(entry, part, parent, start)
        except ShardDamaged as damage:
            self.reasons.append(damage.reason)
            self.store.quarantine(self.namespace, entry.chain, damage.reason)
            return False
        except FileNotFoundError:
            self.store.quarantine(self.namespace, entry.chain, "vanished")
            return False
        except OSError as problem:
            self.reasons.append(type(problem).__name__)
            return False
        if header_of.tokens[: len(part)] != tuple(part) or into != payload(header_of):
            raise WrongBytes(f"block {entry.chain.hex()} at {start}")
        return True

    def _read(
        self, entry: Entry, part: Sequence[int], parent: bytes, start: int
    ) -> tuple[ShardHeader, list[memoryview]]:
        like = header([0] * entry.tokens, parent, layers=self.layers)
        into = empty_like(like)
        expected = Expected(self.namespace, entry.chain, parent, part, start, like.tensors)
        return read_shard(self.files, entry.path, entry, expected, into), into

