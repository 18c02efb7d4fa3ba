"""Names to models."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from kvclient.errors import UnknownModel, UnsupportedModel
from kvd.front.registry import Registry
from kvd.home import Home
from tests.front.support import Daemon


@pytest.fixture
def made() -> Iterator[Daemon]:
    daemon = Daemon(models=())
    yield daemon
    shutil.rmtree(daemon.home)


def test_the_only_model_needs_no_name_and_several_need_a_default(made: Daemon) -> None:
    registry = Registry(Home(made.home))
    with pytest.raises(UnknownModel, match="kvd pull demo"):
        registry.resolve("", "")
    made.add("a")
    assert registry.resolve("", "").name == "a"
    made.add("b")
    assert registry.resolve("", "b").name == "b"
    with pytest.raises(UnknownModel, match="a, b"):
        registry.resolve("", "")


@pytest.mark.parametrize("name", ["nope", "../models/a", "a/../a", ".", "..", "a\0", "x" * 5000])
def test_a_name_that_is_no_model_is_unknown_and_reaches_no_other_folder(made: Daemon, name: str) -> None:
    made.add("a")
    with pytest.raises(UnknownModel):
        Registry(Home(made.home)).resolve(name, "")


def test_a_model_whose_files_are_gone_is_left_out_of_the_list_and_said_when_asked_for(made: Daemon) -> None:
    made.add("a")
    (made.home / "models" / "a" / "config.json").unlink()
    registry = Registry(Home(made.home))
    assert registry.all() == []
    with pytest.raises(UnsupportedModel, match="gone"):
        registry.resolve("a", "")
