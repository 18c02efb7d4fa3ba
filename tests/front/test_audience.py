"""Who is told that blocks left the store, and in how many messages."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.front.audience import CHAINS_MOST, Audience, batches
from kvd.messages import Departed
from kvd.store.departed import MOST, Departure, Departures


@dataclass(frozen=True)
class Worker:
    run: int


def test_a_large_departure_travels_in_several_messages_and_loses_nothing() -> None:
    chains = tuple(n.to_bytes(16, "little") for n in range(2 * CHAINS_MOST + 5))
    messages = list(batches(Departure(b"n", chains, (b"p",))))
    assert [len(m.chains) for m in messages] == [CHAINS_MOST, CHAINS_MOST, 5]
    assert tuple(c for m in messages for c in m.chains) == chains
    assert [m.parents for m in messages] == [(b"p",), (), ()]


def test_a_worker_is_told_of_its_namespaces_until_it_is_gone() -> None:
    audience: Audience[Worker] = Audience()
    one, two = Worker(1), Worker(2)
    audience.join(b"n", one)
    audience.join(b"n", two)
    audience.join(b"m", two)
    left = [Departure(b"m", (b"c",), (b"m",)), Departure(b"other", (b"d",), ())]
    assert list(audience.told(left)) == [(two, Departed((b"c",), (b"m",)))]
    everything = Departed((), (), everything=True)
    assert list(audience.told([Departure(None)])) == [(one, everything), (two, everything)]
    audience.leave(2)
    assert list(audience.told(left)) == []


def test_more_departures_than_can_be_named_are_said_to_be_everything() -> None:
    departures = Departures()
    departures.add(b"n", b"c", b"n")
    departures.add(b"n", b"d", b"n")
    assert departures.take() == (Departure(b"n", (b"c", b"d"), (b"n",)),)
    assert departures.take() == ()
    for number in range(MOST + 2):
        departures.add(b"n", number.to_bytes(16, "little"), b"n")
    assert departures.take() == (Departure(None),)
    assert departures.take() == ()
