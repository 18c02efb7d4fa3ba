"""The table of settings: every key of kvd.toml with its kind, default and documentation.

A key is a field of a section below; the TOML parser, the flags of `kvd serve`, `kvd config show`, validation and the
README's table are generated from these fields. A key that is not here does not exist.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvd import kinds
from kvd.kinds import Kind, WarmPrompt


@dataclass(frozen=True, slots=True)
class Key:
    """What is known of one setting besides its default."""

    kind: Kind
    doc: str
    live: bool = False
    """`reload` applies a change without a restart"""
    secret: bool = False
    """never printed"""


def _key(default: Any, kind: Kind, doc: str, *, live: bool = False, secret: bool = False) -> Any:
    return field(default=default, metadata={"key": Key(kind, doc, live, secret)})


@dataclass(frozen=True, slots=True)
class Daemon:
    log_level: str = _key(
        "info", kinds.choice("debug", "info", "warning", "error"),
        "lowest level that is logged",
        live=True,
    )
    log_prompts: bool = _key(False, kinds.BOOL, "write prompt text into the log (off: never)", live=True)
    autostart: bool = _key(False, kinds.BOOL, "`kv` and `kvclient` may start the daemon when none runs", live=True)
    max_waiting: int = _key(
        64, kinds.COUNT,
        "requests that may wait per model; one more is refused as busy",
        live=True,
    )
    drain: float = _key(10.0, kinds.DURATION, "time a stop gives running requests to finish", live=True)
    watchdog: float = _key(
        30.0, kinds.DURATION,
        "a worker that shows no progress for this long, and for 10x the time its work should take, is "
        "replaced",
        live=True,
    )
    respawn_delay: float = _key(
        0.5, kinds.DURATION,
        "wait before a crashed worker is started again; doubles with each crash",
        live=True,
    )
    respawn_delay_max: float = _key(30.0, kinds.DURATION, "longest such wait", live=True)
    crash_limit: int = _key(
        5, kinds.COUNT,
        "crashes within `crash_window` after which a model stays down until `kvd load`",
        live=True,
    )
    crash_window: float = _key(300.0, kinds.DURATION, "see `crash_limit`", live=True)


@dataclass(frozen=True, slots=True)
class Memory:
    limit: int | None = _key(
        None, kinds.AUTO_SIZE,
        "for weights and KV of all models together; auto: 75 % of what the machine (or its cgroup) has, on a Mac at "
        "most what its GPU may keep, less 1 GiB",
    )


@dataclass(frozen=True, slots=True)
class Models:
    default: str = _key(
        "", kinds.TEXT,
        "model used when a request names none; empty: the only one there is",
        live=True,
    )
    aliases: tuple[tuple[str, str], ...] = _key(
        (), kinds.ALIASES,
        "further names of models: a table like {\"claude-*\" = \"qwen3-4b\", \"gpt-4o\" = \"demo\"}, * is any text; a "
        "model's own name comes first, then an exact alias, then the longest pattern; as a flag NAME=MODEL, separated "
        "by semicolons",
        live=True,
    )
    ttl: float | None = _key(
        None, kinds.TTL,
        "unload a model after this long without a request; off: only when memory is needed",
        live=True,
    )
    kv: str = _key(
        "native", kinds.PRECISION,
        "KV precision at load: native, k8v8, k8v4, …, with overrides by layer (k8v4,0-3=k8v8), or auto (what "
        "`kvd calibrate` chose)",
        live=True,
    )
    kv_of: tuple[tuple[str, str], ...] = _key(
        (), kinds.PRECISIONS,
        "KV precision of single models, before `kv`: a table like {demo = \"k8v4,0-3=k8v8\"}; as a flag "
        "MODEL=PRECISION, separated by semicolons",
        live=True,
    )
    kv_max_kld: float = _key(
        0.01, kinds.POSITIVE,
        "mean KL divergence from native KV up to which a precision passes `kvd calibrate`; others warn at load",
        live=True,
    )
    kv_min_same_top: float = _key(
        0.97, kinds.SHARE,
        "share of positions with native's most likely token from which it passes",
        live=True,
    )

    def precision(self, model: str) -> str:
        """KV precision that this model is loaded at."""
        return dict(self.kv_of).get(model, self.kv)


@dataclass(frozen=True, slots=True)
class Store:
    path: Path | None = _key(None, kinds.PATH, "folder of the KV shards; auto: `store` in the home folder")
    limit: int = _key(
        20 * 2**30, kinds.SIZE,
        "bytes on disk, index and temporary files included; 0: off, what is there stays until `kvd cache clear`",
        live=True,
    )
    free_space: int = _key(5 * 2**30, kinds.SIZE, "free bytes on the disk that the store leaves to others", live=True)
    durable: bool = _key(True, kinds.BOOL, "fsync before a block counts as stored; off only for a RAM disk")
    admission: str = _key(
        "first", kinds.choice("first", "second"),
        "write a prefix at its first use, or only at its second",
        live=True,
    )
    quota: int = _key(0, kinds.SIZE, "most bytes one model may hold in the store; 0: no quota", live=True)
    tbw: int = _key(
        0, kinds.SIZE,
        "endurance the drive's maker states (e.g. \"600 TB\"), to show the share used per year; 0: unknown",
        live=True,
    )


@dataclass(frozen=True, slots=True)
class Cache:
    block_size: int = _key(
        256, kinds.BLOCK,
        "tokens per block, the unit of sharing and storing; part of a block's identity",
    )
    chunk: int | None = _key(
        None, kinds.AUTO_CHUNK,
        "tokens per prefill step, a multiple of 64; auto: 512 on CPU, 2048 on GPU",
    )
    pool: int | None = _key(
        None, kinds.AUTO_SIZE,
        "most bytes of KV in memory per model; auto: what the memory limit leaves",
    )
    pool_initial: int = _key(384 * 2**20, kinds.SIZE, "bytes of KV in memory a model starts with; grows by doubling")


@dataclass(frozen=True, slots=True)
class Gateway:
    host: str = _key("127.0.0.1", kinds.TEXT, "address `kv-gateway` listens on; anything but loopback needs a key")
    port: int = _key(8471, kinds.PORT, "its port")
    api_key: str = _key("", kinds.TEXT, "key its clients must send; empty: none", secret=True)


@dataclass(frozen=True, slots=True)
class Warm:
    prompts: tuple[WarmPrompt, ...] = _key(
        (), kinds.PROMPTS,
        "prefilled at start in the background and pinned: tables with model, file and, if wanted, system and "
        "raw; as a flag MODEL=FILE",
    )


SECTIONS: Mapping[str, type] = {
    "daemon": Daemon,
    "memory": Memory,
    "models": Models,
    "store": Store,
    "cache": Cache,
    "gateway": Gateway,
    "warm": Warm,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table: where a value is written, what it is and where it came from."""

    section: str
    name: str
    key: Key
    default: Any

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        return f"--{self.section}-{self.name}".replace("_", "-")


def settings() -> Iterator[Setting]:
    """The table, in the order of the file."""
    for section, cls in SECTIONS.items():
        for item in dataclasses.fields(cls):
            yield Setting(section, item.name, item.metadata["key"], item.default)
