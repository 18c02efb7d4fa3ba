"""How requests end: the tail is published and stored, and `done` waits for what is on its way to the disk.

Engine thread only. `finish` went out when the text ended; waiting here delays nobody's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mlx.core as mx

from kvclient.errors import KvdError
from kvd.cache.paged import PagedCache
from kvd.cache.results import Match, Published
from kvd.messages import PinPath
from kvd.worker.outbox import Outbox
from kvd.worker.report import Facts, done
from kvd.worker.request import Choice, Request
from kvd.worker.spill import Spill, State
from kvd.worker.text import Tokenizer, decode


class Finisher:
    """Holds the requests whose text has ended and whose blocks are still on their way."""

    def __init__(
        self, cache: PagedCache, spill: Spill, outbox: Outbox, facts: Facts, tokenizer: Tokenizer
    ) -> None:
        self._cache = cache
        self._tokenizer = tokenizer
        self._spill = spill
        self._outbox = outbox
        self._facts = facts
        self._waiting: dict[Request, float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def requests(self) -> Sequence[Request]:
        return tuple(self._waiting)

    @property
    def writing(self) -> bool:
        """Blocks are pinned in the pool until the disk has them."""
        return self._spill.pending_bytes > 0

    def published(self, choice: Choice, block: Published) -> None:
        """A block of a running request became full."""
        if choice.request.prompt.params.stores:
            self._store(choice.request, block)

    def release(self, choice: Choice) -> None:
        """A choice ended, whatever the way: its rows become known to the last one and go to the store."""
        seq = choice.seq
        if seq is None:
            return
        choice.seq = None
        request = choice.request
        request.kv_rows += seq.rows
        seq.tail()
        tokens, namespace = list(seq.tokens), seq.namespace
        seq.close()
        if not request.prompt.params.reads:
            self._cache.clear(namespace)
        if not request.prompt.params.stores:
            return
        match = self._cache.match(tokens, namespace)
        for block in blocks_of(match):
            self._store(request, block)
        if choice.index == 0:
            request.trail = _trail(match)

    def wait(self, request: Request, now: float) -> None:
        """All choices have ended: `done` goes out once their blocks are durable or the client's patience is over."""
        self._waiting[request] = now + request.prompt.params.durable_wait
        self.settle(now)

    def settle(self, now: float) -> None:
        """Send the `done` of every request that has nothing more to wait for."""
        for request, until in list(self._waiting.items()):
            if now >= until or not self._pending(request):
                del self._waiting[request]
                self._done(request)

    def next_deadline(self) -> float | None:
        """When `settle` should be called at the latest (monotonic seconds)."""
        return min(self._waiting.values(), default=None)

    def fail(self, request: Request, problem: KvdError) -> None:
        """End a request with a typed error. Its rows are kept as for any other end."""
        for choice in request.choices:
            self.release(choice)
        self._waiting.pop(request, None)
        self._outbox.event("error", request.id, problem.to_wire())

    def _store(self, request: Request, block: Published) -> None:
        """An offer is a use: what the store only noted waits for another request."""
        state, again = self._spill.state(block.chain), block.chain in request.offered
        if state is State.UNKNOWN or (state is State.NOTED and not again):
            request.offered.add(block.chain)
            self._spill.offer(block, partial(line, self._tokenizer, block.tokens), self._cache.host_rows)

    def _pending(self, request: Request) -> bool:
        return any(self._spill.state(chain) is State.PENDING for chain, _ in request.trail)

    def _done(self, request: Request) -> None:
        stored = 0
        durable = []
        for chain, end in request.trail:
            if self._spill.state(chain) is not State.DURABLE:
                break
            stored = end
            durable.append(chain)
        params = request.prompt.params
        if params.pin and durable:
            self._outbox.tell(PinPath(request.namespace, tuple(durable), params.ttl or 0.0))
        self._outbox.event("done", request.id, done(request, self._facts, stored, mx.get_peak_memory()))


def line(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """A block's text on one line, for `kvd cache ls`."""
    return " ".join(decode(tokenizer, tokens).split())


def blocks_of(match: Match) -> list[Published]:
    """The blocks behind a match, the partly used child last, as the store takes them."""
    entries = [*match.blocks, match.child] if match.child is not None else list(match.blocks)
    return [
        Published(entry.block, entry.namespace, entry.chain, entry.parent, entry.tokens, entry.start, entry)
        for entry in entries
        if entry.block is not None
    ]


def _trail(match: Match) -> list[tuple[bytes, int]]:
    found = [(bytes(entry.chain), entry.start + len(entry.tokens)) for entry in match.blocks]
    if match.child is not None:
        found.append((bytes(match.child.chain), match.rows))
    return found


