"""F4, F3: at every preset a hit is what computing again gives, from memory, from SSD, after a restart; and a switch of
precision misses. The plain mlx wheel multiplies with the reference BLAS, so equal means bit-equal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvd.cache.precision import PRESETS
from tests.worker.rig import Answer, B, Rig, ids

TABLE = "k8v4,0=native,-1=k4v8"


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig


def counts(answer: Answer) -> tuple[int, int, int]:
    stats: dict[str, Any] = answer.stats
    return stats["computed_tokens"], stats["cached_memory_tokens"], stats["cached_ssd_tokens"]


@pytest.mark.parametrize("kv", [*PRESETS, TABLE])
def test_memory_and_ssd_give_the_bits_of_the_cold_pass_and_no_other_precision_hits(rig: Rig, kv: str) -> None:
    length = 4 * B + 5
    prompt = ids(length, 77)
    rig.kv = kv
    rig.restart()
    cold = rig.ask(prompt)
    assert counts(cold) == (length, 0, 0)
    warm = rig.ask(prompt)
    assert counts(warm) == (1, length - 1, 0)
    rig.restart()
    restored = rig.ask(prompt)
    assert counts(restored) == (1, 0, length - 1)
    for other in (warm, restored):
        assert (other.text, other.logprobs) == (cold.text, cold.logprobs)
    assert cold.stats["kv_precision"] == kv


@pytest.mark.parametrize("kv", ["k8v4", "k4v4"])
def test_a_prompt_that_diverges_is_computed_from_there_on(rig: Rig, kv: str) -> None:
    rig.kv = kv
    rig.restart()
    prompt = ids(3 * B + 2, 78)
    rig.ask(prompt)
    other = rig.ask(prompt[: B + 3] + ids(9, 79))
    assert counts(other)[0] == 9
    cold = rig.ask(prompt[: B + 3] + ids(9, 79), cache="off")
    assert other.text == cold.text
    for mine, theirs in zip(other.logprobs, cold.logprobs, strict=True):
        assert mine["logprob"] == pytest.approx(theirs["logprob"], abs=1e-3)


def test_switching_back_finds_what_this_precision_had_stored(rig: Rig) -> None:
    prompt = ids(2 * B + 3, 80)
    rig.kv = "k8v8"
    rig.restart()
    first = rig.ask(prompt)
    rig.kv = "k8v4"
    rig.restart()
    assert counts(rig.ask(prompt))[0] == len(prompt)
    rig.kv = "k8v8"
    rig.restart()
    again = rig.ask(prompt)
    assert counts(again) == (1, 0, len(prompt) - 1)
    assert (again.text, again.logprobs) == (first.text, first.logprobs)


@pytest.mark.parametrize("kv", [*PRESETS, TABLE])
def test_live_bytes_are_those_of_the_formula(rig: Rig, kv: str) -> None:
    """F28. 32 elements a head, 2 heads, 2 layers: bits / 8 bytes each, and scale and bias of a group in float32."""
    rig.kv = kv
    rig.restart()
    answer = rig.ask(ids(3 * B, 81), max_tokens=1)
    per_token = 2 * sum(side(kv, layer, which) for layer in (0, 1) for which in (0, 1))
    assert answer.stats["kv_bytes"] == 3 * B * per_token
    stats = rig.on_engine(lambda: rig.cache.stats)
    arrays = rig.on_engine(lambda: sum(array.nbytes for array in rig.cache.pool.arrays))
    assert arrays == pytest.approx(stats.blocks_total * B * per_token, rel=0.01)


def side(kv: str, layer: int, which: int) -> int:
    """Bytes of one head's row, worked out apart from `KVLayout`. which: 0 K, 1 V."""
    bits = {"native": (32, 32), TABLE: ((32, 32), (4, 8))[layer]}.get(kv) or (int(kv[1]), int(kv[3]))
    return 128 if bits[which] == 32 else 32 * bits[which] // 8 + 8
