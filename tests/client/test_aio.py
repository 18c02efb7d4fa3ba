"""What only the asyncio client promises."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvclient import AsyncClient, Cancelled, Client, aio, wire
from tests.client.fake import CHOICE, STATS, FakeDaemon, answer, silent

LIMIT_S = 30


def run(daemon: FakeDaemon, scene: Callable[[AsyncClient], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        async with AsyncClient(daemon.path) as kv:
            return await asyncio.wait_for(scene(kv), LIMIT_S)

    return asyncio.run(whole())


async def arrived(daemon: FakeDaemon, verb: str) -> wire.Message:
    return await asyncio.to_thread(daemon.next, verb)


def test_it_has_every_verb_of_the_blocking_client() -> None:
    public = {name for name in vars(Client) if not name.startswith("_")} - {"close"}
    assert public == {name for name in vars(AsyncClient) if not name.startswith("_")} - {"aclose"}


def test_cancelling_a_task_cancels_its_request(daemon: FakeDaemon) -> None:
    daemon.scripts["generate"] = silent

    async def scene(kv: AsyncClient) -> None:
        task = asyncio.create_task(kv.generate("demo", "hi"))
        asked = await arrived(daemon, "generate")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await arrived(daemon, "cancel")).body == {"id": asked.id}

    run(daemon, scene)


def test_a_wait_that_is_cancelled_cancels_the_request(daemon: FakeDaemon) -> None:
    daemon.scripts["generate"] = silent

    async def scene(kv: AsyncClient) -> None:
        stream = kv.stream("demo", "hi")
        waiting = asyncio.ensure_future(anext(stream))
        await arrived(daemon, "generate")
        waiting.cancel()
        assert (await arrived(daemon, "cancel")).body == {"id": stream.id}
        assert [event async for event in stream] == []

    run(daemon, scene)


def test_tasks_share_a_client(daemon: FakeDaemon) -> None:
    async def scene(kv: AsyncClient) -> None:
        answers = await asyncio.gather(*(kv.generate("demo", "hi") for _ in range(100)))
        assert [done.text for done in answers] == ["Hello world"] * 100

    run(daemon, scene)


def test_closing_the_client_ends_the_tasks_that_wait(daemon: FakeDaemon) -> None:
    daemon.scripts.update(generate=silent, models=silent)

    async def scene(kv: AsyncClient) -> None:
        tasks = [asyncio.create_task(kv.generate("demo", "hi")), asyncio.create_task(kv.models())]
        missing = {"generate", "models"}  # in either order: they take different lanes
        while missing:
            missing.discard((await asyncio.to_thread(daemon.received.get, timeout=10)).kind)
        await kv.aclose()
        for task in tasks:
            with pytest.raises(Cancelled):
                await task
        with pytest.raises(Cancelled):
            await kv.status()

    run(daemon, scene)


def test_a_stream_goes_out_at_its_first_event_or_on_entering(daemon: FakeDaemon) -> None:
    async def scene(kv: AsyncClient) -> None:
        never = kv.stream("demo", "hi")
        async with kv.stream("demo", "hi") as stream:
            assert (await arrived(daemon, "generate")).id == stream.id
            assert [event.kind async for event in stream][-1] == "done"
        await never.aclose()
        assert [event async for event in never] == []
        await kv.ping()
        assert (await arrived(daemon, "ping")) and daemon.received.empty()

    run(daemon, scene)


def test_who_reads_slowly_loses_nothing_and_costs_nothing(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "FAR_BEHIND", 10)
    wakes: list[int] = []
    wake = aio._Reader._wake
    monkeypatch.setattr(aio._Reader, "_wake", lambda self: (wakes.append(1), wake(self))[1])

    async def scene(kv: AsyncClient) -> None:
        daemon.scripts["generate"] = silent
        stream = kv.stream("demo", "hi")
        first = asyncio.ensure_future(anext(stream))
        await arrived(daemon, "generate")
        daemon.tell(stream.id, "queued", {"position": 0})
        assert (await first).kind == "queued"

        def tell(texts: int) -> None:
            for _ in range(texts):
                daemon.tell(stream.id, "text", {"text": "x", "index": 0})

        tell(50)
        assert stream._reader is not None
        while stream._reader._descriptors:
            await asyncio.sleep(0.01)
        before = len(wakes)
        assert before > 0
        tell(1000)
        await asyncio.to_thread(daemon.settle)
        await asyncio.sleep(0.1)
        assert len(wakes) == before
        daemon.tell(stream.id, "done", {"choices": [CHOICE], "stats": STATS})
        assert sum([len(event.text) async for event in stream]) == 1050

    run(daemon, scene)


def test_other_tasks_run_while_one_waits(daemon: FakeDaemon) -> None:
    async def scene(kv: AsyncClient) -> None:
        daemon.scripts["generate"] = silent
        waiting = asyncio.create_task(kv.generate("demo", "hi"))
        asked = await arrived(daemon, "generate")
        daemon.scripts["generate"] = answer
        assert (await kv.generate("demo", "hi")).text == "Hello world"
        daemon.tell(asked.id, "done", {"choices": [CHOICE], "stats": STATS})
        assert (await waiting).text == "Hello world"

    run(daemon, scene)
