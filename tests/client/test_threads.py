"""Clients shared by threads, and many requests at once."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from kvclient import Client, KvdError
from tests.client.fake import FakeDaemon, answer, silent, started

SOON_S = 30.0
"""Upper limit for what must not hang; nothing here takes a tenth of it."""


def test_threads_share_a_client(daemon: FakeDaemon) -> None:
    daemon.scripts["generate"] = lambda message, send: answer(message, send)
    texts: list[str] = []
    with Client(daemon.path) as kv:
        def ask() -> None:
            for _ in range(20):
                texts.append(kv.generate("demo", "hi").text)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON_S)
    assert texts == ["Hello world"] * 160


def test_many_short_requests_from_many_threads_never_collide(daemon: FakeDaemon) -> None:
    failures: list[KvdError] = []
    with Client(daemon.path) as kv:
        def ping() -> None:
            try:
                for _ in range(300):
                    kv.ping()
            except KvdError as problem:
                failures.append(problem)

        threads = [threading.Thread(target=ping) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON_S)
    assert failures == []


def test_closing_a_client_wakes_the_threads_that_wait(daemon: FakeDaemon) -> None:
    from kvclient import Cancelled

    daemon.scripts["generate"] = silent
    raised: list[BaseException] = []
    kv = Client(daemon.path)

    def ask() -> None:
        try:
            kv.generate("demo", "hi")
        except KvdError as problem:
            raised.append(problem)

    thread = threading.Thread(target=ask)
    thread.start()
    daemon.next("generate")
    kv.close()
    thread.join(SOON_S)
    assert [type(one) for one in raised] == [Cancelled]
    with pytest.raises(Cancelled):
        kv.status()


OUT_OF_DESCRIPTORS = """
import resource, sys, time
from kvclient import Client, KvdError
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with Client(sys.argv[1]) as kv:
    streams = []
    for _ in range(100):
        try:
            streams.append(kv.stream("demo", "hi"))
        except KvdError as problem:
            print(type(problem).__name__, problem.message)
            break
    while streams:
        streams.pop().close()
    for _ in range(1000):  # ZeroMQ gives descriptors back a moment later
        try:
            print(kv.status())
            break
        except KvdError:
            time.sleep(0.01)
"""


def test_a_process_out_of_descriptors_gets_an_error_and_recovers(daemon: FakeDaemon) -> None:
    daemon.scripts["generate"] = silent
    done = subprocess.run([sys.executable, "-c", OUT_OF_DESCRIPTORS, str(daemon.path)], capture_output=True, text=True,
                          timeout=SOON_S)  # fmt: skip
    assert done.stderr == ""
    error, status = done.stdout.splitlines()
    assert error.startswith("Busy no further connection can be opened") and status == "{'up': True}"


def test_hundreds_of_streams_live_side_by_side(daemon: FakeDaemon) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 6000
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this system allows {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        with Client(daemon.path) as kv:
            streams = [started(daemon, kv) for _ in range(400)]
            assert len({stream.id for stream in streams}) == 400
            assert kv.status() == {"up": True}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_nothing_stays_open(daemon: FakeDaemon, kv: Any) -> None:
    def ask() -> None:
        daemon.scripts["generate"] = answer
        kv.generate("demo", "hi")
        id = started(daemon, kv).id
        assert daemon.next("cancel").body == {"id": id}

    ask()
    deadline, before = time.monotonic() + SOON_S, len(os.listdir("/dev/fd"))
    for _ in range(20):
        ask()
    while len(os.listdir("/dev/fd")) > before + 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/dev/fd")) <= before + 4
