"""Drawing the next token of each sequence of a batch. Engine thread only.

A row is processed by itself and its random key depends on (seed, choice, position) alone, so a seeded request gives
the same text alone and in any batch, wherever its logits are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, cast

import mlx.core as mx
from mlx_lm import sample_utils

from kvd.worker.grammar import Grammar
from kvd.worker.params import Sampling

_ALL = 1 << 30
"""context of the penalties: the whole sequence, not mlx-lm's last 20 tokens"""
KEYS: Final = 64
"""random keys made at once"""


@dataclass(slots=True)
class Drawer:
    """What one sequence needs to draw: its settings and the tokens its penalties look at.

    `prompt` counts for the repetition penalty only, as in transformers; presence and frequency look at the answer.
    """

    sampling: Sampling
    choice: int = 0
    prompt: Sequence[int] = ()
    output: list[int] = field(default_factory=list)
    grammar: Grammar | None = None
    _keys: tuple[int, mx.array] | None = field(default=None, repr=False)
    """keys of the KEYS positions from KEYS times the first number on: bringing numbers to a GPU takes half a
    millisecond, one or many"""
    _bias: tuple[mx.array, mx.array] | None = field(default=None, repr=False)

    def accept(self, token: int) -> None:
        """The token was drawn."""
        self.output.append(token)
        if self.grammar is not None:
            self.grammar.accept(token)

    @property
    def blind(self) -> bool:
        """The next draw does not depend on which token the one before it gives: it can be prepared before that is
        known."""
        sampling = self.sampling
        penalties = sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty
        return self.grammar is None and not penalties

    def key(self, ahead: int) -> mx.array:
        """The random key of the draw `ahead` of the next: a hash of seed, choice and position."""
        turn, at = divmod(len(self.output) + ahead, KEYS)
        if self._keys is None or self._keys[0] != turn:
            self._keys = turn, mx.array([self._words(turn * KEYS + n) for n in range(KEYS)], dtype=mx.uint32)
        return self._keys[1][at]

    def bias(self) -> tuple[mx.array, mx.array]:
        """Ids and amounts of the logit bias."""
        if self._bias is None:
            ids, amounts = zip(*self.sampling.logit_bias, strict=True)
            self._bias = mx.array(ids), mx.array(amounts)
        return self._bias

    def _words(self, position: int) -> tuple[int, int]:
        """The two words of a key, as `mx.random.key` makes them of a number."""
        text = f"{self.sampling.seed}/{self.choice}/{position}".encode()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
        return number >> 32, number & 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Draw:
    """A drawn token; `logprob` and `top` ((token, logprob) descending) only where asked."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Draws:
    """Draws of a batch that are computed or being computed; `read` waits for them."""

    def __init__(
        self, tokens: mx.array, chosen: dict[int, mx.array], tops: dict[int, tuple[mx.array, mx.array]]
    ) -> None:
        self.tokens = tokens
        """[rows] ids: what the next step can be fed before anybody knows them"""
        self._chosen = chosen
        self._tops = tops
        mx.async_eval(tokens, *(array for pair in tops.values() for array in pair), *chosen.values())

    def read(self) -> list[Draw]:
        return [
            Draw(int(token), _value(self._chosen.get(i)), _pairs(self._tops[i]) if i in self._tops else ())
            for i, token in enumerate(_numbers(self.tokens))
        ]


def draw(logits: mx.array, drawers: Sequence[Drawer]) -> list[Draw]:
    """One token per row of `logits` [rows, vocab]; row i belongs to drawers[i]."""
    return begin(logits, drawers).read()


def begin(logits: mx.array, drawers: Sequence[Drawer], ahead: int = 0) -> Draws:
    """As `draw`, without waiting. ahead=1: the draws after those that are being computed now (drawers must be
    `blind`)."""
    if all(one.blind and one.sampling.greedy and one.sampling.plain and not one.sampling.logprobs for one in drawers):
        return Draws(mx.argmax(logits, axis=-1), {}, {})
    rows = [_processed(logits[i : i + 1], drawer) for i, drawer in enumerate(drawers)]
    normal = {
        i: row.astype(mx.float32) - mx.logsumexp(row.astype(mx.float32), axis=-1, keepdims=True)
        for i, row in enumerate(rows)
        if drawers[i].sampling.logprobs or not drawers[i].sampling.greedy
    }
    tokens = [_token(rows[i], normal.get(i), drawer, ahead) for i, drawer in enumerate(drawers)]
    tops = {i: _top(normal[i], d.sampling.top_logprobs) for i, d in enumerate(drawers) if d.sampling.top_logprobs}
    chosen = {i: normal[i][0, tokens[i]] for i, d in enumerate(drawers) if d.sampling.logprobs}
    return Draws(mx.concatenate(tokens), chosen, tops)


def _value(array: mx.array | None) -> float | None:
    return None if array is None else float(_numbers(array.reshape(1))[0])


def _pairs(top: tuple[mx.array, mx.array]) -> tuple[tuple[int, float], ...]:
    return tuple((int(id), float(value)) for id, value in zip(*map(_numbers, top), strict=True))


def _numbers(array: mx.array) -> list[float]:
    return cast(list[float], array.tolist())


def _processed(row: mx.array, drawer: Drawer) -> mx.array:
    """Bias, penalties, grammar: what the model's own preference is before it is drawn from."""
    sampling = drawer.sampling
    if not sampling.plain:
        if sampling.logit_bias:
            ids, amounts = drawer.bias()
            row = row.at[:, ids].add(amounts.astype(row.dtype))
        if sampling.repetition_penalty != 1.0:
            seen = mx.array([*drawer.prompt, *drawer.output], dtype=mx.int32)
            row = sample_utils.make_repetition_penalty(sampling.repetition_penalty, _ALL)(seen, row)
        said = mx.array(drawer.output, dtype=mx.int32)
        if sampling.presence_penalty and drawer.output:
            row = sample_utils.make_presence_penalty(sampling.presence_penalty, _ALL)(said, row)
        if sampling.frequency_penalty and drawer.output:
            row = sample_utils.make_frequency_penalty(sampling.frequency_penalty, _ALL)(said, row)
    if drawer.grammar is not None:
        row = row + drawer.grammar.mask(row.shape[-1]).astype(row.dtype)
    return row


def _token(row: mx.array, normal: mx.array | None, drawer: Drawer, ahead: int) -> mx.array:
    """[1] token id."""
    sampling = drawer.sampling
    if sampling.greedy or normal is None:
        return mx.argmax(row, axis=-1)
    with _interpreted():
        if sampling.top_p < 1.0:
            normal = sample_utils.apply_top_p(normal, sampling.top_p)
        if sampling.min_p:
            normal = sample_utils.apply_min_p(normal, sampling.min_p)
        if 0 < sampling.top_k < normal.shape[-1]:
            normal = sample_utils.apply_top_k(normal, sampling.top_k)
    return mx.random.categorical(normal * (1.0 / sampling.temperature), key=drawer.key(ahead))


@contextmanager
def _interpreted() -> Iterator[None]:
    """mlx-lm compiles its filters; on the CPU that runs the C++ compiler for a second in the middle of a stream."""
    if mx.default_device() != mx.cpu:
        yield
        return
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


def _top(normal: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """([count] ids, [count] log probabilities), most likely first."""
    ids = mx.argsort(-normal[0])[:count]
    return ids, normal[0, ids]
