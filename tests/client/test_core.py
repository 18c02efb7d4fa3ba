"""Requests, replies and patience, without a socket or a clock."""

from __future__ import annotations

from typing import Any

import pytest

from kvclient import core, wire
from kvclient.core import Reply, Request, Watch, received, request
from kvclient.errors import BadRequest, Busy, Internal, ProtocolError, Timeout, Unreachable
from kvclient.events import TokenLogprob
from tests.client.fake import CHOICE, STATS
from tests.client.test_fields import GOOD, body


def ask(**more: Any) -> Request:
    return request("generate", {"prompt": "hi", **more}, "demo", "r1")


def reply(kind: str, body: dict[str, Any], id: str = "r1") -> wire.Message:
    return wire.message(kind, id, body)


@pytest.mark.parametrize("verb", list(core.fields.VERBS))
def test_a_request_of_every_verb_survives_the_wire(verb: str) -> None:
    for name in core.fields.VERBS[verb] or ("",):
        asked = request(verb, body(verb, name, GOOD[name]) if name else {}, "demo")
        arrived = wire.parse(asked.message.frames())
        assert arrived == asked.message and arrived.kind == verb
        assert core.fields.checked(verb, arrived.body) == arrived.body


def test_the_control_lane_has_its_verbs() -> None:
    assert request("status", {}).control and request("cancel", {"id": "x"}).control
    assert not ask().control and not request("models", {}).control


@pytest.mark.parametrize("id", ["", "x" * 65, 5])
def test_a_request_id_of_ones_own_is_checked(id: Any) -> None:
    with pytest.raises(BadRequest, match="request_id"):
        request("generate", {"prompt": "hi"}, "demo", id)


@pytest.mark.parametrize("model", ["x" * 257, "\U0001f600" * 257, "\ud800", 5])
def test_a_model_name_is_checked(model: Any) -> None:
    with pytest.raises(BadRequest, match="model"):
        request("generate", {"prompt": "hi"}, model)


def deep(levels: int) -> Any:
    made: Any = "x"
    for _ in range(levels):
        made = [made]
    return made


def test_the_longest_model_name_fits_into_a_header() -> None:
    asked = request("status", {}, "\U0001f600" * 256, "\U0001f600" * 64)
    assert len(asked.message.frames()[0]) < wire.MAX_HEADER
    assert wire.parse(asked.message.frames()) == asked.message


@pytest.mark.parametrize(
    "hidden", [object(), {1: 2}, b"bytes", 2**70, "\ud800", {"\ud800": 1}, deep(101), deep(100_000)]
)
def test_what_another_program_could_not_read_is_a_bad_request(hidden: Any) -> None:
    with pytest.raises(BadRequest):
        request("generate", {"messages": [{"role": "user", "content": "x", "extra": hidden}]})


def test_a_request_over_the_limit_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BODY", 100)
    with pytest.raises(BadRequest) as refused:
        ask(prompt="x" * 200)
    assert refused.value.details["limit"] == 100 and refused.value.details["size"] > 200


def test_a_reply_runs_from_events_to_its_completion() -> None:
    run = Reply(ask())
    assert run.feed(reply("queued", {"position": 1})).position == 1
    logprobs = [{"id": 1, "token": "Hello", "logprob": -1.0}]
    assert run.feed(reply("text", {"text": "Hello", "index": 0, "logprobs": logprobs})).text == "Hello"
    assert run.feed(reply("hologram", {})) is None
    done = run.feed(reply("done", {"choices": [CHOICE], "stats": STATS})).done
    assert not run.open and done is run.completion
    assert (done.text, done.finish_reason, done.stats.computed_tokens) == ("Hello world", "stop", 1)
    assert done.logprobs == (TokenLogprob(1, "Hello", -1.0),)


def test_a_choice_names_the_stop_string_that_ended_it() -> None:
    choices = [{**CHOICE, "stop_sequence": "END"}, {**CHOICE, "index": 1}]
    done = Reply(ask(n=2)).feed(reply("done", {"choices": choices, "stats": {}})).done
    assert [choice.stop_sequence for choice in done.choices] == ["END", None]


def test_choices_come_in_order() -> None:
    choices = [{"index": index, "text": str(index), "finish_reason": "length"} for index in (2, 0, 1)]
    done = Reply(ask(n=3)).feed(reply("done", {"choices": choices, "stats": {}})).done
    assert [choice.text for choice in done.choices] == ["0", "1", "2"] and done.text == "0"


def test_an_error_reply_is_raised_as_its_type_with_its_numbers() -> None:
    run = Reply(ask())
    with pytest.raises(Busy) as busy:
        run.feed(reply("error", {"code": "busy", "message": "full", "details": {"limit": 8}}))
    assert busy.value.details == {"limit": 8} and not run.open


@pytest.mark.parametrize("wrong", [
    reply("text", {"text": "x"}, id="other"), reply("result", {}), reply("done", {}), reply("done", {"choices": []}),
    reply("done", {"choices": [{}]}), reply("done", {"choices": "no"}),
    reply("done", {"choices": [CHOICE], "stats": 5}),
])  # fmt: skip
def test_a_reply_that_does_not_belong_is_a_protocol_error(wrong: wire.Message) -> None:
    with pytest.raises(ProtocolError):
        Reply(ask()).feed(wrong)


def test_nothing_comes_after_the_end() -> None:
    run = Reply(request("status", {}, id="r1"))
    run.feed(reply("result", {"up": True}))
    assert run.result == {"up": True}
    with pytest.raises(ProtocolError, match="not waiting"):
        run.feed(reply("result", {}))


def test_another_version_names_both() -> None:
    frames = wire.Message("done", "r1", wire.pack({}), version=wire.VERSION + 1).frames()
    with pytest.raises(ProtocolError, match=r"speaks protocol 2, this kvclient 1") as refused:
        received(frames)
    assert refused.value.details["theirs"] == 2


def test_a_silent_daemon_is_pinged_and_then_given_up() -> None:
    watch = Watch(ask(), "/s", 100.0)
    assert watch.wakes() == 100 + core.SILENCE_S
    assert not watch.due(100 + core.SILENCE_S - 0.1)
    assert watch.due(100 + core.SILENCE_S)
    assert watch.wakes() == 100 + core.SILENCE_S + core.PONG_S
    assert not watch.due(100 + core.SILENCE_S + 0.1)
    with pytest.raises(Unreachable, match="/s has not answered for 8 s"):
        watch.due(100 + core.SILENCE_S + core.PONG_S)


def test_a_message_or_a_pong_starts_the_patience_anew() -> None:
    watch = Watch(ask(), "/s", 0.0)
    assert watch.due(core.SILENCE_S)
    watch.heard(5.0)
    assert not watch.due(5 + core.SILENCE_S - 0.1)
    assert watch.due(5 + core.SILENCE_S)
    watch.pong(10.0)
    assert not watch.due(10 + core.SILENCE_S - 0.1)


def test_a_living_daemon_that_lost_the_request_is_found_out() -> None:
    watch = Watch(ask(), "/s", 0.0)
    watch.pong(core.ORPHAN_S)
    with pytest.raises(Internal, match="said nothing of this request for"):
        watch.due(core.ORPHAN_S + core.SILENCE_S)


def test_verbs_that_may_work_in_silence_only_need_pongs() -> None:
    watch = Watch(request("load", {"model": "demo"}), "/s", 0.0)
    watch.pong(10 * core.ORPHAN_S)
    assert watch.due(10 * core.ORPHAN_S + core.SILENCE_S)


def test_the_clients_own_limit_is_a_little_later_than_the_daemons() -> None:
    watch = Watch(ask(timeout=1.0), "/s", 0.0)
    assert not watch.due(1.0)
    with pytest.raises(Timeout) as late:
        watch.due(1.0 + core.GRACE_S)
    assert late.value.details == {"limit_s": 1.0, "stage": "client"}
