"""A folder that is deleted, replaced or unmounted under a running owner; folders that are not the store's to take."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvclient.errors import StoreError
from kvd.store import mount
from kvd.store.base import Limits, Reservation
from kvd.store.store import Store
from tests.store.conftest import World, reserve, write
from torments.actor import Actor

PROMPT = list(range(1, 11))


def replaced(folder: str) -> None:
    """Another store takes the place: what a backup put back, or another disk."""
    os.rename(folder, folder + "-old")
    with Store.open(folder, Limits(8_000_000)) as other:
        Actor(other).put([60, 61])


@pytest.mark.parametrize("damage", [
    shutil.rmtree,
    replaced,
    lambda folder: shutil.rmtree(folder + "/blocks"),
    lambda folder: os.unlink(folder + "/CACHEDIR.TAG"),
    lambda folder: os.unlink(folder + "/lock"),
])  # fmt: skip
def test_an_owner_notices_that_its_folder_is_gone_and_the_next_one_makes_it_again(
    world: World, damage: Callable[[str], None]
) -> None:
    actor = world.open()
    actor.put(PROMPT)
    assert actor.store.gone() == ""
    damage(world.folder)
    assert world.folder in actor.store.gone()
    again = world.reopen()
    assert again.store.gone() == ""
    assert again.put(PROMPT) == again.get(PROMPT) == len(PROMPT)


def test_the_end_of_an_owner_touches_nothing_in_the_folder_that_took_the_place(world: World) -> None:
    actor = world.open()
    place = reserve(actor, [60, 61])
    assert isinstance(place, Reservation)
    replaced(world.folder)
    files = {path: path.read_bytes() for path in Path(world.folder).rglob("*.*")}
    actor.store.close()
    assert {path: path.read_bytes() for path in Path(world.folder).rglob("*.*")} == files
    assert os.path.exists(place.final)
    assert world.open().get([60, 61]) == 2


def test_a_report_to_the_last_owner_is_none_to_the_next(world: World) -> None:
    actor = world.open()
    old = reserve(actor, [1, 2])
    assert isinstance(old, Reservation)
    again = world.reopen()
    new = reserve(again, [3, 4])
    assert isinstance(new, Reservation)
    written = write(again, new, [3, 4])
    (late,) = again.store.commit([type(written)(old.id, written.checksum, written.size)])
    assert late.reason == "unknown_reservation"
    assert again.store.commit([written])[0].ok


def test_a_folder_made_in_the_finder_is_as_good_as_an_empty_one(world: World) -> None:
    os.mkdir(world.folder)
    Path(world.folder, ".DS_Store").write_bytes(bytes(6148))
    assert world.open().put([1, 2]) == 2


def test_a_folder_with_files_of_others_is_not_taken(world: World) -> None:
    os.makedirs(world.folder)
    Path(world.folder, "photo.jpg").write_bytes(b"x")
    with pytest.raises(StoreError, match=r"photo\.jpg"):
        world.open()
    assert os.listdir(world.folder) == ["photo.jpg"]
    os.unlink(Path(world.folder, "photo.jpg"))
    assert world.open().put([1]) == 1


def test_a_store_is_not_made_where_its_disk_is_not_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, memory = tmp_path / "disk", tmp_path / "disk.json"
    mounted = {str(disk), "/"}
    monkeypatch.setattr(mount.os.path, "ismount", lambda path: str(path) in mounted)
    root = str(disk / "store")
    mount.check(root, memory)
    mount.remember(root, memory)
    assert mount.mount_of(root) == str(disk)
    disk.mkdir()
    mount.check(root, memory)  # mounted and empty: the user deleted the store
    mounted.discard(str(disk))
    with pytest.raises(StoreError, match=f"mounted at {disk}"):
        mount.check(root, memory)
    mount.check(str(tmp_path / "other"), memory)
    Store.open(root, Limits(8_000_000)).close()
    mount.check(root, memory)  # a store is there, whatever disk that is
    shutil.rmtree(root)
    memory.unlink()
    mount.check(root, memory)


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense"])
def test_a_damaged_memory_of_the_disk_stops_nobody(tmp_path: Path, text: str) -> None:
    memory = tmp_path / "disk.json"
    memory.write_text(text)
    mount.check(str(tmp_path / "store"), memory)
    mount.remember(str(tmp_path / "store"), memory)
    assert memory.read_text() != text
