"""`kv` as a process: how it ends, by itself, by an error, by Ctrl-C or with a closed stdout."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from kvclient import KvdError
from tests.client.command import KV, LIMIT_S, content, kv
from tests.client.fake import CHOICE, STATS, FakeDaemon

pytestmark = pytest.mark.usefixtures("environment")


@pytest.mark.parametrize("kind", [k for k in KvdError.__subclasses__() if k.__module__ == "kvclient.errors"])
def test_every_error_has_its_exit_code_and_one_line(daemon: FakeDaemon, kind: type[KvdError]) -> None:
    daemon.scripts["generate"] = lambda message, send: send("error", kind("it\ntripped").to_wire())
    done = kv("hi")
    assert (done.returncode, done.stdout, done.stderr) == (kind.exit_code, b"", b"kv: it tripped\n")


def test_no_daemon_is_69_and_says_what_to_do(daemon: FakeDaemon) -> None:
    daemon.die()
    done = kv("hi")
    assert done.returncode == 69 and done.stdout == b""
    said = f"kv: no daemon at {daemon.path}; start it with `kvd start`\n"
    assert done.stderr == said.encode()


def test_a_daemon_that_dies_is_69_at_once_and_keeps_what_was_said(daemon: FakeDaemon, running: Any) -> None:
    process = running("hi", events=(("text", {"text": "Hel", "index": 0}),))
    assert os.read(process.stdout.fileno(), 100) == b"Hel"
    daemon.die()
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (69, b"") and b"went away" in err and b"Traceback" not in err


@pytest.mark.parametrize(("stdin", "offset"), [(b"abc\xff", 3), (b"\xc3", 0), ("ä".encode() * 70000 + b"\x80", 140000)])
def test_stdin_that_is_not_utf8_is_65_and_names_the_byte(daemon: FakeDaemon, stdin: bytes, offset: int) -> None:
    done = kv("hi", stdin=stdin)
    assert done.returncode == 65 and f"0x{stdin[offset]:02x} at offset {offset}\n".encode() in done.stderr
    assert daemon.received.empty()


def test_a_prompt_that_is_not_utf8_is_a_usage_error(daemon: FakeDaemon) -> None:
    done = subprocess.run([*KV, b"caf\xe9"], stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S)
    assert done.returncode == 2 and b"PROMPT holds" in done.stderr and b"Traceback" not in done.stderr


def test_a_document_over_the_limit_is_65_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    small = KV[:2] + ["import sys; from kvclient import wire; wire.MAX_BODY = 1000\n"
                      "from kvclient.cli import main; sys.exit(main())"]  # fmt: skip
    done = subprocess.run([*small, "hi"], input=b"x" * 1001, capture_output=True, timeout=LIMIT_S)
    assert done.returncode == 65 and b"more than 1000 bytes" in done.stderr


def test_a_large_document_arrives_whole(daemon: FakeDaemon) -> None:
    document = b"0123456789abcde\n" * 2**19
    assert kv("hi", stdin=document).returncode == 0
    assert content(daemon) == document.decode() + "\nhi"


@pytest.mark.parametrize("words", [
    ["-n", "0", "hi"], ["-n", "many", "hi"], ["-t", "-1", "hi"], ["--top-p", "2", "hi"], ["--nonsense"],
    ["--raw", "-s", "x", "hi"], ["--cache", "maybe", "hi"], ["--timeout", "nan", "hi"], ["--stop", "", "hi"],
    ["--completion", "csh"], [],
])  # fmt: skip
def test_wrong_usage_is_2_and_sends_nothing(daemon: FakeDaemon, words: list[str]) -> None:
    done = kv(*words)
    assert done.returncode == 2 and done.stdout == b"" and done.stderr and b"Traceback" not in done.stderr
    assert daemon.received.empty()


def test_nothing_to_ask_at_a_terminal_is_2_with_usage(terminal: tuple[int, int]) -> None:
    done = subprocess.run(KV, stdin=terminal[1], capture_output=True, timeout=LIMIT_S)
    assert done.returncode == 2
    assert done.stderr.startswith(b"usage: kv [options]") and b"nothing to ask" in done.stderr


def test_a_terminal_as_stdin_is_not_read(terminal: tuple[int, int]) -> None:
    assert subprocess.run([*KV, "hi"], stdin=terminal[1], capture_output=True, timeout=LIMIT_S).returncode == 0


def test_a_closed_stdin_is_no_document(daemon: FakeDaemon) -> None:
    done = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *KV, "hi"], capture_output=True, timeout=LIMIT_S)
    assert done.returncode == 0
    assert content(daemon) == "hi"


def test_prefill_shows_on_a_terminal_and_is_erased_before_the_answer(
    daemon: FakeDaemon, terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    process = subprocess.Popen([*KV, "hi"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=terminal[1])
    seen, done = b"", 0
    daemon.scripts["generate"] = lambda message, send: send("queued", {"position": 0})
    id = daemon.next("generate").id
    deadline = time.monotonic() + LIMIT_S
    while b"/1000 tokens" not in seen and time.monotonic() < deadline:
        done += 1
        daemon.tell(id, "progress", {"done": done, "total": 1000, "cached": 0})
        if select.select([terminal[0]], [], [], 0.05)[0]:
            seen += os.read(terminal[0], 4096)
    daemon.tell(id, "text", {"text": "Hi", "index": 0})
    assert process.stdout is not None and os.read(process.stdout.fileno(), 100) == b"Hi"
    while select.select([terminal[0]], [], [], 0)[0]:
        seen += os.read(terminal[0], 4096)
    assert b"reading [" in seen and seen.endswith(b"\r\x1b[2K")
    daemon.tell(id, "done", {"choices": [CHOICE], "stats": STATS})
    assert process.communicate(timeout=LIMIT_S)[0] == b"\n"


def test_ctrl_c_is_130_and_cancels(daemon: FakeDaemon, running: Any) -> None:
    process = running("hi", events=(("queued", {"position": 0}),))
    id = daemon.next("generate").id
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out, err) == (130, b"", b"")
    assert daemon.next("cancel").body == {"id": id}


@pytest.mark.parametrize("ends", ["ctrl-c", "an error"])
def test_half_an_answer_on_a_terminal_ends_its_line(
    daemon: FakeDaemon, running: Any, terminal: tuple[int, int], ends: str
) -> None:
    process = running("hi", events=(("text", {"text": "Hel", "index": 0}),), stdout=terminal[1])
    id = daemon.next("generate").id
    assert os.read(terminal[0], 100) == b"Hel"
    if ends == "ctrl-c":
        process.send_signal(signal.SIGINT)
    else:
        daemon.tell(id, "error", {"code": "timeout", "message": "not done", "details": {}})
    assert select.select([terminal[0]], [], [], LIMIT_S)[0] and os.read(terminal[0], 100) == b"\r\n"
    assert process.wait(LIMIT_S) == (130 if ends == "ctrl-c" else 75)


def test_ctrl_c_while_stdin_is_read_is_130(running: Any) -> None:
    process = running("hi", stdin=subprocess.PIPE)
    stat = Path(f"/proc/{process.pid}/wchan")
    if not stat.exists():
        pytest.skip("needs /proc to see that it waits")
    deadline = time.monotonic() + LIMIT_S
    while "pipe" not in stat.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_a_closed_stdout_is_141_and_cancels(daemon: FakeDaemon, running: Any) -> None:
    process = running("hi", events=(("text", {"text": "Hel", "index": 0}),))
    id = daemon.next("generate").id
    assert os.read(process.stdout.fileno(), 100) == b"Hel"
    process.stdout.close()
    daemon.tell(id, "text", {"text": "lo", "index": 0})
    assert process.wait(LIMIT_S) == 141 and process.stderr.read() == b""
    assert daemon.next("cancel").body == {"id": id}


def test_a_stdout_closed_before_the_first_token_is_noticed_too(daemon: FakeDaemon, running: Any) -> None:
    process = running("hi")
    id = daemon.next("generate").id
    process.stdout.close()
    daemon.tell(id, "queued", {"position": 0})
    assert process.wait(LIMIT_S) == 141 and process.stderr.read() == b""
    assert daemon.next("cancel").body == {"id": id}


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["--completion", "bash"], ["--json", "hi"], ["hi"]])
def test_a_stdout_closed_from_the_start_leaves_no_traceback(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    given = {"stdin": subprocess.DEVNULL, "stdout": writing, "stderr": subprocess.PIPE}
    done = subprocess.run([*KV, *words], **given, timeout=LIMIT_S)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_full_disk_is_70_and_says_so() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with open("/dev/full", "wb") as full:
        given = {"stdin": subprocess.DEVNULL, "stdout": full, "stderr": subprocess.PIPE}
        done = subprocess.run([*KV, "hi"], **given, timeout=LIMIT_S)
    assert done.returncode == 70 and b"No space left" in done.stderr and b"Traceback" not in done.stderr


def test_a_request_that_somebody_else_cancels_is_130(daemon: FakeDaemon) -> None:
    cancelled = {"choices": [{**CHOICE, "finish_reason": "cancelled"}], "stats": STATS}
    daemon.scripts["generate"] = lambda message, send: send("done", cancelled)
    assert kv("hi").returncode == 130
