"""Requests whose logits can be compared bit for bit, and texts with known token counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvclient import Client, TokenLogprob

TOP = 20


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    logprobs: list[TokenLogprob]
    computed: int
    memory: int
    ssd: int
    stored: int
    prompt: int


def ask(client: Client, ids: list[int], *, max_tokens: int = 4, **options: Any) -> Answer:
    """A greedy answer with the top log probabilities of each token: floats survive the wire bit for bit."""
    options = {"durable_wait_ms": 20_000, **options}
    done = client.generate(
        "demo", tokens=ids, max_tokens=max_tokens, temperature=0.0, logprobs=True, top_logprobs=TOP, **options
    )
    stats = done.stats
    assert stats.cached_tokens + stats.computed_tokens == stats.prompt_tokens == len(ids)
    return Answer(
        done.text,
        list(done.logprobs),
        stats.computed_tokens,
        stats.cached_memory_tokens,
        stats.cached_ssd_tokens,
        stats.stored_tokens,
        stats.prompt_tokens,
    )


def ids(count: int, seed: int = 1) -> list[int]:
    """`count` token ids of no meaning, the same for the same seed, none of them special."""
    state, found = seed * 2654435761 % 2**32, []
    for _ in range(count):
        state = (1664525 * state + 1013904223) % 2**32
        found.append(100 + state % 40_000)
    return found
