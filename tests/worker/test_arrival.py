"""Pieces of a restore: which layers go together, who waits for what, and how a wait ends."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvd.cache.layout import KVLayout, LayerKV, Precision
from kvd.worker.arrival import Arrival, Failure, Group, Unfinished, layer_groups
from kvd.worker.fetch import Restore
from kvd.worker.patience import STILL_S, WANTED_S, Patience
from tests.worker.rig import PATIENCE

NATIVE = KVLayout((LayerKV(2, 32, 32),) * 5, "float32")
"""512 bytes of a token's layer"""


@pytest.mark.parametrize(
    ("nbytes", "layers"),
    [(1, [1, 2, 3, 4, 5]), (2 * 4096, [1, 2, 3, 4, 5]), (2 * 4096 + 1, [2, 4, 5]), (1 << 30, [5])],
)
def test_a_group_is_as_few_whole_layers_as_have_the_bytes(nbytes: int, layers: list[int]) -> None:
    assert layer_groups(NATIVE, 16, nbytes) == tuple(
        Group(stop, slice(2 * start, 2 * stop)) for start, stop in zip([0, *layers], layers, strict=False)
    )


def test_the_parts_of_a_quantised_layer_stay_together() -> None:
    mixed = NATIVE.with_precision([Precision(8, 32)] * 5, [Precision()] * 4 + [Precision(4, 32)])
    assert [group.tensors for group in layer_groups(mixed, 16, 1)] == [
        slice(0, 4), slice(4, 8), slice(8, 12), slice(12, 16), slice(16, 22),
    ]  # fmt: skip


class Scripted(Arrival):
    """An arrival of two blocks in three groups (layers 0, 1-2, 3) whose pieces are scripted."""

    def __init__(self, patience: Patience, *, each: bool = False) -> None:
        groups = (Group(1, slice(0, 2)), Group(3, slice(2, 6)), Group(4, slice(6, 8)))
        super().__init__([None, None], groups, patience.news, each=each)  # type: ignore[list-item]
        self.fate: dict[tuple[int, int], Failure] = {}
        self.tried: list[tuple[int, int]] = []

    def _fill(self, files: object, group: int, block: int) -> Failure | None:
        self.tried.append((group, block))
        return self.fate.get((group, block))

    def come(self, group: int, block: int) -> bool:
        return self.read(None, group, block)  # type: ignore[arg-type]


def test_a_layer_is_there_when_its_group_of_all_blocks_is() -> None:
    one = Scripted(Patience())
    assert not one.come(0, 0) and not one.there(0)
    assert one.come(0, 1) and one.there(0) and not one.there(1)
    assert not one.come(1, 0) and one.come(1, 1)
    assert [one.there(layer) for layer in range(4)] == [True, True, True, False]
    assert not one.done and not one.come(2, 0) and one.come(2, 1) and one.done
    assert sorted(one.landed) == [(block, group) for block in (0, 1) for group in (0, 1, 2)]


def test_every_piece_is_told_where_each_needs_work() -> None:
    one = Scripted(Patience(), each=True)
    assert one.come(0, 0)


def test_a_failed_block_is_read_no_further_and_nothing_is_there_any_more() -> None:
    patience = Patience()
    one = Scripted(patience)
    one.fate[1, 0] = Failure("checksum", damaged=True)
    for group in (0, 1, 2):
        for block in (0, 1):
            one.come(group, block)
    assert one.done and one.failures == {0: Failure("checksum", damaged=True)}
    assert one.tried == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 1)]
    assert not one.there(0)
    with pytest.raises(Unfinished):
        one.wait(0, lambda: STILL_S)


def test_a_wait_ends_with_the_last_piece_of_its_group() -> None:
    patience = Patience()
    one = Scripted(patience)
    patience.begin(None)
    ended = threading.Event()

    def wait() -> None:
        one.wait(1, lambda: PATIENCE)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    for group, block in ((0, 0), (0, 1), (1, 0)):
        one.come(group, block)
        assert not ended.is_set()
    one.come(1, 1)
    thread.join(PATIENCE)
    assert ended.is_set()


def test_a_wait_is_left_soon_when_the_engine_is_wanted_and_in_time_when_it_is_not() -> None:
    now = 100.0
    patience = Patience(lambda: now)
    patience.begin(None)
    assert patience.left() == STILL_S
    now += 1.0
    assert patience.left() == STILL_S - 1.0
    patience.wanted()
    assert patience.left() == WANTED_S
    now += 0.1
    patience.wanted()
    assert patience.left() == pytest.approx(WANTED_S - 0.1)
    with pytest.raises(Unfinished):
        Scripted(patience).wait(0, lambda: patience.left() - WANTED_S)
    patience.heard()
    patience.begin(0.5)
    assert patience.left() == 0.5


def test_being_wanted_wakes_who_waits() -> None:
    asked = threading.Event()
    patience = Patience()
    left: list[str] = []

    def still() -> float:
        asked.set()
        return 0.0 if patience.left() < STILL_S - 1 else PATIENCE

    def wait() -> None:
        with pytest.raises(Unfinished):
            Scripted(patience).wait(0, still)
        left.append("left")

    patience.begin(None)
    thread = threading.Thread(target=wait)
    thread.start()
    assert asked.wait(PATIENCE)
    patience.wanted()
    thread.join(PATIENCE)
    assert left == ["left"]


def test_nothing_of_a_restore_is_accepted_before_all_of_it_is_read() -> None:
    """Though the pass that ran over it asked for no layer."""
    patience = Patience()
    one, ended = Scripted(patience), list[Restore]()
    choice, seq, entry, landing = SimpleNamespace(), SimpleNamespace(), SimpleNamespace(tokens=16), SimpleNamespace()
    landing.settle = lambda rows, parts: None
    restore = Restore(
        cast(Any, choice), cast(Any, seq), 0, [cast(Any, entry)] * 2, [cast(Any, landing)] * 2, 32, 0, one, patience,
        ended.append,
    )  # fmt: skip
    pieces = [(group, block) for group in (0, 1, 2) for block in (0, 1)]
    for group, block in pieces[:-1]:
        one.come(group, block)
    with pytest.raises(Unfinished):
        restore.finish()
    assert not ended
    one.come(*pieces[-1])
    restore.finish()
    assert ended == [restore]


def test_a_reader_that_runs_out_of_memory_fails_a_block_and_goes_on() -> None:
    def full(tensors: slice) -> Any:
        raise MemoryError

    order = cast(Any, SimpleNamespace(entry=SimpleNamespace(path="x", size=0, checksum=b""), expected=None, into=full))
    arrival = Arrival([order], [Group(1, slice(0, 2))], Patience().news)
    arrival._parsed = [cast(Any, object())]
    assert arrival.read(cast(Any, None), 0, 0)
    assert arrival.done and arrival.failures == {0: Failure("read_failed")}
