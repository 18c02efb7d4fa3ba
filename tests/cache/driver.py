"""The calls of NVIDIA's driver that copies make, on host memory: no device is needed to see that the right bytes go to
the right places."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any


class CUresult:
    CUDA_SUCCESS = 0


class CUmemorytype:
    CU_MEMORYTYPE_UNIFIED = 4


class FakeDriver:
    """fails: a call that returns an error."""

    CUresult, CUmemorytype = CUresult, CUmemorytype

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.pinned: dict[int, Any] = {}
        self.copied = self.waits = 0

    def CUDA_MEMCPY2D(self) -> SimpleNamespace:
        return SimpleNamespace()

    def cuInit(self, flags):
        return self._answer("cuInit")

    def cuDeviceGet(self, ordinal):
        return self._answer("cuDeviceGet", ordinal)

    def cuDevicePrimaryCtxRetain(self, device):
        return self._answer("cuDevicePrimaryCtxRetain", "context")

    def cuCtxSetCurrent(self, context):
        return self._answer("cuCtxSetCurrent")

    def cuStreamCreate(self, flags):
        return self._answer("cuStreamCreate", "stream")

    def cuStreamSynchronize(self, stream):
        self.waits += 1
        return self._answer("cuStreamSynchronize")

    def cuMemHostAlloc(self, nbytes, flags):
        buffer = ctypes.create_string_buffer(nbytes)
        self.pinned[ctypes.addressof(buffer)] = buffer
        return self._answer("cuMemHostAlloc", ctypes.addressof(buffer))

    def cuMemFreeHost(self, at):
        del self.pinned[at]
        return self._answer("cuMemFreeHost")

    def cuMemcpy2DAsync(self, plane, stream):
        answer = self._answer("cuMemcpy2DAsync")
        if answer[0] == 0:
            for row in range(plane.Height):
                source, target = plane.srcDevice + row * plane.srcPitch, plane.dstDevice + row * plane.dstPitch
                ctypes.memmove(target, source, plane.WidthInBytes)
            self.copied += plane.Height * plane.WidthInBytes
        return answer

    def _answer(self, call: str, *values: Any) -> tuple[Any, ...]:
        return (1, *values) if call == self.fails else (0, *values)
