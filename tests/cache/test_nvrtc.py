"""Kernels compiled for real, where NVRTC is installed (it needs no GPU), and what is said where they cannot be."""

from __future__ import annotations

import importlib.util
import sys

import mlx.core as mx
import pytest

from kvd.cache import devicemem, nvrtc
from kvd.cache.kernel import _form
from kvd.cache.layout import NATIVE, Precision
from kvd.cache.nvrtc import CompileFailed, Kernel, compiled, missing

FORMS = [
    (mx.bfloat16, 128, 128, 4), (mx.float16, 96, 64, 3), (mx.bfloat16, 32, 64, 1),
    (mx.bfloat16, 128, 128, 4, Precision(8, 64), Precision(4, 64)), (mx.float16, 64, 64, 8, Precision(4, 32), NATIVE),
]  # fmt: skip
INSTALLED = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None
needs_nvrtc = pytest.mark.skipif(not INSTALLED, reason="cuda-bindings are not installed: kernels cannot be compiled")


@pytest.fixture(autouse=True)
def forgotten():
    kept = (compiled, missing, _form)
    for one in kept:
        one.cache_clear()
    yield
    for one in kept:
        one.cache_clear()


@needs_nvrtc
@pytest.mark.parametrize("target", [(b"sm_80", True), (b"sm_90", True), (b"compute_90", False)], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_compiles(monkeypatch, target, form):
    monkeypatch.setattr(nvrtc, "_target", lambda: target)
    kernel = _form(*form)
    assert "decode" in kernel.name
    assert kernel.image.startswith(b"\x7fELF") if target[1] else b".entry" in kernel.image
    for expression in ("kvd::write_rows<unsigned short>", "kvd::write_quantised"):
        assert compiled("rows.cu", expression).name.startswith("_ZN3kvd")


@needs_nvrtc
def test_a_device_that_is_too_old_is_told_why(monkeypatch):
    monkeypatch.setattr(nvrtc, "_target", lambda: (b"sm_75", True))
    with pytest.raises(CompileFailed, match="decode.cu for sm_75: .*sm_80 or higher"):
        _form(mx.bfloat16, 128, 128, 4)


@pytest.mark.parametrize(
    ("own", "target"), [(90, (b"sm_90", True)), (110, (b"compute_103", False)), (130, (b"compute_121", False))]
)
def test_a_device_that_nvrtc_does_not_know_gets_what_it_can_translate(own, target):
    assert nvrtc.target_of(own, [75, 80, 90, 100, 103, 120, 121]) == target


def test_a_device_older_than_all_that_nvrtc_knows_is_told_so():
    with pytest.raises(CompileFailed, match="sm_70"):
        nvrtc.target_of(70, [75, 80, 90])


def test_without_the_bindings_nothing_is_launched_and_the_reason_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr(nvrtc, "on_cuda", lambda: True)
    monkeypatch.setattr(devicemem, "on_cuda", lambda: True)
    assert not nvrtc.available()
    assert "cuda-bindings are not installed" in devicemem.lacking()


def test_a_kernel_that_does_not_compile_is_a_reason_too(monkeypatch):
    def refuse(file, expression):
        raise CompileFailed("NVRTC does not compile rows.cu for sm_10: too old\nand more")

    monkeypatch.setattr(nvrtc, "compiled", refuse)
    assert missing() == "NVRTC does not compile rows.cu for sm_10: too old"


@pytest.mark.skipif(mx.cuda.is_available(), reason="a CUDA device would launch it")
def test_any_number_can_be_told_to_a_kernel():
    with pytest.raises(RuntimeError, match="No CUDA back-end"):  # and not the binding's ValueError about the number
        Kernel("none", b"").launch([mx.zeros(1)], [1, 0.088], (1, 1, 1), 32, (1,), mx.float32)
