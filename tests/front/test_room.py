"""Idle models give way, longest unused first; one that has got a request meanwhile stays."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from kvd.front.memory import Ledger
from kvd.front.room import Room


class Slot(SimpleNamespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def slot(name: str, idle_since: float) -> Any:
    return Slot(model=SimpleNamespace(name=name), idle=True, pinned=False, idle_since=idle_since)


def test_a_model_that_gets_a_request_while_another_is_unloaded_stays() -> None:
    ledger, gone = Ledger(100), list[str]()
    first, second, wants = slots = [slot("first", 1), slot("second", 2), slot("wants", 3)]
    ledger.reserve("first", 40, 0)
    ledger.reserve("second", 40, 0)

    async def unload(one: Any, reason: str) -> None:
        second.idle = False
        gone.append(one.model.name)
        ledger.release(one.model.name)
        slots.remove(one)

    asyncio.run(Room(ledger, lambda: slots, unload).make(wants, 90))
    assert gone == ["first"] and not second.idle and first not in slots
