"""Pool rows to and from host memory on CUDA, beside MLX: copies by the driver, on streams of their own and over pinned
memory.

Any thread may use it. The pool's buffers stay where they are (`inplace`), so their addresses are asked for once; the
rows of a block are copied only when nothing in line writes them any more, which is up to the caller. Moving the same
bytes through MLX would take 64 operations and as many waits of the engine for a block of an 8B model.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import mlx.core as mx

from kvd.cache.hostmem import ALL_PARTS, Handles, window
from kvd.cache.inplace import addresses
from kvd.cache.layout import Part
from kvd.cache.nvrtc import available, missing, on_cuda

KEPT: Final = 8
"""pinned buffers kept for the next copy; pinning takes longer than copying"""
PORTABLE: Final = 1
NON_BLOCKING: Final = 1


class CopyFailed(OSError):
    """A copy between host and device did not work."""

    def __init__(self, call: str, result: object) -> None:
        super().__init__(errno.EIO, f"{call}: {result}")


class Copier:
    """Copies of one process. Raises CopyFailed."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._do("cuInit", 0)
        self._context = self._do("cuDevicePrimaryCtxRetain", self._do("cuDeviceGet", 0))
        self._local = threading.local()
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = []

    @contextmanager
    def pinned(self, nbytes: int) -> Iterator[int]:
        """Address of host memory that copies go to and from at full speed."""
        size = 1 << max(nbytes - 1, 1).bit_length()
        with self._lock:
            held = next((one for one in self._free if one[0] == size), None)
            if held is not None:
                self._free.remove(held)
        self._enter()
        at = held[1] if held is not None else int(self._do("cuMemHostAlloc", size, PORTABLE))
        try:
            yield at
        finally:
            with self._lock:
                self._free.append((size, at))
                surplus = self._free.pop(0)[1] if len(self._free) > KEPT else None
            if surplus is not None:
                self._do("cuMemFreeHost", surplus)

    def copy(self, planes: Sequence[tuple[int, int, int, int, int, int]]) -> None:
        """Each plane: (from, its pitch, to, its pitch, bytes of a row, rows), all in bytes and addresses of host or
        device. Returns when all are there, or none is on its way any more."""
        stream, plane = self._enter(), self._local.plane
        try:
            for source, source_pitch, target, target_pitch, width, height in planes:
                plane.srcDevice, plane.srcPitch = source, source_pitch
                plane.dstDevice, plane.dstPitch = target, target_pitch
                plane.WidthInBytes, plane.Height = width, height
                self._do("cuMemcpy2DAsync", plane, stream)
        finally:  # whatever is in line uses memory that is the caller's
            self._do("cuStreamSynchronize", stream)

    def _enter(self) -> Any:
        """The stream of this thread. It has one description of a copy, too, which the driver reads during the call: a
        new one for each takes longer than the call."""
        if not hasattr(self._local, "stream"):
            plane = self._local.plane = self._driver.CUDA_MEMCPY2D()
            plane.srcMemoryType = plane.dstMemoryType = self._driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
            self._do("cuCtxSetCurrent", self._context)
            self._local.stream = self._do("cuStreamCreate", NON_BLOCKING)
        return self._local.stream

    def _do(self, call: str, *arguments: Any) -> Any:
        result, *values = getattr(self._driver, call)(*arguments)
        if result != self._driver.CUresult.CUDA_SUCCESS:
            raise CopyFailed(call, result)
        return values[0] if values else None


@cache
def copier() -> Copier | None:
    """None where the device is no CUDA device, or `lacking` says why."""
    if not available():
        return None
    from cuda.bindings import driver

    return Copier(driver)


def lacking() -> str:
    """What makes a CUDA device slower than it need be; empty elsewhere."""
    if not on_cuda() or not missing():
        return ""
    return f"decode is slower, and KV on its way to the disk and back stalls prefill: {missing()}"


class DeviceGeneration(Handles):
    """A set of buffers on the device, as `hostmem.Generation` is one that the host can address."""

    def __init__(self, arrays: Sequence[mx.array], height: int, copies: Copier) -> None:
        super().__init__()
        self.arrays = list(arrays)
        self.height = height
        self._copies = copies
        self._addresses = addresses(arrays)

    @contextmanager
    def reading(
        self, parts: Sequence[Part], first: int, rows: int, which: slice = ALL_PARTS
    ) -> Iterator[list[memoryview]]:
        """Rows [first, first + rows) of the parts in `which`, copied to host memory: one window for each part."""
        with self._buffer(parts[which], rows) as windows:
            self._copies.copy([
                (device, pitch, host, width, width, heads)
                for device, host, pitch, width, heads in self._planes(parts, first, rows, which, windows)
            ])  # fmt: skip
            yield [window(at, size) for at, size in windows]

    @contextmanager
    def writing(
        self, parts: Sequence[Part], first: int, rows: int, which: slice = ALL_PARTS
    ) -> Iterator[list[memoryview]]:
        """Windows as of `reading`, to be filled; what is in them when the context is left without an error is copied
        into the rows."""
        with self._buffer(parts[which], rows) as windows:
            yield [window(at, size) for at, size in windows]
            self._copies.copy([
                (host, width, device, pitch, width, heads)
                for device, host, pitch, width, heads in self._planes(parts, first, rows, which, windows)
            ])  # fmt: skip

    @contextmanager
    def _buffer(self, parts: Sequence[Part], rows: int) -> Iterator[list[tuple[int, int]]]:
        """(address, bytes) of each part's rows in one pinned buffer."""
        sizes = [part.heads * rows * part.row_bytes for part in parts]
        with self._copies.pinned(sum(sizes)) as at:
            starts = [at + sum(sizes[:number]) for number in range(len(sizes))]
            yield list(zip(starts, sizes, strict=True))

    def _planes(
        self, parts: Sequence[Part], first: int, rows: int, which: slice, windows: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[int, int, int, int, int]]:
        """(device address, host address, device pitch, bytes of a head's rows, heads) of each part."""
        for part, base, (host, _) in zip(parts[which], self._addresses[which], windows, strict=True):
            size = part.row_bytes
            yield base + first * size, host, self.height * size, rows * size, part.heads
