from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvd.models.size import sizes
from tests.models.quantised import quantise
from tests.tiny import tiny_model


def model(folder: Path, tensors: dict[str, np.ndarray[Any, Any]], **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_dense_weights_count_as_float32_on_the_cpu_and_as_stored_elsewhere(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", {"a.weight": np.zeros((8, 64), np.float16), "norm.weight": np.zeros(64, np.float32)})
    assert sizes(folder).dense == 4 * (8 * 64 + 64)
    assert sizes(folder).stored == 2 * 8 * 64 + 4 * 64


@pytest.mark.parametrize(("bits", "group"), [(2, 32), (3, 64), (4, 32), (4, 64), (6, 32), (8, 64)])
def test_a_quantised_model_expands_to_what_it_was_quantised_from(tmp_path: Path, bits: int, group: int) -> None:
    folder = tiny_model(tmp_path / "m", heads=4, head_dim=64)
    before = sizes(folder)
    after = sizes(quantise(folder, bits, group))
    assert before.dense == before.stored == after.dense
    assert after.stored < after.kept < before.stored


def test_layers_of_their_own_width_count_by_it(tmp_path: Path) -> None:
    words, scales = np.zeros((4, 8), np.uint32), np.zeros((4, 2), np.float16)
    tensors = {f"{name}.{kind}": array for name in "ab" for kind, array in (("weight", words), ("scales", scales))}
    folder = model(tmp_path / "m", tensors, quantization={"group_size": 32, "bits": 4, "b": {"bits": 8}})
    assert sizes(folder).dense == 4 * (4 * 64 + 4 * 32)


def test_awq_counts_eight_values_a_word(tmp_path: Path) -> None:
    tensors = {
        "a.qweight": np.zeros((64, 4), np.int32), "a.scales": np.zeros((2, 32), np.float16),
        "a.qzeros": np.zeros((2, 4), np.int32),
    }  # fmt: skip
    assert sizes(model(tmp_path / "m", tensors, quantization_config={"bits": 4})).dense == 4 * 64 * 32
