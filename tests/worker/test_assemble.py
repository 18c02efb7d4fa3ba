"""What a worker tells MLX of memory, by backend."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kvd.models.backend import Backend
from kvd.worker import assemble


@pytest.mark.parametrize("backend, scratch, wired", [
    ("cpu", assemble.SCRATCH_CPU, []), ("cuda", assemble.SCRATCH_GPU, []), ("metal", assemble.SCRATCH_GPU, [10 << 30]),
])  # fmt: skip
def test_memory_is_kept_resident_for_metal_only_and_freed_buffers_are_bounded(
    monkeypatch: pytest.MonkeyPatch, backend: Backend, scratch: int, wired: list[int]
) -> None:
    cached: list[int] = []
    resident: list[int] = []
    monkeypatch.setattr(mx, "set_cache_limit", cached.append)
    monkeypatch.setattr(mx, "set_wired_limit", resident.append)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 10 << 30})
    assemble.limit_memory(backend)
    assert (cached, resident) == ([scratch], wired)
