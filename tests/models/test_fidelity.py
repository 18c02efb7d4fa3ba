"""The imported demo model against llama.cpp: recorded by hand in data/llama_cpp.json, which says how; compared here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvd.models import blas
from kvd.models.load import load_tokenizer
from rig.daemon import demo_models

RECORDED = json.loads((Path(__file__).parent / "data" / "llama_cpp.json").read_text(encoding="utf-8"))
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the demo model says to LICENSE, to the recorded prose and to a question, computed in one child."""
    texts = [(ROOT / "LICENSE").read_text(encoding="utf-8"), RECORDED["prose"]]
    library = blas.prepare(tmp_path_factory.mktemp("home"))
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"} | ({"LD_PRELOAD": str(library)} if library else {})
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.demo_child", str(demo_models() / "demo")],
        cwd=ROOT, env=env, capture_output=True, text=True, check=True,
        input=json.dumps({"texts": texts, "question": "What is the capital of France?"}),
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def agreement(found: list[int], expected: list[int]) -> float:
    assert len(found) == len(expected) == 500
    return sum(a == b for a, b in zip(found, expected, strict=True)) / 500


def test_token_ids_equal_llama_cpps_on_every_recorded_text() -> None:
    tokenizer = load_tokenizer(demo_models() / "demo", {})
    texts = {entry["text"]: entry["ids"] for entry in RECORDED["texts"]}
    assert len(texts) >= 100
    assert {text: tokenizer.encode(text, add_special_tokens=False) for text in texts} == texts


def test_the_top_token_agrees_with_llama_cpp_on_a_real_text(answered: dict[str, Any]) -> None:
    """llama.cpp rounds activations to 8 bits for a Q4_1 file, so not everywhere."""
    assert agreement(answered["tops"][0], RECORDED["license_top_q4_1"]) >= 0.96


def test_the_top_token_is_llama_cpps_own_where_it_does_not_round(answered: dict[str, Any]) -> None:
    """Same weights, expanded to float32 for llama.cpp too: nothing was lost or reordered in the import."""
    assert agreement(answered["tops"][1], RECORDED["prose_top_f32"]) >= 0.998


def test_it_answers_through_its_chat_template(answered: dict[str, Any]) -> None:
    assert answered["prompt"].endswith("capital of France?<|im_end|>\n<|im_start|>assistant\n")
    assert "Paris" in answered["answer"]
