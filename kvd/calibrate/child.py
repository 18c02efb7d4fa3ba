"""`python -P -m kvd.calibrate.child ORDER`: the process of one calibration, which owns mlx.

ORDER is JSON, see `kvd.calibrate.process.Order`. Standard output carries a JSON object per line: {"note"},
{"plan": {rows, seconds}}, {"at": rows, "doing"}, and last {"result"} or {"error": {code, message, details}}. It ends
with its standard input, a pipe that only its parent has open.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from importlib.metadata import version
from typing import Any, Final, TextIO

from kvclient.errors import Internal, KvdError, OutOfMemory
from kvd import leash
from kvd.calibrate.process import Order, order_of

MARK: Final = "TEXT-GOES-HERE"
PROBE_ROWS: Final = 128
"""rows of the pass that tells how fast this machine is"""


class Teller:
    """Writes messages; progress at most every few rows."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._rows, self._doing = out, 0, ""

    def tell(self, **message: Any) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def tick(self, rows: int) -> None:
        self._rows += rows
        self.tell(at=self._rows, doing=self._doing)

    def doing(self, what: str) -> None:
        self._doing = what
        self.tell(at=self._rows, doing=what)


def main() -> int:
    leash.hold(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent, whose end ends us
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever libraries print must not look like a message
    teller = Teller(out)
    try:
        teller.tell(result=calibrate(order_of(sys.argv[1]), teller))
        return 0
    except KvdError as problem:
        teller.tell(error=problem.to_wire())
    except MemoryError as problem:
        teller.tell(error=OutOfMemory(f"calibrating: {problem}", what="kv pool").to_wire())
    except Exception as problem:  # the border of the process: the parent is told, the log has the rest
        teller.tell(error=Internal(f"calibrating failed: {type(problem).__name__}: {problem}"[:300]).to_wire())
        raise
    return 1


def calibrate(order: Order, teller: Teller) -> str:
    """The result as `kvd.calibrate.result.dumps` writes it."""
    from kvd.cache.check import check
    from kvd.cache.inspection import inspect_layout
    from kvd.calibrate import plan as plans
    from kvd.calibrate import result, trial
    from kvd.calibrate.material import DOCUMENT, PLAIN_QUESTIONS, Question, prepare, shipped
    from kvd.calibrate.run import METHOD, Run, stops_of
    from kvd.models.load import load

    began = time.monotonic()
    loaded = load(order.folder, available=order.memory)
    info, tokenizer = loaded.info, loaded.tokenizer
    layout = inspect_layout(loaded.model, info.architecture)
    report = check(loaded.model, layout, order.block_size, info.architecture)
    context = info.context_length or plans.TOKENS_GPU
    tokens = min(order.tokens or plans.default_tokens(info.backend, info.context_length), context)
    if order.text is None:
        (text, questions), named = shipped(), DOCUMENT
    else:
        text, named = order.text.read_text(encoding="utf-8"), order.text.name
        questions = tuple(Question(words) for words in PLAIN_QUESTIONS)
    material = prepare(
        text, questions, lambda words: [int(i) for i in tokenizer.encode(words, add_special_tokens=False)],
        frame=frame(tokenizer), tokens=tokens, window=order.window or plans.WINDOW,
    )  # fmt: skip
    warnings = []
    if material.tokens < tokens:
        warnings.append(f"the text has {material.tokens:,} tokens only, {tokens:,} were asked for")
    _check_memory(order.memory, info.weights_bytes, layout.bytes_per_token(), material.tokens)
    plan = plans.make(order.presets, len(layout.layers), material.tokens, len(material.window))
    teller.tell(plan={"rows": plan.rows, "seconds": _seconds(loaded, plan), "tokens": material.tokens,
                      "full": len(plan.full), "backend": info.backend, "context": context})  # fmt: skip
    means = trial.Means(
        model=loaded.model, paths=report.paths, block=order.block_size,
        chunk=512 if info.backend == "cpu" else 2048, stops=stops_of(tokenizer), tick=teller.tick,
    )  # fmt: skip
    run = Run(means, layout, material, plan, order.gate, lambda ids: str(tokenizer.decode(ids)), teller.doing)
    found = run.everything(order.budget)
    return result.dumps(
        result.Calibration(
            model=order.name, identity=order.identity, tokens=material.tokens, window=len(material.window),
            context=context, text=named, backend=f"{info.backend}, mlx {version('mlx')}", dtype=layout.dtype,
            gate=order.gate, method=METHOD, settings=found.settings, sides=found.sides, layers=found.layers,
            best=found.best, budget=order.budget, seconds=round(time.monotonic() - began, 1), made_at=time.time(),
            warnings=(*info.notes, *warnings, *found.warnings),
        )
    )  # fmt: skip


def frame(tokenizer: Any) -> tuple[list[int], str]:
    """What the chat template puts before a text, as ids, and behind a question; without one the tokenizer's own start
    and a cue."""
    if getattr(tokenizer, "has_chat_template", False):
        turn = [{"role": "user", "content": MARK}]
        whole = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
        before, found, after = whole.partition(MARK)
        if found:
            return [int(i) for i in tokenizer.encode(before, add_special_tokens=False)], after
    return [int(i) for i in tokenizer.encode("")], "\nAnswer:"


def _check_memory(memory: int | None, weights: int, per_token: int, tokens: int) -> None:
    """The native pool stays while another one, at most as large, is filled; it may double while questions are asked."""
    needed = weights + 4 * per_token * tokens
    if memory is not None and needed > memory:
        raise OutOfMemory(
            f"{tokens} tokens need {needed} bytes with the weights, {memory} are allowed; take fewer (--tokens)",
            needed=needed, available=memory, what="calibration",
        )  # fmt: skip


def _seconds(loaded: Any, plan: Any) -> float:
    """About how long the plan will take, from one short pass."""
    import mlx.core as mx

    from kvd.calibrate import plan as plans

    ids = mx.array([[1 + i % 99 for i in range(PROBE_ROWS)]])
    took = []
    for _ in range(2):
        began = time.perf_counter()
        mx.eval(loaded.model(ids))
        took.append(time.perf_counter() - began)
    info = loaded.info
    elements = info.weights_bytes / (4 if info.backend == "cpu" else 2)
    factor = plans.ATTENTION_CPU if info.backend == "cpu" else plans.ATTENTION_GPU
    share = factor * 2 * info.heads * info.head_dim * info.layers / elements
    return plans.seconds(plan, min(took) / PROBE_ROWS, share)


if __name__ == "__main__":
    sys.exit(main())
