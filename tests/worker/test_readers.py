"""Threads that read shards: who reads what, in which order, and when a read is waited for no longer."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

from kvd.store.files import RealFiles
from kvd.worker.patience import HUNG_S
from kvd.worker.restore import Readers
from tests.worker.rig import PATIENCE, until


class Piecemeal:
    """An arrival of which each piece comes when the test says so. paths: of its blocks; they differ by default."""

    def __init__(self, blocks: int, groups: int = 1, paths: str = "") -> None:
        self.groups, self.orders = [None] * groups, [None] * blocks
        self.paths = paths or [f"{id(self)}-{block}" for block in range(blocks)]
        self.left = [groups] * blocks
        self.stopped = False
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.pieces: list[tuple[int, int]] = []

    @property
    def missing(self) -> list[int]:
        return [block for block, left in enumerate(self.left) if left]

    def path(self, block: int) -> str:
        return self.paths[block]

    def stop(self) -> None:
        self.stopped = True

    def read(self, files: object, group: int, block: int) -> bool:
        self.pieces.append((group, block))
        self.begun.release()
        self.go.acquire()
        self.left[block] -= 1
        return True

    def wait(self, pieces: int) -> None:
        for _ in range(pieces):
            assert self.begun.acquire(timeout=PATIENCE)


def test_what_waits_in_line_is_given_up_only_when_no_read_comes_back() -> None:
    clock = SimpleNamespace(now=100.0)
    told: SimpleQueue[object] = SimpleQueue()
    readers = Readers(RealFiles(), told.put, 2, lambda: clock.now)
    first, second = Piecemeal(3), Piecemeal(1)
    readers.submit(first)  # type: ignore[arg-type]
    readers.submit(second)  # type: ignore[arg-type]
    first.wait(2)
    clock.now += HUNG_S - 1
    assert readers.due(second) == readers.due(first) == 100.0 + HUNG_S  # type: ignore[arg-type]
    first.go.release()
    first.wait(1)
    assert told.get(timeout=PATIENCE) is first
    assert readers.due(first) == 100.0 + HUNG_S  # type: ignore[arg-type]
    assert readers.due(second) == clock.now + HUNG_S  # type: ignore[arg-type]
    assert readers.hung == 0
    clock.now += 1
    assert readers.hung == 1 and not readers.silent
    closing = threading.Thread(target=readers.close, args=(10 * PATIENCE,), daemon=True)
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    first.go.release(2)


def test_a_file_is_read_by_one_at_a_time_and_layers_come_in_order() -> None:
    told: SimpleQueue[object] = SimpleQueue()
    readers = Readers(RealFiles(), told.put, 3)
    one, two = Piecemeal(2, groups=3, paths="ab"), Piecemeal(2, groups=1, paths="bc")
    readers.submit(one)  # type: ignore[arg-type]
    one.wait(2)
    readers.submit(two)  # type: ignore[arg-type]
    two.wait(1)
    assert sorted(one.pieces) == [(0, 0), (0, 1)] and two.pieces == [(0, 1)]
    for _ in range(4):
        one.go.release()
        one.wait(1)
    assert sorted(one.pieces[2:4]) == [(1, 0), (1, 1)] and sorted(one.pieces[4:]) == [(2, 0), (2, 1)]
    assert two.pieces == [(0, 1)]
    one.go.release(2)
    two.wait(1)
    two.go.release(2)
    readers.close(PATIENCE)


def test_what_waits_behind_a_file_that_hangs_is_given_up_with_it_once_the_rest_is_there() -> None:
    clock = SimpleNamespace(now=100.0)
    told: SimpleQueue[object] = SimpleQueue()
    readers = Readers(RealFiles(), told.put, 3, lambda: clock.now)
    first, second = Piecemeal(1, groups=3, paths="x"), Piecemeal(2, groups=3, paths="yx")
    third = Piecemeal(1, paths="x")
    readers.submit(first)  # type: ignore[arg-type]
    first.wait(1)
    clock.now += HUNG_S
    readers.submit(second)  # type: ignore[arg-type]
    second.wait(1)
    assert readers.due(first) == clock.now  # type: ignore[arg-type]
    readers.stop(first)  # type: ignore[arg-type]
    assert readers.due(second) == clock.now + HUNG_S  # type: ignore[arg-type]
    clock.now += 1
    for _ in range(2):
        second.go.release()
        assert told.get(timeout=PATIENCE) is second
        second.wait(1)
    second.go.release()
    assert told.get(timeout=PATIENCE) is second
    readers.submit(third)  # type: ignore[arg-type]
    assert second.pieces == [(0, 0), (1, 0), (2, 0)]
    for behind in (second, third):
        assert readers.due(behind) == 100.0 + HUNG_S  # type: ignore[arg-type]
    assert readers.hung == 1 and not readers.silent
    readers.stop(second)  # type: ignore[arg-type]
    first.go.release()
    assert told.get(timeout=PATIENCE) is first
    third.wait(1)
    third.go.release()
    assert told.get(timeout=PATIENCE) is third
    assert first.pieces == [(0, 0)] and second.pieces == [(0, 0), (1, 0), (2, 0)]
    readers.close(PATIENCE)


class Asked(RealFiles):
    """Notes which files are opened, which answer when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: SimpleQueue[str] = SimpleQueue()
        self.go = threading.Semaphore(0)

    def open(self, path: str) -> int:
        self.opened.put(path)
        self.go.acquire()
        return super().open(path)


def test_while_it_is_silent_one_reader_at_most_looks_whether_another_file_answers(tmp_path: Path) -> None:
    clock, files = SimpleNamespace(now=100.0), Asked()
    told: SimpleQueue[object] = SimpleQueue()
    readers = Readers(files, told.put, 3, lambda: clock.now)
    hung, good, gone = Piecemeal(1, paths="x"), str(tmp_path / "good"), str(tmp_path / "gone")
    Path(good).write_bytes(b"well")
    readers.submit(hung)  # type: ignore[arg-type]
    hung.wait(1)
    clock.now += HUNG_S
    readers.probe(["x"])
    readers.probe(["x", gone])
    readers.probe([good])
    assert files.opened.get(timeout=PATIENCE) == gone and readers.silent
    clock.now += HUNG_S
    assert readers.hung == 2
    files.go.release()
    until(lambda: not readers.silent)
    assert readers.hung == 1
    until(lambda: not readers._probing)
    readers.probe([good])
    assert files.opened.get(timeout=PATIENCE) == good and files.opened.empty()
    files.go.release()
    hung.go.release()
    assert told.get(timeout=PATIENCE) is hung
    readers.close(PATIENCE)


def test_where_every_reader_hangs_none_is_left_to_look() -> None:
    readers = Readers(Asked(), lambda arrival: None, 2)
    hung = Piecemeal(2)
    readers.submit(hung)  # type: ignore[arg-type]
    hung.wait(2)
    readers.probe(["y"])
    assert not readers._pieces
    hung.go.release(2)
    readers.close(PATIENCE)
