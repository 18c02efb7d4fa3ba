"""Identity of cached tokens: namespaces, block chains and the keys that order siblings. Pure, no I/O.

    namespace = H(length-delimited fields)         everything that makes KV bytes what they are
    chain_i   = H(chain_{i-1} ‖ tokens_i as u32 little-endian),  chain_{-1} = namespace

H is BLAKE2b with 16 bytes. A mismatch anywhere gives another chain, so it misses and never collides.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import NewType

Chain = NewType("Chain", bytes)
"""16 bytes that stand for a namespace and every token up to the end of one block."""

SCHEMA = 1
"""Raise when the meaning of stored bytes changes: old namespaces then simply miss."""
CHAIN_BYTES = 16
STEP = 64
"""Tokens per level of the sibling order (a key must stay under LMDB's 511 bytes)."""


def namespace(fields: Mapping[str, str | bytes | int]) -> Chain:
    """Hash named fields (weights fingerprint, tokenizer, layout, block size, salt, …), in the order of their names.

    Every name and value is preceded by its length, so no two field sets give the same input.
    """
    digest = blake2b(digest_size=CHAIN_BYTES, person=b"kvd-namespace")
    digest.update(SCHEMA.to_bytes(4, "little"))
    for name in sorted(fields):
        value = fields[name]
        raw = value if isinstance(value, bytes) else str(value).encode()
        for part in (name.encode(), type(value).__name__.encode(), raw):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return Chain(digest.digest())


def salted(base: bytes, salt: str) -> Chain:
    """Namespace of one tenant: twins with different salts share nothing. An empty salt is the base itself."""
    if not salt:
        return Chain(bytes(base))
    return namespace({"base": bytes(base), "salt": salt})


def next_chain(parent: bytes, tokens: Sequence[int]) -> Chain:
    """Chain of the block that holds `tokens` behind `parent`. A partial block's chain is the same function."""
    return Chain(blake2b(parent + token_bytes(tokens), digest_size=CHAIN_BYTES).digest())


def chains(root: bytes, tokens: Sequence[int], block_size: int) -> list[Chain]:
    """Chains of the full blocks of `tokens`, in order; a tail shorter than a block has none here."""
    found: list[Chain] = []
    parent = root
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = next_chain(parent, tokens[start : start + block_size])
        found.append(Chain(parent))
    return found


def token_bytes(tokens: Iterable[int]) -> bytes:
    """Ids as u32 little-endian. Raises OverflowError for an id outside 0 … 2**32-1."""
    return _packed(tokens, "little")


def ordered_bytes(tokens: Iterable[int]) -> bytes:
    """Ids as u32 big-endian: comparing these bytes compares the ids one by one."""
    return _packed(tokens, "big")


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of leading tokens that are equal. Whole slices are compared, since most prompts share all or nothing."""
    if type(left) is not type(right):
        left, right = list(left), list(right)  # a list never equals a tuple
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def child_keys(parent: bytes, tokens: Sequence[int], chain: bytes) -> list[bytes]:
    """Keys under which a stored block is found among its siblings, one per started level of 64 tokens.

    Level j: H(parent ‖ first 64j tokens) (level 0: the parent itself) ‖ the next 64 tokens, each plus one (so that
    the padding sorts before every token), big-endian, zero-padded ‖ chain: 16 + 256 + 16 bytes. The neighbours of an
    asked key at level j share the longest prefix within that level, so the best child is found exactly, with any
    number of siblings, by at most one descent per level.
    """
    return [level_key(parent, tokens, level) + chain for level in range(max(1, -(-len(tokens) // STEP)))]


def level_key(parent: bytes, tokens: Sequence[int], level: int) -> bytes:
    """The key of `child_keys` at one level, without the chain: what a lookup seeks (`len(tokens) >= 64 * level`)."""
    cut = level * STEP
    head = bytes(parent) if level == 0 else next_chain(parent, tokens[:cut])
    return head + ordered_bytes(token + 1 for token in tokens[cut : cut + STEP]).ljust(4 * STEP, b"\0")


def _packed(tokens: Iterable[int], order: str) -> bytes:
    values = array("I", tokens)
    if sys.byteorder != order:
        values.byteswap()
    return values.tobytes()
