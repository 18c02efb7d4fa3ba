"""Completion scripts: complete, and accepted by the shells that are here."""

from __future__ import annotations

import shutil
import subprocess

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


def test_bash_completes_a_verb_and_its_flags() -> None:
    script = completion.bash()
    probe = 'COMP_WORDS=({}); COMP_CWORD={}; _kvd; echo "${{COMPREPLY[@]}}"'
    cases = (("kvd stat", 1, "status"), ("kvd load --p", 2, "--pin"), ("kvd cache verif", 2, "verify"))
    for words, at, expected in cases:
        done = subprocess.run(["bash", "-c", script + probe.format(words, at)], capture_output=True, text=True)
        assert done.stdout.split() == [expected], done.stderr


def test_another_shell_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--completion", "csh"]) == 2
    assert "bash|zsh|fish" in capsys.readouterr().err
