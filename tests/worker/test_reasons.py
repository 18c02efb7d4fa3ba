"""Every reason that a worker gives for computing what might have been reused has words for people."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvclient.reasons import words
from kvd.worker.arrival import READ_FAILED, VANISHED
from kvd.worker.fetch import CHEAPER

STORE = Path(__file__).parents[2] / "kvd/store"
DAMAGE = sorted({
    code for file in STORE.glob("*.py") for code in re.findall(r'ShardDamaged\("(\w+)"', file.read_text())
})  # fmt: skip


@pytest.mark.parametrize("code", ["not_stored", "diverged", "cache_off", READ_FAILED, VANISHED, CHEAPER, *DAMAGE])
def test_a_reason_is_told_in_words(code: str) -> None:
    assert words(code).startswith(("nothing of it", "it differs", "the request", "computing", "a stored block"))
    assert "_" not in words(code)


def test_the_codes_of_damage_are_found() -> None:
    assert {"checksum", "truncated", "old_format"} <= set(DAMAGE)


def test_a_reason_of_a_newer_daemon_is_shown_as_it_is() -> None:
    assert words("moon_phase") == "moon phase"
