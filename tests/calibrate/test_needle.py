"""F4 on the demo model, through the real daemon: a needle at 60 % depth is found cold, from memory and from SSD at
every precision that can keep it, and what another precision stored is never used.

k4v4 is the one that cannot: calibration fails it on this model, and it loses a digit of the needle here too. A hit then
gives the same wrong answer as the cold pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvclient import Client, Completion
from kvd.calibrate.material import shipped
from rig.daemon import Daemon, demo_models, short_home

NEEDLE = "The password of the night ferry is ANANAS-7734."


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with short_home(demo_models()) as home, Daemon(home) as running:
        yield running


@pytest.fixture(scope="module")
def text() -> str:
    paragraphs = shipped()[0].split("\n\n")[2:7]
    return "\n\n".join([*paragraphs[:3], NEEDLE, *paragraphs[3:], "The password of the night ferry is"])


def ask(daemon: Daemon, text: str, kv: str) -> Completion:
    with daemon.client() as client:
        client.load("demo", kv=kv)
        return answer(client, text)


def answer(client: Client, text: str) -> Completion:
    return client.generate("demo", text, max_tokens=8, temperature=0.0, durable_wait_ms=20_000)


@pytest.mark.parametrize("kv", ["native", "k8v8", "k8v4", "k6v4", "k4v4"])
def test_a_needle_is_answered_alike_cold_from_memory_and_from_ssd(daemon: Daemon, text: str, kv: str) -> None:
    assert 0.5 < text.index(NEEDLE) / len(text) < 0.7
    cold = ask(daemon, text, kv)
    assert cold.stats.computed_tokens == cold.stats.prompt_tokens, "nothing of another precision was used"
    assert cold.stats.kv_precision == kv
    with daemon.client() as client:
        warm = answer(client, text)
        client.unload("demo")
        client.load("demo", kv=kv)
        restored = answer(client, text)
    assert warm.stats.computed_tokens == restored.stats.computed_tokens == 1
    assert restored.stats.cached_ssd_tokens == restored.stats.prompt_tokens - 1
    assert "ANANAS-7734" in cold.text or kv == "k4v4"
    assert cold.text == warm.text == restored.text
