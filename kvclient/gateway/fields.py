"""A JSON object read field by field, each with its type; what nobody read is known afterwards."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from kvclient.errors import BadRequest

_ESCAPED_HALF: Final = re.compile(r"\\u[dD][89a-fA-F]")
_HALF: Final = re.compile("[\ud800-\udfff]")


class Fields:
    """One object of a request. A field that is null counts as absent. Errors are BadRequest with details.field."""

    def __init__(self, raw: Mapping[str, Any], where: str = "") -> None:
        self.raw = raw
        self.where = where
        self._read: set[str] = set()
        self._dropped: list[str] = []

    def has(self, name: str) -> bool:
        return self.raw.get(name) is not None

    def any(self, name: str) -> Any:
        self._read.add(name)
        return self.raw.get(name)

    def text(self, name: str, default: str = "") -> str:
        value = self.any(name)
        if value is None:
            return default
        if not isinstance(value, str):
            self.refuse(name, "a string")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.any(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def integer(self, name: str) -> int | None:
        value = self.any(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            self.refuse(name, "an integer")
        return value

    def number(self, name: str) -> float | None:
        value = self.any(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(name, "a number")
        try:
            return float(value)
        except OverflowError:
            raise BadRequest(f"{self.path(name)} is too large", field=self.path(name)) from None

    def items(self, name: str) -> Sequence[Any]:
        value = self.any(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.refuse(name, "a list")
        return value

    def table(self, name: str) -> Fields | None:
        value = self.any(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(name, "an object")
        return Fields(value, self.path(name))

    def tables(self, name: str) -> list[Fields]:
        return [fields_of(item, f"{self.path(name)}[{index}]") for index, item in enumerate(self.items(name))]

    def needed(self, name: str) -> str:
        """A string that must be there and not empty."""
        value = self.text(name)
        if not value:
            raise BadRequest(f"{self.path(name)} is required", field=self.path(name))
        return value

    def without(self, name: str, why: str) -> None:
        """A field this server cannot honour: absent, null, false and empty pass; anything else is an error."""
        if self.any(name):
            raise BadRequest(f"{self.path(name)} is not supported: {why}", field=self.path(name))

    def skip(self, *names: str) -> None:
        """Fields that only the reply repeats."""
        self._read.update(names)

    def leave(self, *names: str) -> None:
        """Fields that were checked and change nothing in this request: they count as not read."""
        self._read.difference_update(names)

    def drop(self, *parts: str) -> None:
        """Parts of fields that are left out: they count as not read."""
        self._dropped += parts

    def ignored(self) -> list[str]:
        """Names that were sent and that nothing has read."""
        return sorted([*(name for name in self.raw if self.has(name) and name not in self._read), *self._dropped])

    def path(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def refuse(self, name: str, wanted: str) -> NoReturn:
        got = type(self.raw.get(name)).__name__
        raise BadRequest(f"{self.path(name)} must be {wanted}, got {got}", field=self.path(name))


def fields_of(value: Any, where: str = "") -> Fields:
    if not isinstance(value, dict):
        raise BadRequest(f"{where or 'the body'} must be an object, got {type(value).__name__}", field=where or None)
    return Fields(value, where)


def parse_json(raw: bytes) -> Fields:
    """The body of a request. Raises BadRequest for anything but one JSON object that can be written again as it is."""
    try:
        text = raw.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as problem:
        raise BadRequest(f"the body is not JSON: {problem}") from None
    if _ESCAPED_HALF.search(text):
        _check_characters(value)
    return fields_of(value)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number")
    return value


def _check_characters(value: Any) -> None:
    """Raises BadRequest for text that holds half a surrogate pair, as where a client cut an emoji in two."""
    rest = [("", value)]
    while rest:
        path, item = rest.pop()
        if isinstance(item, dict):
            rest += [(f"{path}.{key}" if path else key, inner) for key, inner in item.items()]
            texts = list(item)
        elif isinstance(item, list):
            rest += [(f"{path}[{index}]", inner) for index, inner in enumerate(item)]
            continue
        else:
            texts = [item] if isinstance(item, str) else []
        for text in texts:
            if (half := _HALF.search(text)) is not None:
                raise BadRequest(
                    f"{path or 'the body'} holds a lone surrogate at character {half.start()}: it is no valid text",
                    field=path or None, position=half.start(),
                )  # fmt: skip
