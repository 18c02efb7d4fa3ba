"""Requests from arrival to end: forwarding, waiting, cancelling, clients that die or do not read (F29, F31)."""

from __future__ import annotations

import time

import psutil
import pytest

from kvclient import wire
from tests.front.support import Client, Daemon, until


def live(daemon: Daemon) -> list[str]:
    return [row["id"] for row in daemon.status()["requests"]]


def test_a_request_is_forwarded_and_its_events_come_back_in_order(client: Client) -> None:
    id = client.ask("generate", {"prompt": "say 5"}, "demo")
    queued, *texts, done = client.events(id)
    assert (queued.kind, queued.body) == ("queued", {"position": 0, "model": "demo"})
    assert [m.body["text"] for m in texts] == ["0", "1", "2", "3", "4"]
    assert done.kind == "done" and done.body["stats"]["load_s"] >= 0


@pytest.mark.parametrize("kind", ["warm", "explain", "count"])
def test_the_other_verbs_of_work_are_forwarded_too(client: Client, kind: str) -> None:
    assert client.call(kind, {"prompt": "x"}, "demo") == {"tokens": 3}


def test_without_a_name_the_only_model_answers(client: Client) -> None:
    done = client.call("generate", {"prompt": "say 1"})
    assert (done["choices"][0]["text"], done["model"]) == ("0", "demo")


def test_an_unknown_model_is_an_error_that_names_the_known_ones_and_stays_out_of_the_log(
    shared: Daemon, client: Client
) -> None:
    error = client.result(client.ask("generate", {"prompt": "say 1"}, "my-secret-prompt")).body
    assert error["code"] == "unknown_model" and "demo" in error["message"]
    assert "my-secret-prompt" not in (shared.home / "logs" / "kvd.log").read_text()


def test_a_live_request_id_cannot_be_used_twice(client: Client) -> None:
    id = client.ask("generate", {"prompt": "hold"}, "demo", id="once")
    client.wait_for(id, "progress")
    client.ask("generate", {"prompt": "say 1"}, "demo", id="once")
    assert client.result(id).body["code"] == "bad_request"
    assert client.call("cancel", {"id": id}) == {"id": id, "cancelled": True}
    until(lambda: not client.call("cancel", {"id": id})["cancelled"], "the end of the first")


def test_every_live_request_gets_an_event_at_least_every_beat(shared: Daemon, client: Client) -> None:
    id = client.ask("generate", {"prompt": "hold"}, "demo")
    client.wait_for(id, "progress")
    for _ in range(2):
        again = client.next(3 * wire.BEAT_S)
        assert again.kind == "progress" and again.body == {"done": 1, "total": 2, "cached": 0, "model": "demo"}
    with shared.control() as control:
        control.call("cancel", {"id": id})
    assert client.result(id).body["choices"][0]["finish_reason"] == "cancelled"


def test_the_request_after_the_last_that_may_wait_is_refused_as_busy(client: Client) -> None:
    waiting = [client.ask("generate", {"prompt": "mute"}, "demo") for _ in range(4)]
    refused = client.ask("generate", {"prompt": "mute"}, "demo")
    error = next(m for m in iter(client.next, None) if m.id == refused).body
    assert error["code"] == "busy" and error["details"] == {"waiting": 4, "limit": 4}
    for id in waiting:
        client.ask("cancel", {"id": id})
    client.results(set(waiting))


@pytest.mark.parametrize("prompt", ["hold", "slow 1000 0.01"])
def test_a_client_that_dies_has_its_request_cancelled(shared: Daemon, prompt: str) -> None:
    with shared.client() as dying:
        id = dying.ask("generate", {"prompt": prompt}, "demo")
        dying.next()
        assert id in live(shared)
    until(lambda: id not in live(shared), "the cancel")
    assert shared.model()["live"] == 0


def test_a_client_that_dies_while_its_model_loads_waits_no_more(shared: Daemon) -> None:
    shared.add("slow", "slow 60")
    with shared.client() as dying:
        ids = [dying.ask("generate", {"prompt": "say 1"}, "slow") for _ in range(3)]
        for _ in ids:
            dying.next()
    until(lambda: not set(ids) & set(live(shared)), "the cancel")
    with shared.client() as client:
        client.call("unload", {"model": "slow"})


def test_the_time_limit_of_a_request_counts_while_its_model_loads(shared: Daemon, client: Client) -> None:
    shared.add("slower", "slow 60")
    error = client.result(client.ask("generate", {"prompt": "say 1", "timeout": 0.3}, "slower")).body
    assert error["code"] == "timeout" and error["details"] == {"limit_s": 0.3, "stage": "load"}
    client.call("unload", {"model": "slower"})


def test_unload_in_the_middle_of_a_stream_ends_it_and_counters_return_to_zero(shared: Daemon, client: Client) -> None:
    id = client.ask("generate", {"prompt": "slow 10000 0.01"}, "demo")
    client.wait_for(id, "text")
    with shared.control() as other:
        other.call("unload", {"model": "demo"})
    end = client.result(id)
    assert end.kind in ("done", "error")
    assert live(shared) == [] and shared.status()["memory"]["used_bytes"] == 0
    assert client.call("generate", {"prompt": "say 1"}, "demo")["choices"][0]["text"] == "0"


def test_a_long_prompt_does_not_hold_up_others(shared: Daemon, client: Client) -> None:
    size = 22_000_000
    with shared.client() as heavy:
        id = heavy.ask("generate", {"prompt": "size " + "x" * size}, "demo")
        assert client.call("generate", {"prompt": "say 1"}, "demo")["choices"][0]["text"] == "0"
        assert int(heavy.result(id).body["choices"][0]["text"]) > size


def test_a_client_that_never_reads_loses_its_request_alone_and_memory_stays_flat(
    shared: Daemon, client: Client
) -> None:
    process = psutil.Process(shared.process.pid)
    stuck = Client(shared.socket)
    try:
        id = stuck.ask("generate", {"prompt": "flood 40000 4000"}, "demo")
        until(lambda: shared.count("kvd_slow_readers_total", "given_up") > 0, "the slow reader's mark")
        assert client.call("generate", {"prompt": "say 3"}, "demo")["choices"][0]["text"] == "012"
        until(lambda: id not in live(shared), "the cancel")
        assert process.memory_info().rss < 400 * 2**20
        assert shared.status()["clients"]["backlog_bytes"] < 8 * 2**20
    finally:
        stuck.close()


def test_text_for_a_slow_client_is_merged_and_complete_when_it_reads_again(shared: Daemon) -> None:
    slow = Client(shared.socket)
    try:
        begun = time.monotonic()
        id = slow.ask("generate", {"prompt": "flood 30000 100"}, "demo")
        until(lambda: id not in live(shared), "the end")
        events = list(slow.events(id))
        text = "".join(m.body["text"] for m in events if m.kind == "text")
        assert (events[-1].kind, len(text)) == ("done", 3_000_000), (events[-1].body, shared.logs()[-4:])
        assert time.monotonic() - begun < 30
    finally:
        slow.close()
