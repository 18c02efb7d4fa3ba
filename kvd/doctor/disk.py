"""Checks of the disk under the store: space and speed."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path

from kvd.config import Config
from kvd.doctor.finding import Finding, fail, ok, warn
from kvd.store.files import RealFiles
from kvd.units import format_size

_PROBE = 32 * 2**20
"""bytes written, synced, dropped from the page cache where the system allows, and read back"""
SLOW_READ = 200e6
"""bytes per second below which restoring a prefix is no great gain on a fast GPU"""
SLOW_SYNC = 0.1
"""seconds"""


def existing(path: Path) -> Path:
    """The nearest folder that is there: where the store would be made."""
    while not path.exists():
        path = path.parent
    return path


def space(config: Config) -> Finding:
    place = existing(config.store_path)
    if not config.store.limit:
        return ok("free space", "the store is off (store.limit is 0)")
    found = os.statvfs(place)
    free = found.f_bavail * found.f_frsize
    detail = f"{format_size(free)} free at {place}; the store may take {format_size(config.store.limit)}"
    detail += f" and leaves {format_size(config.store.free_space)}"
    if free <= config.store.free_space:
        fix = "free some space, or lower store.free_space, or move store.path"
        return fail("free space", detail + ": nothing can be stored", fix)
    if free < config.store.free_space + config.store.limit // 4:
        return warn("free space", detail, "free some space, or set store.limit to what you can spare")
    return ok("free space", detail)


def speed(config: Config) -> Finding:
    place = existing(config.store_path)
    if not os.access(place, os.W_OK):
        return fail("disk speed", f"{place} is not writable", "chown it to you, or set store.path")
    try:
        write, sync, read = measure(place)
    except OSError as problem:
        return fail("disk speed", f"{place}: {problem.strerror}", "repair or change the disk, or set store.path")
    detail = f"write {write / 1e6:,.0f} MB/s, fsync {sync * 1000:.1f} ms, read {read / 1e6:,.0f} MB/s"
    if read < SLOW_READ or sync > SLOW_SYNC:
        return warn("disk speed", detail, "put the store on a faster disk (store.path)")
    return ok("disk speed", detail)


def measure(place: Path, size: int = _PROBE) -> tuple[float, float, float]:
    """(write B/s, seconds of one small fsync as the store makes it, read B/s). The file is unlinked before it is
    filled, and kept out of the page cache where the system allows that beforehand only (macOS)."""
    sync_all = RealFiles().full_fsync
    with tempfile.TemporaryFile(dir=place) as file:
        fd = file.fileno()
        if (uncached := getattr(fcntl, "F_NOCACHE", None)) is not None:
            fcntl.fcntl(fd, uncached, 1)
        piece = os.urandom(2**20)
        began = time.perf_counter()
        for _ in range(size // len(piece)):
            os.write(fd, piece)
        sync_all(fd)
        write = size / (time.perf_counter() - began)
        os.write(fd, piece[:4096])
        began = time.perf_counter()
        sync_all(fd)
        sync = time.perf_counter() - began
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        os.lseek(fd, 0, os.SEEK_SET)
        while os.read(fd, 2**20):
            pass
        read = size / (time.perf_counter() - began)
    return write, sync, read
