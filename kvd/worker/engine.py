"""The engine: one loop on the one thread that owns MLX. It carries out what the scheduler decides.

Everything else reaches it through `post`: callables that run between two steps, in order.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from kvclient.errors import Cancelled, KvdError, OutOfMemory, Timeout
from kvd.cache.layout import KVLayout
from kvd.cache.paged import PagedCache
from kvd.cache.results import PoolFull
from kvd.messages import Committed, LookedUp, Reserved
from kvd.worker import report
from kvd.worker.admit import Admission
from kvd.worker.beat import Heart
from kvd.worker.compute import Computer
from kvd.worker.finish import Finisher
from kvd.worker.generation import Generation
from kvd.worker.live import Live
from kvd.worker.outbox import Outbox
from kvd.worker.patience import Patience
from kvd.worker.planner import Rates
from kvd.worker.prompt import Prompt
from kvd.worker.request import Request, Times
from kvd.worker.restore import Readers
from kvd.worker.room import has_room
from kvd.worker.scheduler import Limits, Stage, decide, positions
from kvd.worker.spill import Spill

PINNED_S: Final = 0.05
"""seconds between looks at a pool that is full of blocks the disk has not taken yet"""
FRESH_S: Final = 0.2
"""seconds after which the numbers in the beat are renewed"""


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
        readers: Callable[[Callable[..., None], Callable[[], float]], Readers],
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._cache = cache
        self._outbox = outbox
        self._heart = heart
        self._given = limits
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.rates = Rates()
        self.spill = spill(lambda chain: self.post(lambda: self._finisher.settle(clock())))
        self._patience = Patience(clock)
        self.readers = readers(lambda arrival: self._inbox.put(lambda: self._admission.fetcher.told(arrival)), clock)
        self._facts = report.Facts(model.kv_precision, model.layout.bytes_per_token())
        self._finisher = Finisher(cache, self.spill, outbox, self._facts, model.tokenizer)
        self._computer = Computer(model.model, cache, self.rates, self._finisher.published)
        self._live = Live()
        self._admission = Admission(
            cache, model.layout, self.readers, self.spill, outbox, self.rates, self._patience, model.tokenizer,
            self._live, limits.chunk,
        )  # fmt: skip
        self._generation = Generation(
            model.tokenizer, model.eos, cache, self._computer, self._finisher, self._live, outbox, self.rates,
            self._limits, self._pulse, clock,
        )  # fmt: skip
        self._told_at = 0.0
        self._stop_at: float | None = None
        self._stopped = False

    # --- from other threads

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` on the engine's thread before its next step."""
        self._inbox.put(action)
        self._patience.wanted()

    def looked_up(self, answer: LookedUp) -> None:
        self.post(lambda: self._admission.questions.answered(answer))

    def reserved(self, answer: Reserved) -> None:
        self.spill.reserved(answer)

    def committed(self, answer: Committed) -> None:
        self.spill.committed(answer)

    def on_cache(self, use: Callable[[PagedCache], None]) -> None:
        self.post(lambda: use(self._cache))

    def submit(self, kind: str, id: str, prompt: Prompt, arrival: float) -> None:
        """A prepared request of kind generate, warm or explain."""
        self.post(lambda: self._submit(kind, id, prompt, arrival))

    def cancel(self, id: str, reason: str) -> None:
        self.post(lambda: self._cancel(id, reason))

    def stop(self, drain_s: float) -> None:
        """Take nothing new, end what runs within `drain_s` seconds, then return from `run`."""
        self.post(lambda: self._begin_stop(drain_s))

    # --- the loop

    def run(self) -> None:
        """Until `stop`. Raises nothing for what happens inside one request."""
        while not self._stopped:
            self._receive(wait=not self._step())
            self._expire(self._clock())

    def close(self, flush_s: float) -> None:
        """Wait for blocks on their way to the disk, at most `flush_s` seconds. Called after `run`, on its thread."""
        until = self._clock() + flush_s
        while self.spill.pending_bytes and self._clock() < until:
            self._pulse("flush", flush_s)
            with suppress(queue.Empty):
                self._inbox.get(timeout=0.05)()
        self.readers.close(flush_s)

    def _receive(self, *, wait: bool) -> None:
        if wait:
            self._pulse("idle", 0.0)
            try:
                self._inbox.get(timeout=PINNED_S if self._generation.stalled else self._due_s())()
            except queue.Empty:
                return
        self._patience.heard()
        while True:
            try:
                action = self._inbox.get_nowait()
            except queue.Empty:
                return
            action()

    def _due_s(self) -> float | None:
        """Seconds until something is due though nothing comes in; None: nothing will be."""
        deadlines = (request.deadline for request in self._live.requests)
        due = (*deadlines, self._finisher.next_deadline(), self._admission.due(), self._stop_at)
        return min((max(at - self._clock(), 0.0) for at in due if at is not None), default=None)

    def _step(self) -> bool:
        """Carry out one decision. False: there was nothing to do."""
        generation, live = self._generation, self._live
        generation.stalled = False
        self._admission.collect()
        decision = decide(live.jobs(), self._limits(), self.rates.prefill_s)
        started = self._admit(decision.admit)
        if decoding := [live.choice(id) for id in decision.decode if id in live]:
            generation.decode(decoding, alone=decision.prefill is None and not started)
        if decision.prefill is not None and decision.prefill.id in live:
            generation.prefill(live.choice(decision.prefill.id), decision.prefill, decoding)
        if started or decision.decode or decision.prefill:
            return not generation.stalled
        if (restore := self._admission.fetcher.ready()) is not None:
            generation.ahead(restore, self._due_s())
        return restore is not None

    def _limits(self) -> Limits:
        return replace(self._given, row_s=self.rates.row_s or self._given.row_s)

    # --- requests come and go

    def _submit(self, kind: str, id: str, prompt: Prompt, arrival: float) -> None:
        params = prompt.params
        request = Request(id, prompt, self._admission.namespace(self._cache.namespace, params, id), Times(arrival))
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
        self._live.add(choice)
        place = positions(self._live.jobs(), self._limits())[choice.id]
        self._outbox.event("queued", id, {"position": place})
        self._admission.ask(choice)

    def _check(self, request: Request) -> None:
        if self._stop_at is not None:
            raise Cancelled("the model is being unloaded")
        if (excess := request.prompt.excess) is not None:
            held = self._cache.match(request.tokens, request.namespace).rows
            excess.details["reusable_prefix"] = min(held, excess.details["limit"])
            raise excess
        needed = -(-len(request.tokens) // self._cache.block_size)
        if needed > self._cache.max_blocks:
            block = self._cache.block_size * self._facts.bytes_per_token
            most = self._cache.max_blocks * block
            raise OutOfMemory(
                f"the prompt needs {needed} KV blocks, the pool may have {self._cache.max_blocks}",
                needed=needed * block, available=most, budget=most, what="kv pool",
            )  # fmt: skip

    def _admit(self, ids: Sequence[str]) -> bool:
        """Start waiting choices in their order, up to one for which there is no room: nobody behind it takes what it
        waits for. Whether any was started."""
        started = False
        for choice in map(self._live.choice, ids):
            if choice.lacked_room and not has_room(choice, self._live, self._cache):
                break
            try:
                if not self._admission.admit(choice, self._clock()):
                    continue
            except PoolFull as full:
                self._generation.make_way(choice, full)
                break
            self._outbox.event("progress", choice.request.id, report.progress(choice.request))
            started = True
        return started

    def _cancel(self, id: str, reason: str) -> None:
        request = self._live.request(id)
        if request is None:
            return
        if reason == "timeout":
            self._generation.fail(request, Timeout("the request's time limit is over", stage=self._stage(request)))
            return
        for choice in list(request.live):
            self._generation.end(choice, "cancelled")

    def _expire(self, now: float) -> None:
        for request in self._live.requests:
            if request.deadline is not None and now >= request.deadline:
                limit, stage = request.prompt.params.timeout, self._stage(request)
                late = Timeout(f"not done within {limit:g} s (in {stage})", limit_s=limit, stage=stage)
                self._generation.fail(request, late)
        self._finisher.settle(now)
        if self._stop_at is not None and (now >= self._stop_at or not self._live.requests):
            for request in self._live.requests:
                self._generation.fail(request, Cancelled("the model is being unloaded"))
            self._stopped = not len(self._finisher) or now >= self._stop_at + 5.0

    @staticmethod
    def _stage(request: Request) -> str:
        return next((choice.stage.value for choice in request.live), "done")

    def _begin_stop(self, drain_s: float) -> None:
        self._stop_at = self._clock() + drain_s

    # --- what others see

    def _pulse(self, phase: str, expected_s: float) -> None:
        """What the heart tells from now on; the numbers in it are renewed a few times a second."""
        now = self._clock()
        pulse = replace(self._heart.pulse, phase=phase, at=now, expected_s=expected_s)
        if phase == "idle" or now - self._told_at > FRESH_S:
            self._told_at = now
            pulse = replace(pulse, stats=self.stats(), live=self._standing())
        self._heart.pulse = pulse

    def _standing(self) -> dict[str, tuple[str, Mapping[str, Any]]]:
        places = positions(self._live.jobs(), self._limits())
        live: dict[str, tuple[str, Mapping[str, Any]]] = {}
        for request in self._live.requests:
            live[request.id] = report.standing(request, places.get(request.choices[0].id, 0))
        for request in self._finisher.requests:
            live[request.id] = ("progress", report.progress(request))
        return live

    def stats(self) -> dict[str, Any]:
        """What `kvd status` shows of this model besides the facts it was loaded with."""
        stages = [choice.stage for choice in self._live.choices]
        pool = self._cache.stats
        return {
            "waiting": stages.count(Stage.WAITING), "loading": stages.count(Stage.LOADING),
            "prefilling": stages.count(Stage.PREFILLING), "decoding": stages.count(Stage.DECODING),
            "live": len(stages) - stages.count(Stage.WAITING), "rows_fed": self._computer.rows_fed,
            "pool_bytes": pool.bytes_pool, "blocks_total": pool.blocks_total, "blocks_free": pool.blocks_free,
            "blocks_cached": pool.blocks_cached, "blocks_live": pool.blocks_live, "blocks_limit": pool.blocks_limit,
            "evictions": dict(pool.evictions), "spill_pending_bytes": self.spill.pending_bytes,
            "spill": dict(self.spill.counters), "reads_hung": self.readers.hung,
        }  # fmt: skip
