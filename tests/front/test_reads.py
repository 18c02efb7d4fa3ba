"""A disk of models that hangs costs those who need it, and the daemon nothing."""

from __future__ import annotations

import asyncio
import os
import queue
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvclient.errors import UnknownModel
from kvd.front import reads
from kvd.front.reads import Reads, in_thread
from kvd.models.record import Record, write_record
from tests.front.serve import HUNG
from tests.front.support import PATIENCE_S, Client, Daemon, daemon, until

MODELS = ("demo", "far", "near")
FACTS = ("name", "source", "fingerprint", "pulled_at", "disk_bytes", "context_length")


def hang(made: Daemon, folder: Path) -> None:
    (made.home / HUNG).symlink_to(folder)


def answers(made: Daemon) -> None:
    """The disk is back."""
    (made.home / HUNG).unlink()


def move(made: Daemon, name: str) -> None:
    """A model's files lie elsewhere from now on, its record says where."""
    folder, files = made.home / "models" / name, made.home / name
    folder.rename(files)
    folder.mkdir()
    write_record(folder, Record(name, "test", 1.0, path=str(files)))


def rows(made: Daemon) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in made.status()["models"]}


def facts(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in FACTS}


@pytest.fixture
def made() -> Iterator[Daemon]:
    with daemon("daemon.max_waiting=4", "models.aliases=claude-*=demo", models=MODELS) as made:
        yield made


@pytest.fixture
def client(made: Daemon) -> Iterator[Client]:
    with made.client() as client:
        yield client


def test_while_the_folder_of_models_hangs_streams_loaded_models_and_status_go_on(made: Daemon, client: Client) -> None:
    client.call("load", {"model": "demo"})
    before = rows(made)
    running = client.ask("generate", {"prompt": "slow 100 0.01"}, "demo")
    client.wait_for(running, "text")
    hang(made, made.home / "models")
    with made.client() as other:
        seen = rows(made)
        assert {name: facts(row) for name, row in seen.items()} == {name: facts(row) for name, row in before.items()}
        assert all(row["unread_s"] > 0 for row in seen.values())
        assert not any("unread_s" in row for row in before.values())
        for name in ("demo", "claude-opus"):
            assert other.call("generate", {"prompt": "say 2"}, name)["choices"][0]["text"] == "01"
        assert [row["name"] for row in other.call("models", {"model": "claude-x"})["models"]] == ["demo"]
        assert other.call("cache", {"verb": "clear", "model": "claude-x"})["memory_blocks"] == 5
        assert client.result(running).body["choices"][0]["text"] == "0123456789" * 10
        assert other.call("unload", {"model": "claude-x"}) == {"model": "demo", "unloaded": True}
        assert other.call("unload", {"model": "far"}) == {"model": "far", "unloaded": False}
    answers(made)
    until(lambda: not any("unread_s" in row for row in rows(made).values()), "the disk answers")


def test_one_model_on_a_disk_that_never_answered_is_only_named_and_others_load(made: Daemon, client: Client) -> None:
    move(made, "far")
    hang(made, made.home / "far")
    seen = rows(made)
    assert seen["far"]["unread_s"] > 0 and seen["far"]["state"] == "not loaded" and "source" not in seen["far"]
    assert seen["demo"]["disk_bytes"] > 0 and "unread_s" not in seen["demo"]
    assert client.call("generate", {"prompt": "say 3"}, "near")["choices"][0]["text"] == "012"
    waiting = client.ask("generate", {"prompt": "say 1"}, "far")
    late = client.result(client.ask("generate", {"prompt": "say 1", "timeout": 0.2}, "far"))
    assert late.body["code"] == "timeout" and late.body["details"] == {"limit_s": 0.2, "stage": "load"}
    unwanted = client.ask("generate", {"prompt": "say 1"}, "far")
    with made.control() as control:
        until(lambda: control.call("cancel", {"id": unwanted})["cancelled"], "it is there")
    assert client.result(unwanted).body["code"] == "cancelled"
    loading = client.ask("load", {"model": "far"})
    answers(made)
    found = client.results({waiting, loading})
    assert found[waiting].body["choices"][0]["text"] == "0" and found[loading].body["state"] == "loaded"
    assert facts(rows(made)["far"])["pulled_at"] == 1.0


@pytest.mark.parametrize("known", [True, False])
def test_requests_that_wait_for_the_disk_are_bounded_and_answered_once_it_is_back(
    made: Daemon, client: Client, known: bool
) -> None:
    """Whether a model is there may never have been known, or that is known and what it is not any more."""
    if known:
        rows(made)
    hang(made, made.home / "models")
    assert known == bool(rows(made))
    waiting = {client.ask("generate", {"prompt": "say 1"}, "far") for _ in range(4)}
    until(lambda: len(made.status()["requests"]) == 4, "they wait")
    refused = client.result(client.ask("generate", {"prompt": "say 1"}, "far"))
    assert refused.body["code"] == "busy" and refused.body["details"] == {"waiting": 4, "limit": 4}
    answers(made)
    assert {message.kind for message in client.results(waiting).values()} == {"done"}


@pytest.mark.parametrize("how", ["cancel", "leave"])
def test_who_gives_up_waiting_for_the_disk_takes_nobodys_place(made: Daemon, client: Client, how: str) -> None:
    rows(made)
    hang(made, made.home / "models")
    rows(made)
    with made.client() as other, made.control() as control:
        given_up = {other.ask("generate", {"prompt": "say 1"}, "far") for _ in range(4)}
        until(lambda: len(made.status()["requests"]) == 4, "they wait")
        if how == "cancel":
            for id in given_up:
                assert control.call("cancel", {"id": id})["cancelled"]
            assert {message.body["code"] for message in other.results(given_up).values()} == {"cancelled"}
    until(lambda: not made.status()["requests"], "they are gone")
    waiting = client.ask("generate", {"prompt": "say 1"}, "far")
    until(lambda: made.status()["requests"], "it waits")
    answers(made)
    assert client.result(waiting).kind == "done"


@pytest.mark.parametrize("what", ["config.json", "model.safetensors"])
def test_a_stop_does_not_wait_for_a_disk_that_hangs(what: str) -> None:
    """While a model is looked for, and while its headers are read before it is loaded."""
    with daemon(models=MODELS) as made, made.client() as client:
        rows(made)
        hang(made, made.home / "models" / "far" / what)
        waiting = client.ask("generate", {"prompt": "say 1"}, "far")
        until(lambda: [one for one in made.status()["requests"] if one["id"] == waiting], "it waits")
        made.status()
        assert made.stop() == 0
        assert client.result(waiting).body["code"] == "cancelled"


def test_a_model_is_loaded_from_where_it_is_by_then(made: Daemon, client: Client) -> None:
    """Its requests go to the process that is there, whatever its record says; the next process reads that again."""
    first = client.call("load", {"model": "near"})
    move(made, "near")
    assert client.result(client.ask("generate", {"prompt": "die"}, "near")).body["code"] == "worker_lost"
    assert client.call("generate", {"prompt": "say 2"}, "near")["choices"][0]["text"] == "01"
    assert made.model("near")["pid"] != first["pid"]


def test_a_loaded_model_whose_folder_was_deleted_answers_and_is_listed_until_it_is_unloaded(
    made: Daemon, client: Client
) -> None:
    client.call("load", {"model": "near", "pin": True})
    shutil.rmtree(made.home / "models" / "near")
    assert client.call("generate", {"prompt": "say 2"}, "near")["choices"][0]["text"] == "01"
    assert rows(made)["near"]["state"] == "loaded"
    assert client.call("unload", {"model": "near"}) == {"model": "near", "unloaded": True}
    assert "near" not in rows(made)
    for kind, body, model in (("generate", {"prompt": "say 1"}, "near"), ("unload", {"model": "near"}, "")):
        assert client.result(client.ask(kind, body, model)).body["code"] == "unknown_model"


# --- reads alone


class Disk:
    """Answers one call after the other, with what the test says."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self.says: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()

    def read(self) -> int:
        self.asked.release()
        said = self.says.get(timeout=PATIENCE_S)
        if isinstance(said, Exception):
            raise said
        return said

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.asked.acquire, timeout=PATIENCE_S)


def test_who_asks_gets_what_was_read_later_and_one_thread_reads_at_a_time() -> None:
    async def main() -> None:
        disk = Disk()
        value = Reads(disk.read)
        first = asyncio.create_task(value.fresh())
        await disk.wait()
        later = [asyncio.create_task(value.fresh()) for _ in range(20)]
        await asyncio.sleep(0.1)
        assert not disk.asked.acquire(blocking=False)
        later[0].cancel()
        disk.says.put(1)
        assert await first == 1
        await disk.wait()
        disk.says.put(2)
        assert await asyncio.gather(*later[1:]) == [2] * 19
        assert not disk.asked.acquire(blocking=False) and value.last == 2

    asyncio.run(main())


def test_what_is_late_is_waited_for_once_and_then_it_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        disk = Disk()
        value = Reads(disk.read)
        disk.says.put(1)
        assert await value.newest() == 1 and not value.hung_s
        await disk.wait()
        monkeypatch.setattr(reads, "PATIENCE_S", 0.05)
        assert await value.newest() == 1
        assert value.hung_s > 0
        monkeypatch.setattr(reads, "PATIENCE_S", 10 * PATIENCE_S)
        assert [await asyncio.wait_for(value.newest(), PATIENCE_S) for _ in range(100)] == [1] * 100
        await disk.wait()
        assert not disk.asked.acquire(blocking=False)
        fresh = asyncio.create_task(value.fresh())
        disk.says.put(2)
        disk.says.put(UnknownModel("gone"))
        with pytest.raises(UnknownModel):
            await fresh
        disk.says.put(UnknownModel("gone"))
        with pytest.raises(UnknownModel):
            await value.newest()
        assert value.last is None

    asyncio.run(main())


def test_an_error_that_is_told_again_and_again_does_not_keep_who_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        disk, found = Disk(), []
        value = Reads(disk.read)
        disk.says.put(UnknownModel("gone"))
        for _ in range(50):
            with pytest.raises(UnknownModel) as caught:
                await value.newest()
            found.append(len(caught.traceback))
            monkeypatch.setattr(reads, "PATIENCE_S", 0.05)
        assert value.hung_s > 0 and max(found) < 10
        disk.says.put(1)

    asyncio.run(main())


def test_a_read_that_fails_belongs_to_who_asked_and_one_that_hangs_ends_with_the_process(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await in_thread(lambda: 1 // 0)
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        hung = asyncio.create_task(in_thread(pipe.read_text))
        await asyncio.sleep(0)
        [thread] = [thread for thread in threading.enumerate() if thread.name == "read"]
        assert thread.daemon
        hung.cancel()
        pipe.write_text("done")

    asyncio.run(main())
