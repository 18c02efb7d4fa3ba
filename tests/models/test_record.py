from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvclient.errors import BadRequest, UnknownModel, UnsupportedModel
from kvd.models.record import FILE, Record, find, names, read_record, write_record
from tests.tiny import tiny_model


def place(home: Path, name: str, path: str | None = None) -> Path:
    folder = home / "models" / name
    folder.mkdir(parents=True)
    write_record(folder, Record(name, "here", 1.5, "f" * 64, path))
    return folder


def test_a_record_comes_back_whole(tmp_path: Path) -> None:
    folder = place(tmp_path, "m")
    assert read_record(folder) == Record("m", "here", 1.5, "f" * 64)
    assert [path.name for path in folder.iterdir()] == [FILE]


def test_what_a_newer_version_wrote_is_read(tmp_path: Path) -> None:
    folder = place(tmp_path, "m")
    content = json.loads((folder / FILE).read_text()) | {"new": 1}
    (folder / FILE).write_text(json.dumps(content))
    assert read_record(folder).name == "m"


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"name": "m"'])
def test_a_damaged_record_is_named(tmp_path: Path, content: str) -> None:
    folder = place(tmp_path, "m")
    (folder / FILE).write_text(content)
    with pytest.raises(UnsupportedModel, match="kvd.json cannot be read"):
        read_record(folder)


def test_models_are_found_beside_their_record_or_where_it_points(tmp_path: Path) -> None:
    tiny_model(place(tmp_path, "inside"))
    elsewhere = tiny_model(tmp_path / "elsewhere")
    place(tmp_path, "outside", str(elsewhere))
    (tmp_path / "models" / ".pull-x").mkdir()
    (tmp_path / "models" / "no-record").mkdir()
    assert names(tmp_path) == ["inside", "outside"]
    assert find(tmp_path, "inside")[1] == tmp_path / "models" / "inside"
    assert find(tmp_path, "outside")[1] == elsewhere
    shutil.rmtree(elsewhere)
    with pytest.raises(UnsupportedModel, match="files of model outside are gone"):
        find(tmp_path, "outside")


def test_a_model_has_one_spelling_where_the_disk_takes_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model(place(tmp_path, "Demo"))
    assert find(tmp_path, "Demo")[0].name == "Demo"
    monkeypatch.setattr(os, "listdir", lambda folder: ["demo"])
    with pytest.raises(UnknownModel):
        find(tmp_path, "Demo")


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="none is here yet; try: kvd pull demo"):
        find(tmp_path, "x")
    tiny_model(place(tmp_path, "mine"))
    for name in ("x", "../models/mine", ""):
        with pytest.raises(UnknownModel, match="known: mine") as caught:
            find(tmp_path, name)
        assert caught.value.details["known"] == ["mine"]


def test_a_models_folder_that_cannot_be_read_is_said_and_a_model_that_cannot_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything: who refuses is a stand-in."""
    tiny_model(place(tmp_path, "mine"))
    tiny_model(place(tmp_path, "theirs"))

    def refusing(path: Path, at: str, then: Callable[[Path], Any]) -> Any:
        if at in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return then(path)

    stat, listed, read = Path.stat, Path.iterdir, Path.read_text
    monkeypatch.setattr(Path, "stat", lambda path, **_: refusing(path, "/theirs/", stat))
    monkeypatch.setattr(Path, "read_text", lambda path, **_: refusing(path, "/theirs/", read))
    assert names(tmp_path) == ["mine", "theirs"]
    with pytest.raises(UnsupportedModel, match=r"theirs/kvd.json cannot be read .*Permission denied"):
        find(tmp_path, "theirs")
    monkeypatch.setattr(Path, "iterdir", lambda path: refusing(path, "models", listed))
    with pytest.raises(BadRequest, match="cannot read .*models: Permission denied"):
        names(tmp_path)


def test_files_that_cannot_be_read_where_a_record_points_are_said(tmp_path: Path) -> None:
    place(tmp_path, "m", str(tmp_path / ("x" * 300)))
    with pytest.raises(UnsupportedModel, match="files of model m in .* cannot be read .File name too long"):
        find(tmp_path, "m")
