"""Is the disk mounted that the store lies on?

Without its disk a mount point is an empty folder of another disk, or no folder at all. A store made there would fill
that other disk and be hidden when its own comes back. So the mount point is remembered in a small file outside the
store, and a folder without a store is only taken for a new one while that mount point is one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from kvclient.errors import StoreError
from kvd.atomic import write_text
from kvd.store.tree import Tree


def mount_of(path: str) -> str:
    """The mount point of the disk that holds `path`, or would if it were made."""
    at = os.path.realpath(path)
    while not os.path.ismount(at):
        at = os.path.dirname(at)
    return at


def has_store(root: str) -> bool:
    return os.path.lexists(Tree(root).tag)


def check(root: str, memory: Path) -> None:
    """Raises StoreError when there is no store at `root`, and was one on a disk that is not mounted now."""
    if has_store(root):
        return
    known = _known(memory)
    mount = known.get("mount", "")
    if known.get("root") == root and mount and not os.path.ismount(mount):
        raise StoreError(
            f"the store {root} was on the disk mounted at {mount}, which is not mounted now (to begin a new store "
            f"without it, delete {memory})",
            path=root, mount=mount,
        )


def remember(root: str, memory: Path) -> None:
    """Note the mount point of `root`. Raises StoreError."""
    found = {"root": root, "mount": mount_of(root)}
    if _known(memory) == found:
        return
    try:
        write_text(memory, json.dumps(found) + "\n")
    except OSError as problem:
        raise StoreError(f"cannot write {memory}: {problem.strerror}", path=str(memory)) from None


def _known(memory: Path) -> dict[str, str]:
    """Empty when nothing is known."""
    try:
        found = json.loads(memory.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
