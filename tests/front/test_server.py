"""Whatever arrives on the sockets, others are served and nothing grows (F35)."""

from __future__ import annotations

import random
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from kvclient import wire
from kvd.front.gate import NEEDED, raise_limit
from tests.front.support import Client, Daemon, daemon, until

GREETING = b"\xff" + struct.pack(">Q", 1) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)


def works(made: Daemon) -> None:
    with made.client() as client:
        assert client.call("generate", {"prompt": "say 2"}, "demo")["choices"][0]["text"] == "01"


@pytest.fixture(autouse=True)
def others_are_served(shared: Daemon) -> Iterator[None]:
    works(shared)
    yield
    works(shared)


def test_random_frames_are_dropped_and_counted(shared: Daemon, client: Client) -> None:
    dice = random.Random(7)
    before = shared.count("kvd_protocol_errors_total", "malformed")
    for _ in range(300):
        frames = [dice.randbytes(dice.choice([0, 1, 10, 5000])) for _ in range(dice.randint(1, 5))]
        client.socket.send_multipart(frames)
    until(lambda: shared.count("kvd_protocol_errors_total", "malformed") == before + 300, "all to be counted")


@pytest.mark.parametrize("version", [0, 2, None, "1"])
def test_another_version_gets_an_error_that_names_both(client: Client, version: object) -> None:
    header = wire.pack({"v": version, "t": "ping", "id": "other"})
    client.socket.send_multipart([header, wire.pack({})])
    error = client.result("other").body
    assert error["code"] == "protocol"
    assert (error["details"]["theirs"], error["details"]["ours"]) == (version, wire.VERSION)


@pytest.mark.parametrize("verb", ["nonsense", "", "generate\n"])
def test_an_unknown_verb_is_a_bad_request(client: Client, verb: str) -> None:
    assert client.result(client.ask(verb)).body["code"] == "bad_request"


def test_what_clients_type_as_a_verb_reaches_no_metric(shared: Daemon, client: Client) -> None:
    for n in range(20):
        client.result(client.ask(f"secret-{n}"))
    assert "secret" not in str(shared.status()["metrics"])
    assert "secret" not in (shared.home / "logs" / "kvd.log").read_text()


def test_an_unknown_field_is_a_bad_request(client: Client) -> None:
    assert client.result(client.ask("load", {"model": "demo", "speed": 9})).body["details"]["field"] == "speed"


def test_a_huge_body_for_a_small_verb_is_refused_unread(client: Client) -> None:
    error = client.result(client.ask("cache", {"verb": "ls", "more": "x" * 2_000_000})).body
    assert error["code"] == "bad_request" and error["details"]["size"] > error["details"]["limit"]


def test_work_does_not_belong_on_the_control_socket(shared: Daemon) -> None:
    with shared.control() as control:
        assert control.result(control.ask("generate", {"prompt": "say 1"})).body["code"] == "bad_request"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        GREETING[:20],
        GREETING,
        GREETING + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER" + b"\x02" + b"\xff" * 8 + b"x",
    ],
    ids=["nothing", "http", "half-greeting", "no-handshake", "huge-length"],
)
def test_half_messages_and_foreign_protocols_cost_nothing(shared: Daemon, sent: bytes) -> None:
    process = psutil.Process(shared.process.pid)
    before = process.memory_info().rss
    raw = [socket.socket(socket.AF_UNIX) for _ in range(20)]
    for one in raw:
        one.connect(str(shared.socket))
        one.sendall(sent)
    works(shared)
    assert process.memory_info().rss < before + 50 * 2**20
    for one in raw:
        one.close()


def test_a_body_over_the_limit_ends_its_connection_alone(shared: Daemon) -> None:
    before = shared.count("kvd_protocol_errors_total", "malformed")
    with shared.client() as big:
        big.socket.send_multipart([wire.pack({"v": 1, "t": "ping", "id": "big"}), bytes(wire.MAX_BODY + 1)])
        works(shared)
        assert not big.socket.poll(500)
        assert shared.count("kvd_protocol_errors_total", "malformed") == before, "it was read"


def test_connections_up_to_the_descriptor_limit_shut_the_gate_until_they_go() -> None:
    few = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (64, 1024))
    with daemon(limits=few) as made:
        works(made)
        raw = flood(made)
        with made.control() as control:
            assert control.call("status")["clients"]["gated"]
        process = psutil.Process(made.process.pid)
        before = process.cpu_times().user + process.cpu_times().system
        assert process.num_fds() < 1024
        for one in raw:
            one.close()
        until(made.socket.exists, "the gate to open")
        works(made)
        assert process.cpu_times().user + process.cpu_times().system - before < 2.0


def test_too_few_descriptors_are_refused_at_the_start_with_the_number_needed(tmp_path: Path) -> None:
    for most in (40, NEEDED - 1):
        words = [sys.executable, "-m", "tests.front.serve", str(tmp_path)]
        limited = ["sh", "-c", f'ulimit -n {most}; exec "$@"', "sh", *words]
        done = subprocess.run(limited, capture_output=True, text=True, timeout=60)
        assert (done.returncode, len(done.stderr.splitlines())) == (65, 1), done.stderr
        assert f"{most} open files are too few, kvd needs {NEEDED}" in done.stderr
    assert not (tmp_path / "run").exists()


def test_with_the_fewest_descriptors_clients_after_clients_are_served() -> None:
    with daemon(limits=partial(resource.setrlimit, resource.RLIMIT_NOFILE, (NEEDED, NEEDED))) as made:
        for _ in range(NEEDED):
            with made.client() as client, made.control() as control:
                client.call("generate", {"prompt": "say 1"}, "demo")
                assert not control.call("status")["clients"]["gated"]


def flood(made: Daemon) -> list[socket.socket]:
    """Connect until nobody is there to connect to."""
    taken: list[socket.socket] = []
    raise_limit()
    end = time.monotonic() + 20
    while made.socket.exists():
        assert time.monotonic() < end and made.process.poll() is None
        one = socket.socket(socket.AF_UNIX)
        one.settimeout(0.2)
        try:
            one.connect(str(made.socket))
        except OSError:
            one.close()  # the queue of connections is full, or the gate just shut
            continue
        taken.append(one)
        assert len(taken) < 1024
    return taken
