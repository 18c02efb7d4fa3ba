"""The models that are here, by the records in `models/`: read at every call, so a pulled model is there at once. Their
disk may hang, so threads read it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvclient.errors import KvdError, UnknownModel, UnsupportedModel
from kvd.front.reads import Reads
from kvd.home import Home
from kvd.models import aliases, record, size
from kvd.models.facts import facts, text_config
from kvd.models.record import Record
from kvd.settings import Models

SMALLEST_POOL_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class Model:
    """`folder` holds the model's files, `facts` are what they say (see `kvd.models.facts`)."""

    name: str
    folder: Path
    record: Record
    facts: Mapping[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seen:
    """A model (None: nothing is known but its name) as it was last read: now, or, where `unread_s` is not 0, before its
    disk has been silent for so many seconds."""

    name: str
    model: Model | None
    unread_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes: `dense` with every weight in float32 (what the CPU backend runs well), `kept` in the stored form as that
    backend keeps it, `stored` as in the files; `pool` of the smallest KV pool."""

    dense: int
    kept: int
    stored: int
    pool: int

    def weights(self, backend: str, available: int) -> int:
        """What will be loaded: on the CPU dense, if that fits into `available` bytes."""
        if backend != "cpu":
            return self.stored
        return self.dense if self.dense + self.pool <= available else self.kept


class Registry:
    """Owned by the loop's thread. What lies on a disk that does not answer is taken to be as it was last read."""

    def __init__(self, home: Home) -> None:
        self._home = home.root
        self._names = Reads(lambda: record.names(self._home))
        self._models: dict[str, Reads[Model]] = {}

    @property
    def known(self) -> list[str]:
        """Names of the models that were here when that was last read."""
        return self._names.last or []

    @property
    def silent(self) -> bool:
        """Whether a read does not come back."""
        return bool(self._names.hung_s) or any(reads.hung_s for reads in self._models.values())

    async def names(self) -> list[str]:
        """Raises BadRequest for a folder that cannot be read."""
        found = await self._names.newest()
        return await self._names.fresh() if found is None else found

    async def resolve(self, name: str, settings: Models) -> str:
        """See `resolved`; raises as `names` does, too."""
        return resolved(name, settings, await self.names())

    async def model(self, name: str) -> Model:
        """See `find`. As it is now, however long its disk takes."""
        return await self._of(name).fresh()

    async def seen(self, name: str) -> Seen:
        """Raises what `find` raises."""
        reads = self._of(name)
        model = await reads.newest()
        return Seen(name, model, max(reads.hung_s, self._names.hung_s))

    async def all(self) -> list[Seen]:
        """Without those whose files are gone, or that are being pulled: asking for them by name says so."""
        names = await self._names.newest() or []
        for gone in self._models.keys() - names:
            del self._models[gone]
        return [one for one in await asyncio.gather(*map(self._seen, names)) if one is not None]

    async def _seen(self, name: str) -> Seen | None:
        try:
            return await self.seen(name)
        except KvdError:
            return None

    def _of(self, name: str) -> Reads[Model]:
        return self._models.setdefault(name, Reads(lambda: find(self._home, name)))


def resolved(name: str, settings: Models, names: Sequence[str]) -> str:
    """The model of that name, else the one it is an alias of; for "" the default one, or the only one there is. `names`
    are here. Raises UnknownModel."""
    if not (wanted := name or settings.default):
        if len(names) == 1:
            return names[0]
        known = list(names)
        if not known:
            raise UnknownModel("no model is here yet; try: kvd pull demo", model="", known=known)
        raise UnknownModel(f"which model? there are several and no default: {', '.join(known)}", model="", known=known)
    if wanted in names:
        return wanted
    alias = aliases.match(wanted, settings.aliases)
    if alias is None:
        raise record.unknown(wanted, names)
    pattern, target = alias
    if target in names:
        return target
    problem = record.unknown(target, names)
    chained = "; an alias of an alias leads nowhere" if target in dict(settings.aliases) else ""
    raise UnknownModel(
        f"{wanted!r} is an alias of {target!r} (models.aliases: {pattern}): {problem.message}{chained}",
        **{**problem.details, "model": wanted, "alias_of": target},
    )


def stored_name(name: str, settings: Models, names: Sequence[str], stored: Container[str]) -> str:
    """The name that the store has for a model: `stored` holds those it has something of, also of models that are not
    here any more; they come before aliases. Raises UnknownModel for an alias of no model."""
    if name in stored or name in names or aliases.match(name, settings.aliases) is None:
        return name
    return resolved(name, settings, names)


def find(home: Path, name: str) -> Model:
    """The model of this name. Raises UnknownModel, and UnsupportedModel for one whose files are gone."""
    found, folder = record.find(home, name)
    return Model(name, folder, found, facts(folder))


def needs(folder: Path, block_size: int) -> Needs:
    """How much memory a model will need, from the headers of its files. Raises UnsupportedModel or BadRequest."""
    found = size.sizes(folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise UnsupportedModel(f"{folder}/config.json cannot be read: {problem}", file=str(folder)) from None
    return Needs(found.dense, found.kept, found.stored, SMALLEST_POOL_BLOCKS * block_size * token_bytes(config))


def token_bytes(config: dict[str, Any]) -> int:
    """Bytes of KV per token in float32: 2 * layers * KV heads * head size * 4; 0 where the config does not say."""
    given = text_config(config)
    layers, heads = given.get("num_hidden_layers"), given.get("num_attention_heads")
    kv_heads = given.get("num_key_value_heads") or heads
    head = given.get("head_dim") or (given.get("hidden_size", 0) // heads if heads else 0)
    return 2 * layers * kv_heads * head * 4 if layers and kv_heads and head else 0
