"""Who gives way when memory is needed: models without requests, longest unused first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from kvd.front.memory import Ledger
from kvd.front.slot import Slot


class Room:
    """Owned by the loop's thread. `turn`: one at a time makes room and takes it, or two would unload each other."""

    def __init__(
        self, ledger: Ledger, slots: Callable[[], Sequence[Slot]], unload: Callable[[Slot, str], Awaitable[None]]
    ) -> None:
        self._ledger, self._slots, self._unload = ledger, slots, unload
        self._growing: dict[Slot, asyncio.Task[None]] = {}
        self.turn = asyncio.Lock()

    async def make(self, slot: Slot, wanted: int) -> None:
        """Unload idle models until this one can have `wanted` bytes in all. Unloads none when all of them would not
        do. Which are idle is asked anew after each: a request may have come meanwhile."""
        while (idle := self._idle(slot)) and self._free(slot) < wanted <= self._most(slot, idle):
            await self._unload(idle[0], "memory")

    def is_coming(self, slot: Slot, nbytes: int) -> bool:
        """Whether others give way so that this one's pool can have `nbytes` more: ask again soon. Begins with it."""
        making = self._growing.get(slot)
        if making is None or making.done():
            wanted = self._ledger.held(slot.model.name).total + nbytes
            if self._most(slot, self._idle(slot)) < wanted:
                return False
            self._growing[slot] = asyncio.get_running_loop().create_task(self._in_turn(slot, wanted))
        return True

    async def _in_turn(self, slot: Slot, wanted: int) -> None:
        async with self.turn:
            await self.make(slot, wanted)

    def _idle(self, slot: Slot) -> list[Slot]:
        others = (other for other in self._slots() if other.idle and not other.pinned and other is not slot)
        return sorted(others, key=lambda other: other.idle_since)

    def _free(self, slot: Slot) -> int:
        return self._ledger.free + self._ledger.held(slot.model.name).total

    def _most(self, slot: Slot, idle: Sequence[Slot]) -> int:
        return self._free(slot) + sum(self._ledger.held(s.model.name).total for s in idle)
