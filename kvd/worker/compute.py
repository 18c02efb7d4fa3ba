"""Where rows go through the model: prefill chunks, the last prompt row, batched decode steps. Engine thread only.

Rows are counted here, at the model call, so that what is reported is what was done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from kvd.cache.paged import PagedCache, forward
from kvd.cache.results import Published
from kvd.worker.params import Params
from kvd.worker.planner import Rates
from kvd.worker.request import Choice, Request
from kvd.worker.sampler import Draw, Drawer, draw
from kvd.worker.text import Answer


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

    def chunk(self, choice: Choice, start: int, end: int) -> None:
        """Rows [start, end) of the target, all but the last row of it. Raises PoolFull before anything is computed.
        After any other failure the sequence is as it was."""
        seq = choice.seq
        assert seq is not None and seq.rows == start < end < len(choice.target)
        tokens = choice.target[start:end]
        seq.reserve(len(tokens))
        began = time.monotonic()
        self.rows_fed += len(tokens)
        forward(self._model, self._cache, [(seq, tokens)], logits=False)
        self._rates.prefilled(start, len(tokens), time.monotonic() - began)
        self._count(choice, start, end)
        for block in seq.advance(tokens):
            self._published(choice, block)

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

    def step(self, choices: Sequence[Choice]) -> list[Draw]:
        """One token for each choice, in one batch. Room must have been reserved."""
        batch = [(choice.seq, choice.output[-1:]) for choice in choices if choice.seq is not None]
        assert len(batch) == len(choices)
        logits = forward(self._model, self._cache, batch)
        assert logits is not None
        drawn = draw(logits, [choice.drawer for choice in choices])
        for choice, (seq, token) in zip(choices, batch, strict=True):
            for block in seq.advance(token):
                self._published(choice, block)
        return drawn

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
