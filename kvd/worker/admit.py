"""From the queue to the pool: what memory holds of a prompt, what the store adds, and where its rows go.

Engine thread only. A choice leaves here in stage PREFILLING with a sequence, or waits in LOADING for the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx

from kvd.cache.chain import chains, common_prefix, salted
from kvd.cache.layout import KVLayout
from kvd.cache.paged import PagedCache
from kvd.cache.results import Match, PoolFull
from kvd.messages import LookedUp, Touched
from kvd.worker import report
from kvd.worker.arrival import READ_FAILED, VANISHED
from kvd.worker.compute import drawer_of
from kvd.worker.fetch import CHEAPER, Fetcher
from kvd.worker.live import Live
from kvd.worker.outbox import Outbox
from kvd.worker.params import Params
from kvd.worker.patience import Patience
from kvd.worker.planner import Rates
from kvd.worker.questions import UNANSWERED, Questions
from kvd.worker.request import Choice, Request, nothing
from kvd.worker.restore import Readers
from kvd.worker.scheduler import GRID, Stage
from kvd.worker.spill import Spill
from kvd.worker.text import Answer, Tokenizer

ROOM_AHEAD = 1024
"""tokens of an answer for which room is looked for next to its prompt, however long it may become"""


class Admission:
    """Decides nothing about order: the scheduler has said who comes next."""

    def __init__(
        self,
        cache: PagedCache,
        layout: KVLayout,
        readers: Readers,
        spill: Spill,
        outbox: Outbox,
        rates: Rates,
        patience: Patience,
        tokenizer: Tokenizer,
        live: Live,
        chunk: int,
    ) -> None:
        self._cache = cache
        self._spill = spill
        self._outbox = outbox
        self._tokenizer = tokenizer
        self._live = live
        self.questions = Questions(outbox, patience.now)
        self.fetcher = Fetcher(cache, layout, readers, outbox, rates, patience, self._fetched, chunk)

    @staticmethod
    def namespace(base: bytes, params: Params, id: str) -> bytes:
        """Where a request's blocks are known: its salt's twin of the model's namespace; a place of its own if it is to
        leave no trace."""
        space = salted(base, params.salt)
        return space if params.reads else salted(space, f"off {id}")

    def first_choice(self, request: Request) -> Choice:
        params = request.prompt.params
        return Choice(
            request=request,
            index=0,
            target=list(request.tokens),
            drawer=drawer_of(request, 0),
            answer=Answer(self._tokenizer, params.stop, request.prompt.format),
        )

    # --- asking the front

    def ask(self, choice: Choice) -> None:
        """Ask what the store has of a choice's target. Also for prompts that memory holds: the answer says what of it
        is still durable, and counts as a use."""
        if choice.request.prompt.params.reads:
            choice.asked, choice.found = True, None
            self._ask(choice.request.namespace, choice.target, lambda answer: self._answered(choice, answer))

    def _ask(self, namespace: bytes, tokens: Sequence[int], handle: Callable[[LookedUp], None]) -> None:
        known = tuple(bytes(chain) for chain in chains(namespace, tokens, self._cache.block_size))

        def answered(answer: LookedUp) -> None:
            if answer is not UNANSWERED:
                self._spill.known(known, len(answer.hits))
                self._spill.forget(self._unconfirmed(namespace, tokens, answer))
            handle(answer)

        self.questions.ask(namespace, known, tokens, answered)

    def _unconfirmed(self, namespace: bytes, tokens: Sequence[int], answer: LookedUp) -> list[bytes]:
        """Chains that memory has behind a prompt's full blocks and of which the store did not say that it has them: it
        may have evicted them. Offered again, those that are there after all are refused as such."""
        child = self._cache.match(tokens, namespace).child
        if child is None or (answer.child is not None and answer.child.chain == child.chain):
            return []
        return [bytes(child.chain), *self._cache.index.below(child.chain)]

    def _answered(self, choice: Choice, answer: LookedUp) -> None:
        choice.found = answer
        if choice.stage is not Stage.LOADING or choice.seq is not None:
            return
        try:
            self._place(choice, self._match(choice))
        except PoolFull:
            choice.stage = Stage.WAITING

    # --- admission

    def due(self) -> float | None:
        """When the store is waited for no longer, if nothing comes until then."""
        return min((at for at in (self.questions.due(), self.fetcher.due()) if at is not None), default=None)

    def collect(self) -> None:
        """End what has come from the store, and what is waited for no longer."""
        self.questions.expire()
        self.fetcher.collect()

    def admit(self, choice: Choice, now: float) -> bool:
        """Give a waiting choice its rows. False: it has to wait for another that computes the same prefix now.
        Raises PoolFull; then nothing has changed."""
        others = self._live.choices
        match = self._shared(choice, others)
        choice.follows = next((other for other in others if self._computes_more(other, choice, match.rows)), None)
        if choice.follows is not None:
            return False
        if not choice.asked:
            self.ask(choice)
        if choice.asked and choice.found is None and match.rows < len(choice.target) - 1:
            choice.stage = Stage.LOADING
        else:
            self._place(choice, match)
        if choice.request.times.admitted is None:
            choice.request.times.admitted = now
            if all(other is choice or other.stage is Stage.WAITING for other in others):
                mx.reset_peak_memory()  # nobody else works: what is the most from now on is this request's
        return True

    @staticmethod
    def _computes_more(other: Choice, choice: Choice, rows: int) -> bool:
        """`other` is about to compute rows that `choice` needs and that nobody has yet."""
        if other is choice or not choice.is_behind(other):
            return False
        return common_prefix(choice.target, other.target) - rows >= GRID

    def _match(self, choice: Choice) -> Match:
        if not choice.request.prompt.params.reads and not choice.started:
            return nothing(choice.request.namespace, self._cache.block_size)
        return self._cache.match(choice.target, choice.request.namespace)

    def _shared(self, choice: Choice, others: Iterable[Choice]) -> Match:
        """What memory holds, the unfinished blocks of live sequences included: they become known up to their last row
        where this prompt has them in common."""
        match = self._match(choice)
        more = [
            other.seq for other in others
            if other.seq is not None and other.stage in (Stage.PREFILLING, Stage.DECODING)
            and other.request.namespace == choice.request.namespace
            and common_prefix(other.seq.tokens, choice.target) > match.rows
        ]  # fmt: skip
        for seq in more:
            seq.tail()
        return self._match(choice) if more else match

    def _place(self, choice: Choice, match: Match) -> None:
        """A sequence for a choice: the blocks of memory, and behind them landings for what the store adds."""
        found, request = choice.found, choice.request
        if found is UNANSWERED and match.rows < len(choice.target) - 1:
            request.miss_reason = READ_FAILED
        if found is not None and self.fetcher.gain(match, found):
            start, hung = self.fetcher.computed(match, found, both=self._idle()), self.fetcher.hung
            if start < self.fetcher.rows(found) and not hung:
                self._restore(choice, match.full_blocks(), found, start)
                return
            if hung:
                self.fetcher.probe(match, found)
            request.miss_reason = READ_FAILED if hung else CHEAPER
        self._open(choice, match)
        self._begin(choice, choice.from_memory)

    def _restore(self, choice: Choice, match: Match, found: LookedUp, start: int) -> None:
        """Rows from `start` on come from the store; those between the match and `start` are computed meanwhile."""
        self._open(choice, match)
        try:
            self.fetcher.start(choice, match, found, start)
        except PoolFull:
            self._close(choice)
            choice.lacked_room = True
            raise
        choice.stage = Stage.LOADING
        if start > choice.rows:
            choice.stage, choice.border, choice.request.miss_reason = Stage.PREFILLING, start, CHEAPER
            if not choice.started:
                self._account(choice, choice.from_memory)

    def _idle(self) -> bool:
        """Nothing is computed now."""
        return all(one.stage in (Stage.WAITING, Stage.LOADING) for one in self._live.choices)

    def _open(self, choice: Choice, match: Match) -> None:
        ahead = min(choice.request.prompt.params.max_tokens, ROOM_AHEAD)
        choice.seq = self._cache.open(choice.target, match, choice.request.namespace, len(choice.target) + ahead)
        choice.from_memory, choice.border = choice.seq.rows, None
        if match.blocks:
            used = tuple(bytes(entry.chain) for entry in match.blocks)
            self._outbox.tell(Touched(choice.request.namespace, used))

    def _close(self, choice: Choice) -> None:
        if choice.seq is not None:
            choice.seq.close()
            choice.seq = None

    def _fetched(self, choice: Choice, reason: str, lost: Sequence[bytes]) -> None:
        """All of a restore has landed or failed. A shard that vanished is looked up once more."""
        self._spill.forget(lost)
        if choice.stage is not Stage.LOADING or choice.seq is None:
            return  # it was cancelled meanwhile; memory keeps what came
        request = choice.request
        if reason == VANISHED and not choice.looked_again:
            choice.looked_again = True
            request.miss_reason = reason
            self._account(choice, choice.from_memory)
            self._close(choice)
            self.ask(choice)
            return
        if reason:
            request.miss_reason = reason
        self._begin(choice, choice.from_memory)

    def _begin(self, choice: Choice, memory: int) -> None:
        """The first `memory` rows of the sequence came from memory, the rest of what it has from the store."""
        request = choice.request
        choice.stage, choice.border = Stage.PREFILLING, None
        if not choice.started:
            self._account(choice, memory)
            request.divergence = self._divergence(choice)
            request.miss_reason = report.miss_reason(request, choice.rows)

    @staticmethod
    def _account(choice: Choice, memory: int) -> None:
        cost = choice.request.cost
        cached = min(choice.rows, len(choice.request.tokens) - 1)
        stored = max(cached - max(memory, cost.high), 0)
        cost.ssd += stored
        cost.memory += max(cached - cost.high, 0) - stored
        cost.high = max(cost.high, cached)

    def _divergence(self, choice: Choice) -> dict[str, Any] | None:
        """Where the prompt leaves what memory or, behind a restore, the store has."""
        match, rows = self._match(choice), choice.rows
        stored = match.stored_token if match.rows == rows else None
        if stored is None and choice.found is not None and self.fetcher.rows(choice.found) == rows:
            stored = self.fetcher.stored_token(choice.found, len(choice.target) - rows + choice.found.child_rows)
        return report.divergence(self._tokenizer, choice.request.tokens, rows, stored)

    # --- explain

    def explain(self, request: Request) -> None:
        """What of a prompt is cached, and where it leaves what is stored. Computes nothing."""
        match = self._cache.match(request.tokens, request.namespace)
        self._ask(request.namespace, request.tokens, lambda answer: self._explained(request, match, answer))

    def _explained(self, request: Request, match: Match, answer: LookedUp) -> None:
        total, tokens = len(request.tokens), request.tokens
        rows = max(self.fetcher.gain(match, answer), match.rows)
        request.cost.memory, request.cost.ssd = match.rows, rows - match.rows
        if answer is UNANSWERED and rows < total:
            request.miss_reason = READ_FAILED
        if rows == match.rows:
            stored = match.stored_token
        else:
            stored = self.fetcher.stored_token(answer, total - len(answer.hits) * self._cache.block_size)
        request.divergence = report.divergence(self._tokenizer, tokens, rows, stored)
        body: dict[str, Any] = {
            "prompt_tokens": total,
            "limit": request.prompt.excess and request.prompt.excess.details["limit"],
            "cached_memory_tokens": request.cost.memory,
            "cached_ssd_tokens": request.cost.ssd,
            "first_divergence": request.divergence,
            "miss_reason": report.miss_reason(request, rows),
            "rules": [dict(rule) for rule in request.prompt.rules],
        }
        self._outbox.event("result", request.id, body)
