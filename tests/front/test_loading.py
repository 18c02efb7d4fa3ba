"""A model that loads is the business of those who ask for it: streams of others go on (F32)."""

from __future__ import annotations

import pytest

from tests.front.support import daemon, until


@pytest.mark.parametrize("held", ["preload", "load", "stop"])
def test_no_token_of_a_stream_waits_for_another_model_however_long_it_takes_to_load(held: str) -> None:
    """Held while the front looks for the library, while the worker loads, while an idle model makes room: a whole
    stream that ran before, and one that begins meanwhile, come to their ends first."""
    flags = ("memory.limit=100000", "cache.pool_initial=40000") if held == "stop" else ()
    with daemon(*flags, models=("a", "idle")) as made, made.client() as client, made.client() as other:
        made.add("b", how="held")
        client.call("load", {"model": "a"})
        other.call("load", {"model": "idle"})
        hold = {
            "preload": made.home / "hold-preload",
            "load": made.home / "models" / "b" / "hold-load",
            "stop": made.home / "models" / "idle" / "hold-stop",
        }[held]
        hold.touch()
        before = client.ask("generate", {"prompt": "slow 60 0.01"}, "a")
        client.wait_for(before, "text")
        loading = other.ask("generate", {"prompt": "say 3"}, "b")
        other.wait_for(loading, "queued")
        if held == "load":
            until(lambda: made.model("b")["state"] == "loading", "the worker of b")
        if held == "stop":
            until(lambda: made.model("idle")["state"] == "stopping", "the end of the idle model")
        assert client.result(before).body["choices"][0]["text"] == "0123456789" * 6
        meanwhile = client.ask("generate", {"prompt": "slow 30 0.01"}, "a")
        assert client.result(meanwhile).body["choices"][0]["text"] == "0123456789" * 3
        assert made.model("b")["state"] != "loaded"
        hold.unlink()
        assert other.result(loading).body["choices"][0]["text"] == "012"
