"""Requests between socket and engine: refused, counted, cancelled and handed on."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from kvclient.errors import BadRequest, Cancelled, Internal, from_wire
from kvclient.wire import pack
from kvd.cache.results import Consent
from kvd.messages import Cancel, Clear, Cleared, Departed, Granted, Grow, Work, to_front
from kvd.worker.outbox import Outbox
from kvd.worker.prompt import Prompter
from kvd.worker.service import Growth, Service
from tests.tiny import tiny_model


class Spill:
    def __init__(self) -> None:
        self.told: list[Departed] = []

    def departed(self, message: Departed, memory: Any) -> None:
        self.told.append(message)


class Cache:
    """Two namespaces, one block of each in use."""

    manager = SimpleNamespace(entries=[None, SimpleNamespace(namespace=b"n"), SimpleNamespace(namespace=b"m")])
    pool = SimpleNamespace(block_bytes=100)
    index = None

    def clear(self, namespace: bytes | None = None) -> int:
        return {None: 7, b"n": 3, b"m": 4}[namespace]


class Engine:
    """Notes what it is given."""

    def __init__(self) -> None:
        self.submitted: list[tuple[str, str]] = []
        self.cancelled: list[str] = []
        self.came = threading.Event()
        self.spill = Spill()
        self.cache = Cache()

    def on_cache(self, use: Callable[[Any], None]) -> None:
        use(self.cache)

    def submit(self, kind: str, id: str, prompt: Any, arrival: float) -> None:
        self.submitted.append((kind, id))
        self.came.set()

    def cancel(self, id: str, reason: str) -> None:
        self.cancelled.append(id)


class Desk:
    """A service whose outbox can be waited for."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.told = threading.Semaphore(0)
        self.outbox.wake = self.told.release
        self.growth = Growth(self.outbox)
        self.service = Service(self.outbox, self.growth)
        self.engine = Engine()

    def next(self) -> Any:
        assert self.told.acquire(timeout=20)
        message = self.outbox.take()
        assert message is not None
        return message


@pytest.fixture(scope="module")
def prompter(tmp_path_factory: pytest.TempPathFactory) -> Prompter:
    folder: Path = tiny_model(tmp_path_factory.mktemp("tiny"))
    return Prompter(load_tokenizer(folder), vocab=512, context=100, today=datetime.date(2026, 1, 1))


def work(kind: str, id: str, **body: Any) -> Work:
    return Work(kind, id, pack(body))


def test_requests_are_counted_refused_or_handed_on(prompter: Prompter) -> None:
    desk = Desk()
    desk.service.open(desk.engine, prompter)  # type: ignore[arg-type]
    desk.service.receive(work("count", "c", prompt="people"))
    assert desk.next().body["tokens"] > 0
    desk.service.receive(work("generate", "b", prompt="people", nonsense=1))
    assert isinstance(from_wire(desk.next().body), BadRequest)
    desk.service.receive(work("generate", "g", prompt="people"))
    assert desk.engine.came.wait(20)
    assert desk.engine.submitted == [("generate", "g")]
    desk.service.receive(Cancel("g", "asked"))
    assert desk.engine.cancelled == ["g"]


def test_what_left_the_store_is_handed_on_and_a_clear_is_answered_with_its_counts(prompter: Prompter) -> None:
    desk = Desk()
    desk.service.receive(Departed((b"c",), ()))
    desk.service.open(desk.engine, prompter)  # type: ignore[arg-type]
    desk.service.receive(Departed((b"c",), (b"p",)))
    assert desk.engine.spill.told == [Departed((b"c",), (b"p",))]
    desk.service.receive(Clear(1, ()))
    assert to_front(desk.next()) == Cleared(1, 7, 700, 2)
    desk.service.receive(Clear(2, (b"n",)))
    assert to_front(desk.next()) == Cleared(2, 3, 300, 1)


def test_a_request_cancelled_while_it_is_prepared_never_reaches_the_engine(prompter: Prompter) -> None:
    desk = Desk()
    desk.service.receive(work("generate", "g", prompt="people"))
    desk.service.open(desk.engine, HeldPrompter(prompter, lambda: desk.service.receive(Cancel("g", "asked"))))  # type: ignore[arg-type]
    assert isinstance(from_wire(desk.next().body), Cancelled)
    assert desk.engine.submitted == []


def test_a_cancel_that_comes_while_a_request_is_handed_on_comes_behind_it(prompter: Prompter) -> None:
    desk, order = Desk(), list[str]()

    def submit(kind: str, id: str, prompt: Any, arrival: float) -> None:
        cancel = threading.Thread(target=desk.service.receive, args=(Cancel(id, "asked"),))
        cancel.start()
        cancel.join(0.2)
        order.append("submitted")

    def cancel(id: str, reason: str) -> None:
        order.append("cancelled")
        desk.engine.came.set()

    desk.engine.submit, desk.engine.cancel = submit, cancel  # type: ignore[method-assign]
    desk.service.open(desk.engine, prompter)  # type: ignore[arg-type]
    desk.service.receive(work("generate", "g", prompt="people"))
    assert desk.engine.came.wait(20)
    assert order == ["submitted", "cancelled"]


class HeldPrompter:
    """Something happens while it prepares."""

    def __init__(self, prompter: Prompter, meanwhile: Any) -> None:
        self._prompter, self._meanwhile = prompter, meanwhile

    def prepare(self, kind: str, body: Any) -> Any:
        self._meanwhile()
        return self._prompter.prepare(kind, body)


def test_a_bug_in_preparation_ends_that_request_alone(prompter: Prompter) -> None:
    desk = Desk()

    def fail() -> None:
        raise RuntimeError("bug")

    desk.service.open(desk.engine, HeldPrompter(prompter, fail))  # type: ignore[arg-type]
    desk.service.receive(work("generate", "g", prompt="people"))
    assert isinstance(from_wire(desk.next().body), Internal)
    desk.service.receive(work("generate", "h", prompt="people"))
    assert isinstance(from_wire(desk.next().body), Internal)


def test_bytes_that_are_granted_too_late_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.worker.service.GRANT_WAIT_S", 0.0)
    desk = Desk()
    for ok in (False, True):
        assert desk.growth.ask(1000) is Consent.NO
        asked = to_front(desk.next())
        assert isinstance(asked, Grow)
        desk.service.receive(Granted(asked.q, ok, 0))
        desk.service.receive(Granted(asked.q, ok, 0))
    back = to_front(desk.next())
    assert isinstance(back, Grow) and back.nbytes == -1000 and not len(desk.outbox)


def test_the_pool_grows_only_with_the_ledger_s_consent() -> None:
    desk = Desk()
    answers: list[Consent] = []
    for ok, coming in ((True, False), (False, False), (False, True)):
        asking = threading.Thread(target=lambda: answers.append(desk.growth.ask(1000)))
        asking.start()
        grow = to_front(desk.next())
        desk.service.receive(Granted(grow.q, ok, 0, coming))  # type: ignore[union-attr]
        asking.join(20)
    assert answers == [Consent.YES, Consent.NO, Consent.SOON]


def test_what_the_pool_gives_back_is_told_and_not_waited_for() -> None:
    desk = Desk()
    assert desk.growth.ask(-1000) is Consent.YES
    assert to_front(desk.next()) == Grow(1, -1000)
