"""Requests become token ids, or an error that names the field."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from kvclient.errors import BadRequest, ContextLengthExceeded
from kvd.worker.prompt import Prompter
from tests.tiny import CHAT_TEMPLATE, tiny_model

DAY = datetime.date(2025, 3, 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def prompter(folder: Path) -> Prompter:
    return Prompter(load_tokenizer(folder), vocab=512, context=100, today=DAY)


def user(text: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def test_text_messages_and_ids_become_the_same_tokens(prompter: Prompter, folder: Path) -> None:
    text = "<|im_start|>user\nhi people<|im_end|>\n<|im_start|>assistant\n"
    ids = load_tokenizer(folder).encode(text, add_special_tokens=False)
    assert list(prompter.prepare("generate", {"prompt": text}).tokens) == ids
    assert list(prompter.prepare("generate", user("hi people")).tokens) == ids
    parts = [{"type": "text", "text": "hi "}, {"type": "text", "text": "people"}]
    assert list(prompter.prepare("generate", user(parts)).tokens) == ids
    assert list(prompter.prepare("generate", {"tokens": ids}).tokens) == ids


@pytest.mark.parametrize(("body", "says"), [
    ({}, "exactly one"),
    ({"prompt": "a", "tokens": [1]}, "exactly one"),
    ({"prompt": ""}, "empty"),
    ({"tokens": [1, 512]}, "512"),
    ({"prompt": "a", "nonsense": 1}, "nonsense"),
    ({"prompt": "a", "logit_bias": {"512": 1.0}}, "512"),
    ({"prompt": "a", "temperature": -1}, "temperature"),
    (user([{"type": "image_url", "image_url": {}}]), "content"),
    (user("x", template_kwargs={"chat_template": "{{ 1 }}"}), "chat_template"),
])  # fmt: skip
def test_bad_input_is_refused_by_name(prompter: Prompter, body: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        prompter.prepare("generate", body)


@pytest.mark.parametrize(("sent", "rendered"), [
    ('{"a": 1}', {"a": 1}), ("", {}), ('{"a": ', {"arguments": '{"a": '}), ("[1]", {"arguments": "[1]"}),
    ('"x"', {"arguments": '"x"'}), ('{"a": 1}{"b": 2}', {"arguments": '{"a": 1}{"b": 2}'}),
])  # fmt: skip
def test_a_call_whose_arguments_are_no_object_does_not_end_the_conversation(
    tmp_path: Path, sent: str, rendered: dict[str, Any]
) -> None:
    strict = "{% for m in messages %}{% for c in m.tool_calls %}" \
        "{% for k, v in c.function.arguments.items() %}{{ k }}: {{ v }}\n{% endfor %}{% endfor %}{% endfor %}end"
    prompter = templated(tiny_model(tmp_path), strict)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": sent}}]}
    text = load_tokenizer(tmp_path).decode(prompter.prepare("generate", {"messages": [call]}).tokens)
    assert text == "".join(f"{key}: {value}\n" for key, value in rendered.items()) + "end"


def test_max_tokens_ends_at_the_context(prompter: Prompter) -> None:
    assert prompter.prepare("generate", {"tokens": [5] * 90}).params.max_tokens == 11
    assert prompter.prepare("generate", {"tokens": [5] * 90, "max_tokens": 4}).params.max_tokens == 4
    assert prompter.prepare("generate", {"tokens": [5] * 100}).excess is None
    excess = prompter.prepare("generate", {"tokens": [5] * 101}).excess
    assert excess is not None
    assert (excess.details["prompt"], excess.details["limit"]) == (101, 100)


def test_an_open_end_leaves_out_what_a_sequel_may_change(prompter: Prompter) -> None:
    document = "people know water. " * 3
    warmed = prompter.prepare("warm", user(document + "\n\n", open_end=True)).tokens
    for question in ("What?", "a", "\n1"):
        asked = prompter.prepare("generate", user(document + "\n\n" + question)).tokens
        assert asked[: len(warmed)] == warmed
    assert len(warmed) > 10


def templated(folder: Path, template: str) -> Prompter:
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": template}))
    return Prompter(load_tokenizer(folder), vocab=512, context=4096, today=DAY)


def test_templates_see_the_day_the_model_was_brought_in(tmp_path: Path) -> None:
    prompter = templated(tiny_model(tmp_path), "{{ strftime_now('%d %b %Y') }}" + CHAT_TEMPLATE)
    tokens = prompter.prepare("generate", user("hi")).tokens
    assert load_tokenizer(tmp_path).decode(tokens).startswith("09 Mar 2025")


def test_templates_run_in_a_sandbox_and_their_refusals_are_the_client_s_error(tmp_path: Path) -> None:
    evil = templated(tiny_model(tmp_path / "a"), "{{ messages.__class__.__mro__ }}")
    with pytest.raises(BadRequest, match="unsafe"):
        evil.prepare("generate", user("hi"))
    strict = templated(tiny_model(tmp_path / "b"), "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadRequest, match="roles must alternate"):
        strict.prepare("generate", user("hi"))


def test_a_seed_is_drawn_where_none_was_given(prompter: Prompter) -> None:
    seeds = {prompter.prepare("generate", {"prompt": "a"}).params.sampling.seed for _ in range(5)}
    assert len(seeds) == 5
    assert prompter.prepare("generate", {"prompt": "a", "seed": 7}).params.sampling.seed == 7


class Counting:
    """A tokenizer that remembers the longest text it was to encode."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.longest = inner, 0

    def encode(self, text: str, **options: Any) -> Any:
        self.longest = max(self.longest, len(text))
        return self.inner.encode(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("kind", ["prompt", "messages"])
def test_a_text_far_over_the_context_is_refused_by_its_beginning(folder: Path, kind: str) -> None:
    """Memory and time of its tokens would be those of the whole."""
    counting = Counting(load_tokenizer(folder))
    prompter = Prompter(counting, vocab=512, context=100, today=DAY)
    text = "the of and a " * 10_000
    with pytest.raises(ContextLengthExceeded, match="limit is 100 tokens"):
        prompter.prepare("generate", {"prompt": text} if kind == "prompt" else user(text))
    assert 0 < counting.longest <= 5_000
