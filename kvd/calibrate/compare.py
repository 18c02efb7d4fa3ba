"""How far logits are from native's, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvclient.errors import Internal
from kvd.cache.hostmem import on_cpu
from kvd.cache.softmax import exponential_in_place
from kvd.calibrate.result import Quality

SLICE = 64
"""positions compared at once: the vocabulary is large"""


class NotFinite(Internal):
    """Logits of which some are infinite or no number: there is nothing to compare."""


def log_softmax(logits: mx.array) -> mx.array:
    """[..., vocab] in float32."""
    wide = logits.astype(mx.float32)
    below = wide - wide.max(axis=-1, keepdims=True)
    return below - mx.log(_exponential(below).sum(axis=-1, keepdims=True))


def _checked(logprobs: mx.array) -> mx.array:
    if not _number(mx.isfinite(logprobs).all()):
        raise NotFinite("the model's logits are not finite")
    return logprobs


def _exponential(x: mx.array) -> mx.array:
    """mlx's own takes most of a comparison's time on the CPU."""
    return exponential_in_place(x + 0) if on_cpu() else mx.exp(x)


@dataclass(frozen=True, slots=True)
class Reference:
    """Native's log probabilities and probabilities [positions, vocab], and the token that really followed each position
    but the last. Logits that are no numbers raise NotFinite."""

    logprobs: mx.array
    probs: mx.array
    followed: tuple[int, ...]

    @staticmethod
    def of(logits: mx.array, window: Sequence[int], following: int | None) -> Reference:
        logprobs = _checked(log_softmax(logits))
        probs = _exponential(logprobs)
        mx.eval(logprobs, probs)
        return Reference(logprobs, probs, (*window[1:], *(() if following is None else (following,))))

    def last(self, positions: int) -> Reference:
        skipped = self.logprobs.shape[0] - positions
        return Reference(self.logprobs[skipped:], self.probs[skipped:], self.followed[skipped:])

    def quality(self, logits: mx.array) -> Quality:
        """KL(native || these logits) per position, and what else is told of them."""
        divergences: list[float] = []
        same, native_nll, nll = 0, 0.0, 0.0
        for start in range(0, logits.shape[0], SLICE):
            p = self.logprobs[start : start + SLICE]
            q = _checked(log_softmax(logits[start : start + SLICE]))
            kl = mx.sum(self.probs[start : start + SLICE] * (p - q), axis=-1)
            tops = mx.sum(mx.argmax(p, axis=-1) == mx.argmax(q, axis=-1))
            divergences += _floats(kl)
            same += int(_number(tops))
            ids = mx.array(self.followed[start : start + SLICE])[:, None]
            if ids.size:
                rows = ids.shape[0]
                native_nll -= _number(mx.take_along_axis(p[:rows], ids, axis=-1).sum())
                nll -= _number(mx.take_along_axis(q[:rows], ids, axis=-1).sum())
        count = len(divergences)
        ordered = sorted(divergences)
        difference = mx.exp(mx.array((nll - native_nll) / max(1, len(self.followed))))
        return Quality(
            kld_mean=max(0.0, sum(divergences) / count),
            kld_p99=max(0.0, ordered[min(count - 1, int(0.99 * count))]),
            same_top=same / count,
            perplexity_ratio=_number(difference),
        )


def _number(value: mx.array) -> float:
    found: Any = value.item()
    return float(found)


def _floats(values: mx.array) -> list[float]:
    found: Any = values.tolist()
    return [float(value) for value in found]
