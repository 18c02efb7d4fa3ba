"""`cache clear` reaches the memory of loaded models, and says what it found there."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvclient.wire import Message
from kvd.front.slot import State
from kvd.front.verbs.base import Call
from kvd.front.verbs.cache import Cache
from tests.front.support import Client, Daemon, daemon, until


@pytest.fixture
def made() -> Iterator[Daemon]:
    with daemon(models=("demo", "other", "third")) as found:
        until(lambda: found.status()["store"]["available"], "the store is open")
        yield found


def ask(client: Client, **fields: str) -> Message:
    return client.result(client.ask("cache", {"verb": "clear", **fields}))


def test_a_clear_without_loaded_models_is_one_of_the_disk(made: Daemon) -> None:
    with made.client() as client:
        body = ask(client).body
        assert (body["checked"], body["memory_blocks"], body["memory_blocks_in_use"]) == (0, 0, 0)


def test_every_loaded_model_forgets_what_no_request_uses(made: Daemon) -> None:
    with made.client() as client:
        client.call("load", {"model": "demo"})
        client.call("load", {"model": "other"})
        held = client.ask("generate", {"prompt": "hold"}, "demo")
        client.wait_for(held, "progress")
        body = ask(client).body
        assert (body["memory_blocks"], body["memory_bytes"], body["memory_blocks_in_use"]) == (10, 1000, 1)
        client.ask("cancel", {"id": held})
        client.results({held})


def test_of_one_model_only_that_model_forgets_though_nothing_of_it_is_on_disk(made: Daemon) -> None:
    with made.client() as client:
        client.call("load", {"model": "demo"})
        client.call("load", {"model": "other"})
        body = ask(client, model="demo").body
        assert (body["checked"], body["memory_blocks"], body["memory_bytes"]) == (0, 5, 500)
        refused = ask(client, model="third")
        assert refused.kind == "error" and "nothing is stored" in refused.body["message"]


def test_of_a_worker_that_dies_meanwhile_everything_is_gone(made: Daemon) -> None:
    with made.client() as client:
        client.call("load", {"model": "demo"})
        client.ask("generate", {"prompt": "stop"}, "demo")
        pid = made.model()["pid"]
        state = ("ps", "-o", "state=", "-p", str(pid))
        until(lambda: "T" in subprocess.run(state, capture_output=True, text=True).stdout, "the worker stands still")
        clearing = client.ask("cache", {"verb": "clear"})
        until(lambda: [r for r in made.status()["requests"] if r["kind"] == "cache"], "the clear waits")
        os.kill(pid, signal.SIGKILL)
        assert client.results({clearing})[clearing].body["memory_blocks"] == 0


def test_a_worker_that_is_unloaded_while_the_disk_is_cleared_is_not_waited_for() -> None:
    slot = SimpleNamespace(state=State.LOADED, worker=SimpleNamespace(model="demo"))

    class Store:
        async def do(self, use: Any) -> Any:
            slot.state, slot.worker = State.NOT_LOADED, None
            return {"checked": 3, "freed": 30, "counts": {}, "namespaces": []}, 1, 1

    services = SimpleNamespace(fleet=SimpleNamespace(slots=[slot]), store=Store())
    body = asyncio.run(Cache().run(cast(Call, SimpleNamespace(body={"verb": "clear"}, services=services))))
    assert (body["checked"], body["memory_blocks"]) == (3, 0)


def test_memory_is_cleared_though_the_disk_cannot_be_and_the_error_says_both(made: Daemon) -> None:
    with made.client() as client:
        made.stop()
        (made.home / "store" / "CACHEDIR.TAG").unlink()
        (made.home / "store" / "foreign").write_text("x")
        made.start()
        client.call("load", {"model": "demo"})
        until(lambda: "foreign" in made.status()["store"].get("problem", ""), "the store is refused")
        answer = ask(client)
        assert answer.kind == "error" and answer.body["code"] == "store"
        assert "foreign" in answer.body["message"] and "5 blocks were forgotten in memory" in answer.body["message"]
