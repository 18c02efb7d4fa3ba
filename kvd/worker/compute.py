"""Where rows go through the model: prefill chunks, the last prompt row, batched decode steps. Engine thread only.

Rows are counted here, at the model call, so that what is reported is what was done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import mlx.core as mx
import structlog

from kvd.cache.ahead import outlook
from kvd.cache.paged import PagedCache, forward
from kvd.cache.results import Published
from kvd.cache.sequence import CachedSequence
from kvd.worker.arrival import Unfinished
from kvd.worker.fetch import Restore
from kvd.worker.params import Params
from kvd.worker.planner import Rates
from kvd.worker.request import Choice, Request
from kvd.worker.sampler import Draw, Drawer, Draws, begin
from kvd.worker.scheduler import Stage
from kvd.worker.text import Answer

FIRST_BEHIND: Final = 2
"""steps from a border, where the device has nothing in line, to the first that is behind another one. What copies an
array twice may bring it back to where it was."""
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Flight:
    """A decode step in line. `positions`: what each choice's answer has before the drawn token."""

    choices: tuple[Choice, ...]
    draws: Draws
    positions: tuple[int, ...]

    @classmethod
    def of(cls, choices: Sequence[Choice], draws: Draws, ahead: int) -> _Flight:
        return cls(tuple(choices), draws, tuple(len(choice.output) + ahead for choice in choices))

    def has(self, choice: Choice) -> bool:
        """Whether this step draws the token that `choice` needs next: not if it ended or was preempted since."""
        for one, position in zip(self.choices, self.positions, strict=True):
            if one is choice:
                return choice.stage is Stage.DECODING and choice.seq is not None and len(choice.output) == position
        return False


class Computer:
    """Feeds rows of choices to one model. `published(choice, block)` is called for every block that became full."""

    def __init__(
        self, model: Any, cache: PagedCache, rates: Rates, published: Callable[[Choice, Published], None]
    ) -> None:
        self._model = model
        self._cache = cache
        self._rates = rates
        self._published = published
        self.rows_fed = 0
        self._flight: _Flight | None = None
        self._since_border = FIRST_BEHIND + 1

    def chunk(self, choice: Choice, start: int, end: int, pause: Callable[[], None] | None = None) -> None:
        """Rows [start, end) of the target, all but the last row of it. Raises PoolFull before anything is computed.
        After any other failure the sequence is as it was. `pause` is called between layers, see `forward`."""
        seq = choice.seq
        assert seq is not None and seq.rows == start < end < len(choice.target)
        tokens = choice.target[start:end]
        seq.reserve(len(tokens))
        began = time.monotonic()
        paused = 0.0

        def others() -> None:
            nonlocal paused
            at = time.monotonic()
            assert pause is not None
            pause()
            paused += time.monotonic() - at

        self.rows_fed += len(tokens)
        forward(self._model, self._cache, [(seq, tokens)], logits=False, pause=others if pause else None)
        self._rates.prefilled(start, len(tokens), time.monotonic() - began - paused)
        self._count(choice, start, end)
        for block in seq.advance(tokens):
            self._published(choice, block)
        if end == choice.border:
            choice.stage = Stage.LOADING  # for what comes behind it

    def last_row(self, choice: Choice) -> mx.array:
        """The step of the target's last token, by itself as in a full hit; where its row is stored already nothing is
        written. Returns logits [1, vocab] of the token after it."""
        seq = choice.seq
        total = len(choice.target)
        assert seq is not None and seq.rows in (total - 1, total)
        token = choice.target[-1:]
        stored = seq.rows == total
        if not stored:
            seq.reserve(1)
        self.rows_fed += 1
        logits = forward(self._model, self._cache, [(seq, token)], discard_last=stored)
        assert logits is not None
        mx.eval(logits)
        self._count(choice, total - 1, total)
        if not stored:
            for block in seq.advance(token):
                self._published(choice, block)
        return logits

    def ahead(self, choice: Choice, end: int, restore: Restore) -> mx.array | None:
        """The first pass behind rows that are still being read: a chunk up to row `end` of the target (None), or its
        last row (logits, as `last_row`). Raises PoolFull before anything is computed. After any other failure, such as
        Unfinished, all is as it was but for the rows that were fed."""
        seq, start, total = choice.seq, restore.rows, len(choice.target)
        assert seq is not None and start <= total and end <= total
        stored = start == total
        tokens = choice.target[-1:] if stored else choice.target[start:end]
        rows = outlook(seq, start, 0 if stored else len(tokens))
        if not restore.ready:
            raise Unfinished("the pool grew for what comes behind")
        self.rows_fed += len(tokens)
        restore.wrote = not stored
        try:
            logits = forward(
                self._model, self._cache, [(rows, tokens)], discard_last=stored, logits=end == total, arriving=restore
            )
            if logits is not None:
                mx.eval(logits)
            restore.finish()
        except Exception:
            choice.request.cost.recomputed += len(tokens)
            raise
        self._count(choice, end - len(tokens), end)
        if not stored:
            for block in seq.advance(tokens):
                self._published(choice, block)
        return logits

    def pending(self, choices: Sequence[Choice]) -> list[Choice]:
        """Those of `choices` whose next token is being computed already."""
        flight = self._flight
        return [] if flight is None else [choice for choice in choices if flight.has(choice)]

    def begin(self, choices: Sequence[Choice]) -> None:
        """Put a step for these in line: each feeds its last token. Room must have been reserved."""
        batch = [(_seq(choice), choice.output[-1:]) for choice in choices]
        logits = forward(self._model, self._cache, batch)
        assert logits is not None
        self._flight = _Flight.of(choices, begin(logits, [choice.drawer for choice in choices]), 0)
        self._advance(self._flight, [choice.output[-1] for choice in choices])

    def finish(self, ahead: bool) -> list[tuple[Choice, Draw]]:
        """The tokens of the step in line, for choices that still wait for them. `ahead`: put the next step in line
        before waiting, fed with tokens that nobody knows yet; room must have been reserved."""
        flight, self._flight = self._flight, None
        assert flight is not None
        if ahead and all(flight.has(choice) for choice in flight.choices):
            batch = [(_seq(choice), choice.output[-1:]) for choice in flight.choices]
            logits = forward(self._model, self._cache, batch, inputs=flight.draws.tokens)
            assert logits is not None
            following = begin(logits, [choice.drawer for choice in flight.choices], 1)
            self._flight = _Flight.of(flight.choices, following, 1)
        drawn = flight.draws.read()
        if self._flight is not None:
            self._advance(self._flight, [one.token for one in drawn])
        return [(choice, one) for choice, one in zip(flight.choices, drawn, strict=True) if flight.has(choice)]

    def forget(self, choices: Sequence[Choice]) -> None:
        """Drop the step in line after a failure inside it: rows that it was to write do not count."""
        self._flight = None
        for choice in choices:
            known = len(choice.request.tokens) + len(choice.output) - 1
            if choice.seq is not None and choice.seq.rows > known:
                choice.seq.truncate(known)

    def _advance(self, flight: _Flight, tokens: Sequence[int]) -> None:
        """The step's rows count from now on: whatever is put in line after it sees them. A block that it fills is
        made known only when the step has really been computed."""
        size = self._cache.block_size
        if any((_seq(choice).rows + 1) % size == 0 for choice in flight.choices):
            mx.eval(flight.draws.tokens)
            self._since_border = 0
        self._look_back()
        self._since_border += 1
        for choice, token in zip(flight.choices, tokens, strict=True):
            for block in _seq(choice).advance([token]):
                self._published(choice, block)

    def _look_back(self) -> None:
        """The check at load took a few tokens; whether updates behind a step in line are in place may depend on how
        long the step takes, and so on how much it attends to. Looked at for one step of each block."""
        if self._since_border not in (0, FIRST_BEHIND) or not self._cache.paths.ahead:
            return
        moved = self._cache.pool.moved()
        if moved and self._since_border:
            self._cache.paths = replace(self._cache.paths, ahead=False)
            log.warning("steps are no longer put in line ahead", reason="an update behind one copied the pool")

    @staticmethod
    def _count(choice: Choice, start: int, end: int) -> None:
        cost = choice.request.cost
        fresh = 0 if choice.started else max(end - max(start, cost.high), 0)
        cost.computed += fresh
        cost.recomputed += end - start - fresh
        if not choice.started:
            cost.high = max(cost.high, end)


def drawer_of(request: Request, index: int) -> Drawer:
    """What choice `index` of a request draws with."""
    grammar = request.prompt.grammar
    return Drawer(
        request.prompt.params.sampling, index, request.tokens, grammar=grammar.copy() if grammar is not None else None
    )


def twin(choice: Choice, index: int, tokenizer: Any, params: Params) -> Choice:
    """Another answer to the same prompt: shares every row of `choice` until it draws differently."""
    assert choice.seq is not None
    return Choice(
        request=choice.request,
        index=index,
        target=list(choice.target),
        drawer=drawer_of(choice.request, index),
        answer=Answer(tokenizer, params.stop, choice.request.prompt.format),
        stage=choice.stage,
        seq=choice.seq.fork(),
    )


def _seq(choice: Choice) -> CachedSequence:
    assert choice.seq is not None
    return choice.seq
