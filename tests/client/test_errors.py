"""Errors are the same on both sides of a wire."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvclient import errors
from kvclient.errors import Internal, KvdError, OutOfMemory, from_wire

KINDS = [kind for kind in vars(errors).values()
         if isinstance(kind, type) and issubclass(kind, KvdError) and kind is not KvdError]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_each_type_survives_the_wire(kind: type[KvdError]) -> None:
    back = from_wire(kind("it tripped", limit=5, what="x").to_wire())
    assert type(back) is kind
    assert (back.message, back.details, str(back)) == ("it tripped", {"limit": 5, "what": "x"}, "it tripped")


def test_what_does_not_fit_now_may_be_tried_again_and_what_never_fits_is_bad_input() -> None:
    now, never = (75, 507), (65, 400)
    for budget, ends in ((31, now), (30, never), (None, now), ("31", now)):
        back = from_wire(OutOfMemory("m needs 31 bytes", needed=31, available=0, budget=budget).to_wire())
        assert (type(back), back.code) == (OutOfMemory, "out_of_memory")
        assert (back.exit_code, back.http_status) == ends


def test_codes_are_unique() -> None:
    assert len({kind.code for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tree_in_the_docstring_names_exit_code_and_status(kind: type[KvdError]) -> None:
    line = next(line for line in (errors.__doc__ or "").splitlines() if f"─ {kind.__name__} " in line)
    assert f"{kind.exit_code} / {kind.http_status}" in line


@pytest.mark.parametrize("kind", KINDS)
def test_the_protocol_names_each_code(kind: type[KvdError]) -> None:
    table = Path(errors.__file__).with_name("PROTOCOL.md").read_text().split("\n## Errors\n")[1]
    row = next(line for line in table.splitlines() if line.startswith(f"| `{kind.code}` |"))
    assert row.endswith(f"| {kind.exit_code} | {kind.http_status} |")


@pytest.mark.parametrize("body", [{"code": "from the future", "message": "m"}, {}, {"code": None, "details": None}])
def test_an_unknown_code_is_internal(body: dict[str, object]) -> None:
    back = from_wire(body)
    assert type(back) is Internal and back.details["code"] == body.get("code")
