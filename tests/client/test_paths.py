"""Where the daemon lives."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvclient import paths
from kvclient.errors import BadRequest


def test_kvd_home_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_HOME", "/tmp/here")
    assert paths.home() == Path("/tmp/here")
    assert paths.socket_path() == Path("/tmp/here/run/kvd.sock")


def test_kvd_socket_moves_only_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_HOME", "/tmp/here")
    monkeypatch.setenv("KVD_SOCKET", "/tmp/s")
    assert (paths.home(), paths.socket_path()) == (Path("/tmp/here"), Path("/tmp/s"))
    assert paths.control_path(paths.socket_path()) == Path("/tmp/s.ctl")


@pytest.mark.parametrize(("platform", "data", "expected"), [
    ("linux", "/tmp/data", "/tmp/data/kvd"), ("linux", None, "/tmp/me/.local/share/kvd"),
    ("darwin", "/tmp/data", "/tmp/me/Library/Application Support/kvd"),
])  # fmt: skip
def test_each_platform_has_its_place(
    monkeypatch: pytest.MonkeyPatch, platform: str, data: str | None, expected: str
) -> None:
    monkeypatch.setattr(paths.sys, "platform", platform)
    monkeypatch.setenv("HOME", "/tmp/me")
    if data is None:
        monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_DATA_HOME", data)
    assert paths.home() == Path(expected)


def test_the_limit_counts_the_longest_derived_path(monkeypatch: pytest.MonkeyPatch) -> None:
    room = paths.SOCKET_LIMIT - len(paths.LONGEST_SUFFIX) - 1
    fits = Path("/" + "x" * (room - 1))
    assert paths.checked(fits) == fits
    with pytest.raises(BadRequest, match=f"allows {paths.SOCKET_LIMIT}; set KVD_SOCKET") as refused:
        paths.checked(Path(str(fits) + "x"))
    assert refused.value.details["size"] == paths.SOCKET_LIMIT + 1
