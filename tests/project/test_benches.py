"""That the measuring tools measure what they say, on a tiny model: no figures here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benches.children import packed, precision, restore, steps, synthetic
from kvd.cache.inspection import inspect_layout
from kvd.cache.paged import PagedCache
from kvd.models.load import Loaded, load
from kvd.worker import arrival
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(tiny_model(tmp_path_factory.mktemp("bench") / "model", head_dim=64))


def test_a_step_of_the_engine_has_the_next_one_in_line_when_it_returns(loaded: Loaded) -> None:
    cache = PagedCache(inspect_layout(loaded.model), 256, 4, initial_blocks=4, namespace=bytes(16))
    sequences = [synthetic.filled(cache, 40, 20, seed) for seed in range(2)]
    passes: list[int] = []

    def model(tokens: Any, cache: Any) -> Any:
        passes.append(tokens.size)
        return loaded.model(tokens, cache=cache)

    step = synthetic.engine(model, loaded.tokenizer, cache, sequences)
    for _ in range(3):
        step()
    assert passes == [2] * 4
    assert [sequence.rows for sequence in sequences] == [44, 44]


@pytest.mark.parametrize(("lengths", "shared"), [([50], False), ([30, 70], False), ([80, 80], True)])
def test_every_batch_is_stepped_by_all_that_are_compared(loaded: Loaded, lengths: list[int], shared: bool) -> None:
    found = packed.compare(loaded.model, loaded.tokenizer, lengths, shared, rounds=2)
    assert len(found["others"]) == (2 if len(lengths) > 1 and not shared else 1)
    assert min(found["ours"], found["ratio"], *found["others"]) > 0


def test_single_steps_are_measured_at_every_precision(loaded: Loaded) -> None:
    assert steps.decode(loaded.model, position=40, pairs=3)["ratio"] > 0
    assert steps.growth(loaded.model, blocks=4, steps=3)["seconds"] > 0
    bench = precision.Bench(loaded.model, loaded.info.architecture, loaded.info.backend)
    for found in bench.decode([("native", [0]), ("k8v4", [8, 4])], position=64, rounds=2)["pairs"]:
        assert found["ratio"] > 0
    for kv in ("native", "k8v4"):
        found = bench.memory(kv, 640)
        assert found["measured"] == pytest.approx(found["formula"], rel=0.01)


@pytest.mark.parametrize("tail", [0, 20])
def test_a_restore_is_measured_layer_by_layer_and_in_whole_blocks(
    tail: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival, "GROUP_BYTES", 1)
    bench = restore.Bench(tiny_model(tmp_path / "model", layers=6, vocab=20_000), str(tmp_path), blocks=3)
    try:
        assert bench.first_token(tail, layered=False, rate=2e7)["ahead"] == 0
        found = [bench.first_token(tail, layered=True, rate=2e7) for _ in range(5)]
        assert all(one["seconds"] > 0 for one in found)
        assert any(one["ahead"] == 1 for one in found)
    finally:
        bench.close()
