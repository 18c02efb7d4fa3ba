"""The models a daemon knows, as both APIs list them."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def _pulled(model: Mapping[str, Any]) -> datetime.datetime:
    """When the model was brought in; the epoch if that is not known."""
    value = model.get("pulled_at")
    if isinstance(value, int | float):
        return datetime.datetime.fromtimestamp(value, datetime.UTC)
    if isinstance(value, str):
        try:
            found = datetime.datetime.fromisoformat(value)
        except ValueError:
            return datetime.datetime.fromtimestamp(0, datetime.UTC)
        return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)
    return datetime.datetime.fromtimestamp(0, datetime.UTC)


def under_each_name(found: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The models, and after each the same once more for every alias of it that is a name, not a pattern."""
    return [
        {**model, "name": name}
        for model in found
        for name in (model["name"], *(alias for alias in model.get("aliases", ()) if "*" not in alias))
    ]


def openai_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """What OpenAI lists, and the context's length in tokens, where it is known, by the two names that clients of local
    servers read: vLLM's `max_model_len`, OpenRouter's `context_length`."""
    created = int(_pulled(model).timestamp())
    listed = {"id": model["name"], "object": "model", "created": created, "owned_by": "kvd"}
    length = model.get("context_length")
    return listed if length is None else {**listed, "max_model_len": length, "context_length": length}


def openai_list(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": [openai_model(model) for model in found]}


def anthropic_model(model: Mapping[str, Any]) -> dict[str, Any]:
    name = str(model["name"])
    return {
        "type": "model", "id": name, "display_name": name, "created_at": _pulled(model).isoformat(),
        "max_input_tokens": model.get("context_length"),
    }  # fmt: skip


def anthropic_list(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    listed = [anthropic_model(model) for model in found]
    ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]} if listed else {"first_id": None, "last_id": None}
    return {"data": listed, "has_more": False, **ends}
