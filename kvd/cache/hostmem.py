"""Host views of pool rows without copies: addresses, generations of buffers, and handles that other threads may drop.

An mlx array's address is taken through numpy once per buffer and the numpy view is dropped at once: a view that lives
across an in-place update would be a use after free. What keeps the buffer alive instead is its `Generation`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import mlx.core as mx
import numpy as np

from kvd.cache.layout import Part

ALL_PARTS = slice(None)
Opened = AbstractContextManager[list[memoryview]]


def address(array: mx.array) -> int:
    """Address of an evaluated array's first byte. It stays while updates are in place."""
    return int(np.frombuffer(array, dtype=np.uint8).ctypes.data)  # type: ignore[call-overload]


def window(start: int, nbytes: int) -> memoryview:
    """`nbytes` of memory at address `start`, writable. The caller keeps what is there alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(start)).cast("B")


def on_cpu() -> bool:
    """Whether mlx computes on the CPU here."""
    return mx.default_device() == mx.Device(mx.cpu)


def addressable() -> bool:
    """Whether host threads can read and write an array's rows in place while mlx updates others.

    True on the CPU and with Metal's unified memory, after a trial; on CUDA a host address would migrate the buffer.
    The trial has something read the array before, since that is what makes updates copy until it is waited for.
    """
    if not on_cpu() and not mx.metal.is_available():
        return False
    trial = mx.zeros((1, 2, 8, 32))
    mx.eval(trial)
    first = address(trial)
    mx.eval(trial[..., 1:, :].sum())
    mx.synchronize()
    trial[..., 2:4, :] = mx.ones((1, 2, 2, 32))
    mx.eval(trial)
    window(first, 4)[:] = np.float32(5).tobytes()
    return bool(address(trial) == first and trial[0, 0, 0, 0].item() == 5 and trial[0, 1, 3, 31].item() == 1)


class Handles:
    """How many handles on other threads use something."""

    def __init__(self) -> None:
        self._handles = 0
        self._lock = threading.Lock()

    @property
    def handles(self) -> int:
        return self._handles

    def acquire(self) -> None:
        with self._lock:
            self._handles += 1

    def drop(self) -> None:
        with self._lock:
            self._handles -= 1


class Generation(Handles):
    """A set of buffers (`[1, heads, height, width]` each) and how many handles on other threads use them.

    It refers to the same array objects as its owner, so updates stay in place; once the owner has replaced those
    (the pool grew), it alone keeps the old buffers alive.
    """

    def __init__(self, arrays: Sequence[mx.array], height: int) -> None:
        super().__init__()
        self.arrays = list(arrays)
        self.height = height
        self._addresses = [address(array) for array in arrays]
        self._views = [window(at, array.nbytes) for at, array in zip(self._addresses, arrays, strict=True)]

    def reading(self, parts: Sequence[Part], first: int, rows: int, which: slice = ALL_PARTS) -> Opened:
        """`windows`, while the context is open."""
        return nullcontext(self.windows(parts, first, rows, which))

    def writing(self, parts: Sequence[Part], first: int, rows: int, which: slice = ALL_PARTS) -> Opened:
        """`windows`, to be filled while the context is open."""
        return nullcontext(self.windows(parts, first, rows, which))

    def windows(self, parts: Sequence[Part], first: int, rows: int, which: slice = ALL_PARTS) -> list[memoryview]:
        """Rows [first, first + rows) of the parts in `which`, head by head: the order of a shard."""
        found: list[memoryview] = []
        for part, view in zip(parts[which], self._views[which], strict=True):
            size = part.row_bytes
            for row in range(first, first + part.heads * self.height, self.height):
                found.append(view[row * size : (row + rows) * size])
        return found


class HostBlock:
    """Bytes of one block's first rows, in the order of a shard: part by part, head by head.

    `buffers` may be read on any thread until `release`, which any thread may call, once. Where the host cannot address
    them, the first call of `buffers` copies them.
    """

    def __init__(self, opened: Opened, on_release: Callable[[], None]) -> None:
        self._opened = ExitStack()
        self._source: Opened | None = opened
        self._buffers: list[memoryview] = []
        self._on_release: Callable[[], None] | None = on_release
        self._lock = threading.Lock()

    def buffers(self) -> list[memoryview]:
        with self._lock:
            if self._source is not None:
                self._buffers, self._source = self._opened.enter_context(self._source), None
            return self._buffers

    def release(self) -> None:
        """The bytes are no longer needed. A second call does nothing."""
        with self._lock:
            done, self._on_release = self._on_release, None
            self._buffers, self._source = [], None
            self._opened.close()
        if done is not None:
            done()

    def __enter__(self) -> HostBlock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
