"""Several names, one model: what the daemon does for an alias it does for the model it leads to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvclient.wire import Message
from tests.front.support import Client, Daemon, daemon, until

ALIASES = "models.aliases=claude-*=demo; gpt-4o=demo; lost=gone; other=demo"


@pytest.fixture(scope="module")
def aliased() -> Iterator[Daemon]:
    with daemon(ALIASES, models=("demo", "other")) as made:
        yield made


@pytest.fixture
def client(aliased: Daemon) -> Iterator[Client]:
    with aliased.client() as made:
        yield made
        made.call("unload", {"model": "demo"})


def error(client: Client, kind: str, body: dict[str, str], model: str = "") -> Message:
    refused = client.result(client.ask(kind, body, model))
    assert refused.kind == "error"
    return refused


def test_requests_under_several_names_go_to_one_worker_which_knows_the_model_only(
    aliased: Daemon, client: Client
) -> None:
    names = ("claude-sonnet-4-5", "gpt-4o", "claude-x", "demo")
    answers = [client.call("generate", {"prompt": "say 2"}, name) for name in names]
    assert len({answer["stats"]["pid"] for answer in answers}) == 1
    assert {answer["model"] for answer in answers} == {"demo"}
    assert [model["name"] for model in aliased.status()["models"] if model.get("pid")] == ["demo"]
    assert aliased.status()["memory"]["by_model"].keys() == {"demo"}


def test_every_verb_about_a_model_follows_an_alias(aliased: Daemon, client: Client) -> None:
    loaded = client.call("load", {"model": "gpt-4o", "kv": "k8v8", "pin": True})
    assert (loaded["name"], loaded["pinned"], loaded["kv"]) == ("demo", True, "k8v8")
    assert client.call("load", {"model": "claude-y"})["pid"] == loaded["pid"]
    for kind in ("explain", "count", "warm"):
        assert client.call(kind, {"prompt": "say 1"}, "claude-y")["tokens"] == 3
    until(lambda: aliased.status()["store"]["available"], "the store is open")
    assert client.call("cache", {"verb": "clear", "model": "gpt-4o"})["memory_blocks"] == 5
    assert client.call("cache", {"verb": "stats", "model": "claude-y"})["model"] == "demo"
    assert client.call("cache", {"verb": "ls", "model": "other"})["model"] == "other"
    assert client.call("unload", {"model": "claude-z"}) == {"model": "demo", "unloaded": True}


def test_models_are_listed_with_their_aliases_and_found_by_any_of_their_names(client: Client) -> None:
    rows = {row["name"]: row["aliases"] for row in client.call("models")["models"]}
    assert rows == {"demo": ["claude-*", "gpt-4o"], "other": []}
    assert error(client, "models", {"model": ""}).body["code"] == "unknown_model", "there is no default"
    for name, model in (("claude-sonnet-4-5", "demo"), ("gpt-4o", "demo"), ("other", "other"), ("demo", "demo")):
        (row,) = client.call("models", {"model": name})["models"]
        assert (row["name"], row["aliases"]) == (model, rows[model])
    assert error(client, "models", {"model": "nope"}).body["code"] == "unknown_model"


@pytest.mark.parametrize("kind", ["generate", "load", "unload", "models", "cache"])
def test_an_alias_of_a_model_that_is_not_here_is_an_error_with_both_names(client: Client, kind: str) -> None:
    named = kind in ("generate",)
    body = {"prompt": "say 1"} if named else {"model": "lost"} | ({"verb": "ls"} if kind == "cache" else {})
    refused = error(client, kind, body, "lost" if named else "").body
    assert refused["code"] == "unknown_model"
    assert "'lost' is an alias of 'gone'" in refused["message"] and "known: demo, other" in refused["message"]


def test_aliases_change_with_a_reload_while_their_model_runs_on() -> None:
    with daemon(models=("demo", "other")) as made, made.client() as client:
        config = made.home / "kvd.toml"
        config.write_text('[models]\naliases = {"claude-*" = "demo"}\n')
        assert client.call("reload") == {"applied": ["models.aliases"], "restart": []}
        before = client.call("generate", {"prompt": "say 1"}, "claude-a")
        held = client.ask("generate", {"prompt": "hold"}, "claude-a")
        client.wait_for(held, "progress")
        config.write_text('[models]\naliases = {"claude-*" = "other", "gpt-4o" = "demo"}\n')
        assert client.call("reload")["applied"] == ["models.aliases"]
        after = client.call("generate", {"prompt": "say 1"}, "claude-a")
        same = client.call("generate", {"prompt": "say 1"}, "gpt-4o")
        assert (before["model"], after["model"], same["model"]) == ("demo", "other", "demo")
        assert before["stats"]["pid"] == same["stats"]["pid"] != after["stats"]["pid"]
        client.ask("cancel", {"id": held})
        assert client.result(held).body["model"] == "demo"
        config.write_text('[models]\naliases = {"claude *" = "demo"}\n')
        assert "is no alias" in error(client, "reload", {}).body["message"]
        assert client.call("models", {"model": "claude-a"})["models"][0]["name"] == "other"
