"""`kv` as a process: what it sends and what it prints."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvclient import __version__
from tests.client.command import KV, LIMIT_S, asked, content, kv
from tests.client.fake import CHOICE, STATS, FakeDaemon, result

pytestmark = pytest.mark.usefixtures("environment")


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
    (tmp_path / "kvd.toml").write_text("[models]\naliases = {gpt = 'demo'}\n")
    program = f'kv() {{ {shlex.join(KV)} "$@"; }}\n'
    script = program + kv("--completion", "bash").stdout.decode()

    def complete(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in words)
        ask = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _kv; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", ask], env={**os.environ, "KVD_HOME": str(tmp_path)}, capture_output=True,
                              text=True, timeout=LIMIT_S)  # fmt: skip
        return done.stdout.split()

    assert complete("kv", "--sta") == ["--stats"]
    assert complete("kv", "--cache", "re") == ["read"]
    assert complete("kv", "-m", "") == ["demo", "gpt"]
