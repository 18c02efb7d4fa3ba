"""Configuration: one table, and nothing that is not in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvclient.errors import BadRequest
from kvd import config
from kvd.config import Source, changes, load
from kvd.kinds import WarmPrompt
from kvd.settings import settings


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("KVD_SOCKET", raising=False)
    monkeypatch.setenv("KVD_HOME", "/tmp/kvd-config-test")
    return tmp_path


def written(home: Path, text: str) -> Path:
    file = home / "some.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_without_a_file_every_value_is_the_default_of_the_table(home: Path) -> None:
    found = load()
    assert [found.value(s) for s in settings()] == [s.default for s in settings()]
    assert {found.source(s.path) for s in settings()} == {Source.DEFAULT}


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(home: Path) -> None:
    file = written(home, '[memory]\nlimit = "8 GiB"\n[models]\nttl = "15m"\n')
    found = load(file=file, flags={"memory.limit": "4G"})
    assert (found.memory.limit, found.source("memory.limit")) == (4 * 2**30, Source.FLAG)
    assert (found.models.ttl, found.source("models.ttl")) == (900.0, Source.FILE)
    assert (found.store.limit, found.source("store.limit")) == (20 * 2**30, Source.DEFAULT)


def test_the_least_limits_are_taken_and_a_store_of_0_is_off(home: Path) -> None:
    least = load(flags={"memory.limit": "64MiB", "store.limit": "1MiB"})
    assert (least.memory.limit, least.store.limit) == (64 * 2**20, 2**20)
    assert load(flags={"memory.limit": "auto", "store.limit": "0"}).store.limit == 0


def test_home_and_socket_say_where_they_come_from(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load().source("home") is Source.ENV
    named = load(home=Path("/tmp/kvd-other"))
    assert (named.source("home"), str(named.socket)) == (Source.FLAG, "/tmp/kvd-other/run/kvd.sock")
    monkeypatch.setenv("KVD_SOCKET", "/tmp/kvd-config-test.sock")
    assert (load().source("socket"), str(load().socket)) == (Source.ENV, "/tmp/kvd-config-test.sock")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[memory]\nlimt = "8 GiB"', ["memory.limt", "did you mean memory.limit"]),
        ('[memroy]\nlimit = "8 GiB"', ["[memroy]", "did you mean memory"]),
        ('[store]\nttl = "8 GiB"', ["store.ttl", "did you mean models.ttl"]),
        ("log_level = 'debug'", ["log_level", "under [daemon]"]),
        ("[store]\nlimit = 'lots'", ["store.limit", "'lots'", "8 GiB"]),
        ("[store]\nlimit = -1", ["store.limit", "-1"]),
        ("[memory]\nlimit = 8", ["memory.limit", "8 bytes; did you mean 8GB?", "64 MiB"]),
        ("[memory]\nlimit = '4096'", ["memory.limit", "4096 bytes; did you mean 4096MB?"]),
        ("[memory]\nlimit = '10MB'", ["memory.limit", "10MB is less than the least, 64 MiB"]),
        ("[memory]\nlimit = 0", ["memory.limit", "0 is less than the least, 64 MiB"]),
        ("[store]\nlimit = 20", ["store.limit", "20 bytes; did you mean 20GB?", "1 MiB"]),
        ("[store]\nlimit = '1000KB'", ["store.limit", "1000KB is less than the least, 1 MiB"]),
        ("[store]\nadmission = 'third'", ["store.admission", "first, second"]),
        ("[store]\ndurable = 1", ["store.durable", "true nor false"]),
        ("[cache]\nblock_size = 100", ["cache.block_size", "power of two"]),
        ("[cache]\nchunk = 100", ["cache.chunk", "multiple of 64"]),
        ("[models]\nttl = true", ["models.ttl"]),
        ("[gateway]\nport = 70000", ["gateway.port", "65535"]),
        ("[warm]\nprompts = [{model = 'm'}]", ["warm.prompts", "'file' is missing"]),
        ("[warm]\nprompts = [{model = 'm', file = 'f', pin = true}]", ["'pin'", "known: model"]),
        ("[store\n", ["some.toml"]),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key_and_what_would_do(home: Path, text: str, words: list[str]) -> None:
    with pytest.raises(BadRequest) as caught:
        load(file=written(home, text))
    assert "\n" not in caught.value.message
    for word in words:
        assert word in caught.value.message


def test_a_file_as_editors_of_windows_write_it_is_read_and_one_in_no_utf_8_is_said(home: Path) -> None:
    file = home / "kvd.toml"
    home.mkdir(exist_ok=True)
    file.write_bytes(b'\xef\xbb\xbf[models]\r\ndefault = "demo"\r\n')
    assert load(home).models.default == "demo"
    file.write_bytes(b'[models]\ndefault = "caf\xe9"\n')
    with pytest.raises(BadRequest, match="byte 23 is not UTF-8"):
        load(home)


def test_a_named_file_must_exist_and_the_usual_one_need_not(home: Path) -> None:
    with pytest.raises(BadRequest, match="no such config file"):
        load(file=home / "none.toml")
    load(home=Path("/tmp/kvd-config-none"))


def test_every_key_takes_back_what_it_shows() -> None:
    for setting in settings():
        shown = setting.key.kind.show(setting.default)
        assert setting.key.kind.parse(shown) == setting.default, setting.path


def test_warm_prompts_are_tables_or_pairs(home: Path) -> None:
    file = written(home, "[warm]\nprompts = [{model = 'm', file = '/a.md', system = 'S', raw = true}, 'n=/b.md']")
    assert load(file=file).warm.prompts == (
        WarmPrompt("m", Path("/a.md"), "S", True),
        WarmPrompt("n", Path("/b.md")),
    )


def test_the_store_lies_in_the_home_unless_its_path_is_absolute(home: Path) -> None:
    assert load().store_path == Path("/tmp/kvd-config-test/store")
    assert load(flags={"store.path": "elsewhere"}).store_path == Path("/tmp/kvd-config-test/elsewhere")
    assert load(flags={"store.path": "/mnt/fast"}).store_path == Path("/mnt/fast")


def test_a_reload_tells_what_is_live_from_what_needs_a_restart(home: Path) -> None:
    old = load()
    new = load(flags={"store.limit": "1G", "cache.block_size": "64"})
    assert changes(old, new) == (["store.limit"], ["cache.block_size"])
    assert config.changes(old, old) == ([], [])


def test_aliases_are_a_table_or_pairs_and_come_back_as_they_are_shown(home: Path) -> None:
    file = written(home, '[models.aliases]\n"claude-*" = "qwen3-4b"\n"openai/gpt-4.1:x" = "demo"\n')
    pairs = (("claude-*", "qwen3-4b"), ("openai/gpt-4.1:x", "demo"))
    assert load(file=file).models.aliases == pairs
    (kind,) = [setting.key.kind for setting in settings() if setting.path == "models.aliases"]
    assert load(flags={"models.aliases": kind.show(pairs)}).models.aliases == pairs
    assert kind.show(pairs) == "claude-*=qwen3-4b; openai/gpt-4.1:x=demo"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('aliases = "x"', ["models.aliases", "x: not a model name: ''"]),
        ("aliases = ['a']", ["is not a table of names and their models"]),
        ('aliases = {gpt-4.1 = "demo"}', ["gpt-4 is a table: a name with a dot stands in quotes"]),
        ('aliases = {"" = "demo"}', ["'' is no alias"]),
        ('aliases = {"a=b" = "demo"}', ["'a=b' is no alias", "without spaces, = and ;"]),
        ('aliases = {"a b" = "demo"}', ["'a b' is no alias"]),
        ('aliases = {x = "de*"}', ["x: not a model name: 'de*'"]),
        ("aliases = {x = 3}", ["x: 3 is not text"]),
    ],
)
def test_what_is_no_alias_is_refused_with_the_reason(home: Path, text: str, words: list[str]) -> None:
    with pytest.raises(BadRequest) as caught:
        load(file=written(home, f"[models]\n{text}\n"))
    for word in words:
        assert word in caught.value.message
