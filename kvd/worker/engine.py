"""The engine: one loop on the one thread that owns MLX. It carries out what the scheduler decides.

Everything else reaches it through `post`: callables that run between two steps, in order.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog

from kvclient.errors import Cancelled, Internal, KvdError, OutOfMemory, Timeout
from kvd.cache.layout import KVLayout
from kvd.cache.paged import PagedCache
from kvd.cache.results import PoolFull
from kvd.messages import Committed, LookedUp, Reserved
from kvd.worker import report
from kvd.worker.admit import Admission
from kvd.worker.beat import Heart, Pulse
from kvd.worker.compute import Computer, twin
from kvd.worker.finish import Finisher
from kvd.worker.outbox import Outbox
from kvd.worker.planner import Rates
from kvd.worker.prompt import Prompt
from kvd.worker.request import Choice, Request, Times
from kvd.worker.restore import Readers
from kvd.worker.sampler import Draw, draw
from kvd.worker.scheduler import Chunk, Limits, Stage, check_admission, decide, position, victim
from kvd.worker.spill import Spill
from kvd.worker.text import Piece

UNMEASURED_S: Final = 120.0
"""seconds a step is allowed before one has been measured: the first may compile kernels"""
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model as the engine needs it. `eos`: ids that end an answer."""

    model: Any
    tokenizer: Any
    layout: KVLayout
    namespace: bytes
    eos: frozenset[int]
    kv_precision: str = "native"


class Engine:
    """Owned by the thread that calls `run`; `post` and `stopping` may be used by any."""

    def __init__(
        self,
        model: Model,
        cache: PagedCache,
        *,
        outbox: Outbox,
        heart: Heart,
        spill: Callable[[Callable[[bytes], None]], Spill],
        readers: Callable[[Callable[..., None]], Readers],
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._cache = cache
        self._outbox = outbox
        self._heart = heart
        self._limits = limits
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.rates = Rates()
        self.spill = spill(lambda chain: self.post(self._settle))
        self.readers = readers(lambda result: self.post(lambda: self._admission.fetcher.read(result)))
        self._facts = report.Facts(model.kv_precision, model.layout.bytes_per_token())
        self._finisher = Finisher(cache, self.spill, outbox, self._facts)
        self._computer = Computer(model.model, cache, self.rates, self._finisher.published)
        self._admission = Admission(cache, model.layout, self.readers, self.spill, outbox, self.rates, model.tokenizer)
        self._requests: dict[str, Request] = {}
        self._choices: dict[str, Choice] = {}
        self._stop_at: float | None = None
        self._stopped = False
        self.rows_fed = lambda: self._computer.rows_fed

    # --- from other threads

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` on the engine's thread before its next step."""
        self._inbox.put(action)

    def looked_up(self, answer: LookedUp) -> None:
        self.post(lambda: self._admission.looked_up(answer))

    def reserved(self, answer: Reserved) -> None:
        self.spill.reserved(answer)

    def committed(self, answer: Committed) -> None:
        self.spill.committed(answer)

    def submit(self, kind: str, id: str, prompt: Prompt, arrival: float, load_s: float = 0.0) -> None:
        """A prepared request of kind generate, warm or explain."""
        self.post(lambda: self._submit(kind, id, prompt, arrival, load_s))

    def cancel(self, id: str, reason: str) -> None:
        self.post(lambda: self._cancel(id, reason))

    def stop(self, drain_s: float) -> None:
        """Take nothing new, end what runs within `drain_s` seconds, then return from `run`."""
        self.post(lambda: self._begin_stop(drain_s))

    # --- the loop

    def run(self) -> None:
        """Until `stop`. Raises nothing for what happens inside one request."""
        while not self._stopped:
            busy = self._step()
            self._receive(wait=not busy)
            self._expire(self._clock())

    def close(self, flush_s: float) -> None:
        """Wait for blocks on their way to the disk, at most `flush_s` seconds. Called after `run`, on its thread."""
        until = self._clock() + flush_s
        while self.spill.pending_bytes and self._clock() < until:
            self._pulse("flush", flush_s)
            try:
                self._inbox.get(timeout=0.05)()
            except queue.Empty:
                continue

    def _receive(self, *, wait: bool) -> None:
        if wait:
            self._pulse("idle", 0.0)
            try:
                self._inbox.get(timeout=self._patience())()
            except queue.Empty:
                return
        while True:
            try:
                action = self._inbox.get_nowait()
            except queue.Empty:
                return
            action()

    def _patience(self) -> float | None:
        """Seconds until something is due though nothing comes in; None: nothing will be."""
        due = [request.deadline for request in self._requests.values() if request.deadline is not None]
        due += [at for at in (self._finisher.next_deadline(), self._stop_at) if at is not None]
        return max(min(due) - self._clock(), 0.0) if due else None

    def _step(self) -> bool:
        """Carry out one decision. False: there was nothing to do."""
        limits = replace(self._limits, row_s=self.rates.row_s or self._limits.row_s)
        decision = decide([choice.job() for choice in self._choices.values()], limits)
        started = sum(self._start(self._choices[id]) for id in decision.admit)
        if decision.decode:
            self._decode([self._choices[id] for id in decision.decode if id in self._choices])
        if decision.prefill is not None and decision.prefill.id in self._choices:
            self._prefill(self._choices[decision.prefill.id], decision.prefill)
        return bool(started or decision.decode or decision.prefill)

    # --- requests come and go

    def _submit(self, kind: str, id: str, prompt: Prompt, arrival: float, load_s: float) -> None:
        params = prompt.params
        request = Request(id, prompt, self._admission.namespace(self._cache.namespace, params, id), Times(arrival))
        request.load_s = load_s
        if params.timeout is not None:
            request.deadline = arrival + params.timeout
        if kind == "explain":
            self._admission.explain(request)
            return
        try:
            self._check(request)
        except KvdError as problem:
            self._outbox.event("error", id, problem.to_wire())
            return
        choice = self._admission.first_choice(request)
        request.choices.append(choice)
        self._requests[id] = request
        self._choices[choice.id] = choice
        place = position(choice.id, [one.job() for one in self._choices.values()], self._limits)
        self._outbox.event("queued", id, {"position": place})
        self._admission.ask(choice)

    def _check(self, request: Request) -> None:
        if self._stop_at is not None:
            raise Cancelled("the model is being unloaded")
        check_admission(sum(1 for c in self._choices.values() if c.stage is Stage.WAITING), self._limits)
        needed = -(-len(request.tokens) // self._cache.block_size)
        if needed > self._cache.max_blocks:
            token = self._facts.bytes_per_token
            raise OutOfMemory(
                f"the prompt needs {needed} KV blocks, the pool may have {self._cache.max_blocks}",
                needed=needed * self._cache.block_size * token,
                available=self._cache.max_blocks * self._cache.block_size * token, what="kv pool",
            )  # fmt: skip

    def _start(self, choice: Choice) -> bool:
        """Admit a waiting choice. False: it stays where it is."""
        try:
            started = self._admission.admit(choice, list(self._choices.values()), self._clock())
        except PoolFull as full:
            return self._make_way(choice, full)
        if started:
            self._outbox.event("progress", choice.request.id, report.progress(choice.request))
        return started

    def _prefill(self, choice: Choice, chunk: Chunk) -> None:
        rows = chunk.end - chunk.start
        expected = self.rates.prefill_s(chunk.start, chunk.end)
        self._pulse("prefill", UNMEASURED_S if expected is None else expected)
        with_logits = chunk.end == len(choice.target)
        try:
            if not with_logits:
                self._computer.chunk(choice, chunk.start, chunk.end)
                self._outbox.event("progress", choice.request.id, report.progress(choice.request))
                return
            logits = self._computer.last_row(choice)
        except PoolFull as full:
            self._make_way(choice, full)
            return
        except Exception as problem:  # noqa: BLE001 - the border of one request: it ends with the error, the rest goes on
            self._broken([choice], problem, f"prefill of {rows} rows")
            return
        self._begin_decode(choice, logits)

    def _begin_decode(self, choice: Choice, logits: Any) -> None:
        request, params = choice.request, choice.request.prompt.params
        choice.stage = Stage.DECODING
        now = self._clock()
        if choice.started:
            self._take(choice, draw(logits, [choice.drawer])[0], now)
            return
        request.times.prefilled = now
        assert choice.seq is not None
        choice.seq.tail()  # known from now on: whoever asks the same meanwhile shares it to the token
        if params.kind == "warm":
            self._end(choice, "stop")
            return
        others = [twin(choice, index, self._model.tokenizer, params) for index in range(1, params.n)]
        request.choices += others
        self._choices.update({other.id: other for other in others})
        for one in (choice, *others):
            self._take(one, draw(logits, [one.drawer])[0], now)

    def _decode(self, choices: Sequence[Choice]) -> None:
        batch = [choice for choice in choices if self._reserve(choice)]
        batch = [choice for choice in batch if choice.stage is Stage.DECODING]  # a later one may have taken its room
        if not batch:
            return
        self._pulse("decode", UNMEASURED_S / 10)
        try:
            drawn = self._computer.step(batch)
        except Exception as problem:  # noqa: BLE001 - the border of one request, see _prefill
            if len(batch) == 1:
                self._broken(batch, problem, "decode")
            else:
                for choice in batch:
                    self._decode([choice])
            return
        now = self._clock()
        for choice, one in zip(batch, drawn, strict=True):
            self._take(choice, one, now)

    def _reserve(self, choice: Choice) -> bool:
        if choice.stage is not Stage.DECODING or choice.seq is None:
            return False
        try:
            choice.seq.reserve(1)
        except PoolFull as full:
            if not self._make_way(choice, full) or choice.stage is not Stage.DECODING:
                return False
            return self._reserve(choice)
        return True

    def _take(self, choice: Choice, drawn: Draw, now: float) -> None:
        """A drawn token becomes text; the answer may end with it."""
        request, params = choice.request, choice.request.prompt.params
        request.times.first_token = request.times.first_token or now
        request.times.last_token = now
        choice.output.append(drawn.token)
        if drawn.token in self._model.eos:
            self._end(choice, "stop")
            return
        if params.sampling.logprobs:
            choice.logprobs.append(report.logprob(self._model.tokenizer, drawn))
        self._send(choice, choice.answer.push(drawn.token))
        if choice.answer.stopped:
            self._end(choice, "stop")
        elif len(choice.output) >= params.max_tokens:
            self._end(choice, "length")

    def _send(self, choice: Choice, pieces: Sequence[Piece]) -> None:
        id, index = choice.request.id, choice.index
        for piece in pieces:
            body: dict[str, Any] = {"index": index}
            if piece.call is not None:
                body["call"] = dict(piece.call)
            else:
                body["text"] = piece.text
            if piece.kind == "text" and choice.logprobs:
                body["logprobs"], choice.logprobs = choice.logprobs, []
            self._outbox.event(piece.kind, id, body)

    def _end(self, choice: Choice, reason: str) -> None:
        """A choice's text has ended."""
        request = choice.request
        self._send(choice, choice.answer.finish())
        if reason == "stop" and choice.answer.tool_calls:
            reason = "tool_calls"
        choice.finish_reason = reason
        self._choices.pop(choice.id, None)
        if request.prompt.params.kind != "warm":
            self._outbox.event("finish", request.id, {"index": choice.index, "finish_reason": reason})
        self._finisher.release(choice)
        if not request.live:
            self._requests.pop(request.id, None)
            self._finisher.wait(request, self._clock())

    def _fail(self, request: Request, problem: KvdError) -> None:
        for choice in request.choices:
            self._choices.pop(choice.id, None)
        self._requests.pop(request.id, None)
        self._finisher.fail(request, problem)

    def _broken(self, choices: Sequence[Choice], problem: Exception, what: str) -> None:
        log.error("a request failed inside the model", what=what, exc_info=problem)
        for choice in choices:
            self._fail(choice.request, Internal(f"{what} failed: {type(problem).__name__}: {problem}"[:300]))

    def _make_way(self, choice: Choice, full: PoolFull) -> bool:
        """The pool is full: preempt whoever comes last. True: room was made, try again."""
        jobs = [one.job() for one in self._choices.values()]
        who = victim(jobs, choice.id, self._limits)
        if who is None and any(one.stage is Stage.LOADING for one in self._choices.values()):
            return False
        if who is None:
            block = self._cache.block_size * self._facts.bytes_per_token
            self._fail(choice.request, OutOfMemory(
                f"the KV pool is full: {full.needed} blocks are needed, {full.free} can be had",
                needed=full.needed * block, available=full.free * block, what="kv pool",
            ))  # fmt: skip
            return False
        if choice.stage is Stage.WAITING and who != choice.id:
            return False  # it has nothing yet: it waits for the others to end
        loser = self._choices[who]
        self._finisher.release(loser)
        loser.target = [*loser.request.tokens, *loser.output]
        loser.stage, loser.follows, loser.asked = Stage.WAITING, None, False
        return who != choice.id

    def _cancel(self, id: str, reason: str) -> None:
        request = self._requests.get(id)
        if request is None:
            return
        if reason == "timeout":
            self._fail(request, Timeout("the request's time limit is over", stage=self._stage(request)))
            return
        for choice in list(request.live):
            self._end(choice, "cancelled")

    def _expire(self, now: float) -> None:
        for request in list(self._requests.values()):
            if request.deadline is not None and now >= request.deadline:
                limit = request.prompt.params.timeout
                stage = self._stage(request)
                self._fail(request, Timeout(f"not done within {limit:g} s (in {stage})", limit_s=limit, stage=stage))
        self._finisher.settle(now)
        if self._stop_at is not None and (now >= self._stop_at or not self._requests):
            for request in list(self._requests.values()):
                self._fail(request, Cancelled("the model is being unloaded"))
            self._stopped = not len(self._finisher) or now >= self._stop_at + 5.0

    @staticmethod
    def _stage(request: Request) -> str:
        return next((choice.stage.value for choice in request.live), "done")

    def _settle(self) -> None:
        self._finisher.settle(self._clock())

    def _begin_stop(self, drain_s: float) -> None:
        self._stop_at = self._clock() + drain_s

    # --- what others see

    def _pulse(self, phase: str, expected_s: float) -> None:
        jobs = [choice.job() for choice in self._choices.values()]
        live: dict[str, tuple[str, Mapping[str, Any]]] = {}
        for request in self._requests.values():
            first = request.choices[0]
            live[request.id] = report.standing(request, position(first.id, jobs, self._limits))
        for request in self._finisher.requests:
            live[request.id] = ("progress", report.progress(request))
        self._heart.pulse = Pulse(phase, self._clock(), expected_s, self._stats(), live)

    def _stats(self) -> dict[str, Any]:
        stages = [choice.stage for choice in self._choices.values()]
        pool = self._cache.stats
        return {
            "waiting": stages.count(Stage.WAITING), "loading": stages.count(Stage.LOADING),
            "prefilling": stages.count(Stage.PREFILLING), "decoding": stages.count(Stage.DECODING),
            "live": len(stages) - stages.count(Stage.WAITING), "rows_fed": self._computer.rows_fed,
            "pool_bytes": pool.bytes_pool, "blocks_total": pool.blocks_total, "blocks_free": pool.blocks_free,
            "blocks_cached": pool.blocks_cached, "blocks_live": pool.blocks_live, "blocks_limit": pool.blocks_limit,
            "evictions": dict(pool.evictions), "spill_pending_bytes": self.spill.pending_bytes,
            "spill": dict(self.spill.counters),
        }  # fmt: skip


