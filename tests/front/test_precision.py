"""One model, one KV precision at a time: whose it is, who may change it, what is refused."""

from __future__ import annotations

import json

import pytest

from tests.front.support import Client, Daemon, daemon, until


def test_another_precision_is_refused_while_requests_run_and_taken_afterwards(shared: Daemon, client: Client) -> None:
    client.call("load", {"model": "demo", "kv": "native"})
    held = client.ask("generate", {"prompt": "hold"}, "demo")
    client.wait_for(held, "progress")
    refused = client.result(client.ask("load", {"model": "demo", "kv": "k8v4"}))
    assert refused.body["code"] == "busy"
    for word in ("native", "k8v4", "1 requests", "one precision at a time"):
        assert word in refused.body["message"]
    assert client.call("load", {"model": "demo"})["kv"] == "native"
    client.ask("cancel", {"id": held})
    assert client.result(held).body["choices"][0]["finish_reason"] == "cancelled"
    until(lambda: shared.model()["live"] == 0, "the end of the request")
    assert client.call("load", {"model": "demo", "kv": "k8v4"})["kv"] == "k8v4"


@pytest.mark.parametrize("kv", ["k8", "q4", "k8v4,3", "k8v4,0-3=fast"])
def test_what_is_no_precision_is_refused_without_touching_the_loaded_model(
    shared: Daemon, client: Client, kv: str
) -> None:
    loaded = client.call("load", {"model": "demo"})
    refused = client.result(client.ask("load", {"model": "demo", "kv": kv}))
    assert refused.body["code"] == "bad_request" and "KV precision" in refused.body["message"]
    after = client.call("load", {"model": "demo"})
    assert (after["pid"], after["kv"]) == (loaded["pid"], loaded["kv"])


@pytest.mark.parametrize(
    ("loaded", "same", "other"),
    [("auto", "native", "k8v8"), ("auto", "k16v16", "native,0=k8v8"), ("k8v8", "k8v8,0-3=k8v8", "k8v8,0=k8v4"),
     ("k8v4", "k8v4g64", "k8v4g32"), ("k8v4,3=k8v8", "k8v4,-1=k8v8", "auto"), ("native", "native,1=k16v16", "k4v4")],
)  # fmt: skip
def test_a_model_is_loaded_anew_for_another_precision_but_not_for_the_same_one_in_other_words(
    shared: Daemon, client: Client, loaded: str, same: str, other: str
) -> None:
    client.call("unload", {"model": "demo"})
    first = client.call("load", {"model": "demo", "kv": loaded})
    held = client.ask("generate", {"prompt": "hold"}, "demo")
    client.wait_for(held, "progress")
    assert client.call("load", {"model": "demo", "kv": same})["pid"] == first["pid"]
    client.ask("cancel", {"id": held})
    client.result(held)
    until(lambda: shared.model()["live"] == 0, "the end of the request")
    assert client.call("load", {"model": "demo", "kv": other})["pid"] != first["pid"]


def test_layers_that_the_loaded_model_does_not_have_are_refused_without_unloading_it(
    shared: Daemon, client: Client
) -> None:
    loaded = client.call("load", {"model": "demo"})
    refused = client.result(client.ask("load", {"model": "demo", "kv": "k8v8,7=k4v4"}))
    assert refused.body["code"] == "bad_request" and "0 … 3" in refused.body["message"]
    assert client.call("load", {"model": "demo"})["pid"] == loaded["pid"]


def test_groups_that_the_loaded_models_heads_do_not_take_are_refused_without_unloading_it(
    shared: Daemon, client: Client
) -> None:
    loaded = client.call("load", {"model": "demo"})
    refused = client.result(client.ask("load", {"model": "demo", "kv": "k8v8g128"}))
    assert refused.body["code"] == "bad_request" and "is not a multiple of the group" in refused.body["message"]
    assert client.call("load", {"model": "demo"})["pid"] == loaded["pid"]


def test_a_precision_that_does_not_load_is_not_tried_by_the_next_request(shared: Daemon, client: Client) -> None:
    client.call("load", {"model": "demo", "kv": "native"})
    refused = client.result(client.ask("load", {"model": "demo", "kv": "k2v2"}))
    assert refused.body["code"] == "bad_request" and "head size" in refused.body["message"]
    assert client.call("generate", {"prompt": "say 2"}, "demo")["choices"][0]["text"] == "01"
    assert shared.model()["kv"] == "native"


def test_to_unload_by_hand_forgets_the_precision_that_was_asked_for_loaded_or_not() -> None:
    with daemon("models.kv=k8v8") as made, made.client() as client:
        client.call("load", {"model": "demo", "kv": "k4v4"})
        client.call("unload", {"model": "demo"})
        client.call("generate", {"prompt": "say 1"}, "demo")
        assert made.model()["kv"] == "k8v8"
        client.call("load", {"model": "demo", "kv": "k4v4", "ttl_s": 0.3})
        until(lambda: made.model()["state"] == "not loaded", "the end of its time")
        assert client.call("unload", {"model": "demo"})["unloaded"] is False
        assert client.call("load", {"model": "demo"})["kv"] == "k8v8"


@pytest.mark.parametrize("how", ["crash", "ttl", "memory"])
def test_a_model_that_went_by_itself_comes_back_at_the_precision_that_was_asked_for(how: str) -> None:
    flags = ("memory.limit=100000", "cache.pool_initial=40000")
    with daemon(*flags, models=("demo", "other")) as made, made.client() as client:
        client.call("load", {"model": "demo", "kv": "k4v4", **({"ttl_s": 0.3} if how == "ttl" else {})})
        if how == "crash":
            client.result(client.ask("generate", {"prompt": "die"}, "demo"))
        elif how == "memory":
            made.add("third")
            client.call("load", {"model": "other"})
            client.call("load", {"model": "third"})
        until(lambda: made.model()["state"] == "not loaded", "the end of its process")
        client.call("generate", {"prompt": "say 1"}, "demo")
        assert made.model()["kv"] == "k4v4"


def test_a_load_that_an_unload_by_hand_ends_does_not_bring_an_earlier_precision_back() -> None:
    with daemon() as made, made.client() as client:
        client.call("load", {"model": "demo", "kv": "k4v4", "ttl_s": 0.3})
        until(lambda: made.model()["state"] == "not loaded", "the end of its time")
        hold, how = made.home / "models" / "demo" / "hold-load", made.home / "models" / "demo" / "how"
        how.write_text("held")
        hold.touch()
        loading = client.ask("load", {"model": "demo"})
        until(lambda: made.model()["state"] == "loading", "the load")
        with made.client() as other:
            other.call("unload", {"model": "demo"})
        assert client.result(loading).body["code"] == "cancelled"
        hold.unlink()
        assert client.call("load", {"model": "demo"})["kv"] == "native"


def test_an_unload_by_hand_while_the_model_is_replaced_does_not_take_the_new_precision_away() -> None:
    with daemon() as made, made.client() as client:
        client.call("load", {"model": "demo"})
        hold = made.home / "models" / "demo" / "hold-stop"
        hold.touch()
        loading = client.ask("load", {"model": "demo", "kv": "k4v4"})
        until(lambda: made.model()["state"] == "stopping", "the replacement")
        with made.client() as other:
            unloading = other.ask("unload", {"model": "demo"})
            until(lambda: any(r["kind"] == "unload" for r in made.status()["requests"]), "the unload")
            hold.unlink()
            assert other.result(unloading).kind == "result"
        assert client.result(loading).body["kv"] == "k4v4"


def test_single_models_have_the_precision_that_the_configuration_gives_them() -> None:
    flags = ("models.kv=k8v8", "models.kv_of=two=k8v4,0=native; three=auto")
    with daemon(*flags, models=("one", "two", "three")) as made, made.client() as client:
        found = {name: client.call("load", {"model": name})["kv"] for name in ("one", "two", "three")}
    assert found == {"one": "k8v8", "two": "k8v4,0=native", "three": "auto"}


def test_the_log_says_what_each_generation_took_and_how_its_kv_is_kept() -> None:
    with daemon() as made, made.client() as client:
        client.call("generate", {"prompt": "say 2"}, "demo")
        until(lambda: made.model()["live"] == 0, "the end of the request")
        lines = [json.loads(line) for line in (made.home / "logs" / "kvd.log").read_text().splitlines()]
    loaded = next(line for line in lines if line["event"] == "loaded")
    assert loaded["kv_precision"] == "native"
    end = next(line for line in lines if line["event"] == "end" and line["kind"] == "generate")
    assert {"kv_bytes", "peak_memory_bytes", "kv_precision"} <= end.keys()
