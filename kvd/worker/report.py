"""What a client is told of its request: progress, log probabilities, the bodies of `done` and of `explain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvd.worker.request import Choice, Request
from kvd.worker.sampler import Draw
from kvd.worker.scheduler import Stage
from kvd.worker.text import Tokenizer, decode


@dataclass(frozen=True, slots=True)
class Facts:
    """What all requests of a worker share."""

    kv_precision: str
    bytes_per_token: int


def progress(request: Request) -> dict[str, Any]:
    """Prompt tokens whose KV is there (of a request that has ended: was there), of all, and how many of them were not
    computed."""
    cost = request.cost
    rows = max((choice.rows for choice in request.live), default=cost.high)
    total = len(request.tokens)
    return {"done": min(rows, total), "total": total, "cached": cost.memory + cost.ssd}


def logprob(tokenizer: Tokenizer, drawn: Draw) -> dict[str, Any]:
    """One token's entry of a text event's `logprobs`."""
    top = [{"id": id, "token": decode(tokenizer, [id]), "logprob": value, "top": []} for id, value in drawn.top]
    return {"id": drawn.token, "token": decode(tokenizer, [drawn.token]), "logprob": drawn.logprob, "top": top}


def done(request: Request, facts: Facts, stored: int, peak_bytes: int) -> dict[str, Any]:
    """Body of `done`."""
    return {
        "choices": [_choice(choice) for choice in sorted(request.choices, key=lambda one: one.index)],
        "stats": stats(request, facts, stored, peak_bytes),
    }


def _choice(choice: Choice) -> dict[str, Any]:
    answer = choice.answer
    return {
        "index": choice.index,
        "text": answer.text,
        "finish_reason": choice.finish_reason,
        "stop_sequence": answer.stop_sequence,
        "reasoning": answer.reasoning,
        "tool_calls": [dict(call) for call in answer.tool_calls],
    }


def stats(request: Request, facts: Facts, stored: int, peak_bytes: int) -> dict[str, Any]:
    """Contract's `stats`; the front fills in `load_s`, since it waited. Of a request that ended before its prefill
    did, what is left counts neither as cached nor as computed."""
    cost, times = request.cost, request.times
    completion = sum(len(choice.output) for choice in request.choices)
    admitted = times.admitted if times.admitted is not None else times.arrival
    first, last = times.first_token, times.last_token
    decode_s = last - first if first is not None and last is not None else 0.0
    later = completion - len(request.choices)
    return {
        "prompt_tokens": len(request.tokens),
        "cached_tokens": cost.memory + cost.ssd,
        "cached_memory_tokens": cost.memory,
        "cached_ssd_tokens": cost.ssd,
        "computed_tokens": cost.computed,
        "completion_tokens": completion,
        "stored_tokens": stored,
        "queue_s": admitted - times.arrival,
        "prefill_s": (times.prefilled - admitted) if times.prefilled is not None else 0.0,
        "ttft_s": (first - times.arrival) if first is not None else 0.0,
        "decode_tokens_per_s": later / decode_s if later > 0 and decode_s > 0 else 0.0,
        "kv_bytes": request.kv_rows * facts.bytes_per_token,
        "first_divergence": dict(request.divergence) if request.divergence else None,
        "miss_reason": request.miss_reason,
        "peak_memory_bytes": peak_bytes,
        "recomputed_tokens": cost.recomputed,
        "kv_precision": facts.kv_precision,
        "load_s": 0.0,
        "out_of_memory": dict(request.out_of_memory) if request.out_of_memory else None,
    }


def divergence(tokenizer: Tokenizer, tokens: Sequence[int], at: int, stored: int | None) -> dict[str, Any] | None:
    """Where a prompt leaves what is stored: `stored` is the id there, None if nothing stored goes on differently."""
    if stored is None or at >= len(tokens):
        return None
    return {"token": at, "text": decode(tokenizer, [tokens[at]]), "stored_text": decode(tokenizer, [stored])}


def miss_reason(request: Request, cached: int) -> str | None:
    """Why rows had to be computed, where the failure of a restore has not said it already."""
    if request.miss_reason is not None:
        return request.miss_reason
    if request.prompt.params.cache == "off":
        return "cache_off"
    if request.divergence is not None:
        return "diverged"
    return "not_stored" if cached == 0 and len(request.tokens) > 1 else None


def standing(request: Request, position: int) -> tuple[str, dict[str, Any]]:
    """The event that says where a request is: `queued` or `progress`."""
    if all(choice.stage is Stage.WAITING and not choice.started for choice in request.choices):
        return "queued", {"position": position}
    return "progress", progress(request)
