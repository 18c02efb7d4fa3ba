"""A GGUF file's vocabulary as tokenizer.json and tokenizer_config.json, giving llama.cpp's token ids.

Two kinds: "gpt2" (byte-level BPE, with the pre-tokenizer named by `tokenizer.ggml.pre`) and "llama"
(SentencePiece: merges follow from the scores, bytes are the fallback).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvd.models.gguf.reader import GGUF, refuse

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
MAX_TEMPLATE = 1 << 18
"""bytes of a chat template"""

_WORDS = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"

PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "gpt2": ("gpt-2", "phi-2", "mellum", "olmo"),
    "digits": ("smollm", "starcoder", "refact", "command-r", "codeshell"),
    "llama3": ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"),
    "qwen2": ("qwen2", "deepseek-r1-qwen", "stablelm2", "kormo"),
}
"""How text is cut before merging, and the names in GGUF files that mean it."""

_END_OF_TURN = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "</s>")
)


def token_ids(gguf: GGUF) -> dict[str, Any]:
    """bos_token_id and the ids that end a text: the file's own and well-known control tokens of its vocabulary."""
    tokens = _tokens(gguf)
    kinds = _kinds(gguf, len(tokens))
    ends = [gguf.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ends += [i for i, token in enumerate(tokens) if kinds[i] == _CONTROL and token in _END_OF_TURN]
    ids = list(dict.fromkeys(i for i in ends if isinstance(i, int) and 0 <= i < len(tokens)))
    found: dict[str, Any] = {"eos_token_id": ids if len(ids) != 1 else ids[0]} if ids else {}
    if (bos := _id(gguf, "bos", tokens)) is not None:
        found["bos_token_id"] = bos
    return found


def write_tokenizer(gguf: GGUF, folder: Path) -> None:
    """Write both files. Raises UnsupportedModel naming the tokenizer model or pre-tokenizer that is not known."""
    tokens = _tokens(gguf)
    kinds = _kinds(gguf, len(tokens))
    model = gguf.metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        content = _byte_level(gguf, tokens)
    elif model == "llama":
        content = _sentence_piece(gguf, tokens)
    else:
        raise refuse(gguf.path, f"tokenizer {model!r} is not supported, gpt2 and llama are", tokenizer=str(model))
    content["added_tokens"] = [
        {
            "id": i, "content": token, "special": kinds[i] != _USER_DEFINED,
            "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        }
        for i, token in enumerate(tokens)
        if kinds[i] in (_CONTROL, _USER_DEFINED) or (kinds[i] == _UNKNOWN and model == "llama")
    ]  # fmt: skip
    text = json.dumps({"version": "1.0", "truncation": None, "padding": None} | content, ensure_ascii=False)
    try:
        built = Tokenizer.from_str(text)
    except Exception as error:
        raise refuse(gguf.path, f"its vocabulary is inconsistent ({error})") from error
    if built.get_vocab_size(with_added_tokens=True) != len(tokens):
        raise refuse(gguf.path, f"its vocabulary of {len(tokens)} tokens holds duplicates")
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    settings = _settings(gguf, tokens)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1, ensure_ascii=False), encoding="utf-8")


def _tokens(gguf: GGUF) -> list[str]:
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise refuse(gguf.path, "it carries no tokenizer")
    return tokens


def _kinds(gguf: GGUF, count: int) -> list[int]:
    kinds = gguf.metadata.get("tokenizer.ggml.token_type")
    if kinds is None:
        return [_NORMAL] * count
    if len(kinds) != count:
        raise refuse(gguf.path, f"damaged: {len(kinds)} token types for {count} tokens")
    return list(kinds)


def _id(gguf: GGUF, name: str, tokens: list[str]) -> int | None:
    value = gguf.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) and 0 <= value < len(tokens) else None


def _byte_level(gguf: GGUF, tokens: list[str]) -> dict[str, Any]:
    name = gguf.metadata.get("tokenizer.ggml.pre", "default")
    kind = next((kind for kind, names in PRE_TOKENIZERS.items() if name in names), None)
    if kind is None:
        raise refuse(gguf.path, f"pre-tokenizer {name!r} is not supported", pre_tokenizer=str(name))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    cut: list[dict[str, Any]]
    if kind in ("gpt2", "digits"):
        cut = [{"type": "Digits", "individual_digits": True}] if kind == "digits" else []
        cut.append(byte_level | {"use_regex": True})
    else:
        pattern = {"Regex": _LLAMA3 if kind == "llama3" else _QWEN2}
        cut = [{"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}, byte_level]
    merges = gguf.metadata.get("tokenizer.ggml.merges", [])
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cut},
        "post_processor": _post_processor(gguf, tokens, add_bos=kind == "llama3"),
        "decoder": byte_level | {"use_regex": True},
        "model": _bpe(tokens, [merge.split(" ", 1) for merge in merges], ignore_merges=kind == "llama3"),
    }


def _sentence_piece(gguf: GGUF, tokens: list[str]) -> dict[str, Any]:
    scores = gguf.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise refuse(gguf.path, "damaged: a llama tokenizer needs one score per token")
    prefix = bool(gguf.metadata.get("tokenizer.ggml.add_space_prefix", True))
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    unknown = _id(gguf, "unknown", tokens)
    model = _bpe(tokens, _merges_by_score(tokens, scores), unknown=tokens[unknown] if unknown is not None else None)
    prepend = {"type": "Prepend", "prepend": "▁"}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [prepend, space]} if prefix else space,
        "pre_tokenizer": None,
        "post_processor": _post_processor(gguf, tokens, add_bos=True),
        "decoder": {
            "type": "Sequence",
            "decoders": back + ([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
        },
        "model": model | {"byte_fallback": True, "fuse_unk": True},
    }


def _merges_by_score(tokens: list[str], scores: list[float]) -> list[list[str]]:
    """SentencePiece joins the pair whose result scores best: each split of a token into two tokens, best first."""
    ids = {token: i for i, token in enumerate(tokens)}
    found = [
        (-scores[i], ids[token[:cut]], ids[token[cut:]])
        for i, token in enumerate(tokens)
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [[tokens[left], tokens[right]] for _, left, right in sorted(found)]


def _bpe(
    tokens: list[str], merges: list[list[str]], *, ignore_merges: bool = False, unknown: str | None = None
) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": ignore_merges,
        "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges,
    }  # fmt: skip


def _post_processor(gguf: GGUF, tokens: list[str], add_bos: bool) -> dict[str, Any] | None:
    """Puts the begin (and end) token around a text where the file, or else its kind's convention, says so."""
    flags = {"bos": gguf.metadata.get("tokenizer.ggml.add_bos_token", add_bos)}
    flags["eos"] = gguf.metadata.get("tokenizer.ggml.add_eos_token", False)
    ids = {name: _id(gguf, name, tokens) for name, wanted in flags.items() if wanted}
    around = {name: i for name, i in ids.items() if i is not None}
    if not around:
        return None
    marks = {name: [{"SpecialToken": {"id": tokens[i], "type_id": 0}}] for name, i in around.items()}

    def framed(sequence: str) -> list[dict[str, Any]]:
        return [*marks.get("bos", []), {"Sequence": {"id": sequence, "type_id": 0}}, *marks.get("eos", [])]

    return {
        "type": "TemplateProcessing",
        "single": framed("A"),
        "pair": framed("A") + framed("B"),
        "special_tokens": {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in around.values()},
    }


def _settings(gguf: GGUF, tokens: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        if (i := _id(gguf, name, tokens)) is not None:
            settings[f"{key}_token"] = tokens[i]
    template = gguf.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        if len(template) > MAX_TEMPLATE:
            raise refuse(gguf.path, f"its chat template has {len(template)} characters, {MAX_TEMPLATE} are allowed")
        settings["chat_template"] = template
    return settings
