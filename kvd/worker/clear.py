"""Forgetting on request: what memory holds of prompts and nobody uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.messages import Clear, Cleared

if TYPE_CHECKING:
    from kvd.cache.paged import PagedCache


def clear(cache: PagedCache, asked: Clear) -> Cleared:
    """Drop every known block that no request holds and no writer reads (of some namespaces), at once."""
    wanted = frozenset(asked.namespaces)
    blocks = sum(cache.clear(namespace) for namespace in wanted) if wanted else cache.clear()
    left = sum(1 for entry in cache.manager.entries if entry is not None and (not wanted or entry.namespace in wanted))
    return Cleared(asked.q, blocks, blocks * cache.pool.block_bytes, left)
