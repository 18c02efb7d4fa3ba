"""What `kv` makes of a document and a question."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient import compose, fields


def test_the_document_comes_first_and_a_blank_line_between() -> None:
    assert compose.text("doc\n", "question") == "doc\n\nquestion"


def test_prompt_first_reverses() -> None:
    assert compose.text("doc\n", "question", prompt_first=True) == "question\n\ndoc\n"


@pytest.mark.parametrize(("document", "prompt"), [("doc\n", ""), ("", " question")])
def test_one_alone_goes_unchanged(document: str, prompt: str) -> None:
    assert compose.text(document, prompt) == document + prompt


@given(document=st.text(min_size=1), one=st.text(min_size=1), two=st.text(min_size=1))
def test_two_questions_share_what_warm_prefills(document: str, one: str, two: str) -> None:
    opening = compose.opening(document)
    assert compose.text(document, one) == opening + one
    assert compose.text(document, two) == opening + two


def test_a_system_text_is_its_own_message() -> None:
    assert compose.messages("x", "s") == [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    assert compose.messages("x") == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("verb", ["warm", "explain"])
@pytest.mark.parametrize("raw", [True, False])
def test_what_is_warmed_is_a_good_request(verb: str, raw: bool) -> None:
    body = fields.checked(verb, compose.warm_body("doc\n", None if raw else "s", raw=raw))
    assert body["open_end"] and (body.get("prompt") == "doc\n\n") == raw
