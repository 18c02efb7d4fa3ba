"""How a decode batch is taken apart: rows that share a prefix, and rows on their own. Pure, no mlx."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHARED_ROWS = 256
"""Fewest shared rows for which rows are folded into one product; below, each row attends on its own.
Source: `tools/bench attention` (fold)."""
SEGMENTS = 8
"""Most runs of one sequence that are attended piece by piece; beyond, the block table is used."""


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
    found: list[Piece] = []
    if first >= stop:
        return ()
    for index in range(first // block_size, -(-stop // block_size)):
        low = max(first - index * block_size, 0)
        high = min(stop - index * block_size, block_size)
        start = table[index] * block_size + low
        if found and found[-1].stop == start:
            found[-1] = Piece(found[-1].start, start + high - low)
        else:
            found.append(Piece(start, start + high - low))
    return tuple(found)


def bundles(views: Sequence[View], block_size: int, *, fold: bool = True, table: bool = True) -> list[Bundle]:
    """Every batch row in exactly one bundle, so that the fewest rows of KV are read.

    fold, table: whether rows may be folded, and blocks read through the block table (folding needs both).
    """
    found: list[Bundle] = []
    least = max(1, -(-SHARED_ROWS // block_size))
    everyone = list(range(len(views)))
    sets = _fold(views, everyone, 0, block_size, least) if fold and table else [(everyone, 0)]
    for members, depth in sets:
        if len(members) == 1 or not depth:
            found.extend(_alone(i, views[i], block_size, SEGMENTS if table else len(views[i].table)) for i in members)
            continue
        shared = pieces(views[members[0]].table, block_size, 0, depth * block_size)
        tails = tuple(views[i].table[depth:] for i in members)
        lengths = tuple(views[i].rows - depth * block_size for i in members)
        found.append(Bundle(tuple(members), shared, tails, lengths))
    return sorted(found, key=lambda bundle: bundle.rows)


def _alone(index: int, view: View, block_size: int, most: int) -> Bundle:
    whole = pieces(view.table, block_size, 0, view.rows)
    if len(whole) <= most:
        return Bundle((index,), whole)
    return Bundle((index,), (), (view.table,), (view.rows,))


def _fold(
    views: Sequence[View], members: list[int], depth: int, block_size: int, least: int
) -> list[tuple[list[int], int]]:
    """Split `members`, which agree on their first `depth` blocks, into sets with the depth each set folds at.

    Folding a set of n rows at depth d saves (n - 1) * d block reads: a set is split where its parts save more.
    """
    if len(members) == 1:
        return [(members, 0)]
    limit = min((views[i].rows - 1) // block_size for i in members)
    first = views[members[0]].table
    while depth < limit and all(views[i].table[depth] == first[depth] for i in members):
        depth += 1
    whole = (len(members) - 1) * depth if depth >= least else 0
    groups: dict[int, list[int]] = {}
    for i in members:
        ended = depth >= (views[i].rows - 1) // block_size
        groups.setdefault(-1 - i if ended else views[i].table[depth], []).append(i)
    if len(groups) == len(members):
        return [(members, depth if whole else 0)]
    parts = [part for group in groups.values() for part in _fold(views, group, depth, block_size, least)]
    if whole >= sum((len(part) - 1) * at for part, at in parts):
        return [(members, depth if whole else 0)]
    return parts
