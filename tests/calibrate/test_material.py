"""The text to measure on: needles where they should be, questions that the text answers."""

from __future__ import annotations

import pytest

from kvclient.errors import BadRequest
from kvd.calibrate.material import NEEDLES, Needle, Question, plant, prepare, shipped


def encode(text: str) -> list[int]:
    """A token per character, so that positions can be read off."""
    return [ord(letter) for letter in text]


def test_the_shipped_document_has_8192_tokens_with_room_and_answers_its_six_questions_early() -> None:
    text, questions = shipped()
    assert len(text.split()) > 5900 and len(text.encode()) < 60_000
    assert len(questions) == 6
    for question in questions:
        assert question.expects
        for word in question.expects:
            assert word in text[: len(text) // 7], word


def test_no_needle_is_in_the_document_by_itself() -> None:
    text, _ = shipped()
    for needle in NEEDLES:
        assert needle.answer.strip() not in text
        assert needle.sentence.startswith(needle.probe + needle.answer)


@pytest.mark.parametrize("depth", [0.1, 0.6, 0.9])
def test_a_needle_stands_at_its_depth_of_what_is_used(depth: float) -> None:
    text = "\n\n".join(f"Paragraph {i} says nothing of use." for i in range(200))
    planted = plant(text, [Needle(depth, "THE NEEDLE.", "", "")], encode, 4000)
    assert planted.index("THE NEEDLE.") == pytest.approx(depth * 4000, abs=60)
    assert planted.replace("\n\nTHE NEEDLE.", "") == text


def test_prefix_and_window_are_the_text_in_order_behind_the_frame() -> None:
    text = "\n\n".join(f"Paragraph {i} says nothing." for i in range(60))
    made = prepare(text, [Question("Why?", ("x",))], encode, frame=([1, 2], "TAIL"), tokens=600, window=100)
    whole = [1, 2, *encode(plant(text, NEEDLES, encode, 500))]
    assert list(made.prefix) + list(made.window) == whole[:600]
    assert (len(made.window), made.following) == (100, whole[600])
    assert made.questions == (tuple(encode("\n\nWhy?TAIL")),) and made.expects == (("x",),)
    probe, needle = made.probes[0], NEEDLES[0]
    assert list(probe.ids) == encode("\n\n" + needle.probe + needle.answer) and probe.answer == len(needle.answer)


def test_a_short_text_is_used_whole_and_a_very_short_one_refused_with_its_length() -> None:
    made = prepare("word " * 100, [], encode, frame=([], ""), tokens=8192, window=256)
    assert made.tokens < 8192 and made.following is None and len(made.window) <= made.tokens // 4
    with pytest.raises(BadRequest, match="at least 256"):
        prepare("short", [], lambda text: encode(text)[:10], frame=([], ""), tokens=8192, window=256)
