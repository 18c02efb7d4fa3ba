"""The second half of `kv`: sends the request and shows what comes back."""

from __future__ import annotations

import json
from typing import Any, Final

from kvclient import reasons, stdio
from kvclient.bar import Bar
from kvclient.client import Client
from kvclient.errors import Cancelled, Internal, KvdError
from kvclient.events import Completion, Event, Stats
from kvclient.options import Asked

SLOW_S: Final = 10.0
"""A prefill that took this long is explained without --stats too."""


def answer(asked: Asked, body: dict[str, Any]) -> int:
    """Streams the answer to stdout and returns the exit code. Raises KvdError, StdoutClosed and KeyboardInterrupt; the
    request is cancelled by each."""
    bar = Bar.for_stderr()
    with Client(report=lambda line: stdio.error(f"kv: {line}\n")) as kv:
        stream = kv.stream(asked.model, **body, **asked.options)
        try:
            done, last = _show(stream, bar, quiet=asked.json)
        finally:
            bar.clear()
            stream.close()
        if asked.json:
            stdio.write(json.dumps(_plain(done, asked), ensure_ascii=False) + "\n")
        elif last != "\n":
            stdio.write("\n")
        if asked.stats:
            stdio.error(figures(done.stats))
        if asked.stats or done.stats.prefill_s >= SLOW_S:
            for line in _warnings(kv, done.model, each=asked.stats):
                stdio.complain(line)
    if done.finish_reason == "cancelled":
        return Cancelled.exit_code
    if done.finish_reason == "length" and (cut := _cut(done.stats, asked)):
        stdio.complain(f"the answer was cut after {done.stats.completion_tokens} tokens{cut}")
    return 0


def _warnings(kv: Client, model: str, *, each: bool) -> list[str]:
    """What the model was loaded with a warning for, each in its line or all in one."""
    try:
        models = kv.status().get("models", [])
    except KvdError as problem:
        return [f"the model's warnings cannot be had: {problem.message}"]
    found = [str(warning) for one in models if one.get("name") == model for warning in one.get("warnings", [])]
    lines = found if each or not found else ["; ".join(found)]
    return [f"{model}: {line}" for line in lines]


def _cut(stats: Stats, asked: Asked) -> str:
    """Why an answer ended before its end; empty where that was asked for."""
    if short := stats.out_of_memory:
        return f": the {short['what']} needs {short['needed']} bytes more, {short['available']} can be had"
    return "" if "max_tokens" in asked.options else ", where the context ends"


def _show(stream: Any, bar: Bar, *, quiet: bool) -> tuple[Completion, str]:
    """The completion, and the last character that went to stdout."""
    last = ""
    try:
        for event in stream:
            if event.kind == "text" and event.text and not quiet:
                bar.clear()
                last = event.text[-1]  # before it is written: Ctrl-C comes at any place
                stdio.write(event.text)
                continue
            if event.done is not None:
                return event.done, last
            _note(event, bar)
            stdio.check_stdout()
    except (KvdError, KeyboardInterrupt):
        if last not in ("", "\n") and stdio.terminal():
            stdio.write("\n")  # or what comes next sticks to half an answer
        raise
    raise Internal("the stream ended without an answer")


def _note(event: Event, bar: Bar) -> None:
    if event.progress is not None:
        bar.prefill(event.progress)
    elif event.kind == "queued":
        bar.queued(event.position or 0)
    elif event.kind in ("reasoning", "text"):
        bar.growing("thinking" if event.kind == "reasoning" else "answering", len(event.text))


def _plain(done: Completion, asked: Asked) -> dict[str, Any]:
    return {
        "id": done.id, "model": done.model or asked.model or None, "text": done.text,
        "reasoning": done.reasoning or None, "finish_reason": done.finish_reason, "stats": done.stats.to_wire(),
    }  # fmt: skip


def figures(stats: Stats) -> str:
    """A few lines for people."""
    lines = [f"the model was loaded first, in {stats.load_s:.1f} s"] if stats.load_s >= 0.05 else []
    lines += [
        f"prompt {stats.prompt_tokens} tokens = {stats.cached_tokens} cached ({stats.cached_memory_tokens} memory, "
        f"{stats.cached_ssd_tokens} ssd) + {stats.computed_tokens} computed; "
        f"first token after {stats.ttft_s:.3f} s (queue {stats.queue_s:.3f} s, prefill {stats.prefill_s:.3f} s)",
        f"answer {stats.completion_tokens} tokens at {stats.decode_tokens_per_s:.1f} tokens/s; "
        f"{stats.stored_tokens} tokens stored; KV {stats.kv_bytes / 2**20:.1f} MiB {stats.kv_precision}".rstrip(),
    ]
    if stats.miss_reason:
        at = stats.first_divergence
        where = f" at token {at.token}: {at.text[:40]!r}, stored {at.stored_text[:40]!r}" if at else ""
        lines.append(f"not all was reused: {reasons.words(stats.miss_reason)}{where}")
    return "".join(f"kv: {line}\n" for line in lines)
