"""`kv` as a process: what it sends, what it prints, how it ends."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvclient import KvdError, __version__, wire
from tests.client.fake import CHOICE, STATS, FakeDaemon, result

KV = [sys.executable, "-c", "import sys; from kvclient.cli import main; sys.exit(main())"]
LIMIT_S = 60


@pytest.fixture
def environment(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_SOCKET", str(daemon.path))


@pytest.fixture(autouse=True)
def always(environment: None) -> None:
    """Each test here has the fake daemon as its daemon."""


def kv(*words: str, stdin: bytes = b"", **more: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*KV, *words], input=stdin, capture_output=True, timeout=LIMIT_S, **more)


def asked(daemon: FakeDaemon) -> dict[str, Any]:
    return daemon.next("generate").body


def content(daemon: FakeDaemon) -> str:
    [message] = asked(daemon)["messages"]
    assert message["role"] == "user"
    return str(message["content"])


@pytest.fixture
def running(daemon: FakeDaemon) -> Iterator[Any]:
    """Starts `kv` against a request that says `events` and then nothing more."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*words: str, events: tuple[tuple[str, dict[str, Any]], ...] = (), **more: Any) -> subprocess.Popen[bytes]:
        def script(message: wire.Message, send: Any) -> None:
            for kind, body in events:
                send(kind, body)

        daemon.scripts["generate"] = script
        given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
        process = subprocess.Popen([*KV, *words], **given)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_the_answer_goes_to_stdout_and_nothing_to_stderr() -> None:
    done = kv("hi")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"Hello world\n", b"")


@pytest.mark.parametrize(("words", "stdin", "expected"), [
    (["what?"], b"", "what?"), (["what", "is", "it"], b"", "what is it"), ([], b"doc\n", "doc\n"),
    (["what?"], b"doc\n", "doc\n\nwhat?"), (["what?"], b"doc", "doc\n\nwhat?"),
    (["--prompt-first", "what?"], b"doc\n", "what?\n\ndoc\n"), (["a", "-n", "5", "b"], b"", "a b"),
    (["--", "-x"], b"", "-x"), (["größe?"], "Maß 👩‍👩‍👧\n".encode(), "Maß 👩‍👩‍👧\n\ngröße?"),
])  # fmt: skip
def test_stdin_comes_first_then_a_blank_line_then_the_prompt(
    daemon: FakeDaemon, words: list[str], stdin: bytes, expected: str
) -> None:
    assert kv(*words, stdin=stdin).returncode == 0
    assert content(daemon) == expected


def test_raw_sends_the_text_as_it_is(daemon: FakeDaemon) -> None:
    kv("--raw", stdin=b"Once upon\n")
    assert asked(daemon) == {"prompt": "Once upon\n"}


def test_a_system_text_is_a_message_of_its_own(daemon: FakeDaemon) -> None:
    kv("-s", "be brief", "hi")
    assert asked(daemon)["messages"][0] == {"role": "system", "content": "be brief"}


def test_every_option_becomes_its_field(daemon: FakeDaemon) -> None:
    kv("-n", "5", "-t", "0", "--timeout", "9", "--seed", "3", "--top-p", "0.5", "--top-k", "4", "--min-p", "0.1",
       "--stop", "a", "--stop", "b", "--cache", "read", "--background", "--raw", "hi")  # fmt: skip
    assert asked(daemon) == {
        "prompt": "hi", "max_tokens": 5, "temperature": 0.0, "timeout": 9.0, "seed": 3, "top_p": 0.5, "top_k": 4,
        "min_p": 0.1, "stop": ["a", "b"], "cache": "read", "priority": "background",
    }  # fmt: skip


@pytest.mark.parametrize(("words", "named"), [
    (["--seed", "3", "--min-p", "0.1"], "--seed, --min-p"), (["-t", "0", "--top-p", "0.5"], "--top-p"),
    (["--top-k", "4"], "--top-k"), (["-t", "0.7", "--seed", "3", "--top-p", "0.5"], ""), (["-t", "0"], ""), ([], ""),
])  # fmt: skip
def test_flags_without_an_effect_at_temperature_0_are_named_in_one_line(words: list[str], named: str) -> None:
    done = kv(*words, "hi")
    said = f"kv: no effect at temperature 0: {named}; add -t 1\n" if named else ""
    assert (done.returncode, done.stdout, done.stderr) == (0, b"Hello world\n", said.encode())


@pytest.mark.parametrize(("words", "variable", "expected"), [
    ([], None, ""), ([], "small", "small"), (["-m", "big"], "small", "big"), (["--model", "big"], None, "big"),
])  # fmt: skip
def test_the_model_is_m_or_kv_model_or_the_daemons_default(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, words: list[str], variable: str | None, expected: str
) -> None:
    if variable:
        monkeypatch.setenv("KV_MODEL", variable)
    kv(*words, "hi")
    assert daemon.next("generate").model == expected


def test_json_is_one_object_with_text_and_stats() -> None:
    done = kv("--json", "-m", "demo", "hi")
    assert done.returncode == 0 and done.stdout.count(b"\n") == 1
    told = json.loads(done.stdout)
    assert (told["text"], told["finish_reason"], told["model"]) == ("Hello world", "stop", "demo")
    assert json.loads(kv("--json", "hi").stdout)["model"] == "tiny"  # the daemon's default, by its name
    assert told["stats"]["cached_tokens"] == 6 and told["stats"]["first_divergence"] is None


def test_stats_go_to_stderr() -> None:
    done = kv("--stats", "hi")
    assert done.stdout == b"Hello world\n"
    assert b"prompt 7 tokens = 6 cached (6 memory, 0 ssd) + 1 computed" in done.stderr


def test_stats_name_the_place_of_the_divergence(daemon: FakeDaemon) -> None:
    stats = {**STATS, "miss_reason": "diverged", "first_divergence": {"token": 5, "text": "Mon", "stored_text": "Tue"}}
    daemon.scripts["generate"] = lambda message, send: send("done", {"choices": [CHOICE], "stats": stats})
    told = b"not all was reused: it differs from what is stored at token 5: 'Mon', stored 'Tue'"
    assert told in kv("--stats", "hi").stderr
    assert json.loads(kv("--json", "hi").stdout)["stats"]["miss_reason"] == "diverged"


def test_stats_tell_when_the_model_had_to_be_loaded(daemon: FakeDaemon) -> None:
    loaded = {"choices": [CHOICE], "stats": {**STATS, "load_s": 12.34}}
    assert b"loaded" not in kv("--stats", "hi").stderr
    daemon.scripts["generate"] = lambda message, send: send("done", loaded)
    assert b"the model was loaded first, in 12.3 s\n" in kv("--stats", "hi").stderr


def told_by(daemon: FakeDaemon, *warnings: str, **stats: float) -> None:
    """The model that answers, `tiny`, was loaded with these warnings; its stats are these."""
    done = {"choices": [CHOICE], "stats": {**STATS, **stats}, "model": "tiny"}
    said = {"index": 0, "text": CHOICE["text"]}
    daemon.scripts["generate"] = lambda message, send: (send("text", said), send("done", done))
    daemon.scripts["status"] = result(
        models=[{"name": "big", "warnings": ["of another"]}, {"name": "tiny", "warnings": list(warnings)}]
    )


def test_stats_pass_on_what_the_model_was_loaded_with_a_warning_for(daemon: FakeDaemon) -> None:
    told_by(daemon, "kept as stored", "path x is off")
    done = kv("--stats", "hi")
    assert done.stdout == b"Hello world\n"
    assert done.stderr.endswith(b"kv: tiny: kept as stored\nkv: tiny: path x is off\n")
    assert b"of another" not in done.stderr


@pytest.mark.parametrize(("seconds", "warnings", "said"), [
    (20.0, ["kept as stored", "path x is off"], b"kv: tiny: kept as stored; path x is off\n"), (20.0, [], b""),
    (1.0, ["kept as stored"], b""),
])  # fmt: skip
def test_a_slow_prefill_is_explained_by_the_models_warnings_in_one_line(
    daemon: FakeDaemon, seconds: float, warnings: list[str], said: bytes
) -> None:
    told_by(daemon, *warnings, prefill_s=seconds)
    done = kv("hi")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"Hello world\n", said)


def test_warnings_that_cannot_be_had_do_not_make_a_finished_answer_fail(daemon: FakeDaemon) -> None:
    daemon.scripts["status"] = lambda message, send: send("error", {"code": "busy", "message": "too many"})
    done = kv("--stats", "hi")
    assert (done.returncode, done.stdout) == (0, b"Hello world\n")
    assert done.stderr.endswith(b"kv: the model's warnings cannot be had: too many\n")


def test_an_answer_cut_by_the_context_is_not_cut_silently(daemon: FakeDaemon) -> None:
    cut = {"choices": [{**CHOICE, "finish_reason": "length"}], "stats": STATS}
    daemon.scripts["generate"] = lambda message, send: send("done", cut)
    done = kv("hi")
    assert done.returncode == 0 and b"cut after 2 tokens" in done.stderr
    assert kv("-n", "2", "hi").stderr == b""


def test_an_answer_cut_for_lack_of_memory_is_not_cut_silently(daemon: FakeDaemon) -> None:
    short = {"needed": 4096, "available": 0, "what": "kv pool"}
    cut = {"choices": [{**CHOICE, "finish_reason": "length"}], "stats": {**STATS, "out_of_memory": short}}
    daemon.scripts["generate"] = lambda message, send: send("done", cut)
    done = kv("-n", "100", "hi")
    assert done.returncode == 0
    assert done.stderr == b"kv: the answer was cut after 2 tokens: the kv pool needs 4096 bytes more, 0 can be had\n"


def test_tokens_come_out_as_they_come_in(running: Any) -> None:
    process = running("hi", events=(("text", {"text": "Hel", "index": 0}),))
    assert os.read(process.stdout.fileno(), 100) == b"Hel"
    assert process.poll() is None


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


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """(our end, the program's end)"""
    ours, theirs = pty.openpty()
    yield ours, theirs
    for descriptor in (ours, theirs):
        os.close(descriptor)


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


def test_version_and_help() -> None:
    assert kv("--version").stdout == f"kv {__version__}\n".encode()
    told = kv("--help").stdout.decode()
    for word in ("git diff | kv", "KV_MODEL", "--prompt-first", "exit codes", "141", "default 0: the likeliest token"):
        assert word in told


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions_know_every_option_and_the_shell_takes_them(shell: str) -> None:
    script = kv("--completion", shell).stdout.decode()
    for option in ("model", "max-tokens", "prompt-first", "completion", "cache"):
        assert option in script
    try:
        checked = subprocess.run([shell, "-n"], input=script.encode(), capture_output=True, timeout=LIMIT_S)
    except FileNotFoundError:
        pytest.skip(f"{shell} is not installed")
    assert checked.returncode == 0, checked.stderr


def test_bash_completes_options_values_and_models(tmp_path: Path) -> None:
    (tmp_path / "models" / "demo").mkdir(parents=True)
    script = kv("--completion", "bash").stdout.decode()

    def complete(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in words)
        ask = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _kv; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", ask], env={**os.environ, "KVD_HOME": str(tmp_path)}, capture_output=True,
                              text=True, timeout=LIMIT_S)  # fmt: skip
        return done.stdout.split()

    assert complete("kv", "--sta") == ["--stats"]
    assert complete("kv", "--cache", "re") == ["read"]
    assert complete("kv", "-m", "") == ["demo"]
