"""What is asked, about what, and how many of its tokens two prompts have in common."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvclient import compose

DOCUMENT = Path(__file__).resolve().parents[2] / "LICENSE"
ROLE = "You answer questions about a document in one short sentence."
SHELL_ROLE = "You answer questions about a document in a few words."
"""another system text, so that the first question through the shell is cold too"""
FIRST = "Which version of the licence is this?"
OTHER = "What does a recipient get from each contributor?"
SHELL_FIRST = "What is the title of this document?"
SHELL_SECOND = "What is this document about?"
KILLED = "Who is a contributor?"


@dataclass(frozen=True, slots=True)
class Exam:
    """Questions on the document under one system text."""

    document: str
    system: str

    @classmethod
    def fresh(cls, role: str, private: bool) -> Exam:
        """In a home that others use too, the system text gets a word that no earlier run had: the first is cold."""
        word = "" if private else f"Session {secrets.token_hex(4)}. "
        return cls(DOCUMENT.read_text(encoding="utf-8"), word + role)

    def messages(self, question: str) -> list[dict[str, Any]]:
        return compose.messages(compose.text(self.document, question), self.system)


class Counter:
    """Counts tokens with the model's own tokenizer and template, apart from the daemon."""

    def __init__(self, model: Path) -> None:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns of missing frameworks nobody needs here
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(str(model))

    def ids(self, messages: list[dict[str, Any]]) -> list[int]:
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def beyond(self, messages: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> int:
        """Tokens of the first prompt from where it leaves the second."""
        new, old = self.ids(messages), self.ids(earlier)
        common = next((at for at, (a, b) in enumerate(zip(new, old, strict=False)) if a != b), min(len(new), len(old)))
        return len(new) - common
