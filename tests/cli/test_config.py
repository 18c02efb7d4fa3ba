"""`kvd config` and the flags of `kvd serve`: both follow the table."""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path

import pytest

from kvd.cli import config as verb
from kvd.cli import main as cli
from kvd.cli.settings import config_of
from kvd.config import Source, load
from kvd.settings import SECTIONS, settings


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KVD_HOME", str(tmp_path))
    monkeypatch.setenv("KVD_SOCKET", "/tmp/kvd-cli-config.sock")
    return tmp_path


def test_show_prints_every_key_with_its_source(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "kvd.toml").write_text('[gateway]\napi_key = "topsecret"\n[store]\nlimit = "7 GiB"\n')
    assert cli.main(["config", "show", "--json"]) == 0
    printed = capsys.readouterr().out
    rows = {row["key"]: row for row in json.loads(printed)}
    assert set(rows) == {"home", "socket"} | {s.path for s in settings()}
    assert rows["store.limit"] == {"key": "store.limit", "value": "7 GiB", "source": "file"}
    assert rows["socket"]["source"] == "env"
    assert "topsecret" not in printed
    assert cli.main(["config"]) == 0
    table = capsys.readouterr().out
    assert "topsecret" not in table
    assert all(s.path in table for s in settings())


def test_doc_is_a_file_that_changes_nothing_and_names_every_key(home: Path) -> None:
    text = verb.document()
    assert tomllib.loads(text) == {section: {} for section in SECTIONS}
    (home / "kvd.toml").write_text(text)
    assert load() == load()
    live = "\n".join(line if line.startswith("# ") else line.removeprefix("#") for line in text.splitlines())
    (home / "kvd.toml").write_text(live)
    found = load()
    assert [found.value(s) for s in settings()] == [s.default for s in settings()]
    assert {found.source(s.path) for s in settings()} == {Source.FILE}


def test_doc_writes_a_file_for_the_user_alone_and_overwrites_none(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVD_HOME", str(home / "new"))
    file = home / "new" / "kvd.toml"
    assert cli.main(["config", "doc", "--write"]) == 0
    assert capsys.readouterr().out == f"wrote {file}\n"
    assert (file.read_text(), file.stat().st_mode & 0o777) == (verb.document(), 0o600)
    file.write_text("[store]\n")
    assert cli.main(["config", "doc", "--write"]) == 65
    assert capsys.readouterr().err == f"kvd: cannot write {file}: File exists\n"
    assert file.read_text() == "[store]\n"


def test_every_key_is_a_flag_of_serve() -> None:
    words = [word for s in settings() for word in (s.flag, s.key.kind.show(s.default))]
    args = cli.parser_of("serve").parse_args(words)
    found = config_of(args)
    assert [found.value(s) for s in settings()] == [s.default for s in settings()]
    assert {found.source(s.path) for s in settings()} == {Source.FLAG}


def test_help_of_serve_documents_every_key() -> None:
    shown = " ".join(cli.parser_of("serve").format_help().split())
    for setting in settings():
        assert setting.flag in shown
        assert " ".join(setting.key.doc.split()[:3]) in shown


def test_home_and_config_are_flags_too(tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text("[cache]\nblock_size = 64\n")
    args: argparse.Namespace = cli.parser_of("serve").parse_args(["--home", "/tmp/kvd-x", "--config", str(file)])
    found = config_of(args)
    assert (str(found.home), found.cache.block_size) == ("/tmp/kvd-x", 64)
