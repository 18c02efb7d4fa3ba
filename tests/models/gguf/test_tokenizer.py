"""Vocabularies small enough to see through; the ids were checked by hand against llama.cpp on the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from kvclient.errors import UnsupportedModel
from kvd.models.gguf.reader import read_gguf
from kvd.models.gguf.tokenizer import token_ids, write_tokenizer
from tests.models.gguf.files import gguf_bytes

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGED = ["12", "123", "1234", "Ġa", "aa", "'s", "'S", "ĠĠ", "ĠĠĠ", "éa"]
MERGES = ["1 2", "12 3", "123 4", "Ġ a", "a a", "' s", "' S", "Ġ Ġ", "ĠĠ Ġ"]
BYTE_LEVEL: dict[str, Any] = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": [*ALPHABET, *MERGED, "<|end|>", "<tool>"],
    "tokenizer.ggml.token_type": [1] * (len(ALPHABET) + len(MERGED)) + [3, 4],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": len(ALPHABET) + len(MERGED),
    "tokenizer.ggml.eos_token_id": len(ALPHABET) + len(MERGED),
}
PIECES = {
    "<unk>": 0, "<s>": 0, "</s>": 0, **{f"<0x{i:02X}>": 0 for i in range(256)},
    "▁": -5, "a": -6, "b": -7, "c": -8, "ab": -1, "bc": -2, "▁a": -3, "▁ab": -4, "abc": -9,
}  # fmt: skip
SENTENCE_PIECE: dict[str, Any] = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": list(PIECES),
    "tokenizer.ggml.scores": [float(score) for score in PIECES.values()],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 9,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def written(folder: Path, metadata: dict[str, Any]) -> Tokenizer:
    (folder / "m.gguf").write_bytes(gguf_bytes(metadata, {}))
    write_tokenizer(read_gguf(folder / "m.gguf"), folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    found: list[str] = tokenizer.encode(text, add_special_tokens=False).tokens
    return found


@pytest.mark.parametrize(
    ("pre", "numbers"),
    [
        ("gpt-2", ["1234", "123"]),
        ("smollm", ["1", "2", "3", "4", "1", "2", "3"]),
        ("llama-bpe", ["123", "4", "123"]),
        ("qwen2", ["1", "2", "3", "4", "1", "2", "3"]),
    ],
)
def test_each_pre_tokenizer_cuts_numbers_its_way(tmp_path: Path, pre: str, numbers: list[str]) -> None:
    tokenizer = written(tmp_path, BYTE_LEVEL | {"tokenizer.ggml.pre": pre})
    found = pieces(tokenizer, "1234x123")
    found.remove("x")
    assert found == numbers


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "a's   a", ["a", "'s", "ĠĠ", "Ġa"]),
        ("gpt-2", "a'S", ["a", "'", "S"]),
        ("qwen2", "a'S", ["a", "'S"]),
        ("qwen2", "\n\n a", ["Ċ", "Ċ", "Ġa"]),
        ("llama-bpe", "<|end|>a<tool>", ["<|end|>", "a", "<tool>"]),
    ],
)
def test_text_is_cut_and_merged_as_llama_cpp_does(tmp_path: Path, pre: str, text: str, expected: list[str]) -> None:
    tokenizer = written(tmp_path, BYTE_LEVEL | {"tokenizer.ggml.pre": pre})
    assert pieces(tokenizer, text) == expected
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_begin_token_is_added_by_the_files_word_or_its_kinds_convention(tmp_path: Path) -> None:
    bos = BYTE_LEVEL["tokenizer.ggml.bos_token_id"]
    cases = [("gpt-2", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", True, True)]
    for pre, flag, added in cases:
        metadata = BYTE_LEVEL | {"tokenizer.ggml.pre": pre}
        if flag is not None:
            metadata["tokenizer.ggml.add_bos_token"] = flag
        assert (written(tmp_path, metadata).encode("a").ids[0] == bos) is added


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc", ["▁ab", "c"]),
        ("ab ab", ["▁ab", "▁ab"]),
        ("cab", ["▁", "c", "ab"]),
        ("aé", ["▁a", "<0xC3>", "<0xA9>"]),
        ("a</s>b", ["▁a", "</s>", "▁", "b"]),
        ("  a", ["▁", "▁", "▁a"]),
        ("", []),
    ],
)
def test_sentence_piece_joins_by_score_with_bytes_as_fallback(tmp_path: Path, text: str, expected: list[str]) -> None:
    tokenizer = written(tmp_path, SENTENCE_PIECE)
    assert pieces(tokenizer, text) == expected


def test_sentence_piece_text_round_trips_and_begins_with_its_begin_token(tmp_path: Path) -> None:
    tokenizer = written(tmp_path, SENTENCE_PIECE)
    encoded = tokenizer.encode("ab  é c")
    assert encoded.ids[0] == 1
    assert tokenizer.decode(encoded.ids) == "ab  é c"


def test_every_token_that_ends_a_turn_is_known(tmp_path: Path) -> None:
    tokens = ["<|im_end|>", "<|endoftext|>", "x", "<|eot_id|>"]
    metadata = {
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3, 3, 1, 1],
        "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.bos_token_id": 1,
    }  # fmt: skip
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(metadata, {}))
    assert token_ids(read_gguf(tmp_path / "m.gguf")) == {"eos_token_id": [0, 1], "bos_token_id": 1}


def test_the_chat_template_is_kept(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}é"
    written(tmp_path, BYTE_LEVEL | {"tokenizer.ggml.pre": "gpt-2", "tokenizer.chat_template": template})
    assert json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"] == template


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer.ggml.tokens": [*BYTE_LEVEL["tokenizer.ggml.tokens"][:-1], "1"]}, "duplicates"),
        ({"tokenizer.ggml.token_type": [1]}, "1 token types for"),
        ({"tokenizer.ggml.merges": ["1 nothing"]}, "vocabulary is inconsistent"),
        ({"tokenizer.ggml.pre": "default"}, "pre-tokenizer 'default'"),
        ({"tokenizer.chat_template": "x" * 300_000}, "chat template has 300000"),
        ({"tokenizer.ggml.model": "llama"}, "one score per token"),
    ],
)
def test_vocabularies_that_cannot_be_taken_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        written(tmp_path, BYTE_LEVEL | {"tokenizer.ggml.pre": "gpt-2"} | change)
