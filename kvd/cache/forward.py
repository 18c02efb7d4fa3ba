"""One forward pass of a model over cached sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from kvd.cache.ahead import AheadStep, Arriving, Outlook
from kvd.cache.kernel import whole
from kvd.cache.steps import PausedStep, plan_step

if TYPE_CHECKING:
    from kvd.cache.paged import PagedCache
    from kvd.cache.sequence import CachedSequence


def forward(
    model: Any,
    cache: PagedCache,
    batch: Sequence[tuple[CachedSequence | Outlook, Sequence[int]]],
    *,
    discard_last: bool = False,
    logits: bool = True,
    inputs: mx.array | None = None,
    pause: Callable[[], None] | None = None,
    arriving: Arriving | None = None,
) -> mx.array | None:
    """One sequence with L tokens (a prefill chunk), or N sequences with one token each (a decode batch).

    Rows must have been reserved; call `advance` on each sequence afterwards. Returns the logits `[N, vocab]` of each
    sequence's last token, lazily: evaluate them before the next pass. logits=False returns None, has only the KV
    computed, and evaluates it: what a prefill chunk needs.
    discard_last: the one row given is stored already (rows >= 1): it attends to the stored rows up to itself, its own
    KV is discarded, nothing is written; no `reserve` and no `advance`.
    inputs: `[N]` ids of a decode batch that are still being computed, instead of those in `batch` (which then only
    count): the pass is put in line behind them.
    pause: called before every layer but the first, when all before it is computed and nothing of it is in line. It may
    make passes over other sequences whose rows are reserved; blocks must stay where they are.
    arriving: stored rows of the batch's one sequence, an `Outlook`, that are still being read. Not with `pause`.
    """
    cache.assert_owner()
    assert pause is None or arriving is None
    tokens = [list(ids) for _, ids in batch]
    assert batch and (len(batch) == 1 or all(len(ids) == 1 for ids in tokens)) and len(tokens[0]) >= 1
    if len(batch) > 1 and not cache.paths.opaque:
        one_by_one = [None] * len(batch) if inputs is None else mx.split(inputs, len(batch))
        pairs = zip(batch, one_by_one, strict=True)
        rows = [forward(model, cache, [item], logits=logits, inputs=ids) for item, ids in pairs]
        return mx.concatenate([row for row in rows if row is not None]) if logits else None
    step = plan_step(cache, [sequence for sequence, _ in batch], len(tokens[0]), discard_last)
    if pause is not None:
        step = PausedStep(cache, step, pause)
    if arriving is not None:
        step = AheadStep(step, arriving)
    ids = mx.array(tokens) if inputs is None else inputs[:, None]
    idle = whole(len(batch)) - len(batch) if cache.paths.kernel else 0
    if idle:
        ids = mx.pad(ids, [(0, idle), (0, 0)])
    out = model(ids, cache=cache.layer_caches(step))
    if not logits:
        del out
        cache.pool.evaluate()
        return None
    result: mx.array = out[: len(batch), -1, :]
    return result
