"""The front is light: it loads no numerics, starts at once and costs nothing while it idles (F37)."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from tests.front.support import daemon, until

HEAVY = ("mlx", "mlx_lm", "numpy", "transformers", "huggingface_hub", "torch", "tokenizers")


def test_the_front_never_imports_mlx_or_numpy() -> None:
    code = f"import sys, kvd.front.app, kvd.front.verbs; print([m for m in {HEAVY} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.skipif(not hasattr(psutil.Process, "memory_maps"), reason="psutil tells no maps on macOS")
def test_nor_does_it_while_it_serves() -> None:
    with daemon() as made, made.client() as client:
        client.call("generate", {"prompt": "say 1"}, "demo")
        maps = [m.path for m in psutil.Process(made.process.pid).memory_maps()]
        assert not [path for path in maps if "mlx" in path or "numpy" in path]


def test_the_way_to_the_first_status_takes_less_than_a_second_of_cpu() -> None:
    """Wall time is `tools/bench start`'s affair: here other tests may hold the cores."""
    with daemon() as made:
        made.status()
        used = psutil.Process(made.process.pid).cpu_times()
        assert used.user + used.system < 1.0


def test_an_idle_daemon_with_a_loaded_model_uses_next_to_no_cpu() -> None:
    with daemon() as made, made.client() as client:
        client.call("load", {"model": "demo"})
        until(lambda: made.status()["store"]["available"], "the store")
        process = psutil.Process(made.process.pid)
        before = process.cpu_times()
        time.sleep(4)
        after = process.cpu_times()
        assert (after.user + after.system - before.user - before.system) / 4 < 0.02


def test_files_and_sockets_are_private() -> None:
    with daemon() as made, made.client() as client:
        client.call("generate", {"prompt": "say 1"}, "demo")
        assert made.home.stat().st_mode & 0o777 == 0o700
        for path in (made.home / "run").iterdir():
            assert path.stat().st_mode & 0o077 == 0, path
        for path in (made.home / "logs").iterdir():
            assert path.stat().st_mode & 0o077 == 0, path


def test_prompts_are_not_logged() -> None:
    with daemon("daemon.log_level=debug") as made, made.client() as client:
        client.call("generate", {"prompt": "xyzzy-secret"}, "demo")
        assert all("xyzzy" not in path.read_text() for path in (made.home / "logs").iterdir())
        lines = [line for line in made.logs() if line["event"] == "generate"]
        assert lines and all("request" in line for line in lines)


def test_reload_applies_what_can_change_live_and_names_the_rest() -> None:
    with daemon("daemon.drain=3") as made, made.client() as client:
        (made.home / "kvd.toml").write_text(
            '[daemon]\nmax_waiting = 1\ndrain = "9s"\n[cache]\nblock_size = 64\n[store]\nlimit = "1GiB"\n'
        )
        answer = client.call("reload")
        assert answer == {"applied": ["daemon.max_waiting", "store.limit"], "restart": ["cache.block_size"]}
        until(lambda: made.status()["store"].get("limit") == 2**30, "the store's new limit")
        ids = [client.ask("generate", {"prompt": "mute"}, "demo") for _ in range(2)]
        assert client.results({ids[1]})[ids[1]].body["code"] == "busy"
        assert client.call("load", {"model": "demo"})["block_size"] == 256
        (made.home / "kvd.toml").write_text("[daemon]\nspeed = 1\n")
        error = client.result(client.ask("reload")).body
        assert error["code"] == "bad_request" and "speed" in error["message"]
        client.ask("cancel", {"id": ids[0]})
