"""Every message between front and worker survives the wire; what does not fit is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvclient import wire
from kvclient.errors import OutOfMemory, ProtocolError
from kvd import messages as m

ENTRY = m.Entry(b"c" * 16, b"p" * 16, 256, "/store/blocks/a.safetensors", 4096, b"s" * 16)

FOR_WORKERS: list[m.ToWorker] = [
    m.Work("generate", "r1", wire.pack({"prompt": "x"})),
    m.Work("count", "r2", wire.pack({})),
    m.Cancel("r1", "client gone"),
    m.LookedUp(7, (ENTRY, ENTRY), ENTRY, 12),
    m.LookedUp(8, (), None, 0),
    m.Reserved(9, True, 3, "/store/tmp/3", "/store/blocks/3"),
    m.Reserved(9, False, reason="store_full"),
    m.Committed((m.CommittedItem(3, True), m.CommittedItem(4, False, "damaged"))),
    m.Committed(()),
    m.Departed((b"c" * 16,), (b"p" * 16,)),
    m.Departed((), (), everything=True),
    m.Clear(6, (b"n" * 16,)),
    m.Granted(5, False, 1 << 40),
    m.Granted(5, False, 0, coming=True),
    m.Stop(1.5),
]
FOR_THE_FRONT: list[m.ToFront] = [
    m.Ready({"weights_bytes": 10, "layers": [1, 2]}),
    m.Failed.of(OutOfMemory("too big", needed=2, available=1)),
    *(m.Event(kind, "r1", wire.pack({"text": "a"})) for kind in sorted(m.EVENT_KINDS)),
    m.Lookup(1, b"n" * 16, (b"c" * 16, b"d" * 16), b"n" * 16, tuple(range(600))),
    m.Reserve(2, m.Offer(b"n" * 16, b"c" * 16, b"n" * 16, (1, 2, 3), 0, 9000, "Once upon")),
    m.Written(3, b"s" * 16, 9000),
    m.Abandon(3, "disk_error"),
    m.BadShard(b"n" * 16, b"c" * 16, "checksum"),
    m.Touched(b"n" * 16, (b"c" * 16,)),
    m.PinPath(b"n" * 16, (b"c" * 16,), 60.0),
    m.Cleared(6, 3, 9000, 1),
    m.Grow(5, 1 << 30),
    m.Grow(6, 1 << 20, needed=True),
    m.Beat("prefill", 0.25, 1.0, {"pool_bytes": 5}),
]


def over_the_wire(sent: Any) -> wire.Message:
    return wire.parse(sent.encode().frames())


@pytest.mark.parametrize("sent", FOR_WORKERS, ids=lambda s: type(s).__name__)
def test_a_message_for_a_worker_survives_the_wire(sent: m.ToWorker) -> None:
    assert m.to_worker(over_the_wire(sent)) == sent


@pytest.mark.parametrize("sent", FOR_THE_FRONT, ids=lambda s: type(s).__name__)
def test_a_message_for_the_front_survives_the_wire(sent: m.ToFront) -> None:
    assert m.to_front(over_the_wire(sent)) == sent


def test_every_type_is_in_the_lists_above() -> None:
    assert {type(s) for s in FOR_WORKERS} == set(m.ToWorker.__args__)
    assert {type(s) for s in FOR_THE_FRONT} == set(m.ToFront.__args__)


def test_a_load_error_keeps_its_type_and_numbers() -> None:
    problem = m.Failed.of(OutOfMemory("too big", needed=2, available=1)).problem()
    assert isinstance(problem, OutOfMemory) and problem.details == {"needed": 2, "available": 1}


def test_a_whole_number_of_seconds_is_accepted_as_float() -> None:
    assert m.to_worker(wire.message("stop", m.NOBODY, {"drain_s": 2})) == m.Stop(2.0)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("nonsense", {}),
        ("stop", {}),
        ("stop", {"drain_s": "1"}),
        ("stop", {"drain_s": 1.0, "extra": 1}),
        ("cancel", {"id": 1, "reason": ""}),
        ("committed", {"items": [{"reservation": 1}]}),
        ("committed", {"items": 3}),
        ("looked_up", {"q": True, "hits": [], "child": None, "child_rows": 0}),
    ],
)
def test_what_does_not_fit_is_a_protocol_error(kind: str, body: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        m.to_worker(wire.message(kind, m.NOBODY, body))


@pytest.mark.parametrize("tail", [["a"], [1.0], [True], "abc", None])
def test_token_lists_hold_only_integers(tail: Any) -> None:
    body = {"q": 1, "namespace": b"", "chains": [], "parent": b"", "tail": tail}
    with pytest.raises(ProtocolError):
        m.to_front(wire.message("lookup", m.NOBODY, body))
