"""How a decode batch is taken apart: rows that share a prefix, and rows on their own. Pure, no mlx."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvd.cache.paths import Paths

SAVED_ROWS = 4096
"""Reads of KV rows that folding must save: (rows of the batch - 1) * shared rows. Below, the products are too small for
it to matter; above, 1.7 times faster at 8 x 4,096 with 32 heads (`tools/bench attention`)."""
PADDING = 0.25
"""Share of padding that rows put up with to go through the block table together."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop) of the pool."""

    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class View:
    """What planning needs of a sequence: its block table, cut to the blocks that hold `rows` rows."""

    table: tuple[int, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class Bundle:
    """Batch rows that attend together.

    shared: pieces that all of them attend to, in order. tails: per row its own remaining blocks.
    lengths: per row the valid rows in its tail. One batch row has everything in `shared`, and no tail.
    """

    rows: tuple[int, ...]
    shared: tuple[Piece, ...]
    tails: tuple[tuple[int, ...], ...] = ()
    lengths: tuple[int, ...] = ()


def pieces(table: Sequence[int], block_size: int, first: int, stop: int) -> tuple[Piece, ...]:
    """Where rows [first, stop) of a sequence lie, adjacent blocks joined, in order."""
    if first >= stop:
        return ()
    begin, end = first // block_size, -(-stop // block_size)
    found: list[Piece] = []
    start = at = begin
    while at < end:  # once per block in each step: plain integers
        at += 1
        if at == end or table[at] != table[at - 1] + 1:
            low = table[start] * block_size + (first - begin * block_size if start == begin else 0)
            high = table[at - 1] * block_size + (stop - (at - 1) * block_size if at == end else block_size)
            found.append(Piece(low, high))
            start = at
    return tuple(found)


def bundles(views: Sequence[View], block_size: int, paths: Paths) -> list[Bundle]:
    """Every batch row in exactly one bundle."""
    found: list[Bundle] = []
    alone: list[int] = []
    everyone = list(range(len(views)))
    least = -(-SAVED_ROWS // block_size)
    for members, depth in _fold(views, everyone, 0, block_size, least) if paths.fold and paths.table else []:
        if depth:
            found.append(_folded(views, members, depth, block_size))
        else:
            alone.extend(members)
    if not (paths.fold and paths.table):
        alone = everyone
    scattered: list[int] = []
    for i in alone:
        whole = pieces(views[i].table, block_size, 0, views[i].rows)
        if paths.prefers_table(views[i].rows, len(whole), len(alone)):
            scattered.append(i)
        else:
            found.append(Bundle((i,), whole))
    found.extend(_tabled(views, scattered))
    return sorted(found, key=lambda bundle: bundle.rows)


def _folded(views: Sequence[View], members: Sequence[int], depth: int, block_size: int) -> Bundle:
    shared = pieces(views[members[0]].table, block_size, 0, depth * block_size)
    tails = tuple(views[i].table[depth:] for i in members)
    lengths = tuple(views[i].rows - depth * block_size for i in members)
    return Bundle(tuple(members), shared, tails, lengths)


def _tabled(views: Sequence[View], members: Sequence[int]) -> list[Bundle]:
    """Rows of similar length together, so that padding to the longest stays small."""
    found: list[list[int]] = []
    for i in sorted(members, key=lambda i: -len(views[i].table)):
        if found:
            longest = len(views[found[-1][0]].table)
            total = sum(len(views[j].table) for j in found[-1]) + len(views[i].table)
            if longest * (len(found[-1]) + 1) <= total * (1 + PADDING):
                found[-1].append(i)
                continue
        found.append([i])
    ordered = [sorted(group) for group in found]
    return [
        Bundle(tuple(group), (), tuple(views[i].table for i in group), tuple(views[i].rows for i in group))
        for group in ordered
    ]


def _fold(
    views: Sequence[View], members: list[int], depth: int, block_size: int, least: int
) -> list[tuple[list[int], int]]:
    """Split `members`, which agree on their first `depth` blocks, into sets with the depth each set folds at (0: none).

    Folding a set of n rows at depth d saves (n - 1) * d block reads, worth it from `least`: a set is split where its
    parts save more.
    """
    if len(members) == 1:
        return [(members, 0)]
    limit = max(depth, min((views[i].rows - 1) // block_size for i in members))
    first = views[members[0]].table
    depth = min(_shared(first, views[i].table, depth, limit) for i in members)
    saved = (len(members) - 1) * depth
    together = [(members, depth if saved >= least else 0)]
    groups: dict[int, list[int]] = {}
    for i in members:
        ended = depth >= (views[i].rows - 1) // block_size
        groups.setdefault(-1 - i if ended else views[i].table[depth], []).append(i)
    if len(groups) == len(members):
        return together
    parts = [part for group in groups.values() for part in _fold(views, group, depth, block_size, least)]
    apart = sum((len(part) - 1) * at for part, at in parts)
    return parts if apart > saved or (saved < least and apart) else together


def _shared(left: Sequence[int], right: Sequence[int], low: int, high: int) -> int:
    """How many leading blocks are equal, at most `high`, of which the first `low` are known to be: by bisection, since
    slices compare at memory speed and this runs in each step."""
    if left[low:high] == right[low:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
