"""One face for both clients, so that one suite of tests holds for each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvclient import AsyncClient, Client, Event


class AsyncStreamFace:
    def __init__(self, loop: asyncio.AbstractEventLoop, stream: Any) -> None:
        self._loop, self._stream, self.id = loop, stream, stream.id

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        try:
            return self._loop.run_until_complete(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        self._loop.run_until_complete(self._stream.aclose())


class AsyncFace:
    """Every coroutine runs to its end on a loop of this thread."""

    def __init__(self, path: Path, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = AsyncClient(path, **options)

    def stream(self, *args: Any, **options: Any) -> AsyncStreamFace:
        return AsyncStreamFace(self._loop, self._client.stream(*args, **options))

    def close(self) -> None:
        self._loop.run_until_complete(self._client.aclose())
        self._loop.close()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return lambda *args, **options: self._loop.run_until_complete(method(*args, **options))


FACES = {"blocking": Client, "async": AsyncFace}
