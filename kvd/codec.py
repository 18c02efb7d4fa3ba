"""Dataclasses to and from the maps that msgpack carries, every field checked against its annotation."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from kvclient.errors import ProtocolError

_T = TypeVar("_T")


def plain(value: Any) -> Any:
    """What msgpack can pack: dataclasses, also those inside tuples, become maps; all else stays as it is."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return [plain(item) for item in value]
    return value


def build(kind: type[_T], body: Any) -> _T:
    """A `kind` from an unpacked body. Raises ProtocolError unless names and types fit exactly."""
    checks = _checks(kind)
    if not isinstance(body, dict) or body.keys() != checks.keys():
        raise ProtocolError(f"{kind.__name__}: fields do not fit")
    try:
        return kind(**{name: check(body[name]) for name, check in checks.items()})
    except TypeError as problem:
        raise ProtocolError(f"{kind.__name__}: {problem}") from None


_CHECKS: Final[dict[type[Any], dict[str, Callable[[Any], Any]]]] = {}


def _checks(kind: type[Any]) -> dict[str, Callable[[Any], Any]]:
    if kind not in _CHECKS:
        hints = get_type_hints(kind)
        _CHECKS[kind] = {f.name: _check(hints[f.name]) for f in fields(kind)}
    return _CHECKS[kind]


def _check(hint: Any) -> Callable[[Any], Any]:
    """The function that turns msgpack's value into one of type `hint`, or raises TypeError."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is tuple:
        return lambda value: _items(args[0], value)
    if origin in (Union, types.UnionType):
        inner = _check(args[0])
        return lambda value: None if value is None else inner(value)
    if is_dataclass(hint):
        return lambda value: build(hint, value)  # type: ignore[arg-type]
    return lambda value: _scalar(origin or hint, value)


def _items(inner: Any, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"expected a list, got {type(value).__name__}")
    if inner in (int, bytes):
        if value and set(map(type, value)) != {inner}:
            raise TypeError(f"expected a list of {inner.__name__}")
        return tuple(value)
    check = _check(inner)
    return tuple(check(item) for item in value)


def _scalar(wanted: type[Any], value: Any) -> Any:
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise TypeError(f"expected {wanted.__name__}, got {type(value).__name__}")
    return value
