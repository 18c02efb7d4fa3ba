"""The verbs, once for both clients: each function checks its arguments and says what to send and how to read the
answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypedDict, TypeVar

from kvclient.core import Request, request
from kvclient.errors import ProtocolError
from kvclient.events import Stats
from kvclient.fields import Options

T = TypeVar("T")


class InputOptions(TypedDict, total=False):
    """What is to be read, when it is not a raw prompt."""

    tokens: list[int] | None
    messages: list[dict[str, Any]] | None
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    template_kwargs: dict[str, Any] | None


class ExplainOptions(InputOptions, total=False):
    """open_end: more text will follow, so only the tokens that no sequel changes are meant."""

    salt: str | None
    open_end: bool | None


class WarmOptions(ExplainOptions, total=False):
    """pin: keep it in the store, for ttl_s seconds if given."""

    pin: bool | None
    ttl_s: float | None
    timeout: float | None
    cache: str | None
    priority: str | None
    durable_wait_ms: int | None


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One verb asked for: what to send, and how its result reads."""

    request: Request
    read: Callable[[dict[str, Any]], T]

    def answer(self, result: dict[str, Any]) -> T:
        """Raises ProtocolError for a result that does not fit."""
        try:
            return self.read(result)
        except (KeyError, TypeError, ValueError) as problem:
            verb = self.request.verb
            raise ProtocolError(f"malformed result of {verb}: {type(problem).__name__} {problem}") from None


def _whole(result: dict[str, Any]) -> dict[str, Any]:
    return result


def generate(model: str | None, prompt: str | None, request_id: str | None, options: Options) -> Request:
    return request("generate", {"prompt": prompt, **options}, model, request_id)


def warm(model: str | None, prompt: str | None, options: WarmOptions) -> Call[Stats]:
    asked = request("warm", {"prompt": prompt, **options}, model)
    return Call(asked, lambda result: Stats.from_wire(result.get("stats") or {}))


def explain(model: str | None, prompt: str | None, options: ExplainOptions) -> Call[dict[str, Any]]:
    return Call(request("explain", {"prompt": prompt, **options}, model), _whole)


def count(model: str | None, prompt: str | None, options: InputOptions) -> Call[int]:
    return Call(request("count", {"prompt": prompt, **options}, model), lambda result: int(result["tokens"]))


def models(model: str | None) -> Call[list[dict[str, Any]]]:
    return Call(request("models", {"model": model}), lambda result: list(result["models"]))


def load(model: str, kv: str | None, pin: bool | None, ttl_s: float | None) -> Call[dict[str, Any]]:
    return Call(request("load", {"model": model, "kv": kv, "pin": pin, "ttl_s": ttl_s}), _whole)


def unload(model: str) -> Call[dict[str, Any]]:
    return Call(request("unload", {"model": model}), _whole)


def status() -> Call[dict[str, Any]]:
    return Call(request("status", {}), _whole)


def cancel(request_id: str) -> Call[bool]:
    return Call(request("cancel", {"id": request_id}), lambda result: bool(result.get("cancelled", True)))


def cache(verb: str, options: Mapping[str, Any]) -> Call[dict[str, Any]]:
    return Call(request("cache", {**options, "verb": verb}), _whole)


def reload() -> Call[dict[str, Any]]:
    return Call(request("reload", {}), _whole)


def ping() -> Call[dict[str, Any]]:
    return Call(request("ping", {}), _whole)


def shutdown(drain_s: float | None) -> Call[dict[str, Any]]:
    return Call(request("shutdown", {"drain_s": drain_s}), _whole)
