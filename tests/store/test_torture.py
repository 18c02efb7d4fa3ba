"""The short form of `tools/torture`: whatever fails, no wrong byte, nothing acknowledged lost, the limit held."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torments.__main__ import CAMPAIGNS

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_fault_costs_no_acknowledged_block_and_no_byte(name: str, tmp_path: Path) -> None:
    """In a process of its own: descriptors are counted, and what sockets of other tests open now and then are not the
    store's."""
    found = tmp_path / "found.json"
    command = [sys.executable, "-P", "-m", "torments", "--quick", "--json", str(found), name]
    environment = {**os.environ, "PYTHONPATH": f"{TOOLS}:{TOOLS.parent}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert found.exists(), done.stderr
    (outcome,) = json.loads(found.read_text())
    assert outcome["failures"] == []
    assert outcome["ok"] and outcome["runs"]
    assert done.returncode == 0, done.stderr
