"""From rows to answers: prefill, batched decode, tokens into text, and how each of them may end. Engine thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import structlog

from kvclient.errors import Internal, KvdError, OutOfMemory
from kvd.cache.hostmem import on_cpu
from kvd.cache.paged import PagedCache
from kvd.cache.results import PoolFull
from kvd.worker import report
from kvd.worker.arrival import Unfinished
from kvd.worker.compiling import Compiling
from kvd.worker.compute import Computer, twin
from kvd.worker.fetch import Restore
from kvd.worker.finish import Finisher
from kvd.worker.live import Live
from kvd.worker.outbox import Outbox
from kvd.worker.patience import STILL_S
from kvd.worker.planner import Rates
from kvd.worker.request import Choice, Request
from kvd.worker.sampler import Draw, draw
from kvd.worker.scheduler import Chunk, Limits, Stage, chunk_end, victim
from kvd.worker.text import Piece, Tokenizer

UNMEASURED_S: Final = 5.0
UNMEASURED_ROW_S: Final = 0.05
"""seconds expected of a chunk, and per row of it, before one has been measured: the first may compile kernels"""
AHEAD: Final = 8
"""rows for which room is looked for before a chunk within which streams go on; a chunk takes few of their turns"""
SLOWER: Final = 4
"""times what is expected, that a chunk may take on a machine that others use too"""
STEP_S: Final = 3.0
"""seconds expected of a decode step, at most"""
log = structlog.get_logger()


class Generation:
    """Carries out chunks and steps for the requests in `live` and takes out those that end."""

    def __init__(
        self, tokenizer: Tokenizer, eos: frozenset[int], cache: PagedCache, computer: Computer, finisher: Finisher,
        live: Live, outbox: Outbox, rates: Rates, limits: Callable[[], Limits], pulse: Callable[[str, float], None],
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        """`pulse(phase, seconds)` is told before every pass what it is and how long it should take."""
        self._tokenizer = tokenizer
        self._eos = eos
        self._cache = cache
        self._computer = computer
        self._finisher = finisher
        self._live = live
        self._outbox = outbox
        self._rates = rates
        self._limits = limits
        self._pulse = pulse
        self._compiling = Compiling(gpu=not on_cpu())
        self._clock = clock
        self._turn_at = 0.0
        """when streams had their last step"""
        self.stalled = False
        """the pool is full, of blocks that the disk has not taken yet or until others gave way: waiting helps"""

    def prefill(self, choice: Choice, chunk: Chunk, beside: Sequence[Choice] = ()) -> None:
        """One chunk, or the last row with which decoding begins. Those in `beside` go on within a long chunk."""
        if choice.stage is not Stage.PREFILLING:
            return  # the decode step before it took its room
        rows = chunk.end - chunk.start
        expected = self._expected(chunk.start, chunk.end)
        self._pulse("prefill", expected + self._compiling.extra_s("prefill", rows))
        with_logits = chunk.end == len(choice.target)
        try:
            if not with_logits:
                self._computer.chunk(choice, chunk.start, chunk.end, self._pause(choice, rows, beside, expected))
                self._outbox.event("progress", choice.request.id, report.progress(choice.request))
                return
            logits = self._computer.last_row(choice)
        except PoolFull as full:
            self.make_way(choice, full)
            return
        except Exception as problem:  # noqa: BLE001  the border of one request: it ends with the error
            self._broken([choice], problem, f"prefill of {rows} rows")
            return
        self._begin_decode(choice, logits)

    def ahead(self, restore: Restore, due_s: float | None) -> None:
        """The first pass behind a restore that is still being read; nothing else is due for `due_s` seconds."""
        choice, start, total = restore.choice, restore.rows, len(restore.choice.target)
        end = chunk_end(start, total, self._limits().chunk)
        self._pulse("prefill", STILL_S + self._expected(min(start, total - 1), end))
        restore.patience.begin(due_s)
        try:
            logits = self._computer.ahead(choice, end, restore)
        except (Unfinished, PoolFull):
            restore.given_up = True
            return
        except Exception as problem:  # noqa: BLE001  the border of one request, as in prefill
            self._broken([choice], problem, f"prefill of {end - start} rows")
            return
        if logits is None:
            self._outbox.event("progress", choice.request.id, report.progress(choice.request))
        else:
            self._begin_decode(choice, logits)

    def _expected(self, start: int, end: int) -> float:
        """Seconds that a chunk should take."""
        expected = self._rates.prefill_s(start, end)
        return UNMEASURED_S + (end - start) * UNMEASURED_ROW_S if expected is None else expected

    def _pause(self, choice: Choice, rows: int, beside: Sequence[Choice], expected: float) -> Callable[[], None] | None:
        """What is to happen between the layers of a chunk: the streams beside it have their turn. Raises PoolFull where
        the chunk itself has no room. Blocks may not move within the chunk, so that room is looked for before it."""
        if not beside or SLOWER * expected <= (turn_s := self._limits().turn_s):
            return None
        assert choice.seq is not None
        choice.seq.reserve(rows)
        for one in beside:
            with suppress(PoolFull):
                if one.seq is not None:
                    one.seq.reserve(AHEAD)

        def turn() -> None:
            if self._clock() - self._turn_at < turn_s:
                return
            batch = [one for one in beside if one.stage is Stage.DECODING and one.seq is not None and one.seq.spare]
            if batch:
                self.decode(batch, alone=False)
                self._pulse("prefill", expected)

        return turn

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
            self.end(choice, "stop")
            return
        others = [twin(choice, index, self._tokenizer, params) for index in range(1, params.n)]
        request.choices += others
        for other in others:
            self._live.add(other)
        for one in (choice, *others):
            self._take(one, draw(logits, [one.drawer])[0], now)

    def decode(self, choices: Sequence[Choice], *, alone: bool) -> None:
        """One token for each, in one batch; those that join while a step is in line wait for the next. `alone`: nothing
        else is due, so that the following step may be put in line before this one's tokens are known."""
        batch = self._computer.pending(choices)
        self._pulse("decode", STEP_S + self._compiling.extra_s("decode", len(choices)))
        try:
            if not batch:
                batch = self._with_room(choices)
                if not batch:
                    return
                self._computer.begin(batch)
            alone = alone and self._cache.paths.ahead and len(batch) == len(choices)
            drawn = self._computer.finish(alone and self._may_go_ahead(batch))
        except Exception as problem:  # noqa: BLE001  the border of one request, as in prefill
            self._computer.forget(batch)
            if len(batch) == 1:
                self._broken(batch, problem, "decode")
            else:
                for choice in batch:
                    self.decode([choice], alone=False)
            return
        now = self._turn_at = self._clock()
        for choice, one in drawn:
            self._take(choice, one, now)

    def _with_room(self, choices: Sequence[Choice]) -> list[Choice]:
        """Those that have room for one more row, after others were preempted for them where need be."""
        batch = [choice for choice in choices if self._reserve(choice)]
        return [choice for choice in batch if choice.stage is Stage.DECODING]  # a later one may have taken its room

    @staticmethod
    def _may_go_ahead(batch: Sequence[Choice]) -> bool:
        """Whether all will take another token, drawn without knowing this one, and have room for its row."""
        for choice in batch:
            if not choice.drawer.blind or len(choice.output) + 1 >= choice.request.prompt.params.max_tokens:
                return False
            try:
                assert choice.seq is not None
                choice.seq.reserve(1)
            except PoolFull:
                return False
        return True

    def _reserve(self, choice: Choice) -> bool:
        if choice.stage is not Stage.DECODING or choice.seq is None:
            return False
        try:
            choice.seq.reserve(1)
        except PoolFull as full:
            if not self.make_way(choice, full) or choice.stage is not Stage.DECODING:
                return False
            return self._reserve(choice)
        return True

    def _take(self, choice: Choice, drawn: Draw, now: float) -> None:
        """A drawn token becomes text; the answer may end with it."""
        if choice.stage is not Stage.DECODING:
            return  # another answer to its request failed in this step
        request, params = choice.request, choice.request.prompt.params
        request.times.first_token = request.times.first_token or now
        request.times.last_token = now
        try:
            choice.drawer.accept(drawn.token)
            pieces = choice.answer.push(drawn.token) if drawn.token not in self._eos else None
        except Exception as problem:  # noqa: BLE001  the border of one request, as in prefill
            self._broken([choice], problem, "text of an answer")
            return
        if pieces is None:
            self.end(choice, "stop")
            return
        if params.sampling.logprobs:
            choice.logprobs.append(report.logprob(self._tokenizer, drawn))
        self._send(choice, pieces)
        grammar = choice.drawer.grammar
        if choice.answer.stopped or (grammar is not None and grammar.complete):
            self.end(choice, "stop")
        elif len(choice.output) >= params.max_tokens:
            self.end(choice, "length")

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

    def end(self, choice: Choice, reason: str) -> None:
        """A choice's text has ended."""
        request = choice.request
        self._send(choice, choice.answer.finish())
        if reason == "stop" and choice.answer.tool_calls:
            reason = "tool_calls"
        choice.finish_reason = reason
        self._live.remove(choice)
        if request.prompt.params.kind != "warm":
            body = {"index": choice.index, "finish_reason": reason, "stop_sequence": choice.answer.stop_sequence}
            self._outbox.event("finish", request.id, body)
        self._finisher.release(choice)
        if not request.live:
            self._live.end(request)
            self._finisher.wait(request, self._clock())

    def fail(self, request: Request, problem: KvdError) -> None:
        """End a request with a typed error; its rows are kept."""
        self._live.end(request)
        self._finisher.fail(request, problem)

    def _broken(self, choices: Sequence[Choice], problem: Exception, what: str) -> None:
        log.error("a request failed inside the model", what=what, exc_info=problem)
        for choice in choices:
            self.fail(choice.request, Internal(f"{what} failed: {type(problem).__name__}: {problem}"[:300]))

    def _outgrown(self, choice: Choice, full: PoolFull) -> None:
        """Nobody can give room any more: an answer ends with what it has and says why, a prompt with the error."""
        block = self._cache.block_size * self._cache.layout.bytes_per_token()
        problem = OutOfMemory(
            f"the KV pool is full: {full.needed} blocks are needed, {full.free} can be had",
            needed=full.needed * block, available=full.free * block, what="kv pool",
        )  # fmt: skip
        if not choice.started:
            self.fail(choice.request, problem)
            return
        choice.request.out_of_memory = problem.details
        self.end(choice, "length")

    def make_way(self, choice: Choice, full: PoolFull) -> bool:
        """The pool is full: preempt whoever comes last. True: room was made, try again."""
        who = victim(self._live.jobs(), choice.id, self._limits())
        if who is None:
            self.stalled = self._finisher.writing or full.soon
            if not self.stalled:
                self._outgrown(choice, full)
            return False
        loser = self._live.choice(who)
        if choice.stage is Stage.WAITING or loser.border is not None:
            return False
        self._finisher.release(loser)
        loser.target = [*loser.request.tokens, *loser.output]
        loser.stage, loser.follows, loser.asked, loser.lacked_room = Stage.WAITING, None, False, True
        return loser is not choice
