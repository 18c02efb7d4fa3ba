"""The limit on open files, on a system that plays macOS: unlimited by its own word, and refusing more than 10,240."""

from __future__ import annotations

import resource

import pytest

from kvclient.descriptors import raise_limit
from kvd.models.load import raise_file_limit

FREE = resource.RLIM_INFINITY


class System:
    def __init__(self, soft: int, hard: int) -> None:
        self.limits = (soft, hard)

    def getrlimit(self, which: int) -> tuple[int, int]:
        assert which == resource.RLIMIT_NOFILE
        return self.limits

    def setrlimit(self, which: int, limits: tuple[int, int]) -> None:
        if limits[0] > 10240 or limits[0] == FREE:
            raise ValueError("Invalid argument")
        self.limits = limits


def system(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> System:
    made = System(soft, hard)
    monkeypatch.setattr(resource, "getrlimit", made.getrlimit)
    monkeypatch.setattr(resource, "setrlimit", made.setrlimit)
    return made


@pytest.mark.parametrize(("soft", "hard", "after"), [
    (256, FREE, 10240), (256, 4096, 4096), (256, 1 << 20, 10240), (20000, 1 << 20, 20000), (4096, 4096, 4096),
])  # fmt: skip
def test_the_soft_limit_is_raised_and_never_lowered(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, after: int
) -> None:
    made = system(monkeypatch, soft, hard)
    assert raise_limit() == after and made.limits == (after, hard)


def test_without_any_limit_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    made = system(monkeypatch, FREE, FREE)
    assert raise_limit() == 10240 and made.limits == (FREE, FREE)


def test_a_worker_gets_what_macos_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    made = system(monkeypatch, 256, FREE)
    raise_file_limit()
    assert made.limits == (10240, FREE)
