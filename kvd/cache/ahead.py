"""A pass over rows that are still being read: planned as if they were there, each layer waits for its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx

from kvd.cache.plugin import Step

if TYPE_CHECKING:
    from kvd.cache.paged import PagedCache
    from kvd.cache.sequence import CachedSequence


@dataclass(frozen=True, slots=True)
class Outlook:
    """A sequence as it will be when its landings are accepted: what a pass over it is planned from."""

    cache: PagedCache
    rows: int
    block_table: tuple[int, ...]


def outlook(sequence: CachedSequence, rows: int, n: int) -> Outlook:
    """The sequence with `rows` rows, as its landings will make it, and capacity for n further ones behind them.

    What is written behind rows that a landing brings overwrites what else it brings: tell its `accept`. Raises
    PoolFull; then nothing has changed.
    """
    sequence.cache.assert_owner()
    size = sequence.cache.block_size
    more = -(-(rows + n) // size) - len(sequence.block_table)
    if more > 0:
        sequence.lengthen(more)
    return Outlook(sequence.cache, rows, sequence.block_table)


class Arriving(Protocol):
    """Rows of the sequence that come layer by layer."""

    def there(self, layer: int) -> bool:
        """Whether `wait` returns at once."""
        ...

    def wait(self, layer: int) -> None:
        """Until the pool has this layer's rows. Whatever it raises ends the pass."""
        ...


class AheadStep:
    """A step whose layers wait for their stored rows, while the device computes what comes before."""

    def __init__(self, step: Step, arriving: Arriving) -> None:
        self.offset = step.offset
        self.opaque = step.opaque
        self._step, self._arriving = step, arriving

    def fetch(self, layer: int, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        if not self._arriving.there(layer):
            mx.async_eval(keys, values)
        self._arriving.wait(layer)
        return self._step.fetch(layer, keys, values)
