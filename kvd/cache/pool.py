"""The KV pool: per layer and part one mlx array `[1, kv_heads, blocks * block_size, width]`, updated in place.

An update is in place while nothing else refers to the array: no view of it may live across an update. Everything here
runs on the one thread that owns mlx; host buffers handed out may be used by others (see `hostmem`).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from kvd.cache.devicemem import DeviceGeneration, copier
from kvd.cache.hostmem import ALL_PARTS, Generation, Opened, address, addressable
from kvd.cache.inplace import Item, assign, launch
from kvd.cache.layout import KVLayout, Part
from kvd.cache.nvrtc import available
from kvd.cache.placement import Move
from kvd.cache.side import Side

Buffers = Generation | DeviceGeneration
STAGING_KEPT = 8
"""Staging buffers kept for the next restore (page faults of new memory cost more than the copy)."""


class KVPool:
    """Bytes of all blocks. Knows rows and parts, nothing of sequences."""

    def __init__(self, layout: KVLayout, block_size: int, blocks: int) -> None:
        self.layout = layout
        self.block_size = block_size
        self.blocks = blocks
        self.parts: tuple[Part, ...] = layout.parts
        self.host_addressable = addressable()
        self.copier = copier()
        """copies between the device and the host, where those have memory of their own"""
        self.launches = available()
        """whether rows are written by a kernel; else as operations of mlx"""
        self._assigned: list[mx.array] = []
        self._places: list[int] = []
        self.arrays = [_zeros(part, blocks * block_size) for part in self.parts]
        mx.eval(self.arrays)
        self._index()
        self._retired: list[Buffers] = []
        self._staging: list[Generation] = []
        self._generation: Buffers | None = None

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

    def settle(self, always: bool = False) -> None:
        """Before updates are planned: while other threads have addresses, wait for steps in line. One that still reads
        an array makes the next update copy it, away from those addresses. Waiting for a result is not enough: Metal
        tells that it is there before MLX lets go of what it was made from. always: whoever has addresses; a copy of
        the array costs more."""
        held = self._generation is not None and self._generation.handles
        if self.host_addressable and (held or always):
            mx.synchronize()

    def moved(self) -> bool:
        """Whether an update has copied an array since this was asked last; growing is no copy. Waits for steps in line.
        False where the host does not know addresses."""
        if not self.host_addressable:
            return False
        before, self._places = self._places, [address(array) for array in self.arrays]
        return bool(before) and before != self._places

    def write(self, items: Sequence[Item]) -> None:
        """Bring rows into arrays of the pool, in place; what reads those from now on sees them."""
        self._assigned = (launch if self.launches else assign)(items)

    def execute(self, moves: Sequence[Move]) -> None:
        """Copy blocks, in order. Each is gathered and evaluated first, so that no view pins the pool."""
        size = self.block_size
        for move in moves:
            taken = self._taken(self.arrays, move.src, move.rows)
            self.settle(always=True)
            self.write([(array, move.dst * size, part) for array, part in zip(self.arrays, taken, strict=True)])
            self.evaluate()

    def grow(self, blocks: int) -> bool:
        """Enlarge to `blocks`, one array at a time; buffers in use by other threads live until they let go.

        False where the device has no memory for it; then everything is as it was.
        """
        generation, self._generation = self._generation, None
        self._places = []
        if generation is not None and generation.handles:
            self._retired.append(generation)
        generation = None
        self.k.clear()
        self.v.clear()
        try:
            self._resize(blocks)
        except (RuntimeError, MemoryError):
            self._resize(self.blocks)
            return False
        finally:
            self._index()
        self.blocks = blocks
        return True

    def _resize(self, blocks: int) -> None:
        """Give every array room for `blocks` blocks; its first rows stay."""
        height = blocks * self.block_size
        kept = min(self.blocks * self.block_size, height)
        for i, part in enumerate(self.parts):
            if self.arrays[i].shape[2] != height:
                other = _zeros(part, height)
                assign([(other, 0, self.arrays[i][..., :kept, :])])
                mx.eval(other)
                self.arrays[i] = other

    def sweep(self) -> None:
        """Let go of older buffers that nobody uses any more."""
        self._retired = [old for old in self._retired if old.handles]

    def evaluate(self) -> None:
        """Run every pending update; wait for those of steps in line as well, where other threads reach the device."""
        mx.eval(self.arrays, self._assigned)
        if self.copier is not None:
            mx.synchronize()

    # --- host bytes

    def acquire(self) -> Buffers:
        """The current buffers, evaluated, counted as in use by one more handle."""
        self.evaluate()
        height = self.blocks * self.block_size
        if self.copier is not None:
            self._generation = self._generation or DeviceGeneration(self.arrays, height, self.copier)
        elif self._generation is None or not self._generation.handles:
            self._generation = Generation(self.arrays, height)  # updates may have copied since nobody looked
        self._generation.acquire()
        return self._generation

    def reading(self, generation: Buffers, block: int, rows: int) -> Opened:
        """A block's first rows in these buffers, for other threads: a window per part, or per part and head."""
        return generation.reading(self.parts, block * self.block_size, rows)

    def writing(self, generation: Buffers, block: int, rows: int, parts: slice = ALL_PARTS) -> Opened:
        """As `reading`, to be filled."""
        return generation.writing(self.parts, block * self.block_size, rows, parts)

    def current(self, generation: Buffers) -> bool:
        """Whether these are still the pool's buffers: it has not grown since."""
        return generation is self._generation

    def copy_rows(self, block: int, rows: int) -> Generation:
        """A private copy of a block's first rows."""
        return self._private(self._taken(self.arrays, block, rows), rows)

    def staging(self) -> Generation:
        """Host buffers for one block; used ones come back by `reuse`."""
        if self._staging:
            return self._staging.pop()
        return self._private([_zeros(part, self.block_size) for part in self.parts], self.block_size)

    def reuse(self, staging: Generation) -> None:
        if len(self._staging) < STAGING_KEPT:
            self._staging.append(staging)

    def staged_windows(self, staging: Generation, rows: int, parts: slice = ALL_PARTS) -> list[memoryview]:
        return staging.windows(self.parts, 0, rows, parts)

    def put(self, block: int, staged: Sequence[mx.array], rows: int, parts: slice = ALL_PARTS) -> None:
        """Bring staged rows of some parts into the pool. The staging buffers may be used again when this returns."""
        start = block * self.block_size
        pairs = zip(self.arrays[parts], staged[parts], strict=True)
        self.settle(always=True)
        self.write([(array, start, part[..., :rows, :]) for array, part in pairs])
        self.evaluate()

    def zero(self, block: int) -> None:
        """Wipe what a failed restore left: bytes that happen to be NaN would spoil products that mask them."""
        self.put(block, [_zeros(part, self.block_size) for part in self.parts], self.block_size)

    def carry_over(self, generation: Buffers, block: int, rows: int) -> None:
        """Rows that were written into older buffers while the pool grew: bring them into the current ones."""
        if not self.current(generation):
            self.put(block, self._taken(generation.arrays, block, rows), rows)

    # --- inside

    def _taken(self, arrays: Sequence[mx.array], block: int, rows: int) -> list[mx.array]:
        """Copies of a block's first rows, evaluated: no view is left that would pin the pool."""
        first = block * self.block_size
        taken = [_copied(array, first, first + rows) for array in arrays]
        mx.eval(taken)
        return taken

    def _private(self, arrays: Sequence[mx.array], rows: int) -> Generation:
        mx.eval(arrays)
        return Generation(arrays, rows)

    def _index(self) -> None:
        sides: dict[tuple[int, str], list[mx.array]] = {}
        for part, array in zip(self.parts, self.arrays, strict=True):
            sides.setdefault((part.layer, part.side), []).append(array)
        layers = list(enumerate(self.layout.layers))
        self.k = [Side(tuple(sides[i, "k"]), layer.k) for i, layer in layers]
        self.v = [Side(tuple(sides[i, "v"]), layer.v) for i, layer in layers]


def _copied(array: mx.array, first: int, stop: int) -> mx.array:
    """Rows [first, stop) in a contiguous buffer of their own."""
    if array.shape[1] == 1 or stop - first == array.shape[2]:  # such a slice is contiguous: it would stay a view
        return mx.contiguous(mx.take(array, mx.arange(first, stop), axis=2))
    return mx.contiguous(array[..., first:stop, :])


def _zeros(part: Part, rows: int) -> mx.array:
    """An array at the start of a buffer that is one row longer.

    MLX's CUDA backend takes a view for mlx-lm's own cache, and reads it from row 0 of its buffer whatever row the view
    starts at, when the buffer holds exactly that cache (0.32.4, one query row in half precision).
    """
    size = part.heads * rows * part.width
    buffer = mx.zeros((size + part.width,), getattr(mx, part.dtype))
    array = buffer[:size].reshape(1, part.heads, rows, part.width)
    mx.eval(array)
    return array
