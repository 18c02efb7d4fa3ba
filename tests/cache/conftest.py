"""Fixtures of the tests of the cache."""

from __future__ import annotations

import pytest

from tests.cache.support import DEVICES, device_of


@pytest.fixture(params=DEVICES)
def addressable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every kind of device, by its name in DEVICES."""
    return device_of(request.param, monkeypatch)
