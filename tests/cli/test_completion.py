"""Completion scripts: complete, and accepted by the shells that are here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.cli import completion
from kvd.cli import main as cli


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_verb_and_flag_is_completed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--completion", shell]) == 0
    script = capsys.readouterr().out
    for verb in cli.VERBS:
        assert verb in script
    flag = "memory-limit" if shell == "fish" else "--memory-limit"
    assert flag in script


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_shell_accepts_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    cli.main(["--completion", shell])
    done = subprocess.run([program, "-n"], input=capsys.readouterr().out, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def complete(home: Path, *words: str) -> list[str]:
    """What bash offers for the last of `words`. `kvd` is the one of this checkout."""
    line = " ".join(f"'{word}'" for word in words)
    program = f'kvd() {{ "{sys.executable}" -m kvd.cli.main "$@"; }}\n'
    ask = f'COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _kvd; echo "${{COMPREPLY[@]}}"'
    env = {**os.environ, "KVD_HOME": str(home)}
    done = subprocess.run(["bash", "-c", program + completion.bash() + ask], env=env, capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_a_verb_and_its_flags(tmp_path: Path) -> None:
    assert complete(tmp_path, "kvd", "stat") == ["status"]
    assert complete(tmp_path, "kvd", "load", "--p") == ["--pin"]
    assert complete(tmp_path, "kvd", "cache", "verif") == ["verify"]


def test_bash_completes_models_and_where_they_hold_their_aliases(tmp_path: Path) -> None:
    for name in ("demo", "qwen3-4b", ".pull-x", "$(echo made >&2)"):
        (tmp_path / "models" / name).mkdir(parents=True)
    aliases = """{"gpt-4o" = "demo", "claude-*" = "demo", "$(echo ran >&2)" = "demo"}"""
    (tmp_path / "kvd.toml").write_text(f"[models]\naliases = {aliases}\n")
    for verb in ("load", "unload", "warm", "explain"):
        assert complete(tmp_path, "kvd", verb, "d") == ["demo"]
        assert complete(tmp_path, "kvd", verb, "g") == ["gpt-4o"]
    assert complete(tmp_path, "kvd", "cache", "clear", "--model", "") == ["demo", "gpt-4o", "qwen3-4b"]
    assert complete(tmp_path, "kvd", "rm", "demo", "q") == ["qwen3-4b"]
    assert complete(tmp_path, "kvd", "rm", "g") == complete(tmp_path, "kvd", "calibrate", "g") == []
    assert complete(tmp_path, "kvd", "warm", "demo", "q") == [], "files follow"
    assert complete(tmp_path, "kvd", "pull", "d") == []


@pytest.mark.parametrize("toml", [None, "[models", "models = 1", "[models]\naliases = 1", "\ufeff[models]"])
def test_models_are_completed_whatever_the_configuration_is(tmp_path: Path, toml: str | None) -> None:
    assert complete(tmp_path, "kvd", "load", "d") == []
    (tmp_path / "models" / "demo").mkdir(parents=True)
    if toml is not None:
        (tmp_path / "kvd.toml").write_text(toml)
    assert complete(tmp_path, "kvd", "load", "d") == ["demo"]


@pytest.mark.parametrize("module", ["kvd.cli.main", "kvclient.cli"])
def test_a_tab_for_a_model_loads_next_to_nothing(module: str) -> None:
    code = f"import sys; from {module} import main; main(['--completion', 'names']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"argparse", "zmq", "rich", "numpy", "mlx", "kvd.config"} & set(done.stdout.split())


def test_another_shell_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--completion", "csh"]) == 2
    assert "bash|zsh|fish" in capsys.readouterr().err
