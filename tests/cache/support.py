"""Models and reference results for the tests of the cache. The wheel's reference BLAS makes equal shapes bit-equal."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from kvd.cache import precision
from kvd.cache.chain import Chain, namespace
from kvd.cache.devicemem import Copier
from kvd.cache.hostmem import ALL_PARTS, address
from kvd.cache.inspection import inspect_layout
from kvd.cache.landing import BlockLanding
from kvd.cache.paged import CachedSequence, PagedCache, forward
from tests.cache.driver import FakeDriver
from tests.tiny import Family, tiny_model

BLOCK = 8
SPACE = namespace({"test": 1})


@cache
def model(family: Family = "llama", **options: Any) -> Any:
    folder = Path(tempfile.mkdtemp(prefix="kvd", dir="/tmp"))
    loaded, _ = load_model(tiny_model(folder / "model", family, **options))
    return loaded


def new_cache(
    net: Any, blocks: int = 64, initial: int | None = None, kv: str | dict[str, Any] = "native", **options: Any
) -> PagedCache:
    layout = precision.apply(inspect_layout(net), kv)
    return PagedCache(layout, BLOCK, blocks, initial_blocks=initial or blocks, namespace=SPACE, **options)


DEVICES = ("in place", "copied", "staged")
"""How bytes get into and out of a pool: the host addresses it, the device copies, mlx moves them."""


def device_of(kind: str, monkeypatch: Any) -> str:
    """Pools of this kind of device from now on."""
    if kind != "in place":
        monkeypatch.setattr("kvd.cache.pool.addressable", lambda: False)
    if kind == "copied":
        copies = Copier(FakeDriver())
        monkeypatch.setattr("kvd.cache.pool.copier", lambda: copies)
        monkeypatch.setattr("kvd.cache.devicemem.addresses", lambda arrays: [address(array) for array in arrays])
    return kind


def saved(cache: PagedCache, entry: Any) -> list[bytes]:
    """Bytes of a stored block, a row of one head after the other, part by part: the same on every kind of device."""
    with cache.host_rows(SimpleNamespace(entry=entry)) as handle:  # type: ignore[arg-type,union-attr]
        return [bytes(buffer) for buffer in handle.buffers()]


def fill(landing: BlockLanding, source: Sequence[bytes], rows: int | None = None, parts: slice = ALL_PARTS) -> None:
    """Bring the bytes of `saved` into a landing, however its windows are cut."""
    joined, at = b"".join(source), 0
    with landing.writing(rows, parts) as windows:
        assert sum(window.nbytes for window in windows) == len(joined)
        for window in windows:
            window[:] = joined[at : at + window.nbytes]
            at += window.nbytes


def prompt(length: int, seed: int = 0, vocab: int = 500) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(vocab) for _ in range(length)]


def stock_logits(net: Any, tokens: Sequence[int], chunk: int = 64) -> mx.array:
    """mlx-lm's own cache: chunks from row 0, then a step with the last token."""
    caches = make_prompt_cache(net)
    for start in range(0, len(tokens) - 1, chunk):
        part = list(tokens[start : min(start + chunk, len(tokens) - 1)])
        net(mx.array([part]), cache=caches)
        mx.eval([c.state[:2] for c in caches])
    out = net(mx.array([[tokens[-1]]]), cache=caches)[:, -1, :]
    mx.eval(out)
    return out


def prefill(net: Any, cache: PagedCache, sequence: CachedSequence, tokens: Sequence[int], chunk: int = 64) -> None:
    """Rows [sequence.rows, len(tokens)) in chunks on the grid of `chunk` from row 0."""
    while sequence.rows < len(tokens):
        at = sequence.rows
        part = list(tokens[at : min((at // chunk + 1) * chunk, len(tokens))])
        sequence.reserve(len(part))
        forward(net, cache, [(sequence, part)], logits=False)
        sequence.advance(part)


def ask(net: Any, cache: PagedCache, tokens: Sequence[int], space: Chain = SPACE, expected: int = 0) -> Any:
    """What the engine does for a prompt: match, prefill the rest, one step with the last token.

    Returns (logits, open sequence, rows computed).
    """
    match = cache.match(tokens, space)
    sequence = cache.open(tokens, match, space, expected or len(tokens) + 8)
    computed = len(tokens) - sequence.rows
    if sequence.rows == len(tokens):
        out = forward(net, cache, [(sequence, [tokens[-1]])], discard_last=True)
        mx.eval(out)
        return out, sequence, 1
    prefill(net, cache, sequence, tokens[:-1])
    return step(net, cache, sequence, tokens[-1]), sequence, computed


def step(net: Any, cache: PagedCache, sequence: CachedSequence, token: int) -> mx.array:
    sequence.reserve(1)
    out = forward(net, cache, [(sequence, [token])])
    mx.eval(out)
    sequence.advance([token])
    assert out is not None
    return out


def finish(sequence: CachedSequence) -> None:
    sequence.tail()
    sequence.close()


def same(left: mx.array, right: mx.array) -> bool:
    """Bit for bit."""
    return bool(mx.array_equal(left.view(mx.uint32), right.view(mx.uint32)))


def near(left: mx.array, right: mx.array, tolerance: float = 1e-3) -> bool:
    """Promise 1 across attention paths: |delta logit| <= 1e-3 in float32."""
    return bool(mx.abs(left.astype(mx.float32) - right.astype(mx.float32)).max().item() <= tolerance)


def step_batch(net: Any, cache: PagedCache, sequences: Sequence[CachedSequence], tokens: Sequence[int]) -> mx.array:
    for sequence in sequences:
        sequence.reserve(1)
    out = forward(net, cache, [(s, [t]) for s, t in zip(sequences, tokens, strict=True)])
    mx.eval(out)
    for sequence, token in zip(sequences, tokens, strict=True):
        sequence.advance([token])
    assert out is not None
    return out
