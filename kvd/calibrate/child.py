"""`python -P -m kvd.calibrate.child ORDER`: the process of one calibration, which owns mlx.

ORDER is JSON, see `kvd.calibrate.process.Order`. Standard output carries a JSON object per line: {"plan": {tokens,
settings, seconds, …}}, {"doing", "kind", "share", "left"} with the share of the time that has gone and the seconds
left, and last {"result"} or {"error": {code, message, details}}. It ends with its standard input, a pipe that only its
parent has open.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, TextIO

from kvclient.errors import Internal, KvdError, OutOfMemory
from kvd import leash
from kvd.calibrate.plan import Pace, Plan, Stage, Stages
from kvd.calibrate.process import Order, order_of
from kvd.calibrate.result import Calibration, stored

if TYPE_CHECKING:
    from kvd.cache.layout import KVLayout
    from kvd.cache.paths import Paths
    from kvd.calibrate.material import Material
    from kvd.models.load import Loaded, ModelInfo

MARK: Final = "TEXT-GOES-HERE"
PROBE_ROWS: Final = 128
"""rows of the pass that tells how fast this machine is"""


class Teller:
    """Writes messages: each stage, and how far it is after every pass."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._pace: Pace | None = None
        self._kind = self._doing = ""

    def tell(self, **message: Any) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def plan(self, stages: Stages, **facts: Any) -> None:
        self._pace = Pace(stages)
        self.tell(plan={**facts, "seconds": self._pace.left})

    def doing(self, kind: str, what: str) -> None:
        self._kind, self._doing = kind, what
        if self._pace is not None:
            self._pace.begin(kind)
        self.tick()

    def tick(self) -> None:
        if self._pace is not None:
            share, left = round(self._pace.share, 4), round(self._pace.left, 1)
            self.tell(doing=self._doing, kind=self._kind, share=share, left=left)


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
    from kvd.models.load import import_mlx_lm, load

    import_mlx_lm()
    from kvd.cache.inspection import inspect_layout
    from kvd.calibrate import plan as plans
    from kvd.calibrate import result
    from kvd.calibrate.run import METHOD, Run, stops_of
    from kvd.calibrate.trial import Setup

    began = time.monotonic()
    loaded = load(order.folder, available=order.memory)
    info, tokenizer = loaded.info, loaded.tokenizer
    layout = inspect_layout(loaded.model, info.architecture)
    context = info.context_length or result.ENOUGH
    material, named, warnings = _material(order, info, tokenizer, context)
    _check_memory(order.memory, info.weights_bytes, layout.bytes_per_token(), material.tokens)
    backend = f"{info.backend}, mlx {version('mlx')}"
    chunk = 512 if info.backend == "cpu" else 2048
    basis = digest(order.identity, METHOD, backend, layout.describe(), order.block_size, chunk, asdict(material))
    known = known_of(order, basis)
    plan = plans.make(order.presets, len(layout.layers), material.tokens, len(material.window))
    setup = Setup(
        model=loaded.model, paths=_paths(loaded.model, layout, order.block_size, info.architecture),
        block=order.block_size, chunk=chunk, stops=stops_of(tokenizer), tick=teller.tick,
    )  # fmt: skip
    run = Run(
        setup, layout, material, plan, order.gate, order.budget, lambda ids: str(tokenizer.decode(ids)), teller.doing,
        known,
    )  # fmt: skip
    stages = plans.remaining(_stages(loaded, plan), plan, known)
    teller.plan(
        stages, tokens=material.tokens, backend=info.backend, context=context, since=known.made_at if known else None,
        settings=stages["preset"].count + stages["native"].count,
    )  # fmt: skip
    found = run.everything()
    return result.dumps(
        result.Calibration(
            model=order.name, identity=order.identity, basis=basis, tokens=material.tokens,
            window=len(material.window), context=context, text=named, backend=backend, dtype=layout.dtype,
            gate=order.gate, method=METHOD, settings=found.settings, sides=found.sides, layers=found.layers,
            best=found.best, budget=order.budget, seconds=round(time.monotonic() - began, 1), made_at=time.time(),
            warnings=(*info.notes, *warnings, *found.warnings),
        )
    )  # fmt: skip


def _material(order: Order, info: ModelInfo, tokenizer: Any, context: int) -> tuple[Material, str, list[str]]:
    """The text as token ids, its name, and what is to be said where it is shorter than asked for."""
    from kvd.calibrate import plan as plans
    from kvd.calibrate.material import DOCUMENT, PLAIN_QUESTIONS, Question, prepare, shipped

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
    asked = order.tokens or tokens
    if material.tokens >= asked:
        return material, named, []
    what = f"the text has {material.tokens:,}" if material.tokens < tokens else f"the model takes {context:,}"
    return material, named, [f"{what} tokens only, {asked:,} were asked for"]


def _paths(model: Any, native: KVLayout, block: int, architecture: str) -> Callable[[KVLayout], Paths]:
    """The attention paths as a worker has them after its check at load, which starts a process on some devices: that
    is done for the native layout only."""
    from kvd.cache.check import check, narrowed, query_heads
    from kvd.cache.check_device import check_device

    paths = check(model, native, block, architecture).paths

    def of(layout: KVLayout) -> Paths:
        if layout == native:
            return paths
        return narrowed(paths, check_device(layout, block, query_heads(model, layout), view=paths.view), layout)

    return of


def digest(*parts: Any) -> str:
    """Of everything that decides what is measured."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def known_of(order: Order, basis: str) -> Calibration | None:
    """What the model's kept result has on the same basis."""
    if order.kept is None:
        return None
    try:
        found = stored(order.kept)
    except ValueError:
        return None  # the command that gave the order has said so
    return found if found is not None and found.basis == basis else None


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


def _stages(loaded: Loaded, plan: Plan) -> dict[str, Stage]:
    """The plan with its seconds, from a short pass and a step."""
    from kvd.calibrate import plan as plans

    info = loaded.info
    elements = info.weights_bytes / (4 if info.backend == "cpu" else 2)
    factor = plans.ATTENTION_CPU if info.backend == "cpu" else plans.ATTENTION_GPU
    share = factor * 2 * info.heads * info.head_dim * info.layers / elements
    return plans.stages(plan, _took(loaded.model, PROBE_ROWS) / PROBE_ROWS, share, _took(loaded.model, 1))


def _took(model: Any, rows: int) -> float:
    """Seconds of one pass; the first may compile kernels."""
    import mlx.core as mx

    ids = mx.array([[1 + i % 99 for i in range(rows)]])
    took = []
    for _ in range(3):
        began = time.perf_counter()
        mx.eval(model(ids))
        took.append(time.perf_counter() - began)
    return min(took)


if __name__ == "__main__":
    sys.exit(main())
