"""Bad input on the real programs: one line on stderr, the contract's exit code, and nothing lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvclient import __version__
from kvd.models.record import Record, write_record
from rig.daemon import Daemon, short_home
from tests.tiny import tiny_model

CONTEXT = 700
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with short_home() as home:
        folder = tiny_model(home / "models" / "tiny", context=CONTEXT)
        write_record(folder, Record("tiny", "random weights", time.time()))
        with Daemon(home) as running:
            yield running


def run(
    program: str, *arguments: str, home: Path, stdin: bytes = b"", **env: str
) -> subprocess.CompletedProcess[bytes]:
    clean = {k: v for k, v in os.environ.items() if k not in ("KVD_SOCKET", "KV_MODEL")}
    return subprocess.run(
        [str(BIN / program), *arguments], input=stdin, capture_output=True, timeout=60,
        env={**clean, "KVD_HOME": str(home), **env},
    )  # fmt: skip


def refused(done: subprocess.CompletedProcess[bytes], code: int, *words: str) -> None:
    said = done.stderr.decode()
    assert done.returncode == code, said
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1, said
    for word in words:
        assert word in said, said


def test_a_daemon_says_that_it_is_ready_and_how_to_ask(daemon: Daemon) -> None:
    (line,) = daemon.stderr().splitlines()
    assert line.startswith(f"kvd {__version__} is ready in {daemon.home}") and 'kv "hello"' in line


def test_an_unknown_model_is_named_with_those_that_are_here(daemon: Daemon) -> None:
    refused(run("kv", "-m", "nope", "hello", home=daemon.home), 65, "nope", "tiny")


def test_a_prompt_over_the_context_limit_gives_both_numbers(daemon: Daemon) -> None:
    done = run("kv", "-m", "tiny", "--raw", "word", home=daemon.home, stdin=b" the of and a to in is" * 400)
    refused(done, 65, str(CONTEXT))


def test_stdin_that_is_not_utf8_is_refused_before_anything_is_sent(daemon: Daemon) -> None:
    refused(run("kv", "-m", "tiny", "x", home=daemon.home, stdin=b"ok \xff\xfe"), 65, "UTF-8")


def test_without_a_daemon_it_says_how_to_start_one(tmp_path: Path) -> None:
    with short_home() as home:
        refused(run("kv", "hello", home=home), 69, "kvd start")


def test_a_socket_path_that_is_too_long_is_an_error_that_says_so(tmp_path: Path) -> None:
    with short_home() as home:
        long = "/tmp/" + "x" * 120 + "/kvd.sock"
        refused(run("kv", "hello", home=home, KVD_SOCKET=long), 65, "too long", "KVD_SOCKET")
        refused(run("kvd", "serve", home=home, KVD_SOCKET=long), 65, "too long")


def test_an_unknown_configuration_key_stops_the_start(tmp_path: Path) -> None:
    with short_home() as home:
        (home / "kvd.toml").write_text("[store]\nlimt = '1 GB'\n")
        refused(run("kvd", "serve", home=home), 65, "limt", "limit")


def test_an_unreadable_gguf_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 100)
    with short_home() as home:
        refused(run("kvd", "pull", str(broken), home=home), 65, "broken.gguf")
        assert not [entry for entry in (home / "models").glob("*") if entry.is_dir() and (entry / "kvd.json").exists()]


def test_a_truncated_shard_is_a_miss_and_the_answer_is_the_same(daemon: Daemon) -> None:
    ids = [3 + (11 * i) % 400 for i in range(500)]
    options = {"tokens": ids, "max_tokens": 6, "temperature": 0.0, "durable_wait_ms": 20_000}
    with daemon.client() as client:
        first = client.generate("tiny", **options)
        client.unload("tiny")
        for shard in (daemon.home / "store" / "blocks").rglob("*.safetensors"):
            os.truncate(shard, shard.stat().st_size // 2)
        again = client.generate("tiny", **options)
    assert again.text == first.text
    assert again.stats.computed_tokens == len(ids)
    until = time.monotonic() + 30  # the report of it follows the answer
    while not (store := daemon.status()["store"])["quarantined_files"] and time.monotonic() < until:
        time.sleep(0.1)
    assert store["quarantined_files"] >= 1, store["counters"]
