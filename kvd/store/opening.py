"""From a folder to a store: names and sizes against the index, no shard opened; limits hold before anyone may write."""

from __future__ import annotations

import contextlib
import json
import os
import plistlib
import sys

from kvclient.errors import StoreError
from kvd.store.adopt import enforce, quarantine_file, rebuild_index
from kvd.store.check import sound
from kvd.store.core import Core
from kvd.store.files import read_whole, replace_whole
from kvd.store.index import Batch
from kvd.store.kv import IndexFailed
from kvd.store.ledger import HEADROOM
from kvd.store.scan import Listing, remove, scan
from kvd.store.tree import OURS, TAG

_SMALL_LIMIT = 16 * 1024 * 1024
FINDER = {".DS_Store", ".localized"}
"""what macOS puts into a folder that somebody made or looked at in the Finder: nobody's files"""


def make_root(core: Core) -> None:
    """The store's folder. Raises StoreError for one that holds files but no store: they would be collected as foreign;
    OSError."""
    root, tag = core.tree.root, os.path.basename(core.tree.tag)
    if not os.path.isdir(root):
        os.makedirs(root, mode=0o700)
        core.files.fsync_dir(os.path.dirname(root))
    names = {item.name for item in core.files.list(root)} - FINDER
    if tag not in names and (foreign := sorted(names - OURS)):
        raise StoreError(
            f"{root} holds {foreign[0]!r} and is no store of kvd: give store.path a folder of its own", path=root
        )


def make_folders(core: Core) -> None:
    """Folders with mode 0700 and the marks that keep backups and indexers away. Raises OSError."""
    for folder in core.tree.folders:
        core.files.mkdir(folder)
    for name, text in (("CACHEDIR.TAG", TAG), (".metadata_never_index", b"")):
        path = core.tree.small(name)
        try:
            core.files.stat(path)
        except FileNotFoundError:
            replace_whole(core.files, path, text, core.limits.durable)
            exclude_from_backup(core.tree.root)


def exclude_from_backup(folder: str) -> None:
    """Time Machine's exclusion attribute, on macOS; a volume without attributes is no error."""
    if sys.platform == "darwin":
        import ctypes

        value = plistlib.dumps("com.apple.backupd", fmt=plistlib.FMT_BINARY)
        name = b"com.apple.metadata:com_apple_backup_excludeItem"
        ctypes.CDLL(None).setxattr(os.fsencode(folder), name, value, len(value), 0, 0)


def fill(core: Core) -> None:
    """Everything `Store.open` does behind the lock. Raises OSError, IndexFailed (it cannot even be made anew)."""
    listing = scan(core.files, core.tree)
    core.junk.update(listing.foreign)
    core.quarantined.update(listing.quarantine)
    core.namespaces.update(listing.namespaces)
    core.counters["foreign"] = len(listing.foreign)
    _sweep_temp(core, listing)
    core.orphans = dict(listing.shards)
    _load_small(core)
    core.measure()
    if not core.limits.off:
        core.collect_junk(core.ledger.missing(0))
    if _trusted(core):
        try:
            core.index.reopen()
            _reconcile(core)
        except IndexFailed as problem:
            core.index_failed(problem)
            _rebuild(core)
    else:
        _rebuild(core)
    compact(core)
    core.measure()
    enforce(core)


def _sweep_temp(core: Core, listing: Listing) -> None:
    """What writers left when they died."""
    for path, disk in listing.temp.items():
        try:
            remove(core.files, path)
            core.counters["collected.temp"] += 1
        except OSError:
            core.counters["unlink_failed"] += 1
            core.junk[path] = disk


def _load_small(core: Core) -> None:
    """Pins, labels, wear, sightings. A damaged file is kept aside and counted."""

    def whole(name: str) -> bytes:
        return read_whole(core.files, core.tree.small(name), _SMALL_LIMIT)

    for name, load in (
        ("pins.json", core.pins.load),
        ("names.json", lambda: _load_names(core, whole("names.json"))),
        ("wear.json", lambda: core.wear.unpack(whole("wear.json"))),
        ("seen", lambda: core.sightings.unpack(whole("seen"))),
    ):
        path = core.tree.small(name)
        try:
            load()
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError, AttributeError):
            quarantine_file(core, path, 0, "damaged")


def _load_names(core: Core, text: bytes) -> None:
    for namespace, names in json.loads(text).items():
        of = [names] if isinstance(names, str) else names  # one name may stand alone
        core.models[bytes.fromhex(namespace)] = tuple(str(name) for name in of)


def _trusted(core: Core) -> bool:
    """May the index be opened in this process? It was closed in order and not touched since, or a child process that
    walked all of it says so. Removes the mark of a clean close."""
    data = os.path.join(core.tree.index, "data.mdb")
    try:
        there = core.files.stat(data)
    except FileNotFoundError:
        return not core.orphans
    try:
        mark = json.loads(read_whole(core.files, core.tree.clean, _SMALL_LIMIT))
        core.files.unlink(core.tree.clean)
    except FileNotFoundError:
        core.counters["index.unclean"] += 1
        return sound(core.tree.index)
    except ValueError:
        return False
    return bool(mark == {"size": there.size, "mtime": there.mtime})


def mark_clean(core: Core) -> None:
    """Say that the index was closed in order. Raises OSError."""
    there = core.files.stat(os.path.join(core.tree.index, "data.mdb"))
    text = json.dumps({"size": there.size, "mtime": there.mtime}).encode()
    replace_whole(core.files, core.tree.clean, text, core.limits.durable)


def _reconcile(core: Core) -> None:
    """Rows with their file become slots; rows without one are removed; a file of another size is not the one the index
    knows: it goes to quarantine."""
    gone = []
    for slot in core.index.load():
        file = core.orphans.get(slot.chain)
        if file is None or file.namespace != slot.namespace:
            core.counters["missing_file"] += 1
            gone.append(slot)
        elif file.size != slot.size:
            gone.append(slot)
            del core.orphans[slot.chain]
            path = core.tree.shard(slot.namespace, slot.chain)
            quarantine_file(core, path, file.disk, "size_mismatch")
        else:
            del core.orphans[slot.chain]
            slot.disk, slot.mtime, slot.used = file.disk, file.mtime, max(slot.used, file.mtime)
            core.table.add(slot)
    core.ledger.shards = core.table.bytes
    core.settle_other()
    core.counters["orphans"] += len(core.orphans)
    core.wear.unpack(core.index.meta("wear"))
    if gone:
        core.index.apply(Batch(remove=gone))


def _rebuild(core: Core) -> None:
    for slot in list(core.table):
        core.forget(slot, departed=False)
    core.orphans = scan(core.files, core.tree).shards
    core.settle_other()
    rebuild_index(core)


def compact(core: Core) -> None:
    """An index that is mostly free pages is copied without them: the ledger counts its file."""
    used, size = core.index.pages()
    if size <= HEADROOM or size < 2 * used:
        return
    side = os.path.join(core.tree.tmp, "index")
    with contextlib.suppress(OSError, IndexFailed):
        core.files.mkdir(side)
        core.index.copy(side)
        core.index.close()
        core.files.rename(os.path.join(side, "data.mdb"), os.path.join(core.tree.index, "data.mdb"))
        core.counters["index.compacted"] += 1
    remove(core.files, side)
    core.index.reopen()
