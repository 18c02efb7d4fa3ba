"""The daemon's events for one Ask: those of its one prompt, or of several merged into one request's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import fields, replace
from typing import Any, Final

from kvclient.aio import AsyncClient
from kvclient.events import Choice, Completion, Event, Stats
from kvclient.gateway.ask import Ask

WAITING: Final = ("queued", "progress")
"""Events of no choice."""


async def events_of(client: AsyncClient, ask: Ask, id: str) -> AsyncGenerator[Event]:
    """Ends with `done`. Raises KvdError. Closing it early cancels the request. `id` names it at the daemon (the second
    prompt of several is `id-1`, and so on)."""
    source = _one(client, ask, id, 0) if len(ask.bodies) == 1 else _merged(client, ask, id)
    async with aclosing(source) as events:
        async for event in events:
            yield event


async def _one(client: AsyncClient, ask: Ask, id: str, number: int) -> AsyncGenerator[Event]:
    name = f"{id}-{number}" if number else id
    body = ask.bodies[number]
    copies = 1 if "n" in body else ask.n
    async with client.stream(ask.model or None, request_id=name, **body) as stream:
        async for event in stream:
            if copies == 1:
                yield event
            else:
                for copy in _copied(event, copies):
                    yield copy


async def _merged(client: AsyncClient, ask: Ask, id: str) -> AsyncGenerator[Event]:
    """Prompts run side by side: the daemon batches them. One failure ends all."""
    queue: asyncio.Queue[tuple[int, Event | BaseException]] = asyncio.Queue(maxsize=64)

    async def pump(number: int) -> None:
        try:
            async with aclosing(_one(client, ask, id, number)) as events:
                async for event in events:
                    await queue.put((number, event))
        except Exception as problem:  # noqa: BLE001 - handed to the reader, which raises it
            await queue.put((number, problem))

    tasks = [asyncio.create_task(pump(number)) for number in range(len(ask.bodies))]
    ends: dict[int, Completion] = {}
    try:
        while len(ends) < len(tasks):
            number, event = await queue.get()
            if isinstance(event, BaseException):
                raise event
            if event.done is not None:
                ends[number] = event.done
            else:
                yield replace(event, index=number * ask.n + event.index)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    choices = [_moved(choice, number * ask.n) for number in sorted(ends) for choice in ends[number].choices]
    stats = _sum([end.stats for end in ends.values()])
    yield Event("done", id, done=Completion(id, tuple(choices), stats, ends[0].model))


def _copied(event: Event, copies: int) -> list[Event]:
    """The one answer as each of so many choices."""
    if event.done is not None:
        choices = [replace(event.done.choices[0], index=index) for index in range(copies)]
        return [replace(event, done=replace(event.done, choices=tuple(choices)))]
    return [event] if event.kind in WAITING else [replace(event, index=index) for index in range(copies)]


def _moved(choice: Choice, by: int) -> Choice:
    return replace(choice, index=choice.index + by)


def _sum(all_stats: list[Stats]) -> Stats:
    """Counts of tokens and bytes added up; times and the rest are those of the slowest."""
    slowest = max(all_stats, key=lambda stats: stats.ttft_s)
    counts: dict[str, Any] = {
        f.name: sum(getattr(stats, f.name) for stats in all_stats)
        for f in fields(Stats)
        if f.name.endswith("_tokens") or f.name == "kv_bytes"
    }
    return replace(slowest, **counts)
