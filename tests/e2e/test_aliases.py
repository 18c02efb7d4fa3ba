"""Several names for one model: the daemon, its worker and its store know the model's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvclient.errors import UnknownModel
from rig.daemon import Daemon
from tests.e2e.asking import ids


def answer(daemon: Daemon, model: str, tokens: list[int]) -> Any:
    with daemon.client() as client:
        return client.generate(model, tokens=tokens, max_tokens=2, temperature=0.0, durable_wait_ms=20_000)


def test_names_lead_to_one_worker_and_what_one_computed_the_others_and_a_restart_find(own_daemon: Daemon) -> None:
    config = own_daemon.home / "kvd.toml"
    config.write_text('[models]\naliases = {"claude-*" = "demo", "gpt-4o" = "demo"}\n')
    prompt = ids(300)
    with own_daemon.client() as client:
        with pytest.raises(UnknownModel, match="claude-sonnet-4-5"):
            client.count("claude-sonnet-4-5", tokens=prompt)
        assert client.reload() == {"applied": ["models.aliases"], "restart": []}
    first = answer(own_daemon, "claude-sonnet-4-5-20250929", prompt)
    (pid,) = own_daemon.worker_pids()
    assert (first.model, first.stats.computed_tokens) == ("demo", 300)
    for name in ("claude-haiku-4-5", "gpt-4o", "demo"):
        again = answer(own_daemon, name, prompt)
        assert (again.text, again.model, again.stats.computed_tokens) == (first.text, "demo", 1)
    assert own_daemon.worker_pids() == [pid]
    with own_daemon.client() as client:
        assert client.explain("claude-opus", tokens=prompt)["cached_memory_tokens"] == 300
        assert {node["model"] for node in client.cache("ls", model="claude-opus")["prefixes"]} == {"demo"}
        assert list(client.cache("stats")["models"]) == ["demo"]
    own_daemon.restart()
    assert answer(own_daemon, "gpt-4o", prompt).stats.cached_ssd_tokens == 299
    said = json.loads(kv(own_daemon.home, "-m", "claude-x", "-n", "2", "--json", "Hello"))
    assert said["model"] == "demo" and len(own_daemon.worker_pids()) == 1
    with own_daemon.client() as client:
        assert client.cache("clear", model="gpt-4o")["memory_blocks"] > 0
        assert client.unload("claude-x") == {"model": "demo", "unloaded": True}
    assert own_daemon.worker_pids() == []


def kv(home: Path, *words: str) -> str:
    """What `kv` prints."""
    command = [str(Path(sys.executable).with_name("kv")), *words]
    env = {"KVD_HOME": str(home), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=120
    ).stdout
