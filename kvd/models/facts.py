"""What a model's files say of it, for lists of models: nothing is loaded. Standard library only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvclient.errors import UnsupportedModel
from kvd.models.fingerprint import read_config

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")


def facts(folder: Path) -> dict[str, int | None]:
    """`disk_bytes` of all its files, `context_length` in tokens. Empty where the files are gone or cannot be read."""
    try:
        size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        return {"disk_bytes": size, "context_length": context_length(read_config(folder))}
    except (OSError, UnsupportedModel):
        return {}


def context_length(config: dict[str, Any]) -> int | None:
    """Tokens; None where the configuration names no limit."""
    text = text_config(config)
    return next((int(text[key]) for key in _CONTEXT_KEYS if isinstance(text.get(key), int)), None)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part that describes the language model: a model of several modalities has it inside, others are all of it."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config
