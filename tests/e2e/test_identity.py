"""F6 on the real daemon: the cache belongs to the weights, not to a path or a name. Tiny random models."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from kvd.models.record import Record, write_record
from rig.daemon import Daemon, short_home
from tests.tiny import tiny_model

PROMPT = [3 + (7 * i) % 400 for i in range(600)]


@pytest.fixture
def home() -> Iterator[Path]:
    with short_home() as made:
        add(made, "one")
        yield made


def add(home: Path, name: str, seed: int = 0) -> Path:
    folder = tiny_model(home / "models" / name, seed=seed)
    write_record(folder, Record(name, "random weights", time.time()))
    return folder


def computed(home: Path, model: str) -> int:
    """Prompt tokens that a daemon started for this one request feeds to the model."""
    with Daemon(home) as daemon, daemon.client() as client:
        done = client.generate(model, tokens=PROMPT, max_tokens=2, temperature=0.0, durable_wait_ms=20_000)
        return done.stats.computed_tokens


def test_a_renamed_folder_keeps_its_cache(home: Path) -> None:
    assert computed(home, "one") == len(PROMPT)
    (home / "models" / "one").rename(home / "models" / "other")
    write_record(home / "models" / "other", Record("other", "random weights", time.time()))
    assert computed(home, "other") == 1


def test_one_changed_weight_misses_and_the_old_weights_hit_again(home: Path) -> None:
    file = home / "models" / "one" / "model.safetensors"
    assert computed(home, "one") == len(PROMPT)
    before = file.read_bytes()
    weights = load_file(file)
    weights["model.norm.weight"][0] += 0.5
    save_file(weights, file, metadata={"format": "mlx"})
    assert computed(home, "one") == len(PROMPT)
    file.write_bytes(before)
    assert computed(home, "one") == 1


def test_other_weights_at_the_same_path_miss(home: Path) -> None:
    assert computed(home, "one") == len(PROMPT)
    add(home, "one", seed=1)
    assert computed(home, "one") == len(PROMPT)
