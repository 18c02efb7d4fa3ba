"""Host access to arrays: only where it works, and never to a buffer that is gone."""

from __future__ import annotations

import errno
import threading
from contextlib import ExitStack

import mlx.core as mx
import numpy as np
import pytest

from kvd.cache import devicemem, hostmem
from kvd.cache.devicemem import KEPT, Copier, CopyFailed, DeviceGeneration
from kvd.cache.hostmem import Generation, HostBlock, address, addressable, window
from kvd.cache.layout import Part
from tests.cache.driver import FakeDriver
from tests.cache.support import BLOCK, device_of, model, new_cache, prefill, prompt


def test_this_device_can_be_addressed():
    assert addressable()


def test_a_device_without_unified_memory_is_not_tried(monkeypatch):
    monkeypatch.setattr(hostmem, "on_cpu", lambda: False)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert not addressable()


def test_an_array_that_moves_under_updates_is_found_out(monkeypatch):
    places = iter([address(mx.zeros(64)), 2])
    monkeypatch.setattr(hostmem, "address", lambda array: next(places))
    kept = mx.zeros(64)
    monkeypatch.setattr(hostmem, "window", lambda start, nbytes: memoryview(bytearray(nbytes)))
    assert not addressable()
    del kept


def test_a_device_that_lets_go_too_late_of_what_was_read_is_found_out(monkeypatch):
    """Updates behind a read copy the array there, even when the read was waited for."""
    made, kept, zeros = [], [], mx.zeros

    def noted(*shape):
        made.append(zeros(*shape))
        return made[-1]

    def late():
        kept.append(made[0][..., :1, :])
        mx.eval(kept)

    monkeypatch.setattr(mx, "zeros", noted)
    monkeypatch.setattr(mx, "synchronize", late)
    assert not addressable()
    assert kept


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.uint32])
def test_what_is_written_through_a_window_is_in_the_array(dtype):
    array = mx.zeros((1, 2, 4, 8), dtype)
    mx.eval(array)
    size = array.nbytes
    window(address(array), size)[:] = b"\x01" * size
    assert bytes(memoryview(array.view(mx.uint8))) == b"\x01" * size


def test_handles_are_counted_from_any_thread():
    array = mx.zeros((1, 1, 2, 4))
    mx.eval(array)
    generation = Generation([array], 2)
    threads = [threading.Thread(target=lambda: [generation.acquire() for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert generation.handles == 2000


def test_a_handle_lets_go_once():
    calls = []
    array = mx.zeros((1, 2, 2, 4))
    mx.eval(array)
    generation = Generation([array], 2)
    part = Part("k.0", 0, "k", "float32", 2, 4)
    with HostBlock(generation.reading([part], 0, 2), lambda: calls.append(1)) as handle:
        assert [window.nbytes for window in handle.buffers()] == [32, 32]
    handle.release()
    assert calls == [1] and handle.buffers() == []


def test_copies_go_back_to_buffers_that_are_kept_and_errors_name_the_call():
    driver = FakeDriver()
    copies = Copier(driver)
    for _ in range(3):
        with copies.pinned(1000) as first, copies.pinned(1000) as second:
            assert first != second
    assert len(driver.pinned) == 2
    with ExitStack() as stack:
        for _ in range(KEPT + 3):
            stack.enter_context(copies.pinned(1000))
    assert len(driver.pinned) == KEPT
    for size, call in enumerate(("cuMemcpy2DAsync", "cuStreamSynchronize", "cuMemHostAlloc"), 20):
        driver.fails = call
        with pytest.raises(CopyFailed, match=call) as caught, copies.pinned(1 << size) as at:
            copies.copy([(at, 4, at + 64, 4, 4, 1)])
        assert caught.value.errno == errno.EIO
    with pytest.raises(CopyFailed, match="cuInit"):
        Copier(FakeDriver(fails="cuInit"))


def test_a_copy_that_fails_waits_for_those_that_are_in_line_before_its_buffer_is_anothers():
    driver = FakeDriver()
    copies = Copier(driver)
    driver.fails = "cuMemcpy2DAsync"
    with pytest.raises(CopyFailed), copies.pinned(1000) as at:
        copies.copy([(at, 4, at + 64, 4, 4, 1)] * 2)
    assert driver.waits == 1


def test_a_tail_that_cannot_be_copied_is_an_error_that_holds_nothing(monkeypatch):
    device_of("copied", monkeypatch)
    cache = new_cache(model())
    sequence = cache.open([], None)
    prefill(model(), cache, sequence, prompt(BLOCK // 2))
    tail = sequence.tail()
    monkeypatch.setattr(cache.pool.copier._driver, "fails", "cuMemcpy2DAsync")
    with pytest.raises(CopyFailed):
        cache.host_rows(tail)
    assert not cache.pool._generation.handles


def test_what_is_written_under_an_error_is_not_copied_to_the_device(monkeypatch):
    monkeypatch.setattr(devicemem, "addresses", lambda arrays: [address(array) for array in arrays])
    array = mx.zeros((1, 2, 8, 4))
    mx.eval(array)
    part = Part("k.0", 0, "k", "float32", 2, 4)
    generation = DeviceGeneration([array], 8, Copier(FakeDriver()))
    with pytest.raises(OSError, match="torn"), generation.writing([part], 2, 3) as (window,):
        window[:] = b"\x01" * window.nbytes
        raise OSError("torn")
    assert not array.any().item()
    with generation.writing([part], 2, 3) as (window,):
        window[:] = b"".join(np.float32(value).tobytes() for value in range(24))
    assert array[0, 0, 2:5].flatten().tolist() == list(range(12))
    assert array[0, 1, 2:5].flatten().tolist() == list(range(12, 24))
    assert not array[:, :, 5:].any().item()
    with generation.reading([part], 3, 1) as (window,):
        assert bytes(window) == b"".join(np.float32(value).tobytes() for value in (4, 5, 6, 7, 16, 17, 18, 19))
