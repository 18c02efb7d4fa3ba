"""The shell part of the tools: it has to run under the bash 3.2 and the BSD programs of macOS too."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    path for path in (ROOT / "tools").iterdir()
    if path.is_file() and (path.name == "_env" or path.read_bytes().startswith(b"#!/usr/bin/env bash"))
)  # fmt: skip
GNU = (
    "readlink -f", "realpath", "sed -i", "date -d", "date +%s%N", "nproc", "stat -c", "mktemp -t", "grep -P",
    "timeout ", "sha256sum", "declare -A", "local -n", "mapfile", "readarray", "${!", ",,}", "^^}", "|&", "&>>",
    "coproc", "EPOCH", "shopt -s globstar", "wait -n", "cp -a", "xargs -r", "sort -V", "head -c -", "ls --", "[@]",
)  # fmt: skip
"""What macOS has not or has otherwise. An empty array is an unbound variable to bash 3.2."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_tool_uses_nothing_that_macos_lacks(script: Path) -> None:
    code = re.sub(r"(?m)(^|\s)#.*$", "", script.read_text())
    assert [word for word in GNU if word in code] == []


@pytest.mark.parametrize("name", ["python3.14", "python3.13", "python3.12", "python3.11", "python3", "python"])
def test_a_python_is_found_under_the_only_name_it_has(tmp_path: Path, name: str) -> None:
    """uv and Homebrew give some machines a python3.14 and no python3 but Apple's."""
    (tmp_path / name).symlink_to(sys.executable)
    found = subprocess.run(
        ["/bin/bash", "-c", ". tools/_env; find_python"], cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert (found.stdout, found.stderr) == (f"{tmp_path / name}\n", "")
