"""Why not all of a prompt was reused (`miss_reason`), in words."""

from __future__ import annotations

from typing import Final

_WORDS: Final = {
    "not_stored": "nothing of it was stored",
    "diverged": "it differs from what is stored",
    "cache_off": "the request did without the cache",
    "recompute_cheaper": "computing the rest is faster than reading it from the disk",
    "vanished": "a stored block had gone from the disk",
    "read_failed": "a stored block could not be read from the disk",
    "old_format": "a stored block is of another version",
    "other_version": "a stored block is of another version",
}
_DAMAGE: Final = {
    "bad_header", "header_checksum", "checksum", "chain_mismatch", "size_mismatch", "truncated", "other_block",
    "other_tokens", "other_layout",
}  # fmt: skip
"""what is found wrong with a block when it is read; it is set aside then"""


def words(code: str) -> str:
    """A code of a newer daemon stays as it is, with spaces."""
    plain = code.replace("_", " ")
    return f"a stored block was damaged ({plain})" if code in _DAMAGE else _WORDS.get(code, plain)
