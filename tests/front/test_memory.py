"""Memory is promised before it is used, and refused with both numbers."""

from __future__ import annotations

import pytest

from kvclient.errors import OutOfMemory
from kvd.front.memory import Ledger
from kvd.front.registry import Needs, needs, token_bytes
from tests.front.support import daemon, until


def test_a_refusal_names_what_is_needed_and_what_is_there_and_changes_nothing() -> None:
    ledger = Ledger(100)
    ledger.reserve("a", 60, 10)
    with pytest.raises(OutOfMemory) as refused:
        ledger.reserve("b", 30, 1)
    assert refused.value.details["needed"] == 31 and refused.value.details["available"] == 30
    assert ledger.used == 70
    ledger.reserve("b", 29, 1)
    assert ledger.free == 0


def test_a_refusal_says_in_peoples_units_whether_it_fits_not_now_or_never_and_which_key_to_raise() -> None:
    ledger = Ledger(100 * 2**20)
    ledger.reserve("a", 80 * 2**20, 0)
    needs = "b needs {} MiB ({} MiB for its weights, 1 MiB for the smallest KV pool), "
    with pytest.raises(OutOfMemory) as busy:
        ledger.reserve("b", 40 * 2**20, 2**20)
    assert busy.value.message == needs.format(41, 40) + (
        "20 MiB of the budget of 100 MiB (memory.limit, flag --memory-limit) are free, models in use or pinned do not "
        "give way"
    )
    assert busy.value.details["needed"] <= busy.value.details["budget"]
    with pytest.raises(OutOfMemory) as never:
        ledger.reserve("b", 100 * 2**20, 2**20)
    assert never.value.message == needs.format(101, 100) + (
        "more than the budget of 100 MiB (memory.limit, flag --memory-limit)"
    )
    assert never.value.details["needed"] > never.value.details["budget"]


def test_a_pool_grows_only_within_the_budget_and_gives_back() -> None:
    ledger = Ledger(100)
    ledger.reserve("a", 60, 10)
    assert ledger.grow("a", 30) and not ledger.grow("a", 1)
    assert ledger.grow("a", -20) and ledger.held("a").pool == 20
    ledger.release("a")
    assert ledger.used == 0


def test_what_a_worker_reports_is_written_down() -> None:
    ledger = Ledger(100)
    ledger.reserve("a", 60, 10)
    ledger.correct("a", 50, 25)
    assert ledger.used == 75


def test_on_the_cpu_weights_are_dense_when_they_fit_and_stay_packed_when_not() -> None:
    wanted = Needs(dense=80, kept=12, stored=10, pool=5)
    assert wanted.weights("cpu", 100) == 80
    assert wanted.weights("cpu", 84) == 12
    assert wanted.weights("metal", 100) == 10


def test_bytes_per_token_follow_the_config() -> None:
    config = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    assert token_bytes(config) == 2 * 30 * 3 * 64 * 4
    assert token_bytes({"text_config": config}) == token_bytes(config)
    assert token_bytes({}) == 0


def test_a_model_over_the_budget_is_refused_before_anything_starts() -> None:
    with daemon("memory.limit=1000000", models=()) as made, made.client() as client:
        made.add("huge", weights=4_000_000)
        assert needs(made.home / "models" / "huge", 256).stored == 4_000_000
        error = client.result(client.ask("generate", {"prompt": "say 1"}, "huge")).body
        assert error["code"] == "out_of_memory"
        assert error["details"]["needed"] > 4_000_000 and error["details"]["available"] == 1_000_000
        assert error["details"]["budget"] == 1_000_000 and "977 KiB (memory.limit" in error["message"]
        assert made.count("kvd_workers_total", "started") == 0
        assert made.count("kvd_memory_refusals_total", "load") == 1


def test_the_longest_unused_idle_model_makes_room_but_never_a_pinned_or_busy_one() -> None:
    flags = ("memory.limit=120000", "cache.pool_initial=20000")
    with daemon(*flags, models=("a", "b", "c", "d")) as made, made.client() as client:

        def states() -> dict[str, str]:
            return {m["name"]: m["state"] for m in made.status()["models"]}

        client.call("load", {"model": "a", "pin": True})
        for name in ("b", "c"):
            client.call("generate", {"prompt": "say 1"}, name)
        assert states() == {"a": "loaded", "b": "loaded", "c": "loaded", "d": "not loaded"}
        client.call("generate", {"prompt": "say 1"}, "d")
        assert states()["b"] == "not loaded" and states()["a"] == states()["c"] == "loaded"
        busy = [client.ask("generate", {"prompt": "hold"}, name) for name in ("c", "d")]
        for id in busy:
            client.wait_for(id, "progress")
        error = client.results({client.ask("generate", {"prompt": "say 1"}, "b")})
        assert [m.body["code"] for m in error.values()] == ["out_of_memory"]
        assert states()["a"] == "loaded"


def test_another_precision_replaces_the_model_and_the_configured_one_is_the_default() -> None:
    with daemon("models.kv=k8v8") as made, made.client() as client:
        first = client.call("load", {"model": "demo"})
        assert first["kv"] == first["kv_precision"] == "k8v8"
        assert client.call("load", {"model": "demo", "kv": "k8v8"})["pid"] == first["pid"]
        second = client.call("load", {"model": "demo", "kv": "k4v4"})
        assert second["pid"] != first["pid"] and second["kv_precision"] == "k4v4"
        assert client.call("load", {"model": "demo"})["pid"] == second["pid"]


def test_an_unused_model_goes_after_its_time_to_live_and_a_pinned_one_stays() -> None:
    with daemon("models.ttl=0.3", models=("a", "b")) as made, made.client() as client:
        client.call("load", {"model": "a", "pin": True})
        client.call("load", {"model": "b"})
        until(lambda: made.model("b")["state"] == "not loaded", "the end of its time")
        assert made.model("a")["state"] == "loaded"
        assert made.count("kvd_models_unloaded_total", "ttl") == 1


def test_the_limit_of_a_pool_holds_from_the_start_where_it_is_below_the_usual_first_size() -> None:
    with daemon("cache.pool=50000", models=("a",)) as made, made.client() as client:
        loaded = client.call("load", {"model": "a"})
        assert loaded["pool_limit"] == 50_000
        assert made.status()["memory"]["used_bytes"] == 50_000 + 4_000


def test_a_pool_grows_by_asking_until_the_budget_is_used_up_by_all_models_together() -> None:
    flags = ("memory.limit=200000", "cache.pool_initial=40000")
    with daemon(*flags, models=("a", "b")) as made, made.client() as client:

        def grow(name: str, nbytes: int) -> str:
            done = client.call("generate", {"prompt": f"grow {nbytes}"}, name)
            return str(done["choices"][0]["text"])

        assert client.call("load", {"model": "a"})["pool_limit"] == 200_000 - 64
        client.call("load", {"model": "b"})
        free = 200_000 - 2 * (40_000 + 4_000)
        assert grow("a", 100_000) == f"(True, {free - 100_000})"
        assert grow("b", 20_000) == f"(False, {free - 100_000})"
        assert grow("a", -50_000) == "(True, 0)"
        assert grow("b", 20_000) == f"(True, {free - 70_000})"
        assert made.status()["memory"]["used_bytes"] == 200_000 - free + 70_000
        assert made.count("kvd_memory_refusals_total", "grow") == 1


def test_a_pool_that_needs_more_makes_the_longest_unused_idle_model_go_but_no_pinned_or_busy_one() -> None:
    flags = ("memory.limit=212000", "cache.pool_initial=40000")
    with daemon(*flags, models=("a", "b", "c", "d")) as made, made.client() as client:

        def grow(how: str, nbytes: int) -> str:
            done = client.call("generate", {"prompt": f"{how} {nbytes}"}, "a")
            return str(done["choices"][0]["text"])

        def states() -> dict[str, str]:
            return {m["name"]: m["state"] for m in made.status()["models"]}

        for name in ("a", "b", "c", "d"):
            client.call("load", {"model": name, "pin": name == "b"})
        free = 212_000 - 4 * 44_000
        assert grow("grow", free + 1) == f"(False, {free})"  # what it could do without makes nobody go
        assert grow("need", free + 2 * 44_000 + 1) == f"(False, {free})"  # nor what would not do
        assert states() == {"a": "loaded", "b": "loaded", "c": "loaded", "d": "loaded"}
        assert grow("need", free + 1) == f"(True, {44_000 - 1})"
        assert states() == {"a": "loaded", "b": "loaded", "c": "not loaded", "d": "loaded"}
        assert made.count("kvd_memory_refusals_total", "grow") == 2
        busy = client.ask("generate", {"prompt": "hold"}, "d")
        client.wait_for(busy, "progress")
        assert grow("need", 44_000) == f"(False, {44_000 - 1})"
        assert states()["d"] == "loaded"
