"""What a request in any of the HTTP shapes asks of the daemon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Ask:
    """One HTTP request, translated.

    `bodies` are `generate` bodies, one per prompt (more than one only for completions with several prompts); choice
    `i` of prompt `p` is choice `p * n + i` of the reply. A body without an `n` asks for one answer, which is every
    choice of its prompt. `notes` go into the reply's `kvd` object.
    """

    model: str
    bodies: Sequence[dict[str, Any]]
    n: int = 1
    stream: bool = False
    usage: bool = True
    """usage is sent at the end of a stream"""
    echo: Sequence[str] = ()
    """text put in front of the choices of each prompt (completions with `echo`)"""
    tops: int | None = None
    """alternatives asked for per token; None: no log probabilities"""
    request: dict[str, Any] = field(default_factory=dict)
    """what the reply repeats of the request (responses)"""
    notes: dict[str, Any] = field(default_factory=dict)
