"""Host access to arrays: only where it works, and never to a buffer that is gone."""

from __future__ import annotations

import threading

import mlx.core as mx
import pytest

from kvd.cache import hostmem
from kvd.cache.hostmem import Generation, HostBlock, address, addressable, window
from kvd.cache.layout import Part


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
