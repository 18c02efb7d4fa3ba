"""Streamed text equals the full decode, cut wherever tokens are cut; stop strings, reasoning and tool calls apart."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import TextStateMachine
from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from kvclient.wire import pack, unpack
from kvd.worker.text import BROKEN, Answer, Detokenizer, Format, StopFinder, decode, format_of
from tests.tiny import tiny_model

HARD = [
    "한국어 텍스트입니다", "👨‍👩‍👧‍👦 family 👩🏽‍🚀", "🇩🇪🇫🇷 flags", "e\u0301 a\u0308 combining", "नमस्ते दुनिया",
    "  two  spaces ",
    "line\n\n\ttab", "日本語と中文", "\u200b\u200d zero", "plain words of the people",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def byte_fallback() -> Any:
    """A sentencepiece-like decoder: ▁ for spaces, <0xNN> tokens for bytes, the first space stripped."""
    vocab = [f"<0x{n:02X}>" for n in range(256)] + ["▁", "▁the", "a", "b", "▁", "語"]
    pieces = {piece: n for n, piece in enumerate(dict.fromkeys(vocab))}
    raw = Tokenizer(models.BPE(vocab=pieces, merges=[], byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def streamed(tokenizer: Any, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(id) for id in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", HARD)
def test_deltas_join_to_the_full_decode_and_no_character_is_split(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    for end in range(1, len(ids) + 1):
        deltas = streamed(tokenizer, ids[:end])
        full = decode(tokenizer, ids[:end])
        assert "".join(deltas) == full
        assert all(BROKEN not in delta for delta in deltas[:-1])
        assert sum(delta.count(BROKEN) for delta in deltas) == full.count(BROKEN)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 511), max_size=40))
def test_any_tokens_stream_to_their_full_decode(tokenizer: Any, ids: list[int]) -> None:
    assert "".join(streamed(tokenizer, ids)) == decode(tokenizer, ids)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 260), max_size=30))
def test_any_tokens_with_byte_fallback_stream_to_their_full_decode(byte_fallback: Any, ids: list[int]) -> None:
    assert "".join(streamed(byte_fallback, ids)) == decode(byte_fallback, ids)


def test_text_is_not_held_back_without_a_reason(tokenizer: Any) -> None:
    ids = tokenizer.encode("people know water", add_special_tokens=False)
    assert all(delta for delta in streamed(tokenizer, ids)[:-1])


def cuts(text: str, pieces: int) -> list[list[str]]:
    """Ways to cut a text into `pieces` pieces."""
    borders = itertools.combinations(range(1, len(text)), pieces - 1)
    return [[text[a:b] for a, b in itertools.pairwise((0, *border, len(text)))] for border in borders]


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_a_stop_string_is_found_across_any_borders(pieces: int) -> None:
    for parts in cuts("say END. then STOP here", pieces):
        finder, out, found = StopFinder(["STOP", "END!"]), "", False
        for part in parts:
            text, found = finder.push(part)
            out += text
            if found:
                break
        assert (out, found) == ("say END. then ", True)


@pytest.mark.parametrize("stops", [["bcdef", "cd"], ["bcd", "cd"], ["bc", "bcd"]])
def test_the_stop_string_that_is_complete_first_counts_however_the_text_is_cut(stops: list[str]) -> None:
    def cut(parts: list[str]) -> tuple[str, str | None]:
        finder, out = StopFinder(stops), ""
        for part in parts:
            text, found = finder.push(part)
            out += text
            if found:
                break
        return out, finder.hit

    text = "abcdefg"
    assert {cut(parts) for pieces in range(1, 8) for parts in cuts(text, pieces)} == {cut(list(text))}


def test_the_beginning_of_a_stop_string_is_given_back_at_the_end() -> None:
    finder = StopFinder(["STOP"])
    assert finder.push("no ST") == ("no ", False)
    assert finder.finish() == "ST"


THINK = {"normal": [("<think>", "reasoning"), ("<tool_call>", "tool")], "reasoning": [("</think>", "normal")],
         "tool": [("</tool_call>", "normal")]}  # fmt: skip
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


def parse(text: str, tools: Any = None) -> Any:
    return json.loads(text)


def said(parts: list[str], initial: str = "normal", stops: list[str] | None = None) -> tuple[Answer, list[Any]]:
    """What an answer gives for text that arrives in these parts."""
    format = Format(TextStateMachine(THINK), initial, "<tool_call>", "</tool_call>", parse)

    class Parts:
        def decode(self, ids: Any, **_: Any) -> str:
            return "".join(parts[id] for id in ids)

        def convert_ids_to_tokens(self, ids: Any) -> list[str]:
            return [parts[id] for id in ids]

    answer = Answer(Parts(), stops or [], format)
    pieces = [piece for id in range(len(parts)) for piece in answer.push(id)] + answer.finish()
    return answer, pieces


@pytest.mark.parametrize("initial", ["normal", "reasoning"])
@pytest.mark.parametrize("text", [
    f"<think>why</think>so {CALL} done", f"a{CALL}{CALL}b", "<think>never closed", "<tool_call>{broken",
    f"x{CALL[:-3]}", "plain < text </think>", "<tool_call>not json</tool_call>tail",
])  # fmt: skip
def test_streamed_and_whole_answers_are_the_same_and_no_text_vanishes(text: str, initial: str) -> None:
    whole, _ = said([text], initial)
    for parts in cuts(text, 2) + [list(text)]:
        answer, pieces = said(parts, initial)
        assert (answer.text, answer.reasoning) == (whole.text, whole.reasoning)
        assert [call["arguments"] for call in answer.tool_calls] == [call["arguments"] for call in whole.tool_calls]
        assert "".join(piece.text for piece in pieces if piece.kind == "text") == answer.text
        assert "".join(piece.text for piece in pieces if piece.kind == "reasoning") == answer.reasoning


def test_calls_and_reasoning_are_told_apart() -> None:
    answer, pieces = said(list(f"<think>why</think>so {CALL} done"))
    assert (answer.text, answer.reasoning) == ("so  done", "why")
    assert [(call["name"], call["arguments"]) for call in answer.tool_calls] == [("f", '{"x": 1}')]
    assert [kind for kind, _ in itertools.groupby(piece.kind for piece in pieces)] == [
        "reasoning", "text", "tool_call", "text",
    ]  # fmt: skip


def test_a_call_that_does_not_parse_stays_as_the_model_wrote_it() -> None:
    assert said(["a<tool_call>{broken"])[0].text == "a<tool_call>{broken"
    assert said(["a<tool_call>no</tool_call>b"])[0].text == "a<tool_call>no</tool_call>b"


@pytest.mark.parametrize("body", ["[" * 5000, "[]", '{"name": 1%s, "arguments": {}}' % ("0" * 30),
                                  '{"name": "\\ud83d", "arguments": {}}'])  # fmt: skip
def test_what_cannot_be_sent_as_a_call_stays_as_the_model_wrote_it(body: str) -> None:
    for text in (f"a<tool_call>{body}</tool_call>b", f"a<tool_call>{body}"):
        answer, pieces = said([text])
        assert (answer.text, answer.tool_calls) == (text, [])
        assert "".join(piece.text for piece in pieces) == text


def test_half_a_character_in_the_arguments_of_a_call_stays_escaped() -> None:
    answer, _ = said(['<tool_call>{"id": 7, "name": "f", "arguments": {"x": "\\ud83d \u00fc"}}</tool_call>'])
    [call] = answer.tool_calls
    assert call["arguments"] == '{"x": "\\ud83d \u00fc"}' and str(call["id"]).startswith("call_")
    assert unpack(pack(dict(call))) == call


def test_nothing_follows_a_stop_string() -> None:
    answer, _ = said(list("one STOP two"), stops=["STOP"])
    assert answer.stopped
    assert answer.text == "one "


def test_a_model_without_tags_gives_plain_text(tokenizer: Any, tmp_path: Path) -> None:
    format = format_of(tokenizer, [], [1, 2, 3])
    assert (format.initial, format.parse) == ("normal", None)
