"""The KV pool: per layer and part one mlx array `[1, kv_heads, blocks * block_size, width]`, updated in place.

An update is in place while nothing else refers to the array: no view of it may live across an update. Everything here
runs on the one thread that owns mlx; host buffers handed out may be used by others (see `hostmem`).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from kvd.cache.blocks import Move
from kvd.cache.hostmem import Generation, HostBlock, addressable, window
from kvd.cache.layout import KVLayout, Part

Parts = tuple[mx.array, ...]
"""One side of a layer: (rows,) native, or (words, scales, biases) quantised."""


class KVPool:
    """Bytes of all blocks. Knows rows and parts, nothing of sequences."""

    def __init__(self, layout: KVLayout, block_size: int, blocks: int) -> None:
        self.layout = layout
        self.block_size = block_size
        self.blocks = blocks
        self.parts: tuple[Part, ...] = layout.parts
        self.host_addressable = addressable()
        self.arrays = [_zeros(part, blocks * block_size) for part in self.parts]
        mx.eval(self.arrays)
        self._index()
        self._retired: list[Generation] = []
        self._generation: Generation | None = None

    # --- sizes

    @property
    def block_bytes(self) -> int:
        return self.layout.bytes_per_token() * self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes held: the arrays, and older buffers that other threads still use."""
        current = sum(array.nbytes for array in self.arrays)
        return current + sum(array.nbytes for old in self._retired for array in old.arrays)

    def growth_bytes(self, blocks: int) -> int:
        """Most bytes that growing to `blocks` takes on top of what is held, the transient copy included."""
        more = (blocks - self.blocks) * self.block_bytes
        old = [array.nbytes for array in self.arrays]
        in_use = self._generation is not None and self._generation.handles > 0
        return more + (sum(old) if in_use else max(old))

    # --- rows

    def execute(self, moves: Sequence[Move]) -> None:
        """Copy blocks, in order. Each is gathered and evaluated first, so that no view pins the pool."""
        size = self.block_size
        for move in moves:
            rows = mx.arange(move.src * size, move.src * size + move.rows)
            taken = [mx.take(array, rows, axis=2) for array in self.arrays]
            mx.eval(taken)
            for array, part in zip(self.arrays, taken, strict=True):
                array[..., move.dst * size : move.dst * size + move.rows, :] = part
        if moves:
            mx.eval(self.arrays)

    def grow(self, blocks: int) -> None:
        """Enlarge to `blocks`, one array at a time; buffers in use by other threads live until they let go."""
        generation, self._generation = self._generation, None
        if generation is not None and generation.handles:
            self._retired.append(generation)
        generation = None
        kept = self.blocks * self.block_size
        self._unindex()
        for i, part in enumerate(self.parts):
            larger = _zeros(part, blocks * self.block_size)
            larger[..., :kept, :] = self.arrays[i]
            mx.eval(larger)
            self.arrays[i] = larger
        self.blocks = blocks
        self._index()

    def sweep(self) -> None:
        """Let go of older buffers that nobody uses any more."""
        self._retired = [old for old in self._retired if old.handles]

    def evaluate(self) -> None:
        """Run every pending update."""
        mx.eval(self.arrays)

    # --- host bytes

    def host_rows(self, block: int, rows: int) -> tuple[list[memoryview], Generation]:
        """Zero-copy windows on a block's first rows; the generation has been acquired for the caller."""
        mx.eval(self.arrays)
        generation = self._current()
        generation.acquire()
        height = self.blocks * self.block_size
        return _windows(self.parts, generation.addresses, height, block * self.block_size, rows), generation

    def copy_rows(self, block: int, rows: int) -> HostBlock:
        """A private copy of a block's first rows."""
        at = mx.arange(block * self.block_size, block * self.block_size + rows)
        copies = [mx.take(array, at, axis=2) for array in self.arrays]
        mx.eval(copies)
        private = Generation(copies)
        return HostBlock(_windows(self.parts, private.addresses, rows, 0, rows), private.arrays.clear, private)

    def staging(self, rows: int) -> tuple[list[memoryview], list[mx.array]]:
        """Host buffers for a block where the pool itself has none, and the arrays behind them."""
        arrays = [_zeros(part, rows) for part in self.parts]
        mx.eval(arrays)
        return _windows(self.parts, Generation(arrays).addresses, rows, 0, rows), arrays

    def put(self, block: int, staged: Sequence[mx.array], rows: int) -> None:
        """Bring staged rows into the pool."""
        start = block * self.block_size
        for array, part in zip(self.arrays, staged, strict=True):
            array[..., start : start + rows, :] = part[..., :rows, :]
        mx.eval(self.arrays)

    def carry_over(self, generation: Generation, block: int, rows: int) -> None:
        """Rows that were written into older buffers while the pool grew: bring them into the current ones."""
        if generation is self._generation:
            return
        start = block * self.block_size
        at = mx.arange(start, start + rows)
        self.put(block, [mx.take(array, at, axis=2) for array in generation.arrays], rows)

    # --- inside

    def _current(self) -> Generation:
        if self._generation is None:
            self._generation = Generation(self.arrays)
        return self._generation

    def _index(self) -> None:
        layers = range(len(self.layout.layers))
        sides: dict[tuple[int, str], list[mx.array]] = {}
        for part, array in zip(self.parts, self.arrays, strict=True):
            sides.setdefault((part.layer, part.side), []).append(array)
        self.k: list[Parts] = [tuple(sides[layer, "k"]) for layer in layers]
        self.v: list[Parts] = [tuple(sides[layer, "v"]) for layer in layers]

    def _unindex(self) -> None:
        self.k, self.v = [], []


def _zeros(part: Part, rows: int) -> mx.array:
    return mx.zeros((1, part.heads, rows, part.width), getattr(mx, part.dtype))


def _windows(parts: Sequence[Part], addresses: Sequence[int], height: int, first: int, rows: int) -> list[memoryview]:
    found: list[memoryview] = []
    for part, base in zip(parts, addresses, strict=True):
        for head in range(part.heads):
            found.append(window(base + (head * height + first) * part.row_bytes, rows * part.row_bytes))
    return found
