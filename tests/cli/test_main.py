"""The `kvd` command as a whole: help, versions, errors as one line with the contract's exit code."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvclient.errors import Busy, KvdError, UnknownModel
from kvd.cli import main as cli


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvd", dir="/tmp") as folder:
        monkeypatch.setenv("KVD_HOME", folder)
        monkeypatch.delenv("KVD_SOCKET", raising=False)
        monkeypatch.delenv("KVD_AUTOSTART", raising=False)
        yield Path(folder)


def kvd(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvd.cli.main", *words], env={**os.environ, **env}, capture_output=True, text=True
    )


def test_help_names_every_verb_and_each_verb_explains_itself() -> None:
    shown = kvd("--help")
    assert shown.returncode == 0
    for verb in cli.VERBS:
        assert f"  {verb} " in shown.stdout
        text = cli.parser_of(verb).format_help()
        assert "kvd " + verb in text.split("\n\n", 1)[1], f"{verb} shows no example"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("statsu",), "did you mean status"),
        (("help", "statsu"), "did you mean status"),
        (("logs", "-n", "-3"), "not a number of lines"),
        (("logs", "--workers", "--json"), "takes no --json"),
        (("load",), "model"),
        (("stop", "--nwo"), "--nwo, did you mean --now?"),
        (("serve", "--memory-limt=8GiB"), "did you mean --memory-limit?"),
        (("cache", "lst"), "lst"),
        (("cache", "clear"), "--yes"),
        (("config", "show", "--markdown"), "takes no --markdown"),
        (("config", "show", "--write"), "takes no --write"),
        (("config", "doc", "--write", "--markdown"), "one of --write and --markdown"),
        (("config", "reload", "--config", "other.toml"), "takes no --config"),
    ],
)
def test_wrong_usage_is_one_line_and_2(words: tuple[str, ...], said: str) -> None:
    done = kvd(*words)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert said in done.stderr


def test_no_words_show_the_verbs_and_exit_2() -> None:
    done = kvd()
    assert done.returncode == 2 and done.stderr.startswith("usage: kvd VERB")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("warm", "demo", "-s", "You are terse.", "manual.md", "--pin", "--ttl", "7d"), "manual.md"),
        (("explain", "demo", "-s", "You are terse.", "manual.md", "--json"), "manual.md"),
        (("cache", "pin", "--ttl", "7d", "abcdef"), "no store yet"),
        (("cache", "--json", "import", "none.kvd"), "no store yet"),
    ],
)
def test_options_may_stand_anywhere(home: Path, words: tuple[str, ...], said: str) -> None:
    done = kvd(*words)
    assert (done.returncode, len(done.stderr.splitlines())) == (65, 1), done.stderr
    assert said in done.stderr


def test_version_loads_no_heavy_package() -> None:
    code = (
        "import sys; from kvd.cli.main import main; main(['--version']); "
        "print([m for m in ('mlx', 'numpy', 'transformers', 'zmq', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1] == "[]"


@pytest.mark.parametrize("command", ["kvd.cli.main", "kvclient.cli"])
def test_nothing_is_imported_before_an_interruption_is_caught(command: str) -> None:
    code = f"import sys; before = set(sys.modules); import {command}; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in loaded if name != "__future__" and not command.startswith(name)] == []


@pytest.mark.parametrize("command", ["kvd.cli.main", "kvclient.cli"])
def test_an_interruption_at_the_first_import_is_130_without_a_word(command: str) -> None:
    code = (
        f"import builtins, sys, {command} as command\n"
        "def interrupted(*_): raise KeyboardInterrupt\n"
        "imported, builtins.__import__ = builtins.__import__, interrupted\n"
        "code = command.main(['status'])\n"
        "builtins.__import__ = imported; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("verb", sorted(set(cli.VERBS) - {"pull"}))
def test_no_verb_of_the_running_system_imports_mlx(verb: str) -> None:
    code = (
        f"import sys; from kvd.cli.main import parser_of; parser_of({verb!r}); "
        "print([m for m in ('mlx', 'numpy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("words", [("status",), ("unload", "demo"), ("top", "--once")])
def test_without_a_daemon_it_says_so_and_exits_69(home: Path, words: tuple[str, ...]) -> None:
    done = kvd(*words)
    assert (done.returncode, len(done.stderr.splitlines())) == (69, 1), done.stderr
    assert "kvd.sock" in done.stderr


def test_an_unknown_config_key_is_one_line_and_65(home: Path) -> None:
    (home / "kvd.toml").write_text('[memory]\nlimt = "1G"\n')
    done = kvd("serve")
    assert done.returncode == 65
    assert done.stderr.splitlines() == [
        f"kvd: {home / 'kvd.toml'}: unknown key memory.limt; did you mean memory.limit?"
    ]


def test_a_socket_path_over_the_limit_is_one_line_and_65(home: Path) -> None:
    done = kvd("status", KVD_SOCKET="/tmp/" + "x" * 120)
    assert done.returncode == 65
    assert "socket path too long" in done.stderr
    assert "108" in done.stderr or "104" in done.stderr


def failing(error: BaseException) -> object:
    class Module:
        """Explained: kvd models"""

        @staticmethod
        def configure(parser: object) -> None: ...

        @staticmethod
        def run(args: object) -> int:
            raise error

    return Module


@pytest.mark.parametrize(
    ("error", "code"),
    [(UnknownModel("no such model"), 65), (Busy("full"), 75), (KeyboardInterrupt(), 130)],
)
def test_errors_of_the_daemon_keep_their_exit_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_module", lambda verb: failing(error))
    assert cli.main(["models"]) == code
    shown = capsys.readouterr()
    assert shown.err == (f"kvd: {error.message}\n" if isinstance(error, KvdError) else "")
