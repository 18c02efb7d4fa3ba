"""What one gateway is told at its start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvclient.gateway.auth import Guard
from kvclient.gateway.volatile import Rule

DEFAULT_MAX_BODY: Final = 32 * 1024 * 1024
DEFAULT_MAX_REQUESTS: Final = 256
EVERY_MODEL: Final = "*"


@dataclass(frozen=True, slots=True)
class Settings:
    """`max_body` in bytes; `max_requests` generations at once, one more is refused as busy."""

    guard: Guard = field(default_factory=Guard)
    volatile: Mapping[str, Sequence[Rule]] = field(default_factory=dict)
    """rules by model name; "*" holds for models that are not named"""
    max_body: int = DEFAULT_MAX_BODY
    max_requests: int = DEFAULT_MAX_REQUESTS

    def rules(self, model: str) -> Sequence[Rule]:
        return self.volatile.get(model, self.volatile.get(EVERY_MODEL, ()))
