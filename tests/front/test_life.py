"""One owner per home, clean stops, and nothing that outlives a killed front (F31, F36, F40)."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from kvd.front.life import wait_for_old_workers
from kvd.home import Home
from tests.front.support import Daemon, daemon, until

KILLS = 3


def gone(process: psutil.Process) -> bool:
    """Ended; nobody may have collected its status yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_daemon_whose_home_was_deleted_ends_and_leaves_its_successor_alone() -> None:
    """It is held while the other starts, so that both are there at once."""
    first, second = Daemon(), Daemon()
    try:
        first.start()
        os.kill(first.process.pid, signal.SIGSTOP)
        shutil.rmtree(first.home)
        shutil.move(second.home, first.home)
        second.home, second.socket = first.home, first.socket
        second.start()
        with second.client() as client:
            client.call("load", {"model": "demo"})
        worker = second.model()["pid"]
        os.kill(first.process.pid, signal.SIGCONT)
        assert first.process.wait(20) == 70
        assert second.model()["pid"] == worker and psutil.pid_exists(worker)
        assert second.socket.exists() and second.stop() == 0
        assert "the home was deleted" not in (second.home / "logs" / "kvd.log").read_text()
    finally:
        first.process.kill()
        first.process.wait()
        second.remove()


def test_a_second_daemon_refuses_with_the_pid_of_the_first() -> None:
    with daemon() as first:
        second = subprocess.run(
            [sys.executable, "-m", "tests.front.serve", str(first.home)], capture_output=True, text=True, timeout=20
        )
        assert second.returncode == 75
        assert f"in use by process {first.process.pid}" in second.stderr and "Traceback" not in second.stderr
        assert first.status()["pid"] == first.process.pid


def test_a_second_home_cannot_take_the_first_ones_socket() -> None:
    with daemon() as first:
        other = Daemon()
        environment = {**os.environ, "KVD_SOCKET": str(first.socket)}
        second = subprocess.run(
            [sys.executable, "-m", "tests.front.serve", str(other.home)],
            capture_output=True, text=True, timeout=20, env=environment,
        )  # fmt: skip
        shutil.rmtree(other.home)
        assert second.returncode == 75 and f"process {first.process.pid}" in second.stderr
        assert first.status()["pid"] == first.process.pid


def test_a_front_that_was_stopped_for_a_while_does_not_blame_its_workers() -> None:
    with daemon("daemon.watchdog=1.5") as made, made.client() as client:
        held = client.ask("generate", {"prompt": "hold"}, "demo")
        client.wait_for(held, "progress")
        made.process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        made.process.send_signal(signal.SIGCONT)
        client.ask("cancel", {"id": held})
        assert client.results({held})[held].kind == "done"
        assert made.count("kvd_workers_total", "hang") == 0


def test_lock_and_sockets_of_a_killed_front_are_taken_over_and_no_worker_stays() -> None:
    with daemon() as made:
        for _ in range(KILLS):
            with made.client() as client:
                client.call("generate", {"prompt": "say 1"}, "demo")
                held = client.ask("generate", {"prompt": "hold"}, "demo")
                client.wait_for(held, "progress")
                worker = psutil.Process(made.model()["pid"])
                made.process.kill()
                made.process.wait()
                until(partial(gone, worker), "the worker's end", 1.5)
            made.start()
            status = made.status()
            assert status["pid"] == made.process.pid and status["requests"] == []
            until(lambda: made.status()["store"]["available"], "the store")
            assert not list((made.home / "run" / "workers").iterdir())
            assert not list((made.home / "tmp").iterdir())


def test_a_new_front_opens_the_store_only_when_old_workers_are_gone(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.create()
    record = home.workers / "1-1"
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(record)], stdout=subprocess.PIPE) as old:
        assert old.stdout is not None and old.stdout.readline()
        record.write_text(f"{old.pid}\n")
        assert wait_for_old_workers(home, patience_s=0.2) == 1
        assert old.wait(5) == -signal.SIGKILL
    assert not record.exists()
    assert wait_for_old_workers(home) == 0


def test_sigterm_lets_running_requests_finish() -> None:
    with daemon() as made, made.client() as client:
        id = client.ask("generate", {"prompt": "slow 10 0.05"}, "demo")
        client.wait_for(id, "text")
        made.process.send_signal(signal.SIGTERM)
        assert client.result(id).body["choices"][0]["text"] == "0123456789"
        assert made.process.wait(10) == 0
        assert not made.socket.exists()


def test_requests_that_do_not_finish_in_the_drain_time_get_a_terminal_event() -> None:
    with daemon("daemon.drain=0.2") as made, made.client() as client:
        running = client.ask("generate", {"prompt": "hold"}, "demo")
        client.wait_for(running, "progress")
        made.add("slow", "slow 60")
        waiting = client.ask("generate", {"prompt": "say 1"}, "slow")
        client.wait_for(waiting, "queued")
        made.process.send_signal(signal.SIGTERM)
        ends = client.results({running, waiting})
        assert ends[waiting].body["code"] == "cancelled"
        assert made.process.wait(10) == 0


def test_while_it_drains_new_requests_are_refused() -> None:
    with daemon("daemon.drain=20") as made, made.client() as client:
        running = client.ask("generate", {"prompt": "hold"}, "demo")
        client.wait_for(running, "progress")
        client.call("shutdown", {})
        refused = client.ask("generate", {"prompt": "say 1"}, "demo")
        assert client.results({refused})[refused].body["code"] == "busy"
        client.ask("cancel", {"id": running})
        assert made.process.wait(10) == 0


def test_a_second_sigterm_stops_at_once() -> None:
    with daemon("daemon.drain=60") as made, made.client() as client:
        running = client.ask("generate", {"prompt": "hold"}, "demo")
        client.wait_for(running, "progress")
        made.process.send_signal(signal.SIGTERM)
        until(lambda: any(line["event"] == "unload" for line in made.logs()), "the first")
        made.process.send_signal(signal.SIGTERM)
        assert client.result(running).body["code"] == "cancelled"
        assert made.process.wait(10) == 0


def test_shutdown_is_answered_before_the_end() -> None:
    with daemon() as made:
        with made.control() as control:
            assert control.call("shutdown", {"drain_s": 0})["pid"] == made.process.pid
        assert made.process.wait(10) == 0


def test_hang_up_reads_the_configuration_again() -> None:
    with daemon() as made:
        (made.home / "kvd.toml").write_text("[daemon]\nmax_waiting = 2\n")
        made.process.send_signal(signal.SIGHUP)
        until(lambda: any(line["event"] == "reload" for line in made.logs()), "the reload")
        (made.home / "kvd.toml").write_text("[daemon]\nnonsense = 2\n")
        made.process.send_signal(signal.SIGHUP)
        until(lambda: any(line["event"] == "reload refused" for line in made.logs()), "the refusal")
        assert made.status()["pid"] == made.process.pid


def test_on_a_terminal_its_log_is_for_people_and_it_stops_when_the_terminal_goes_away() -> None:
    made = Daemon()
    pid, master = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "tests.front.serve", str(made.home)])
    try:
        until(made.socket.exists, "the start")
        with made.client() as client:
            client.call("generate", {"prompt": "say 1"}, "demo")
        shown = os.read(master, 65536).decode()
        assert "ready" in shown and '{"' not in shown
        os.close(master)
        until(lambda: os.waitpid(pid, os.WNOHANG)[0], "the end")
        assert not made.socket.exists()
        assert any(line["event"] == "stopped" for line in made.logs())
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(made.home)


@pytest.mark.parametrize("name", ["store", "logs"])
def test_a_home_that_cannot_be_used_is_one_clear_line(name: str) -> None:
    made = Daemon()
    try:
        (made.home / name).write_text("in the way")
        done = subprocess.run(
            [sys.executable, "-m", "tests.front.serve", str(made.home)], capture_output=True, text=True, timeout=20
        )
        assert done.returncode == 65 and "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) == 1
    finally:
        shutil.rmtree(made.home)


def test_a_store_folder_deleted_under_the_daemon_is_made_again_and_no_worker_pays_for_it() -> None:
    with daemon() as made, made.client() as client:
        client.call("generate", {"prompt": "say 1"}, "demo")
        until(lambda: made.status()["store"]["available"], "the store is open")
        worker = made.model()["pid"]
        shutil.rmtree(made.home / "store")
        until(lambda: made.count("kvd_store_events_total", "store_lost"), "the loss is noticed")
        until(lambda: made.status()["store"]["available"], "the store is back")
        assert (made.home / "store" / "CACHEDIR.TAG").exists()
        assert client.call("generate", {"prompt": "say 1"}, "demo")["stats"]["pid"] == worker
        told = [line["event"] for line in made.logs() if line["event"].startswith("store ")]
        assert told == ["store is open", "store lost", "store is open"]


def test_a_store_that_opens_late_does_not_cost_this_daemons_own_workers() -> None:
    """Only workers of an earlier front are waited for, and ended if they stay."""
    with daemon("store.limit=1GB") as made, made.client() as client:
        until(lambda: made.status()["store"]["available"], "the store is open")
        made.stop()
        (made.home / "store" / "CACHEDIR.TAG").unlink()
        (made.home / "store" / "foreign").write_text("x")
        made.start()
        until(lambda: "foreign" in made.status()["store"].get("problem", ""), "the store is refused")
        worker = client.call("generate", {"prompt": "say 1"}, "demo")["stats"]["pid"]
        (made.home / "store" / "foreign").unlink()
        until(lambda: made.status()["store"]["available"], "the store is open at last")
        assert client.call("generate", {"prompt": "say 1"}, "demo")["stats"]["pid"] == worker


def test_a_store_that_is_off_is_logged_and_shown() -> None:
    with daemon("store.limit=0") as made:
        until(lambda: made.status()["store"].get("off"), "the store is off")
        until(lambda: [line for line in made.logs() if line["event"] == "store off"], "it is logged")
