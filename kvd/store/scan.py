"""What lies in the store's folder, by name and size: no file is opened."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import NamedTuple

from kvd.store.base import disk_bytes
from kvd.store.files import Files, Item
from kvd.store.tree import INDEX_FILES, OURS, Tree, chain_of, namespace_of


class ShardFile(NamedTuple):
    """A shard as its folder lists it; sizes in bytes, mtime in seconds."""

    namespace: bytes
    chain: bytes
    size: int
    disk: int
    mtime: float


@dataclass(slots=True)
class Listing:
    """`foreign`, `temp` and `quarantine` map a path to the bytes it takes; a foreign folder stands for all in it."""

    shards: dict[bytes, ShardFile] = field(default_factory=dict)
    namespaces: set[bytes] = field(default_factory=set)
    foreign: dict[str, int] = field(default_factory=dict)
    temp: dict[str, int] = field(default_factory=dict)
    quarantine: dict[str, int] = field(default_factory=dict)


def scan(files: Files, tree: Tree) -> Listing:
    """Raises OSError."""
    found = Listing()
    for item in files.list(tree.root):
        if item.name not in OURS:
            _foreign(files, found, tree.root, item)
    for item in files.list(tree.index):
        if item.name not in INDEX_FILES:
            _foreign(files, found, tree.index, item)
    for folder, into in ((tree.tmp, found.temp), (tree.quarantine, found.quarantine)):
        for item in files.list(folder):
            path = os.path.join(folder, item.name)
            into[path] = _whole(files, path, item)
    for item in files.list(tree.blocks):
        namespace = namespace_of(item.name)
        if namespace is None or not item.folder:
            _foreign(files, found, tree.blocks, item)
        else:
            found.namespaces.add(namespace)
            _shards(files, tree, namespace, found)
    return found


def _shards(files: Files, tree: Tree, namespace: bytes, found: Listing) -> None:
    folder = tree.namespace(namespace)
    shards = found.shards
    for item in files.list(folder):
        chain = chain_of(item.name)
        if chain is None or item.folder or chain in shards:
            _foreign(files, found, folder, item)
        else:
            disk = max(item.allocated, disk_bytes(item.size))
            shards[chain] = ShardFile(namespace, chain, item.size, disk, item.mtime)


def _foreign(files: Files, found: Listing, folder: str, item: Item) -> None:
    path = os.path.join(folder, item.name)
    found.foreign[path] = _whole(files, path, item)


def _whole(files: Files, path: str, item: Item) -> int:
    """Bytes on disk of a file, or of a folder with everything in it."""
    total = item.allocated
    if item.folder:
        total += sum(_whole(files, os.path.join(path, inner.name), inner) for inner in files.list(path))
    return total


def remove(files: Files, path: str) -> None:
    """A file, or a folder with everything in it; links are removed, not followed. Raises OSError."""
    try:
        item = files.stat(path)
    except FileNotFoundError:
        return
    if item.folder:
        for inner in files.list(path):
            remove(files, os.path.join(path, inner.name))
        files.rmdir(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            files.unlink(path)
