"""Names to models."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator

import pytest

from kvclient.errors import UnknownModel, UnsupportedModel
from kvd.front.registry import Model, Registry, find, stored_name
from kvd.home import Home
from kvd.models.aliases import by_model
from kvd.models.record import names
from kvd.settings import Models
from tests.front.support import Daemon

NONE = Models()


@pytest.fixture
def made() -> Iterator[Daemon]:
    daemon = Daemon(models=())
    yield daemon
    shutil.rmtree(daemon.home)


def resolve(made: Daemon, name: str, settings: Models) -> Model:
    async def found() -> Model:
        registry = Registry(Home(made.home))
        return await registry.model(await registry.resolve(name, settings))

    return asyncio.run(found())


def test_the_only_model_needs_no_name_and_several_need_a_default(made: Daemon) -> None:
    with pytest.raises(UnknownModel, match="kvd pull demo"):
        resolve(made, "", NONE)
    made.add("a")
    assert resolve(made, "", NONE).name == "a"
    made.add("b")
    assert resolve(made, "", Models(default="b")).name == "b"
    with pytest.raises(UnknownModel, match="a, b"):
        resolve(made, "", NONE)


@pytest.mark.parametrize("name", ["nope", "../models/a", "a/../a", ".", "..", "a\0", "x" * 5000])
def test_a_name_that_is_no_model_is_unknown_and_reaches_no_other_folder(made: Daemon, name: str) -> None:
    made.add("a")
    with pytest.raises(UnknownModel):
        resolve(made, name, NONE)
    with pytest.raises(UnknownModel):
        find(made.home, name)


def test_a_model_whose_files_are_gone_is_left_out_of_the_list_and_said_when_asked_for(made: Daemon) -> None:
    made.add("a")
    (made.home / "models" / "a" / "config.json").unlink()
    assert asyncio.run(Registry(Home(made.home)).all()) == []
    with pytest.raises(UnsupportedModel, match="gone"):
        resolve(made, "a", NONE)


def aliased(*pairs: tuple[str, str], default: str = "") -> Models:
    return Models(default=default, aliases=pairs)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("gpt-4o", "a"),
        ("claude-sonnet-4-5-20250929", "b"),
        ("claude-haiku-4-5", "a"),
        ("claude-", "b"),
        ("b", "b"),
        ("gpt-4o-mini", "b"),
        ("openai/gpt-5:latest", "c"),
    ],
)
def test_an_alias_leads_to_its_model_exact_before_pattern_and_the_longest_pattern_first(
    made: Daemon, name: str, model: str
) -> None:
    for here in ("a", "b", "c"):
        made.add(here)
    settings = aliased(
        ("*", "c"), ("*gpt*4o*", "b"), ("claude-*", "b"), ("claude-*-4-5", "a"), ("b", "a"), ("gpt-*", "c"),
        ("gpt-4o", "a"),
    )  # fmt: skip
    assert resolve(made, name, settings).name == model


@pytest.mark.parametrize("name", ["claude", "xclaude-y", "Claude-x", "gpt-4z", "gpt-4", "gpt-[4]x", "aa", "a b"])
def test_of_a_pattern_only_the_star_is_special_and_the_whole_name_must_fit(made: Daemon, name: str) -> None:
    made.add("m")
    settings = aliased(("claude-*", "m"), ("gpt-?*", "m"), ("gpt-[4]*z", "m"), ("a", "m"))
    with pytest.raises(UnknownModel, match="no model named"):
        resolve(made, name, settings)
    assert resolve(made, "gpt-?", settings).name == "m"


def test_an_alias_of_no_model_is_an_error_with_both_names_and_an_alias_of_an_alias_leads_nowhere(made: Daemon) -> None:
    made.add("demo")
    settings = aliased(("claude-*", "gone"), ("x", "y"), ("y", "demo"))
    with pytest.raises(UnknownModel) as caught:
        resolve(made, "claude-opus", settings)
    for word in ("'claude-opus'", "'gone'", "claude-*", "known: demo"):
        assert word in caught.value.message
    assert caught.value.details == {"model": "claude-opus", "alias_of": "gone", "known": ["demo"]}
    with pytest.raises(UnknownModel, match="'x' is an alias of 'y'.*an alias of an alias leads nowhere"):
        resolve(made, "x", settings)


def test_the_default_may_be_an_alias_and_a_name_asked_for_is_not_replaced_by_the_default(made: Daemon) -> None:
    made.add("a")
    made.add("b")
    settings = aliased(("fast", "b"), default="fast")
    assert resolve(made, "", settings).name == "b"
    with pytest.raises(UnknownModel, match="'nope'"):
        resolve(made, "nope", settings)


def test_a_name_that_the_store_knows_is_no_alias_there_though_its_model_is_gone() -> None:
    here, settings = ["demo"], aliased(("claude-*", "demo"), ("x", "none"))
    stored = {"claude-removed", "other"}
    assert stored_name("claude-removed", settings, here, stored) == "claude-removed"
    assert stored_name("claude-opus", settings, here, stored) == "demo"
    assert stored_name("demo", settings, here, stored) == "demo"
    assert stored_name("nope", settings, here, stored) == "nope"
    with pytest.raises(UnknownModel, match="'none'"):
        stored_name("x", settings, here, stored)


def test_aliases_are_listed_with_their_models_without_those_that_a_model_hides(made: Daemon) -> None:
    made.add("a")
    made.add("b")
    settings = aliased(("x", "a"), ("b", "a"), ("claude-*", "a"), ("y", "gone"))
    assert by_model(settings.aliases, names(made.home)) == {"a": ["x", "claude-*"], "gone": ["y"]}
