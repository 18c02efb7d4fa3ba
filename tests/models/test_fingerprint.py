from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvclient.errors import BadRequest, UnsupportedModel
from kvd.models import fingerprint
from kvd.models.fingerprint import identify, moved
from tests.tiny import tiny_model


def flip_bit(path: Path, at: int = -1) -> None:
    """Change one weight, keeping the file's size, time and inode's number out of it."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model")


def test_a_renamed_or_copied_folder_is_the_same_model(tmp_path: Path, folder: Path) -> None:
    first = identify(folder)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    renamed = folder.rename(tmp_path / "renamed")
    assert identify(renamed) == identify(copy) == first


def test_one_changed_weight_is_another_model(folder: Path) -> None:
    first = identify(folder)
    flip_bit(folder / "model.safetensors")
    second = identify(folder)
    assert second.weights != first.weights and second.whole != first.whole
    assert (second.tokenizer, second.config, second.rope) == (first.tokenizer, first.config, first.rope)


def test_tokenizer_configuration_rope_and_adapter_are_parts_of_their_own(tmp_path: Path, folder: Path) -> None:
    first = identify(folder)

    def parts_that_differ() -> list[str]:
        now = identify(folder)
        return [name for name in first.__slots__ if getattr(now, name) != getattr(first, name)]

    original = (folder / "config.json").read_text()
    edit(folder, rope_theta=20000.0)
    assert parts_that_differ() == ["rope"]
    edit(folder, rope_theta=10000.0, rms_norm_eps=1e-6)
    assert parts_that_differ() == ["config"]
    edit(folder, rms_norm_eps=1e-5, transformers_version="99", _name_or_path="elsewhere")
    assert parts_that_differ() == []
    (folder / "config.json").write_text(original)
    flip_bit(folder / "tokenizer.json", -2)
    assert parts_that_differ() == ["tokenizer"]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapters.safetensors").write_bytes(b"a")
    (adapter / "adapter_config.json").write_text("{}")
    one = identify(folder, adapter=adapter)
    (adapter / "adapters.safetensors").write_bytes(b"b")
    assert len({first.adapter, one.adapter, identify(folder, adapter=adapter).adapter}) == 3


def test_the_parts_of_a_digest_are_told_apart() -> None:
    assert len({fingerprint._combine(*parts) for parts in (("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""))}) == 4


def test_shards_are_told_apart_by_order_and_cut(tmp_path: Path) -> None:
    for name, pieces in {"x": (b"ab", b"c"), "y": (b"a", b"bc"), "z": (b"c", b"ab")}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        for number, piece in enumerate(pieces):
            (tmp_path / name / f"model-{number}.safetensors").write_bytes(piece)
    assert len({identify(tmp_path / name).weights for name in "xyz"}) == 3


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Weight files whose bytes were read."""
    seen: list[Path] = []
    digest = fingerprint._digest

    def watched(path: Path) -> str:
        if path.suffix == ".safetensors":
            seen.append(path)
        return digest(path)

    monkeypatch.setattr(fingerprint, "_digest", watched)
    return seen


def test_weights_are_read_once_and_again_when_they_change(tmp_path: Path, folder: Path, reads: list[Path]) -> None:
    memo = tmp_path / "memo"
    first = identify(folder, memo)
    assert identify(folder, memo) == first and len(reads) == 1
    flip_bit(folder / "model.safetensors")
    assert identify(folder, memo) != first and len(reads) == 2


def test_a_file_put_in_place_with_the_old_time_is_noticed(tmp_path: Path, folder: Path, reads: list[Path]) -> None:
    memo, path = tmp_path / "memo", folder / "model.safetensors"
    first, before = identify(folder, memo), path.stat()
    other = Path(shutil.copyfile(path, tmp_path / "other"))
    flip_bit(other)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)
    assert path.stat().st_mtime_ns == before.st_mtime_ns and path.stat().st_size == before.st_size
    assert identify(folder, memo) != first and len(reads) == 2


def test_what_a_memo_knows_moves_with_a_rename(tmp_path: Path, folder: Path, reads: list[Path]) -> None:
    memo = tmp_path / "memo"
    first = identify(folder, memo)
    renamed = folder.rename(tmp_path / "renamed")
    moved(memo, folder, renamed)
    assert identify(renamed, memo) == first and len(reads) == 1


@pytest.mark.parametrize("content", ["", "[1]", '{"a": 1}', "\0"])
def test_a_damaged_memo_costs_reading_again(tmp_path: Path, folder: Path, reads: list[Path], content: str) -> None:
    memo = tmp_path / "memo"
    first = identify(folder, memo)
    (next(memo.iterdir())).write_text(content)
    assert identify(folder, memo) == first and len(reads) == 2
    assert identify(folder, memo) == first and len(reads) == 2


def test_files_that_cannot_be_read_are_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="no usable weights"):
        identify(folder)
    (folder / "model.safetensors").symlink_to(folder / "gone")
    with pytest.raises(BadRequest, match=r"cannot read .*model\.safetensors"):
        identify(folder)
