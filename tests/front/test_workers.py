"""A worker that dies ends its requests with a typed error at once, and the next request has a new one (F30)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from kvclient.wire import Message
from tests.front.support import Client, Daemon, daemon, until


@pytest.fixture(autouse=True)
def no_crashes_before(shared: Daemon, client: Client) -> None:
    client.call("load", {"model": "demo"})


def works_again(client: Client) -> None:
    assert client.call("generate", {"prompt": "say 2"}, "demo")["choices"][0]["text"] == "01"


def lost(message: Message, reason: str) -> None:
    assert message.kind == "error" and message.body["code"] == "worker_lost"
    assert message.body["details"]["reason"] == reason
    assert Path(message.body["details"]["log"]).exists()


@pytest.mark.parametrize(("prompt", "reason"), [("abort", "signal"), ("exit 3", "exit"), ("exit 0", "exit")])
def test_requests_of_a_worker_that_ends_get_an_error_and_the_next_one_works(
    client: Client, prompt: str, reason: str
) -> None:
    bystander = client.ask("generate", {"prompt": "hold"}, "demo")
    client.wait_for(bystander, "progress")
    begun = time.monotonic()
    end = client.ask("generate", {"prompt": prompt}, "demo")
    errors = client.results({bystander, end})
    assert time.monotonic() - begun < 10
    for id in (bystander, end):
        lost(errors[id], reason)
    works_again(client)


def test_requests_the_lost_worker_had_not_begun_go_to_the_next_one_unharmed(shared: Daemon, client: Client) -> None:
    waiting = client.ask("generate", {"prompt": "mute"}, "demo")
    aborting = client.ask("generate", {"prompt": "abort"}, "demo")
    lost(client.results({aborting})[aborting], "signal")
    until(lambda: shared.model()["state"] == "loaded", "the next worker")
    client.ask("cancel", {"id": waiting})
    assert client.results({waiting})[waiting].body["choices"][0]["finish_reason"] == "cancelled"


def test_a_cancelled_request_does_not_go_to_the_next_worker(client: Client) -> None:
    cancelled = client.ask("generate", {"prompt": "deaf"}, "demo")
    assert client.call("cancel", {"id": cancelled})["cancelled"]
    aborting = client.ask("generate", {"prompt": "abort"}, "demo")
    ends = client.results({cancelled, aborting})
    lost(ends[aborting], "signal")
    lost(ends[cancelled], "signal")


def test_a_request_that_kills_two_workers_before_it_begins_ends(shared: Daemon, client: Client) -> None:
    before = shared.count("kvd_workers_total", "signal")
    lost(client.result(client.ask("generate", {"prompt": "die"}, "demo")), "signal")
    assert shared.count("kvd_workers_total", "signal") == before + 2


def test_a_worker_killed_from_outside_is_noticed(shared: Daemon, client: Client) -> None:
    held = client.ask("generate", {"prompt": "hold"}, "demo")
    client.wait_for(held, "progress")
    os.kill(shared.model()["pid"], signal.SIGKILL)
    message = client.result(held)
    lost(message, "signal")
    assert "SIGKILL" in message.body["message"]
    works_again(client)


def test_a_worker_that_hangs_or_is_stopped_is_ended_at_the_watchdogs_limit() -> None:
    with daemon("daemon.watchdog=3", "daemon.respawn_delay=0", models=("one", "two")) as made, made.client() as client:
        stuck = client.ask("generate", {"prompt": "stuck"}, "one")
        stopped = client.ask("generate", {"prompt": "stop"}, "two")
        errors = client.results({stuck, stopped})
        for id in (stuck, stopped):
            lost(errors[id], "hang")
        assert made.count("kvd_workers_total", "hang") == 2
        assert client.call("generate", {"prompt": "say 1"}, "two")["choices"][0]["text"] == "0"


def test_a_load_that_compiles_is_given_its_time_however_small_the_model() -> None:
    with daemon("daemon.watchdog=1", "daemon.respawn_delay=0", models=()) as made, made.client() as client:
        made.add("new", "compiles 4")
        assert client.call("generate", {"prompt": "say 1"}, "new")["choices"][0]["text"] == "0"
        assert made.count("kvd_workers_total", "hang") == 0
        made.add("stuck", "slow 60")
        lost(client.result(client.ask("generate", {"prompt": "say 1"}, "stuck")), "hang")


def test_what_a_crashed_worker_wrote_to_stderr_is_kept() -> None:
    with daemon(models=()) as made, made.client() as client:
        made.add("bad", "crash")
        message = client.result(client.ask("generate", {"prompt": "say 1"}, "bad"))
        lost(message, "signal")
        assert "crashed while loading" in Path(message.body["details"]["log"]).read_text()


def test_a_crash_loop_stops_says_so_and_ends_by_load() -> None:
    with daemon("daemon.crash_limit=3", "daemon.respawn_delay=0.05", models=()) as made, made.client() as client:
        made.add("bad", "crash")
        for _ in range(3):
            lost(client.result(client.ask("generate", {"prompt": "say 1"}, "bad")), "signal")
        refused = client.result(client.ask("generate", {"prompt": "say 1"}, "bad"))
        lost(refused, "crash_loop")
        assert "3 times" in refused.body["message"] and "kvd load bad" in refused.body["message"]
        assert made.model("bad")["state"] == "down"
        assert made.count("kvd_workers_total", "started") == 3
        (made.home / "models" / "bad" / "how").unlink()
        client.call("load", {"model": "bad"})
        assert client.call("generate", {"prompt": "say 1"}, "bad")["choices"][0]["text"] == "0"


def test_a_load_that_fails_gives_its_own_error_and_no_crash() -> None:
    with daemon(models=()) as made, made.client() as client:
        made.add("big", "refuse")
        message = client.result(client.ask("generate", {"prompt": "say 1"}, "big"))
        assert message.body["code"] == "out_of_memory" and message.body["details"] == {"needed": 2, "available": 1}
        until(lambda: made.model("big")["state"] == "not loaded", "the worker's end")
        assert made.model("big")["crashes"] == 0
        assert made.status()["memory"]["used_bytes"] == 0


def test_a_worker_has_its_own_tmpdir_which_goes_with_it(shared: Daemon, client: Client) -> None:
    pid = shared.model()["pid"]
    environment = psutil.Process(pid).environ()
    tmp = Path(environment["TMPDIR"])
    assert tmp.parent == shared.home / "tmp" and tmp.exists()
    assert "MLX_CUDA_USE_CUDNN_SDPA" not in environment
    client.call("unload", {"model": "demo"})
    assert not tmp.exists()
    assert not list((shared.home / "run").glob("kvd.sock.w*"))
