"""A request in the engine: what it asked for, how far it is, what it has cost. Engine thread only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvd.cache.chain import common_prefix
from kvd.cache.results import Match
from kvd.cache.sequence import CachedSequence
from kvd.messages import LookedUp
from kvd.worker.prompt import Prompt
from kvd.worker.sampler import Drawer
from kvd.worker.scheduler import Job, Stage
from kvd.worker.text import Answer


@dataclass(slots=True)
class Times:
    """Monotonic seconds; None: not reached."""

    arrival: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    prefilled: float | None = None


@dataclass(slots=True)
class Cost:
    """Tokens of the prompt by where their KV came from. `high`: leading prompt rows that were cached or computed once;
    rows below it that are fed again are recomputed."""

    memory: int = 0
    ssd: int = 0
    computed: int = 0
    recomputed: int = 0
    high: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """`trail`: (chain, leading tokens up to its end) of the blocks that hold prompt and first answer, once it ended.
    `offered`: chains offered to the store for it, of which one that was only noted is not offered twice.
    `out_of_memory`: what an answer that was cut for lack of room needed, and what there was."""

    id: str
    prompt: Prompt
    namespace: bytes
    times: Times
    choices: list[Choice] = field(default_factory=list)
    cost: Cost = field(default_factory=Cost)
    deadline: float | None = None
    miss_reason: str | None = None
    divergence: Mapping[str, Any] | None = None
    trail: Sequence[tuple[bytes, int]] = ()
    offered: set[bytes] = field(default_factory=set)
    kv_rows: int = 0
    out_of_memory: Mapping[str, Any] | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt.tokens

    @property
    def live(self) -> list[Choice]:
        return [choice for choice in self.choices if choice.finish_reason is None]


@dataclass(slots=True, eq=False)
class Choice:
    """One answer to a request: a sequence over the pool. `target` are the tokens whose rows must be stored before the
    next draw: the prompt at first, prompt and answer so far after a preemption."""

    request: Request
    index: int
    target: list[int]
    drawer: Drawer
    answer: Answer
    stage: Stage = Stage.WAITING
    seq: CachedSequence | None = None
    follows: Choice | None = None
    """whose prefill computes this one's prefix now"""
    finish_reason: str | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """of tokens whose text is still held back"""
    asked: bool = False
    """the front has been asked what of `target` is stored"""
    found: LookedUp | None = None
    """its answer"""
    looked_again: bool = False
    lacked_room: bool = False
    """it found none or gave its own to others: it is tried again only when there is room for all of it"""
    border: int | None = None
    """rows from there on are being read while those before it are computed"""
    from_memory: int = 0
    """rows its sequence took from memory; what a restore adds comes from the store"""

    @property
    def id(self) -> str:
        return f"{self.request.id}/{self.index}"

    @property
    def output(self) -> list[int]:
        return self.drawer.output

    @property
    def rows(self) -> int:
        return self.seq.rows if self.seq is not None else 0

    @property
    def started(self) -> bool:
        """It has drawn a token: it is not in its first prefill."""
        return bool(self.output)

    def job(self) -> Job:
        """How the scheduler sees it."""
        after = self.follows.id if self.follows is not None and self.is_behind(self.follows) else None
        rows = min(self.rows, len(self.target) - 1)
        params = self.request.prompt.params
        return Job(
            self.id, self.stage, self.request.times.arrival, len(self.target), rows, params.priority, after, self.border
        )

    def is_behind(self, other: Choice) -> bool:
        """`other` is still computing rows that this one needs too."""
        if other.stage not in (Stage.LOADING, Stage.PREFILLING) or other.request.namespace != self.request.namespace:
            return False
        return other.rows < common_prefix(self.target, other.target)


def nothing(namespace: bytes, block_size: int) -> Match:
    """The match of a request that reads no cache."""
    return Match(namespace, block_size, 0, (), None, None)
