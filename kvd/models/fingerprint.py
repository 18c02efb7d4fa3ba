"""What a model is, by content: the parts of a KV namespace that the model's files decide.

A weights fingerprint is a SHA-256 over the content of all weight files; each file's digest is remembered by
(path, size, mtime, inode), so that only the first use reads the bytes. Where the folder lies and what it is
called does not count. Standard library only: the front computes fingerprints too.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvclient.errors import BadRequest, UnsupportedModel

MEMO = ".memo"
"""folder of remembered digests, beside the models"""
_MEMO_FILE = "fingerprints.json"
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "tiktoken.model",
)  # fmt: skip
_ADAPTER_FILES = ("adapters.safetensors", "adapter_config.json")
_ROPE_KEYS = (
    "rope_theta", "rope_scaling", "rope_parameters", "rope_traditional", "rope_local_base_freq",
    "partial_rotary_factor", "max_position_embeddings", "original_max_position_embeddings",
)  # fmt: skip
_IRRELEVANT = frozenset(
    ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "eos_token_id", "bos_token_id",
     "pad_token_id", *_ROPE_KEYS)
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Identity:
    """Hex digests (64 characters; adapter "" when there is none). Any difference is another namespace."""

    weights: str
    tokenizer: str
    config: str
    rope: str
    adapter: str = ""

    @property
    def whole(self) -> str:
        return _combine(self.weights, self.tokenizer, self.config, self.rope, self.adapter)


def identify(folder: Path, memo: Path | None = None, adapter: Path | None = None) -> Identity:
    """Identity of the model files in `folder`. `memo` is a folder that keeps digests between runs.

    Raises BadRequest (cannot be read) or UnsupportedModel (no weights, no configuration).
    """
    config = read_config(folder)
    digests = file_digests(weight_files(folder), memo)
    tokenizer = [path for name in _TOKENIZER_FILES if (path := folder / name).is_file()]
    pieces = [adapter / name for name in _ADAPTER_FILES] if adapter else []
    rope = {key: config[key] for key in _ROPE_KEYS if config.get(key) is not None}
    rest = {key: value for key, value in config.items() if key not in _IRRELEVANT}
    return Identity(
        weights=_combine(*digests),
        tokenizer=_combine(*(part for path in tokenizer for part in (path.name, _digest(path)))),
        config=_of_json(rest),
        rope=_of_json(rope),
        adapter=_combine(*file_digests(pieces, memo)) if pieces else "",
    )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json. Raises UnsupportedModel when it is missing or not an object."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedModel(f"{folder} is not a model: no readable config.json", file=str(path)) from error
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not JSON ({error})", file=str(path)) from error
    if not isinstance(config, dict):
        raise UnsupportedModel(f"{path} is not a JSON object", file=str(path))
    return config


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that mlx-lm loads, in order. Raises UnsupportedModel: none, or only pickled ones."""
    if files := sorted(folder.glob("model*.safetensors")):
        return files
    pickled = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    reason = "no model*.safetensors"
    if pickled:
        reason = f"only {pickled[0].name}, a pickle that can run code; safetensors are needed"
    raise UnsupportedModel(f"{folder} has no usable weights: {reason}", file=str(folder), reason=reason)


def file_digests(files: Iterable[Path], memo: Path | None) -> list[str]:
    """SHA-256 of each file, from the memo where (path, size, mtime, inode) are as remembered."""
    files = list(files)
    known = _remembered(memo)
    keys = [_key(path) for path in files]
    missing = [path for path, key in zip(files, keys, strict=True) if key not in known]
    if missing:
        with ThreadPoolExecutor(min(4, len(missing))) as pool:
            fresh = dict(zip(missing, pool.map(_digest, missing), strict=True))
        # The key was taken before reading: a file changed meanwhile has another key next time.
        known |= {key: fresh[path] for path, key in zip(files, keys, strict=True) if path in fresh}
        _remember(memo, known)
    return [known[key] for key in keys]


def moved(memo: Path, old: Path, new: Path) -> None:
    """Files under `old` were renamed to be under `new`: their remembered digests hold there."""
    before, after = f"{old.resolve()}{os.sep}", f"{new.resolve()}{os.sep}"
    known = _remembered(memo).items()
    _remember(memo, {after + key.removeprefix(before) if key.startswith(before) else key: hex for key, hex in known})


def _key(path: Path) -> str:
    try:
        found = path.stat()
    except OSError as error:
        raise BadRequest(f"cannot read {path}: {error.strerror or error}", path=str(path)) from error
    return f"{path.resolve()}|{found.st_size}|{found.st_mtime_ns}|{found.st_ino}"


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadRequest(f"cannot read {path}: {error.strerror or error}", path=str(path)) from error


def _combine(*parts: str) -> str:
    """Length-delimited, so that no two different lists give the same input."""
    state = hashlib.sha256()
    for part in parts:
        raw = part.encode()
        state.update(len(raw).to_bytes(8, "little") + raw)
    return state.hexdigest()


def _of_json(value: Any) -> str:
    return _combine(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True))


def _remembered(memo: Path | None) -> dict[str, str]:
    if memo is None:
        return {}
    try:
        content = json.loads((memo / _MEMO_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # only a memory: what it lacks is computed
    return {str(key): str(value) for key, value in content.items()} if isinstance(content, dict) else {}


def _remember(memo: Path | None, known: dict[str, str]) -> None:
    """Replaced as a whole, so that a reader sees the old or the new one. A full disk only costs the next run time."""
    if memo is None:
        return
    # A file that was replaced has several keys: the newest one wins. Files that went away are forgotten.
    newest = {key.split("|", 1)[0]: key for key in known}
    kept = {key: known[key] for path, key in newest.items() if os.path.exists(path)}
    try:
        memo.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, temp = tempfile.mkstemp(dir=memo, prefix=_MEMO_FILE)
    except OSError:
        return
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(kept, file, indent=0)
        os.replace(temp, memo / _MEMO_FILE)
    except OSError:
        Path(temp).unlink(missing_ok=True)
