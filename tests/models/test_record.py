from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvclient.errors import UnknownModel, UnsupportedModel
from kvd.models.record import FILE, Record, find, names, read_record, write_record
from tests.tiny import tiny_model


def place(home: Path, name: str, path: str | None = None) -> Path:
    folder = home / "models" / name
    folder.mkdir(parents=True)
    write_record(folder, Record(name, "here", 1.5, "f" * 64, path, ("a note",)))
    return folder


def test_a_record_comes_back_whole(tmp_path: Path) -> None:
    folder = place(tmp_path, "m")
    assert read_record(folder) == Record("m", "here", 1.5, "f" * 64, None, ("a note",))
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


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="none is here yet; try: kvd pull demo"):
        find(tmp_path, "x")
    tiny_model(place(tmp_path, "mine"))
    for name in ("x", "../models/mine", ""):
        with pytest.raises(UnknownModel, match="known: mine") as caught:
            find(tmp_path, name)
        assert caught.value.details["known"] == ["mine"]
