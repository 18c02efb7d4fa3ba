"""What HTTP adds to a request: the gateway over a fake daemon that answers at once, against `kvclient` on the same
daemon in the same run. Daemon and gateway are processes of their own, as in use."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benches.rows import Row, row
from kvclient.aio import AsyncClient

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 60
TOKENS = 400
TOKEN_ROUNDS = 9
STREAMS = 64
STREAM_TOKENS = 100
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]


def run() -> list[Row]:
    with ExitStack() as stack:
        socket = stack.enter_context(_process([sys.executable, "-m", "benches.children.fakedaemon"], {}))
        command = [sys.executable, "-m", "kvclient.gateway.main", "--port", "0"]
        env = {"KVD_SOCKET": socket, "KVD_HOME": str(Path(socket).parent)}
        url = stack.enter_context(_process(command, env)).removeprefix("kv-gateway: ")
        return asyncio.run(_measure(socket, url))


@contextmanager
def _process(command: list[str], env: dict[str, str]) -> Iterator[str]:
    """A child; gives the first line that it prints."""
    path = os.pathsep.join((str(ROOT / "tools"), str(ROOT)))
    child = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path, **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        line = child.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"{command[2]} ended with {child.wait()}")
        yield line
    finally:
        child.stdin.close()
        child.terminate()
        child.wait(20)
        child.stdout.close()


async def _measure(socket: str, url: str) -> list[Row]:
    async with AsyncClient(socket) as client:
        http = await Http.open(url)
        await http.ask(1)
        plain: list[float] = []
        through: list[float] = []
        for _ in range(ROUNDS):
            plain.append((await _direct(client, 1))[0])
            through.append((await http.ask(1))[0])
        each: list[float] = []
        each_through: list[float] = []
        for _ in range(TOKEN_ROUNDS):
            each.append((await _direct(client, TOKENS))[1] / TOKENS)
            each_through.append((await http.ask(TOKENS))[1] / TOKENS)
        http.close()
        many = [await _many([_direct(client, STREAM_TOKENS) for _ in range(STREAMS)]) for _ in range(3)]
        connections = [await Http.open(url) for _ in range(STREAMS)]
        many_through = [await _many([one.ask(STREAM_TOKENS) for one in connections]) for _ in range(3)]
        for one in connections:
            one.close()
    return _rows(plain, through, each, each_through, statistics.median(many), statistics.median(many_through))


def _rows(
    plain: list[float], through: list[float], each: list[float], each_through: list[float], many: float, all_many: float
) -> list[Row]:
    added = statistics.median(b - a for a, b in zip(plain, through, strict=True))
    added_each = statistics.median(b - a for a, b in zip(each, each_through, strict=True))
    count = STREAMS * STREAM_TOKENS
    return [
        row("gateway: time to first token, added", 1000 * added, "ms", bar="<= 10", of="value"),
        row("  through the gateway", 1000 * statistics.median(through), "ms", baseline=1000 * statistics.median(plain)),
        row("gateway: per streamed token, added", 1000 * added_each, "ms", bar="<= 0.2", of="value"),
        row(
            "  through the gateway", 1000 * statistics.median(each_through), "ms",
            baseline=1000 * statistics.median(each),
        ),
        row(f"gateway: {STREAMS} streams at once, tokens/s", count / all_many, "tok/s", baseline=count / many),
        row(
            "  per streamed token, added", 1000 * (all_many - many) / count, "ms", bar="<= 0.2", of="value",
        ),
    ]


async def _many(asks: list[Any]) -> float:
    """Seconds for all of them side by side."""
    begin = time.perf_counter()
    await asyncio.gather(*asks)
    return time.perf_counter() - begin


async def _direct(client: AsyncClient, tokens: int) -> tuple[float, float]:
    """(seconds to the first token, from it to the end) by kvclient."""
    begin = time.perf_counter()
    first = 0.0
    seen = 0
    async with client.stream("demo", messages=HELLO, max_tokens=tokens) as stream:
        async for event in stream:
            if event.kind == "text":
                first = first or time.perf_counter()
                seen += 1
    end = time.perf_counter()
    assert seen == tokens
    return first - begin, end - first


class Http:
    """One kept-alive connection, read as cheaply as possible: what is measured is the gateway, not a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader, self._writer, self._host = reader, writer, host

    @classmethod
    async def open(cls, url: str) -> Http:
        place = urlsplit(url)
        return cls(*await asyncio.open_connection(place.hostname, place.port), place.netloc)

    async def ask(self, tokens: int) -> tuple[float, float]:
        """(seconds to the first token, from it to the end) of a streamed chat completion."""
        body = json.dumps({"model": "demo", "messages": HELLO, "max_tokens": tokens, "stream": True,
                           "stream_options": {"include_usage": True}}).encode()  # fmt: skip
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Length: {len(body)}\r\n\r\n"
        begin = time.perf_counter()
        self._writer.write(head.encode() + body)
        first = 0.0
        data = b""
        seen = 0
        tail = b""
        while not tail.endswith(b"0\r\n\r\n"):
            data = await self._reader.read(65536)
            assert data
            found = data.count(b'"delta":{"content":')
            if found and not first:
                first = time.perf_counter()
            seen += found
            tail = (tail + data)[-5:]
        end = time.perf_counter()
        assert abs(seen - tokens) <= tokens // 20, (seen, tokens)  # a marker may lie across two reads
        return first - begin, end - first

    def close(self) -> None:
        self._writer.close()
