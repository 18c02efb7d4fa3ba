from pathlib import Path

import pytest

from tests.tiny import Family, tiny_model


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_same_arguments_give_same_bytes_and_another_seed_other_weights(tmp_path: Path, family: Family) -> None:
    first, again = tiny_model(tmp_path / "a", family), tiny_model(tmp_path / "b", family)
    other = tiny_model(tmp_path / "c", family, seed=1)
    assert content(first) == content(again)
    assert content(first)["model.safetensors"] != content(other)["model.safetensors"]


def test_any_text_round_trips(tmp_path: Path) -> None:
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(tiny_model(tmp_path))
    for text in ("people  and\n\n\twords", "héllo 世界 🦊\u200d", "<|im_start|>user\nhi<|im_end|>\n"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
