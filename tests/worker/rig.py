"""An engine with everything around it in one process: a tiny model, a real store, and a stand-in for the front."""

from __future__ import annotations

import datetime
import itertools
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvclient.errors import KvdError, from_wire
from kvclient.wire import TERMINAL, unpack
from kvd.cache import precision
from kvd.cache.chain import chains
from kvd.cache.inspection import inspect_layout
from kvd.cache.paged import PagedCache
from kvd.cache.results import Consent
from kvd.messages import (
    Abandon,
    BadShard,
    Committed,
    Event,
    LookedUp,
    Lookup,
    PinPath,
    Reserve,
    Reserved,
    Touched,
    Written,
    to_front,
)
from kvd.models.fingerprint import identify
from kvd.models.load import load
from kvd.store import upkeep
from kvd.store.base import Limits as StoreLimits
from kvd.store.base import Refusal
from kvd.store.files import Files, RealFiles
from kvd.store.store import Store
from kvd.store.tree import Tree
from kvd.worker.assemble import make_engine, space_of
from kvd.worker.beat import Heart
from kvd.worker.engine import Engine, Model
from kvd.worker.outbox import Outbox
from kvd.worker.prompt import Prompter
from kvd.worker.scheduler import Limits
from tests.tiny import tiny_model

PATIENCE = 60.0
B = 16
"""tokens per block in these tests"""


@dataclass
class Answer:
    """Everything one request was told. `body` is that of its terminal event."""

    id: str
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    told: threading.Condition = field(default_factory=threading.Condition)

    def add(self, kind: str, body: dict[str, Any]) -> None:
        with self.told:
            self.events.append((kind, body))
            self.told.notify_all()
        if kind in TERMINAL:
            self.ended.set()

    def wait_for(self, kind: str, count: int = 1) -> None:
        """Until `count` events of a kind came."""
        with self.told:
            assert self.told.wait_for(lambda: sum(k == kind for k, _ in self.events) >= count, PATIENCE), self.events

    def wait_rows(self, rows: int) -> None:
        """Until a progress event says that so many rows are there (events that nobody took yet are merged)."""
        def there() -> bool:
            return any(kind == "progress" and body["done"] >= rows for kind, body in self.events)
        with self.told:
            assert self.told.wait_for(there, PATIENCE), self.events

    def end(self) -> Answer:
        assert self.ended.wait(PATIENCE), f"no end of {self.id}: {self.events}"
        return self

    @property
    def kind(self) -> str:
        return self.events[-1][0]

    @property
    def body(self) -> dict[str, Any]:
        return self.events[-1][1]

    @property
    def stats(self) -> dict[str, Any]:
        self.check()
        stats: dict[str, Any] = self.body["stats"]
        return stats

    @property
    def text(self) -> str:
        self.check()
        return str(self.body["choices"][0]["text"])

    @property
    def logprobs(self) -> list[dict[str, Any]]:
        return [one for kind, body in self.events if kind == "text" for one in body.get("logprobs", ())]

    @property
    def deltas(self) -> str:
        return "".join(body["text"] for kind, body in self.events if kind == "text")

    def problem(self) -> KvdError:
        assert self.kind == "error", self.events[-1]
        return from_wire(self.body)

    def check(self) -> None:
        if self.kind == "error":
            raise from_wire(self.body)


class Rig:
    """Use as a context manager. `restart` begins a new engine over the same store: memory is gone."""

    def __init__(
        self, *, files: Callable[[], Files] = RealFiles, pool_blocks: int = 256, limits: Limits = Limits(chunk=64),  # noqa: B008
        model: Mapping[str, Any] | None = None, store_limit: int = 1 << 30, kv: str = "native",
        consent: Callable[[int, bool], Consent] = lambda nbytes, needed: Consent.YES,
    ) -> None:
        self.kv = kv
        """precision of the next start"""
        self.folder = Path(tempfile.mkdtemp(prefix="kvd", dir="/tmp"))
        self.model_folder = tiny_model(self.folder / "model", **(model or {}))
        self._files = files
        self._pool_blocks = pool_blocks
        self._consent = consent
        self._limits = limits
        self._limit = store_limit
        self._ids = itertools.count(1)
        self.answers: dict[str, Answer] = {}
        self.hold_writes = threading.Event()
        """set: commits wait until `release_writes`"""
        self._held: list[Written] = []
        self.hold_lookups = threading.Event()
        """set: lookups are not answered until `release_lookups`"""
        self._lookups: list[LookedUp] = []
        self._errands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def __enter__(self) -> Rig:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        self.outbox = Outbox()
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.outbox.wake = lambda: self._wakes.put(True)
        self._front = threading.Thread(target=self._run_front, daemon=True)
        self._front.start()
        ready = threading.Event()
        self._worker = threading.Thread(target=self._run_engine, args=(ready,), daemon=True)
        self._worker.start()
        assert ready.wait(PATIENCE)

    def stop(self, drain_s: float = 0.0) -> None:
        self.engine.stop(drain_s)
        self._worker.join(PATIENCE)
        assert not self._worker.is_alive()
        self._wakes.put(False)
        self._front.join(PATIENCE)

    def restart(self) -> None:
        self.stop()
        self.start()

    # --- the worker

    def _run_engine(self, ready: threading.Event) -> None:
        loaded = load(self.model_folder)
        layout = precision.apply(inspect_layout(loaded.model), self.kv)
        space = space_of(identify(self.model_folder), layout, B)
        self.cache = PagedCache(
            layout, B, self._pool_blocks, initial_blocks=8, namespace=space, on_bytes=self._consent
        )  # fmt: skip
        model = Model(loaded.model, loaded.tokenizer, layout, space, frozenset(loaded.tokenizer.eos_token_ids), self.kv)
        self.tokenizer = loaded.tokenizer
        self.heart = Heart(self.outbox)
        self.engine: Engine = make_engine(
            model, self.cache, self.outbox, self.heart, self._files(), self._limits, 1 << 26
        )
        self.prompter = Prompter(
            loaded.tokenizer, vocab=loaded.info.vocab, context=loaded.info.context_length or 4096,
            today=datetime.date(2026, 1, 2),
        )
        ready.set()
        self.engine.run()
        self.engine.close(5.0)

    # --- the front

    def _run_front(self) -> None:
        self.store = Store.open(self.folder / "store", StoreLimits(self._limit))
        while self._wakes.get():
            while not self._errands.empty():
                self._errands.get()()
            while (message := self.outbox.take()) is not None:
                self._answer(to_front(message))
            if self._lookups and not self.hold_lookups.is_set():
                lookups, self._lookups = self._lookups, []
                for lookup in lookups:
                    self.engine.looked_up(lookup)
            if self._held and not self.hold_writes.is_set():
                held, self._held = self._held, []
                self.engine.committed(Committed(tuple(self.store.commit(held))))
        self.store.close()

    def _answer(self, message: Any) -> None:
        store = self.store
        match message:
            case Event(kind, id, packed):
                self.answers[id].add(kind, unpack(packed))
            case Lookup(q, namespace, chains, parent, tail):
                found = store.lookup(namespace, chains, parent, tail)
                self._lookups.append(LookedUp(q, found.hits, found.child, found.child_rows, found.child_token))
            case Reserve(q, offer):
                made = store.reserve(offer)
                if isinstance(made, Refusal):
                    self.engine.reserved(Reserved(q, False, reason=made.reason))
                else:
                    self.engine.reserved(Reserved(q, True, made.id, made.temp, made.final))
            case Written():
                self._held.append(message)
            case Abandon(reservation, reason):
                store.abandon(reservation, reason)
            case BadShard(namespace, chain, reason):
                store.quarantine(namespace, chain, reason)
            case Touched(namespace, chains):
                store.touched(namespace, chains)
            case PinPath(namespace, chains, ttl_s):
                store.pin(namespace, chains, ttl_s or None)

    def clear_store(self) -> None:
        """Drop every block, as `kvd cache clear` does, on the thread that owns the store."""
        self.on_store(lambda: sum(1 for _ in upkeep.clear(self.store.core)))

    def on_store(self, action: Callable[[], Any]) -> Any:
        """What `action` returns, called on the thread that owns the store."""
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._errands.put(lambda: done.put(action()))
        self._wakes.put(True)
        return done.get(timeout=PATIENCE)

    def release_writes(self) -> None:
        self.hold_writes.clear()
        self._wakes.put(True)

    def release_lookups(self) -> None:
        self.hold_lookups.clear()
        self._wakes.put(True)

    # --- a client

    def send(self, kind: str = "generate", *, arrival: float | None = None, **body: Any) -> Answer:
        """`arrival` in monotonic seconds, now if None."""
        answer = Answer(f"r{next(self._ids)}")
        self.answers[answer.id] = answer
        if kind == "generate":
            body = {"temperature": 0.0, "max_tokens": 4, "durable_wait_ms": 20_000, **body}
        prompt = self.prompter.prepare(kind, body)
        self.engine.submit(kind, answer.id, prompt, time.monotonic() if arrival is None else arrival)
        return answer

    def ask(self, tokens: Sequence[int], **body: Any) -> Answer:
        """A greedy answer with log probabilities, complete."""
        return self.send(tokens=list(tokens), logprobs=True, top_logprobs=5, **body).end()

    def shard(self, tokens: Sequence[int], index: int) -> Path:
        """The file of a prompt's block."""
        chain = chains(self.cache.namespace, tokens, B)[index]
        return Path(Tree(str(self.folder / "store")).shard(self.cache.namespace, chain))

    def on_engine(self, action: Callable[[], Any]) -> Any:
        """Run on the engine's thread and return what it returns."""
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.engine.post(lambda: done.put(action()))
        return done.get(timeout=PATIENCE)


def until(so: Callable[[], bool]) -> None:
    """For what no event tells."""
    end = time.monotonic() + PATIENCE
    while not so():
        assert time.monotonic() < end
        time.sleep(0.005)


def same(a: Answer, b: Answer) -> None:
    assert a.text == b.text
    assert a.logprobs == b.logprobs


def counts(answer: Answer) -> tuple[int, int, int, int]:
    """(computed, from memory, from SSD, recomputed)"""
    stats = answer.stats
    assert stats["cached_tokens"] + stats["computed_tokens"] == stats["prompt_tokens"]
    return (
        stats["computed_tokens"], stats["cached_memory_tokens"], stats["cached_ssd_tokens"], stats["recomputed_tokens"]
    )  # fmt: skip


def ids(count: int, seed: int = 1, vocab: int = 512) -> list[int]:
    """`count` token ids of no meaning, none of them special."""
    state, found = seed * 2654435761 % 2**32, []
    for _ in range(count):
        state = (1664525 * state + 1013904223) % 2**32
        found.append(3 + (state >> 8) % (vocab - 3))
    return found


def rows_seen(rig: Rig) -> list[int]:
    """Wrap the model so that every call notes how many rows it was given."""
    computer = rig.engine._computer
    model, seen = computer._model, list[int]()

    def spy(tokens: Any, cache: Any) -> Any:
        seen.append(tokens.size)
        return model(tokens, cache=cache)

    computer._model = spy
    return seen
