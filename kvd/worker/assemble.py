"""Putting a worker together: the model, its pool, its identity, and the engine over them."""

from __future__ import annotations

import dataclasses
import datetime
import os
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import structlog

from kvclient.errors import KvdError, OutOfMemory
from kvd.cache import precision
from kvd.cache.chain import namespace
from kvd.cache.check import Report, check
from kvd.cache.devicemem import lacking
from kvd.cache.inspection import inspect_layout
from kvd.cache.layout import KVLayout
from kvd.cache.paged import PagedCache
from kvd.calibrate.choice import Choice, choose
from kvd.models import blas
from kvd.models.fingerprint import MEMO, Identity, identify
from kvd.models.load import Loaded, ModelInfo, load
from kvd.models.precompile import Precompiling, kept_by_mlx, kinds_of
from kvd.models.record import find
from kvd.store.files import Files, RealFiles
from kvd.worker.beat import Heart
from kvd.worker.compiling import COMPILE_S
from kvd.worker.engine import Engine, Model
from kvd.worker.outbox import Outbox
from kvd.worker.prompt import Prompter
from kvd.worker.restore import Readers
from kvd.worker.scheduler import Limits
from kvd.worker.service import Growth
from kvd.worker.spill import Spill

if TYPE_CHECKING:
    from kvd.worker.main import Options

CHUNK_CPU: Final = 512
CHUNK_GPU: Final = 2048
ANY_CONTEXT: Final = 1 << 24
"""tokens, for a model that names no limit"""
SCRATCH_CPU: Final = 1 << 28
SCRATCH_GPU: Final = 1 << 30
"""bytes of freed buffers that MLX may keep for its next use; left alone it keeps gigabytes of a long prefill"""
READERS: Final = 4
"""threads that read shards: they wait for the disk most of the time"""
PENDING_LEAST: Final = 1 << 26
"""bytes of blocks that may always wait for the disk"""
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Built:
    """A worker ready to run. `info` is what `ready` tells the front."""

    engine: Engine
    prompter: Prompter
    info: dict[str, Any]


def assemble(given: Options, outbox: Outbox, growth: Growth, heart: Heart) -> Built:
    """Load the model and build everything over it. Raises what `kvd.models.load` raises, and OutOfMemory when not even
    one block of KV fits."""
    loaded = load(given.model, available=given.weights_limit)
    mx.set_cache_limit(SCRATCH_CPU if loaded.info.backend == "cpu" else SCRATCH_GPU)
    products = kinds_of(loaded.model, loaded.info.dtype) if loaded.info.backend == "cuda" else ()
    compiling = Precompiling(products, kept_by_mlx())
    identity = identify(given.model, given.home / "models" / MEMO)
    kv = choose(given.kv, given.home / "models" / given.name, given.name, identity.whole)
    layout = precision.apply(inspect_layout(loaded.model, loaded.info.architecture), kv.text)
    for line in precision.describe_layers(layout):
        log.info("kv", precision=kv.text, layers=line)
    log.info("kv size", precision=kv.text, bytes_per_token=layout.bytes_per_token())
    space = space_of(identity, layout, given.block_size)
    block_bytes = layout.bytes_per_token() * given.block_size
    if given.pool_limit < block_bytes:
        raise OutOfMemory(
            f"one block of KV has {block_bytes} bytes, the pool may have {given.pool_limit}",
            needed=block_bytes, available=given.pool_limit, budget=given.pool_limit, what="kv pool",
        )  # fmt: skip
    cache = PagedCache(
        layout, given.block_size, given.pool_limit // block_bytes,
        initial_blocks=given.pool_initial // block_bytes, namespace=space, on_bytes=growth.ask,
    )  # fmt: skip
    if loaded.info.backend == "cuda":
        heart.pulse = dataclasses.replace(heart.pulse, at=time.monotonic(), expected_s=COMPILE_S)
    compiling.wait()
    report = check(loaded.model, layout, given.block_size, loaded.info.architecture)
    cache.paths = report.paths
    for item in report.checks:
        log.info("attention", path=item.path, ok=item.ok, error=item.error, reason=item.reason)
    model = Model(
        loaded.model, loaded.tokenizer, layout, space, frozenset(loaded.tokenizer.eos_token_ids), kv.text
    )
    chunk = given.chunk or (CHUNK_CPU if loaded.info.backend == "cpu" else CHUNK_GPU)
    pending = max(given.pool_limit // 8, PENDING_LEAST)
    engine = make_engine(model, cache, outbox, heart, RealFiles(), Limits(chunk=chunk), pending)
    context = loaded.info.context_length or ANY_CONTEXT
    prompter = Prompter(loaded.tokenizer, vocab=loaded.info.vocab, context=context, today=pulled(given))
    mx.reset_peak_memory()  # that of a request is told with it; converting weights takes more than any
    return Built(engine, prompter, _info(given, loaded, layout, cache, report, kv))


def make_engine(
    model: Model, cache: PagedCache, outbox: Outbox, heart: Heart, files: Files, limits: Limits, max_pending: int
) -> Engine:
    """The engine with its writer and readers. `max_pending`: bytes of blocks that may wait for the disk."""
    return Engine(
        model, cache, outbox=outbox, heart=heart,
        spill=lambda settled: Spill(files, model.layout, outbox, settled, max_pending=max_pending),
        readers=lambda told, clock: Readers(files, told, READERS, clock),
        limits=limits,
    )  # fmt: skip


def space_of(identity: Identity, layout: KVLayout, block_size: int) -> bytes:
    """The namespace of this model's blocks: everything that decides their bytes."""
    fields: dict[str, str | bytes | int] = {f.name: getattr(identity, f.name) for f in dataclasses.fields(identity)}
    return namespace({**fields, "layout": layout.describe(), "block_size": block_size})


def pulled(given: Options) -> datetime.date:
    """The day the model was brought in, which templates are told as today; that of its configuration if unknown."""
    try:
        record, _ = find(given.home, given.name)
        seconds = record.pulled_at
    except KvdError:
        seconds = (given.model / "config.json").stat().st_mtime
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).date()


def _info(
    given: Options, loaded: Loaded, layout: KVLayout, cache: PagedCache, report: Report, kv: Choice
) -> dict[str, Any]:
    info: ModelInfo = loaded.info
    facts = {f.name: getattr(info, f.name) for f in dataclasses.fields(info) if f.name != "notes"}
    stats = cache.stats
    warnings = [*info.notes, *kv.warnings]
    warnings += [f"attention path {item.path} is off: {item.reason}" for item in report.checks if not item.ok]
    if info.backend == "cpu" and (warning := _blas_warning()):
        warnings.append(warning)
    if slow := lacking():
        warnings.append(slow)
    return {
        **facts, "warnings": warnings, "batchable": report.batchable, "kv_precision": kv.text,
        "kv_layout": layout.describe(), "kv_layers": precision.describe_layers(layout),
        "kv_bytes_per_token": layout.bytes_per_token(), "block_size": given.block_size,
        "pool_bytes": stats.bytes_pool, "pool_limit_bytes": given.pool_limit, "mlx": version("mlx"),
    }  # fmt: skip


def _blas_warning() -> str:
    """Measured, since a library in LD_PRELOAD need not have taken effect. Empty where products are fast."""
    preloaded = [Path(p) for p in os.environ.get("LD_PRELOAD", "").split(":") if blas.PREFIX in p]
    measured = blas.measure(preloaded[0] if preloaded else None)
    log.info("blas", gflops=round(measured.gflops, 1), fast=measured.fast, reason=measured.reason)
    if measured.fast:
        return ""
    return f"matrix products are slow here ({measured.reason}); `kvd doctor` says why"
