"""`kvd calibrate` as a user runs it, on a tiny model, in a child process that owns mlx."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvd import config
from kvd.calibrate import result
from kvd.cli.main import main
from kvd.front.life import clear_tmp
from kvd.home import Home
from tests.calibrate.support import tiny_home


@pytest.fixture(scope="module")
def shared() -> Iterator[Home]:
    with tiny_home() as home:
        yield home


@pytest.fixture
def home(shared: Home, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("KVD_HOME", str(shared.root))
    monkeypatch.delenv("KVD_SOCKET", raising=False)
    return shared


def test_the_result_is_kept_with_the_model_and_written_as_asked(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["calibrate", "tiny", "--tokens", "320", "--presets", "k8v8,k4v4"]
    assert main([*words, "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg")]) == 0
    kept = result.stored(home.models / "tiny")
    assert kept is not None and kept.tokens == 320
    assert [item.name for item in kept.settings][:4] == ["native", "native again", "k8v8", "k4v4"]
    assert result.loads((tmp_path / "a.json").read_text()) == kept
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    seen = capsys.readouterr()
    assert "k4v4" in seen.out and "kept in" in seen.out
    assert "320 tokens, 4 settings and a search: about" in seen.err and "layer 1 alone" in seen.err
    assert list(home.tmp.iterdir()) == []


def test_a_text_of_ones_own_and_json_on_standard_output(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("\n\n".join(f"Line {i} of a text about the number {i * i}." for i in range(80)))
    assert main(["calibrate", "tiny", "--text", str(text), "--tokens", "256", "--presets", "k8v8", "--json", "-"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["text"] == "mine.txt" and made["settings"][2]["facts"] == [0, 0]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["other"], 65, "no model named 'other'"),
        (["tiny", "--presets", "k8v8,fast"], 65, "unknown KV precision 'fast'"),
        (["tiny", "--text", "/nowhere/text"], 65, "cannot read /nowhere/text"),
        (["tiny", "--tokens", "256", "--presets", "k8v8g64"], 65, "the head size 32 is not a multiple of the group"),
        (["tiny", "--tokens", "256", "--presets", "k8v8", "--budget", "10"], 65, "no table takes 10 bytes per token"),
        (["tiny", "--presets", ""], 65, "unknown KV precision ''"),
        (["tiny", "--plot", "/nowhere/a.svg"], 65, "cannot write /nowhere/a.svg"),
        (["tiny", "--json", "/"], 65, "cannot write /"),
    ],
)
def test_what_cannot_be_measured_is_one_line_that_says_why(
    home: Home, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    assert main(["calibrate", *words]) == code
    seen = capsys.readouterr()
    assert seen.out == ""
    last = seen.err.strip().splitlines()[-1]
    assert last.startswith("kvd") and said in last
    assert "Traceback" not in seen.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tokens", "many"], "not a number: 'many'"), (["--tokens", "200"], "at least 256 are needed"),
        (["--budget", "-5"], "not a number: '-5'"),
    ],
)  # fmt: skip
def test_numbers_that_are_none_are_a_matter_of_usage(
    home: Home, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["calibrate", "tiny", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_memory_limit_is_kept_to_and_named(
    home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(config.LEAST, "memory.limit")
    home.config.write_text('[memory]\nlimit = "3 MiB"\n')
    try:
        assert main(["calibrate", "tiny", "--tokens", "512"]) != 0
    finally:
        home.config.unlink()
    assert "are allowed; take fewer (--tokens)" in capsys.readouterr().err


def test_a_shorter_measurement_does_not_replace_a_longer_one_unless_asked_to(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["calibrate", "tiny", "--presets", "k8v8", "--tokens"]
    assert main([*words, "288"]) == 0
    kept = result.stored(home.models / "tiny")
    assert main([*words, "256"]) == 0
    assert result.stored(home.models / "tiny") == kept
    assert "not kept" in capsys.readouterr().out
    assert main([*words, "256", "--fresh"]) == 0
    kept = result.stored(home.models / "tiny")
    assert kept is not None and kept.tokens == 256


def test_what_was_measured_is_taken_over_with_its_date_and_fresh_measures_it_again(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["calibrate", "tiny", "--tokens", "304", "--presets"]
    assert main([*words, "k8v8"]) == 0
    first = result.stored(home.models / "tiny")
    capsys.readouterr()
    assert main([*words, "k6v6"]) == 0
    said = capsys.readouterr().err
    assert "most is taken over from" in said and "k8v8" not in said and "layer" not in said
    second = result.stored(home.models / "tiny")
    assert first is not None and second is not None and second.setting("k8v8") == first.setting("k8v8")
    assert second.setting("k6v6") is not None and second.layers == first.layers
    assert main([*words, "k6v6", "--fresh"]) == 0
    assert "taken over" not in capsys.readouterr().err


def test_an_interrupt_ends_it_all_and_keeps_nothing_by_halves(home: Home) -> None:
    before = result.stored(home.models / "tiny")
    kvd = subprocess.Popen(
        [sys.executable, "-m", "kvd.cli.main", "calibrate", "tiny", "--fresh"],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert kvd.stderr is not None
    assert "a search: about" in kvd.stderr.readline()
    [child] = psutil.Process(kvd.pid).children()
    clear_tmp(home)
    assert len(list(home.tmp.iterdir())) == 1, "a daemon that starts meanwhile takes away its folder"
    os.killpg(kvd.pid, signal.SIGINT)
    _, said = kvd.communicate(timeout=30)
    assert kvd.returncode == 130 and "Traceback" not in said
    assert not child.is_running()
    assert result.stored(home.models / "tiny") == before and list(home.tmp.iterdir()) == []
