"""What a kill may take: hits, last uses and sightings. They are written in batches, apart from any request."""

from __future__ import annotations

import contextlib
from typing import Final

from kvd.store.base import disk_bytes
from kvd.store.core import Core
from kvd.store.files import replace_whole
from kvd.store.index import BATCH, Batch
from kvd.store.table import Slot

TOUCH_S: Final = 3600.0
"""A shard's time is brought up to date at most this often."""
FLUSH_S: Final = 30.0
"""Hits and last uses go to the index in batches this far apart."""
SEEN_S: Final = 300.0
"""So do sightings to their file: a prefix whose first use a kill forgets is written one use later."""


class Notes:
    """What was noted and is not written yet: lost with the process."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._used: dict[bytes, Slot] = {}
        self._flushed = self._seen = core.clock()

    def use(self, slot: Slot) -> None:
        """A block was used: it counts a hit and is the most recent now."""
        slot.hits += 1
        slot.used = self._core.clock()
        self._used[slot.chain] = slot

    def tend(self) -> None:
        """Write what is due. Raises OSError, IndexFailed."""
        now = self._core.clock()
        if now - self._flushed >= FLUSH_S:
            self.flush()
        if now - self._seen >= SEEN_S:
            self.save_sightings()

    def flush(self) -> None:
        """Hits and last uses to the index, times to files. Raises OSError, IndexFailed."""
        core = self._core
        self._flushed = core.clock()
        slots = [s for c, s in sorted(self._used.items()) if core.table.slots.get(c) is s]
        self._used.clear()
        for slot in slots:
            if slot.used - slot.mtime >= TOUCH_S:
                with contextlib.suppress(FileNotFoundError):
                    core.files.touch(core.tree.shard(slot.namespace, slot.chain), slot.used)
                slot.mtime = slot.used
        for at in range(0, len(slots), BATCH):
            core.write_index(Batch(update=slots[at : at + BATCH]))

    def save_sightings(self) -> None:
        """To their file, within the limit: without room they stay in memory only, counted. Raises OSError."""
        core = self._core
        self._seen = core.clock()
        if not core.sightings.changed:
            return
        text = core.sightings.pack()
        if reason := core.make_room(disk_bytes(len(text))):
            core.counters[f"sightings.{reason}"] += 1
            return
        replace_whole(core.files, core.tree.small("seen"), text, core.limits.durable)
        core.sightings.changed = False
        core.measure()
