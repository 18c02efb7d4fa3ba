"""Remove models from the disk.

Asks first on a terminal. A model that is loaded is refused. What is only used where it is (a folder that was pulled in
place, a link) stays there: kvd forgets it. What is stored of its KV stays too, for when it comes back.

  kvd rm demo
  kvd rm demo other --yes
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from kvclient import Client
from kvclient.errors import BadRequest, Busy, Internal, Unreachable, UnsupportedModel
from kvd.cli import cache
from kvd.cli.output import agreed, print_json
from kvd.cli.usage import Usage
from kvd.home import Home
from kvd.models import record
from kvd.units import format_size


@dataclass(frozen=True, slots=True)
class Removal:
    """`files` is where the model's files stay, None if they go. `bytes` of the disk go, `stored_bytes` of KV stay."""

    model: str
    bytes: int
    files: str | None
    stored_bytes: int


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="names, as `kvd models` lists them")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="what went and what stayed, as JSON")


def run(args: argparse.Namespace) -> int:
    home = Home.default()
    wanted = list(dict.fromkeys(args.models))
    folders = [_folder(home, name) for name in wanted]
    _refuse_loaded(wanted)
    stored = _stored()
    removals = [_removal(folder, stored.get(folder.name, 0)) for folder in folders]
    if not args.yes and not _agreed(removals):
        print("nothing was removed", file=sys.stderr)
        return 0
    for folder in folders:
        _remove(folder)
    if args.json:
        print_json({"removed": [asdict(removal) for removal in removals]})
    else:
        print("\n".join(line for removal in removals for line in lines(removal)))
    return 0


def lines(removal: Removal) -> list[str]:
    """What was done, for people."""
    out = [f"removed {removal.model} ({what(removal)})"]
    if removal.stored_bytes:
        clear = f"kvd cache clear --model {removal.model} --yes"
        out.append(f"{format_size(removal.stored_bytes)} of its KV stay in the store; `{clear}` drops them")
    return out


def what(removal: Removal) -> str:
    return f"its files stay in {removal.files}" if removal.files else format_size(removal.bytes)


def _folder(home: Home, name: str) -> Path:
    """Raises UnknownModel. A model whose files are gone, or a link to nowhere, can be removed too."""
    folder = home.models / record.checked_name(name)
    if not folder.is_symlink() and name not in record.names(home.root):
        record.find(home.root, name)
    return folder


def _refuse_loaded(names: list[str]) -> None:
    try:
        with Client(autostart=False) as client:
            loaded = [row["name"] for row in client.models() if row["state"] != "not loaded" and row["name"] in names]
    except Unreachable as problem:
        if not problem.details.get("absent"):
            raise
        return
    if loaded:
        raise Busy(f"{loaded[0]} is loaded; `kvd unload {loaded[0]}` first", model=loaded[0])


def _stored() -> dict[str, int]:
    """Bytes in the store, by model."""
    try:
        found: dict[str, int] = cache.ask("stats", {}).get("models", {})
    except BadRequest:
        return {}  # there is no store yet
    return found


def _removal(folder: Path, stored: int) -> Removal:
    """A link counts as nothing: what it leads to is not looked into."""
    if folder.is_symlink():
        return Removal(folder.name, 0, str(folder.resolve()), stored)
    size = sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())
    try:
        files = record.read_record(folder).path
    except UnsupportedModel:
        files = None
    return Removal(folder.name, size, files, stored)


def _agreed(removals: list[Removal]) -> bool:
    if not sys.stdin.isatty():
        raise Usage("rm needs --yes where nobody can be asked")
    listed = ", ".join(f"{removal.model} ({what(removal)})" for removal in removals)
    return agreed(f"remove {listed}")


def _remove(folder: Path) -> None:
    """Out of sight as a whole, then file by file: killed in between, the next pull removes the rest."""
    from kvd.models.staging import staging

    try:
        with staging(folder.parent, folder.name) as scratch:
            folder.rename(scratch / folder.name)
    except OSError as error:
        raise Internal(f"cannot remove {folder}: {error.strerror or error}", path=str(folder)) from error
