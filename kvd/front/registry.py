"""The models that are here, by the records in `models/`: read at every call, so a pulled model is there at once."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvclient.errors import KvdError, UnknownModel, UnsupportedModel
from kvd.home import Home
from kvd.models import aliases, record, size
from kvd.models.record import Record
from kvd.settings import Models

SMALLEST_POOL_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class Model:
    """`folder` holds the model's files."""

    name: str
    folder: Path
    record: Record


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
    def __init__(self, home: Home) -> None:
        self._home = home.root

    def all(self) -> list[Model]:
        found = []
        for name in record.names(self._home):
            try:
                found.append(self._find(name))
            except KvdError:
                continue  # its files are gone, or it is being pulled: asking for it by name says so
        return found

    def resolve(self, name: str, settings: Models) -> Model:
        """The model of that name, else the one it is an alias of; for "" the default one, or the only one there is.
        Raises UnknownModel, and UnsupportedModel for one whose files are gone."""
        if wanted := name or settings.default:
            return self._named(wanted, settings)
        known = record.names(self._home)
        if len(known) == 1:
            return self._find(known[0])
        if not known:
            raise UnknownModel("no model is here yet; try: kvd pull demo", model="", known=[])
        raise UnknownModel(f"which model? there are several and no default: {', '.join(known)}", model="", known=known)

    def stored_name(self, name: str, settings: Models, stored: Container[str]) -> str:
        """The name that the store has for a model: `stored` holds those it has something of, also of models that are
        not here any more; they come before aliases. Raises UnknownModel for an alias of no model."""
        if name in stored or name in record.names(self._home) or aliases.match(name, settings.aliases) is None:
            return name
        return self.resolve(name, settings).name

    def aliases(self, settings: Models) -> dict[str, list[str]]:
        """Names and patterns by the model they lead to."""
        return aliases.by_model(settings.aliases, record.names(self._home))

    def _named(self, name: str, settings: Models) -> Model:
        try:
            return self._find(name)
        except UnknownModel:
            alias = aliases.match(name, settings.aliases)
            if alias is None:
                raise
        pattern, target = alias
        try:
            return self._find(target)
        except UnknownModel as problem:
            chained = "; an alias of an alias leads nowhere" if target in dict(settings.aliases) else ""
            raise UnknownModel(
                f"{name!r} is an alias of {target!r} (models.aliases: {pattern}): {problem.message}{chained}",
                **{**problem.details, "model": name, "alias_of": target},
            ) from None

    def _find(self, name: str) -> Model:
        found, folder = record.find(self._home, name)
        return Model(name, folder, found)


def needs(folder: Path, block_size: int) -> Needs:
    """How much memory a model will need, from the headers of its files. Raises UnsupportedModel or BadRequest."""
    found = size.sizes(folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise UnsupportedModel(f"{folder}/config.json cannot be read: {problem}", file=str(folder)) from None
    return Needs(found.dense, found.kept, found.stored, SMALLEST_POOL_BLOCKS * block_size * token_bytes(config))


def token_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of KV per token in float32: 2 * layers * KV heads * head size * 4; 0 where the config does not say."""
    inner = config.get("text_config")
    given = inner if isinstance(inner, dict) else config
    layers, heads = given.get("num_hidden_layers"), given.get("num_attention_heads")
    kv_heads = given.get("num_key_value_heads") or heads
    head = given.get("head_dim") or (given.get("hidden_size", 0) // heads if heads else 0)
    return 2 * layers * kv_heads * head * 4 if layers and kv_heads and head else 0
