"""The text that precisions are compared on: a long document, needles planted in it, questions about it. Pure.

The set in `data/` ships with the package: a document of its own and six questions on facts from its first quarter, so
that short runs can answer them too. Any other text takes the document's place; its questions are then only compared
with what native KV answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from kvclient.errors import BadRequest

Encode = Callable[[str], list[int]]
DOCUMENT: Final = "the handbook that ships with kvd"
LEAST: Final = 256
"""tokens below which nothing can be said"""


@dataclass(frozen=True, slots=True)
class Needle:
    """`sentence` is planted at `depth` of the text; after `probe` the model should go on with `answer`."""

    depth: float
    sentence: str
    probe: str
    answer: str


@dataclass(frozen=True, slots=True)
class Question:
    """`expects`: one of these words is in a right answer; none where the text is not ours."""

    text: str
    expects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Probe:
    """A needle as ids: what is fed, and how many ids at its end must have been predicted."""

    ids: tuple[int, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class Material:
    """Everything as token ids. `window` follows `prefix`; `following` is the id behind it, if there is one."""

    prefix: tuple[int, ...]
    window: tuple[int, ...]
    following: int | None
    probes: tuple[Probe, ...]
    questions: tuple[tuple[int, ...], ...]
    expects: tuple[tuple[str, ...], ...]

    @property
    def tokens(self) -> int:
        return len(self.prefix) + len(self.window)


NEEDLES: Final = (
    Needle(0.1, "The code of the harbour safe is KESTREL-4471.", "The code of the harbour safe is", " KESTREL-4471"),
    Needle(0.3, "The spare key of the mill hangs behind the blue clock.", "The spare key of the mill hangs behind",
           " the blue clock"),
    Needle(0.5, "The password of the night ferry is ANANAS-7734.", "The password of the night ferry is",
           " ANANAS-7734"),
    Needle(0.6, "The number of the lost parcel is 580-926-13.", "The number of the lost parcel is", " 580-926-13"),
    Needle(0.8, "The winner of the garden prize was Ottilie Brandt.", "The winner of the garden prize was",
           " Ottilie Brandt"),
)  # fmt: skip
PLAIN_QUESTIONS: Final = (
    "What is this text about?", "Which names occur in the text?", "Which numbers does the text give?",
    "How does the text begin?", "What is said last?", "What is the most important statement of the text?",
)  # fmt: skip


def shipped() -> tuple[str, tuple[Question, ...]]:
    """The document and its questions."""
    folder = files("kvd.calibrate") / "data"
    raw: list[dict[str, Any]] = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    questions = tuple(Question(item["question"], tuple(item["expects"])) for item in raw)
    return (folder / "handbook.txt").read_text(encoding="utf-8"), questions


def plant(text: str, needles: Sequence[Needle], encode: Encode, tokens: int) -> str:
    """The text with every needle as a paragraph of its own at its depth of the first `tokens` tokens."""
    paragraphs = text.split("\n\n")
    ends, total = [], 0
    for paragraph in paragraphs:
        total += len(encode(paragraph + "\n\n"))
        ends.append(total)
    reach = min(total, tokens)
    placed: dict[int, list[str]] = {}
    for needle in needles:
        at = min(range(len(ends)), key=lambda i: abs(ends[i] - needle.depth * reach))
        placed.setdefault(at, []).append(needle.sentence)
    with_needles = [[paragraph, *placed.get(i, [])] for i, paragraph in enumerate(paragraphs)]
    return "\n\n".join(line for group in with_needles for line in group)


def prepare(
    text: str, questions: Sequence[Question], encode: Encode, *, frame: tuple[list[int], str], tokens: int, window: int
) -> Material:
    """frame: ids before the text and the text behind a question, from the chat template. tokens: how much of the text
    is used, its frame included; less where the text is shorter. Raises BadRequest for a text under LEAST tokens."""
    head, tail = frame
    ids = [*head, *encode(plant(text, NEEDLES, encode, tokens - window))]
    total = min(tokens, len(ids))
    if total < LEAST:
        raise BadRequest(f"the text has {total} tokens, at least {LEAST} are needed", tokens=total, least=LEAST)
    window = min(window, total // 4)
    probes = []
    for needle in NEEDLES:
        probe, answer = encode(f"\n\n{needle.probe}"), encode(needle.answer)
        probes.append(Probe((*probe, *answer), len(answer)))
    return Material(
        prefix=tuple(ids[: total - window]),
        window=tuple(ids[total - window : total]),
        following=ids[total] if len(ids) > total else None,
        probes=tuple(probes),
        questions=tuple(tuple(encode(f"\n\n{question.text}{tail}")) for question in questions),
        expects=tuple(question.expects for question in questions),
    )
