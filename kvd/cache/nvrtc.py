"""CUDA kernels of our own: compiled by NVRTC when first needed, 0.3 s each, and launched as operations of MLX.

MLX would compile a kernel too (`mx.fast.cuda_kernel`), behind headers of its own: 2.5 s each, anew in every process.

MLX does not know what a kernel writes into its inputs. Such writes are in order with everything that is put in line
after the kernel has been (`mx.async_eval`); nothing else that changes those arrays may be part of the same evaluation.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import mlx.core as mx


class CompileFailed(RuntimeError):
    """NVRTC does not take a kernel for this device."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One form of a kernel, for this process's device. name: the mangled one."""

    name: str
    image: bytes

    def launch(
        self, inputs: Sequence[mx.array], scalars: Sequence[int | float], blocks: tuple[int, int, int], threads: int,
        shape: tuple[int, ...], dtype: mx.Dtype,
    ) -> mx.array:  # fmt: skip
        """Its output, of `shape` and `dtype`. Its parameters are the inputs as pointers, the output, the scalars (32
        bits each). An input that is not row contiguous is copied before."""
        across, down, deep = blocks
        told = [scalar if isinstance(scalar, int) else single(scalar) for scalar in scalars]
        (out,) = mx.fast.precompiled_cuda_kernel(
            name=self.name, compiled_source=self.image, inputs=inputs, output_shapes=[shape], output_dtypes=[dtype],
            scalars=told, grid=(across * threads, down, deep), threadgroup=(threads, 1, 1),
            ensure_row_contiguous=True,
        )  # fmt: skip
        result: mx.array = out
        return result


def single(value: float) -> float:
    """The nearest number that 32 bits hold: MLX takes no other."""
    nearest: float = struct.unpack("f", struct.pack("f", value))[0]
    return nearest


def on_cuda() -> bool:
    return mx.default_device() != mx.Device(mx.cpu) and bool(mx.cuda.is_available())


def available() -> bool:
    """Whether this process's device takes our kernels."""
    return on_cuda() and not missing()


@cache
def missing() -> str:
    """Why a CUDA device takes none; empty where it does."""
    try:
        compiled("rows.cu", "kvd::write_rows<uint4>")
    except ImportError:
        return "NVIDIA's cuda-bindings are not installed"
    except RuntimeError as problem:  # a library that is not found is one, too
        return str(problem).partition("\n")[0]
    return ""


@cache
def compiled(file: str, expression: str) -> Kernel:
    """The kernel that `expression` names in a file of this package. Raises CompileFailed with NVRTC's log."""
    from cuda.bindings import nvrtc

    text, named = (files("kvd.cache") / file).read_bytes(), expression.encode()
    target, native = _target()
    options = [b"--gpu-architecture=" + target, b"--std=c++20"]
    program = _done(nvrtc.nvrtcCreateProgram(text, file.encode(), 0, None, None))
    try:
        _done(nvrtc.nvrtcAddNameExpression(program, named))
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_done(nvrtc.nvrtcGetProgramLogSize(program)))
            _done(nvrtc.nvrtcGetProgramLog(program, log))
            said = bytes(log).rstrip(b"\0\n").decode(errors="replace")
            raise CompileFailed(f"NVRTC does not compile {file} for {target.decode()}: {said}")
        name = _done(nvrtc.nvrtcGetLoweredName(program, named)).decode()
        size, read = (
            (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN) if native else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        )
        image = bytearray(_done(size(program)))
        _done(read(program, image))
        return Kernel(name, bytes(image))
    finally:
        _done(nvrtc.nvrtcDestroyProgram(program))


@cache
def _target() -> tuple[bytes, bool]:
    from cuda.bindings import driver, nvrtc

    _done(driver.cuInit(0))
    device = _done(driver.cuDeviceGet(0))
    kinds = driver.CUdevice_attribute
    major, minor = (
        _done(driver.cuDeviceGetAttribute(kind, device))
        for kind in (
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
        )
    )  # fmt: skip
    return target_of(10 * major + minor, _done(nvrtc.nvrtcGetSupportedArchs()))


def target_of(own: int, known: Sequence[int]) -> tuple[bytes, bool]:
    """What to compile for, and whether it is the device's own code: one that NVRTC does not know gets the PTX of the
    newest before it, which its driver translates. Raises CompileFailed."""
    if own in known:
        return b"sm_%d" % own, True
    older = [arch for arch in known if arch < own]
    if not older:
        raise CompileFailed(f"NVRTC compiles for sm_{min(known)} and newer, this device is sm_{own}")
    return b"compute_%d" % max(older), False


def _done(returned: tuple[Any, ...]) -> Any:
    """What a call of the driver or of NVRTC gives besides its result; None where that is all."""
    result, *values = returned
    if int(result):
        raise CompileFailed(f"{type(result).__name__} {result.name}")
    return values[0] if values else None
