"""The store alone: restore against plain reading, one block's write and commit, lookups, a start with 10,000 shards."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from benches.rows import Row, median_ratio, paired, row
from kvd.cache.chain import chains, next_chain
from kvd.store.base import Limits, Refusal, Written
from kvd.store.files import RealFiles
from kvd.store.shard import Expected, ShardHeader, Tensors, TensorSpec, offer_of, read_shard, store_shard, write_shard
from kvd.store.store import Store
from torments.blocks import LAYOUT, NAMESPACE
from torments.oracle import crash

FILES = RealFiles()
BLOCK = 256
LAYERS, HEADS, DIM = 30, 3, 64
"""the demo model in float32: 11.8 MB per block"""
BLOCKS = 16
SHARDS = 10_000
PREFIX = 131_072
ROUNDS = 7
READERS = 2
STARTS = 5
LIMIT = 1 << 40


def run() -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="kvd") as base:
        return [*_restore(base), *_write(base), *_lookups(base), *_start(base)]


def block(tokens: list[int], parent: bytes = NAMESPACE, start: int = 0, layers: int = LAYERS) -> ShardHeader:
    names = [f"{side}.{layer}" for layer in range(layers) for side in ("k", "v")]
    specs = Tensors(TensorSpec(name, "F32", (HEADS, len(tokens), DIM)) for name in names)
    return ShardHeader(NAMESPACE, next_chain(parent, tokens), parent, tuple(tokens), start, LAYOUT, specs, "words")


def rows_of(header: ShardHeader, memory: memoryview) -> list[memoryview]:
    """The block's place in a pool: one range of rows per tensor and head."""
    views = []
    at = 0
    for spec in header.tensors:
        size = spec.nbytes // HEADS
        for _ in range(HEADS):
            views.append(memory[at : at + size])
            at += size
    return views


def _restore(base: str) -> list[Row]:
    """All blocks of one prefix into reused memory, every byte checked, against reading the same files one by one into
    the same memory."""
    headers = [block([n + 1] * BLOCK, start=n * BLOCK) for n in range(BLOCKS)]
    size = headers[0].data_bytes
    memory = [memoryview(bytearray(os.urandom(1 << 16) * (size // (1 << 16) + 1)))[:size] for _ in headers]
    paths = [os.path.join(base, f"{n}.safetensors") for n in range(BLOCKS)]
    for path, header, view in zip(paths, headers, memory, strict=True):
        write_shard(FILES, path, header, rows_of(header, view), durable=True)
    total = sum(os.path.getsize(path) for path in paths)

    def one(n: int) -> None:
        header = headers[n]
        expected = Expected(NAMESPACE, header.chain, header.parent, header.tokens, header.start, header.tensors)
        read_shard(FILES, paths[n], None, expected, rows_of(header, memory[n]))

    def plain() -> None:
        for path, view in zip(paths, memory, strict=True):
            with open(path, "rb", buffering=0) as file:
                file.seek(4096)
                while file.readinto(view):
                    pass

    found = []
    with ThreadPoolExecutor(READERS) as pool:
        caches: dict[str, Callable[[], object]] = {"cold": lambda: forget(paths), "warm": lambda: None}
        if not hasattr(os, "posix_fadvise"):
            del caches["cold"]
        for name, prepare in caches.items():
            ours, theirs = paired(
                partial(_timed, lambda: list(pool.map(one, range(BLOCKS))), prepare),
                partial(_timed, plain, prepare), ROUNDS,
            )
            ratio = 1 / median_ratio(ours, theirs)
            rate = total / statistics.median(ours) / 1e9
            found.append(row(f"restore, {name} page cache", rate, "GB/s", baseline=rate / ratio, bar=">= 0.8"))
    for path in paths:
        os.unlink(path)
    return found


def forget(paths: list[str]) -> None:
    """Put files out of the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _timed(what: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
    prepare()
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def _write(base: str) -> list[Row]:
    """One block: the worker's half in CPU seconds against writing the same bytes plainly, the owner's half in time."""
    memory = memoryview(bytearray(block([1] * BLOCK).data_bytes))
    commits: list[float] = []
    with Store.open(os.path.join(base, "write"), Limits(LIMIT)) as store:
        tokens = iter(range(1, 1000))

        def ours() -> float:
            header = block([next(tokens)] * BLOCK)
            began = time.perf_counter()
            place = store.reserve(offer_of(header))
            reserved = time.perf_counter() - began
            if isinstance(place, Refusal):
                raise RuntimeError(place.reason)
            cpu = time.process_time()
            size, checksum = store_shard(FILES, place.temp, place.final, header, rows_of(header, memory))
            cpu = time.process_time() - cpu
            commits.append(reserved + _timed(lambda: store.commit([Written(place.id, checksum, size)])))
            return cpu

        def plain() -> float:
            path = os.path.join(base, "plain")
            began = time.process_time()
            with open(path, "wb", buffering=0) as file:
                file.write(memory)
                os.fsync(file.fileno())
            took = time.process_time() - began
            os.unlink(path)
            return took

        cpu, baseline = paired(ours, plain, ROUNDS)
    return [
        row("write one block, CPU", statistics.median(cpu), "s", baseline=statistics.median(baseline)),
        row("commit of one block", statistics.median(commits) * 1e3, "ms"),
    ]


def _tiny(n: int, parent: bytes = NAMESPACE, tokens: list[int] | None = None, start: int = 0) -> ShardHeader:
    return block(tokens or [n // 100, n % 100, *range(62), n], parent, start, layers=1)


def _fill(store: Store, headers: list[ShardHeader]) -> None:
    """Put many small shards into a store without syncing each of them."""
    written = []
    for header in headers:
        place = store.reserve(offer_of(header))
        if isinstance(place, Refusal):
            raise RuntimeError(place.reason)
        memory = memoryview(bytes(header.data_bytes))
        size, checksum = store_shard(FILES, place.temp, place.final, header, rows_of(header, memory), durable=False)
        written.append(Written(place.id, checksum, size))
    if not all(item.ok for item in store.commit(written)):
        raise RuntimeError("not committed")


def _lookups(base: str) -> list[Row]:
    tokens = [(n * 7919) % 50_000 for n in range(PREFIX)]
    with Store.open(os.path.join(base, "lookup"), Limits(LIMIT, durable=False)) as store:
        parent, headers = NAMESPACE, []
        for start in range(0, PREFIX, BLOCK):
            headers.append(_tiny(0, parent, tokens[start : start + BLOCK], start))
            parent = headers[-1].chain
        _fill(store, headers)
        asked = list(chains(NAMESPACE, tokens, BLOCK))
        assert len(store.lookup(NAMESPACE, asked, NAMESPACE, tokens).hits) == PREFIX // BLOCK
        took = [_timed(lambda: store.lookup(NAMESPACE, asked, NAMESPACE, tokens)) for _ in range(30)]
    return [row("lookup of a prefix of 128K tokens", statistics.median(took) * 1e3, "ms")]


def _start(base: str) -> list[Row]:
    """10,000 shards: a start after a clean stop, one after a kill, and the best of 10,000 siblings."""
    folder = os.path.join(base, "start")
    limits = Limits(LIMIT, durable=False)
    with Store.open(folder, limits) as store:
        _fill(store, [_tiny(n) for n in range(SHARDS)])
        asked = [[n // 100, n % 100, *range(62), n + 1, 5] for n in range(0, SHARDS, 97)]
        child = [_timed(partial(store.lookup, NAMESPACE, [], NAMESPACE, tokens)) for tokens in asked]
    clean, killed, cpu = [], [], []
    for _ in range(STARTS):
        began = time.process_time()
        clean.append(_timed(lambda: Store.open(folder, limits).close()))
        cpu.append(time.process_time() - began)
        store = Store.open(folder, limits)
        assert len(store.core.table) == SHARDS
        crash(store)
        killed.append(_timed(lambda: Store.open(folder, limits).close()))
    return [
        row("best child among 10,000 siblings", statistics.median(child) * 1e3, "ms", bar="<= 1.0", of="value"),
        row(f"start with 10,000 shards, best of {STARTS}", min(clean), "s", bar="<= 0.3", of="value"),
        row("start with 10,000 shards, CPU", statistics.median(cpu), "s"),
        row(f"start with 10,000 shards after a kill, best of {STARTS}", min(killed), "s"),
    ]
