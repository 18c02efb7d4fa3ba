"""What `kv` sends for a piped document and a question, and what `kvd warm` prefills of it: the document comes first, so
that every question on it shares its tokens."""

from __future__ import annotations

from typing import Any

GAP = "\n\n"


def opening(document: str) -> str:
    """The document up to where the question starts."""
    return document.rstrip("\r\n") + GAP if document else ""


def text(document: str, prompt: str, *, prompt_first: bool = False) -> str:
    """Document, a blank line, prompt; with only one of them, that one unchanged."""
    if not document or not prompt:
        return document or prompt
    return prompt + GAP + document if prompt_first else opening(document) + prompt


def messages(content: str, system: str | None = None) -> list[dict[str, Any]]:
    """One user message, after the system text if there is one."""
    user = {"role": "user", "content": content}
    return [user] if system is None else [{"role": "system", "content": system}, user]


def warm_body(document: str, system: str | None = None, *, raw: bool = False) -> dict[str, Any]:
    """Fields of a `warm` (or `explain`) that reads what `kv < document` would send, whatever the question."""
    start = opening(document)
    return {"open_end": True, **({"prompt": start} if raw else {"messages": messages(start, system)})}
