"""The byte ledger and the bytes written."""

from __future__ import annotations

import pytest

from kvd.store.admit import Sightings
from kvd.store.ledger import HEADROOM, INDEX_PER_BLOCK, Ledger
from kvd.store.wear import Wear


def test_what_is_reserved_is_never_more_than_the_limit() -> None:
    ledger = Ledger(HEADROOM + 100_000)
    assert ledger.missing(100_000 - INDEX_PER_BLOCK) == 0
    ledger.reserve(1, 100_000 - INDEX_PER_BLOCK)
    assert ledger.usage().room == 0 and ledger.missing(1) > 0
    with pytest.raises(ValueError):
        ledger.reserve(2, 1)


def test_a_reservation_becomes_a_shard_or_nothing() -> None:
    ledger = Ledger(10**7)
    ledger.reserve(1, 5000)
    ledger.reserve(2, 5000)
    ledger.settle(1, 4096)
    ledger.settle(2, 0)
    usage = ledger.usage()
    assert (usage.shards, usage.reserved, usage.used) == (4096, 0, 4096 + HEADROOM)


def test_the_oldest_sightings_are_forgotten_first() -> None:
    seen = Sightings(2)
    assert [seen.again(c) for c in (b"a", b"b", b"a", b"c", b"b", b"a")] == [False, False, True, False, False, False]


def test_a_day_ends_at_midnight_and_a_year_is_projected_from_the_rate() -> None:
    now = [0.0]
    wear = Wear(lambda: now[0])
    wear.add(100)
    now[0] = 2 * 86_400.0
    assert (wear.today, wear.total) == (0, 100)
    wear.add(50)
    assert wear.today == 50 and wear.per_year() == pytest.approx(75 * 365.25)
    assert wear.endurance_per_year(1000) == pytest.approx(75 * 365.25 / 1000) and wear.endurance_per_year(0) is None


def test_counts_of_a_lost_index_are_taken_from_where_they_are_higher() -> None:
    wear, other = Wear(lambda: 0.0), Wear(lambda: 0.0)
    wear.add(100)
    other.unpack(wear.pack())
    other.unpack(b"garbage")
    other.unpack(b"1 0.0 0 1")
    assert other.total == 100


def test_the_headroom_grows_with_the_limit_up_to_a_point() -> None:
    assert [Ledger(limit).usage().headroom >> 20 for limit in (1 << 30, 1 << 33, 1 << 40)] == [4, 16, 16]
