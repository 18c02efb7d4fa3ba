"""Installing under launchd and systemd, against tools on PATH that only write down how they were called."""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvclient.errors import BadRequest, Busy, Internal
from kvd.cli import main as cli
from kvd.home import Home, Lock
from kvd.service import launchd
from kvd.service.launchd import LABEL, Launchd
from kvd.service.manager import Manager
from kvd.service.systemd import Systemd

FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$*" in print*/org.kvd.daemon) [ "$(grep -c "print.*kvd" "$CALLS")" -le "${LINGERS:-0}" ]; exit ;; esac
case "$*" in *"$FAIL_ON"*) [ -n "$FAIL_ON" ] && { [ ! -e "$CALLS.failed" ] || [ -n "$FAIL_ALWAYS" ]; } && {
    touch "$CALLS.failed"; echo "fake: refused" >&2; exit 5; } ;; esac
exit 0
"""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a PATH with fake managers; returns the file of recorded calls."""
    bin = tmp_path / "bin"
    bin.mkdir()
    for tool in ("launchctl", "systemctl"):
        (bin / tool).write_text(FAKE)
        (bin / tool).chmod(0o755)
    calls = tmp_path / "calls"
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path / "some user"))
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("FAIL_ON", "")
    monkeypatch.setenv("KVD_HOME", str(tmp_path / "kvd home"))
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "KVD_SOCKET", "HF_HOME", "HF_ENDPOINT", "FAIL_ALWAYS"):
        monkeypatch.delenv(name, raising=False)
    return calls


@pytest.fixture(params=[Launchd, Systemd])
def service(request: pytest.FixtureRequest) -> Manager:
    made: Manager = request.param()
    return made


def said(calls: Path) -> list[str]:
    return calls.read_text().splitlines() if calls.exists() else []


def test_an_agent_is_written_loaded_and_restarts_only_after_failures(machine: Path) -> None:
    agent = Launchd()
    assert agent.install() is False
    plist = plistlib.loads(agent.file.read_bytes())
    assert plist["Label"] == LABEL == agent.file.stem
    assert plist["ProgramArguments"] == [sys.executable, "-P", "-m", "kvd.cli.main", "serve"]
    assert plist["KeepAlive"] == {"SuccessfulExit": False}
    assert plist["ThrottleInterval"] >= 10
    assert plist["ProcessType"] == "Interactive"
    assert plist["SoftResourceLimits"]["NumberOfFiles"] >= 1024
    assert plist["EnvironmentVariables"] == {"KVD_HOME": os.environ["KVD_HOME"]}
    assert Path(plist["StandardErrorPath"]).parent.is_dir(), "launchd does not make folders of logs"
    domain = f"gui/{os.getuid()}"
    steps = (f"print {domain}", f"enable {domain}/{LABEL}", f"bootstrap {domain} {agent.file}")
    assert said(machine) == [f"launchctl {words}" for words in steps]


def test_a_plist_follows_the_rules_of_plutil() -> None:
    """What `plutil -lint` checks: XML plist 1.0, a dictionary, and the types launchd.plist(5) gives each key."""
    data = Launchd().render()
    start = b"<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<!DOCTYPE plist PUBLIC \"-//Apple//DTD PLIST 1.0//EN\""
    assert data.startswith(start)
    types = {
        "Label": str, "ProgramArguments": list, "EnvironmentVariables": dict, "RunAtLoad": bool, "KeepAlive": dict,
        "ThrottleInterval": int, "ExitTimeOut": int, "ProcessType": str, "Umask": int, "SoftResourceLimits": dict,
        "WorkingDirectory": str, "StandardOutPath": str, "StandardErrorPath": str,
    }  # fmt: skip
    plist = plistlib.loads(data)
    assert {key: type(value) for key, value in plist.items()} == types
    assert all(isinstance(word, str) for word in plist["ProgramArguments"])
    assert plist["Umask"] == 0o077
    assert Path(plist["ProgramArguments"][0]).is_absolute()


@pytest.mark.skipif(shutil.which("plutil") is None, reason="plutil is macOS's own")
def test_plutil_accepts_the_plist(tmp_path: Path) -> None:
    file = tmp_path / "agent.plist"
    file.write_bytes(Launchd().render())
    subprocess.run(["plutil", "-lint", str(file)], check=True)


def test_a_unit_is_written_enabled_and_started(machine: Path) -> None:
    unit = Systemd()
    assert unit.install() is False
    text = unit.file.read_text()
    assert "@" not in text
    assert f"ExecStart={sys.executable} -P -m kvd.cli.main serve\n" in text
    assert f'Environment="KVD_HOME={os.environ["KVD_HOME"]}"\n' in text
    assert "Restart=on-failure\n" in text
    assert "StartLimitBurst=5\n" in text
    steps = ("show-environment", "daemon-reload", "enable kvd.service", "restart kvd.service")
    assert said(machine) == [f"systemctl --user {words}" for words in steps]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_SOCKET", '/tmp/odd "name" 100%/$HOME/kvd.sock')
    file = tmp_path / "kvd.service"
    file.write_bytes(Systemd().render())
    assert r'Environment="KVD_SOCKET=/tmp/odd \"name\" 100%%/$HOME/kvd.sock"' in file.read_text()
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(file)], capture_output=True, text=True, env=env
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if "kvd.service" in line]) == (0, [])


def test_installing_again_replaces_what_another_environment_installed(service: Manager, machine: Path) -> None:
    service.file.parent.mkdir(parents=True)
    old = service.render().replace(sys.executable.encode(), b"/gone/bin/python3")
    service.file.write_bytes(old)
    assert str(service.program()) == "/gone/bin/python3"
    assert service.install() is True
    assert str(service.program()) == sys.executable
    first = service.file.read_bytes()
    assert service.install() is True
    assert service.file.read_bytes() == first
    assert len(list(service.file.parent.iterdir())) == 1


def test_an_old_install_is_stopped_before_the_new_one_starts(machine: Path) -> None:
    agent = Launchd()
    agent.install()
    machine.unlink()
    agent.install()
    assert [line.split()[1] for line in said(machine)] == ["print", "bootout", "print", "enable", "bootstrap"]


def test_launchd_is_waited_for_while_the_old_job_answers_what_it_was_asked(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Launchd()
    agent.install()
    assert plistlib.loads(agent.file.read_bytes())["ExitTimeOut"] < launchd._GONE_S
    machine.unlink()
    monkeypatch.setattr(launchd, "_RETRY_S", 0.01)
    monkeypatch.setenv("LINGERS", str(2 * launchd._RETRIES))
    agent.install()
    words = [line.split()[1] for line in said(machine)]
    assert words == ["print", "bootout", *["print"] * (2 * launchd._RETRIES + 1), "enable", "bootstrap"]
    monkeypatch.setattr(launchd, "_GONE_S", 0.0)
    agent.uninstall()
    assert said(machine)[-1].split()[1] == "print", "it is not waited for longer than launchd itself does"


def test_launchd_may_need_a_moment_to_let_the_old_job_go(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL_ON", "bootstrap")
    Launchd().install()
    assert [line.split()[1] for line in said(machine)] == ["print", "enable", "bootstrap", "bootstrap"]


def test_uninstall_undoes_it_and_then_has_nothing_to_do(service: Manager, machine: Path) -> None:
    service.install()
    assert service.uninstall() is True
    assert not service.file.exists()
    assert service.program() is None
    before = said(machine)
    assert service.uninstall() is False
    assert said(machine) == before


def test_without_the_manager_nothing_is_written(service: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(BadRequest, match="kvd serve"):
        service.install()
    assert not service.file.exists()


def test_a_refusal_is_told_in_the_managers_words(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL_ON", "enable")
    monkeypatch.setenv("FAIL_ALWAYS", "1")
    with pytest.raises(Internal, match="failed with 5: fake: refused"):
        Systemd().install()


@pytest.mark.parametrize(("kind", "asked", "told"), [
    (Systemd, "--user", ("no systemd user session here", "`loginctl enable-linger $USER`")),
    (Launchd, f"print gui/{os.getuid()}", ("no graphical session of this user here", "log in at the screen")),
])  # fmt: skip
def test_without_a_session_of_the_user_it_says_what_to_do_and_changes_nothing(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: type[Manager],
    asked: str, told: tuple[str, str],
) -> None:  # fmt: skip
    monkeypatch.setattr("kvd.cli.install.manager", kind)
    monkeypatch.setattr("kvd.cli.uninstall.manager", kind)
    monkeypatch.setenv("FAIL_ON", asked)
    monkeypatch.setenv("FAIL_ALWAYS", "1")
    assert cli.main(["install"]) == 69
    shown = capsys.readouterr().err
    assert told[0] in shown and "fake: refused" in shown and told[1] in shown and "`kvd serve`" in shown
    file = kind().file
    assert not file.exists()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("ExecStart=x\n")
    assert cli.main(["uninstall"]) == 69
    assert file.exists()


def test_the_verbs_install_print_and_uninstall(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["install", "--print"]) == 0
    assert "kvd.cli.main" in capsys.readouterr().out
    assert said(machine) == []
    assert cli.main(["install"]) == 0
    assert "installed" in capsys.readouterr().out
    assert cli.main(["install"]) == 0
    assert "replaced" in capsys.readouterr().out
    assert cli.main(["uninstall"]) == 0
    assert "removed" in capsys.readouterr().out
    assert cli.main(["uninstall"]) == 0
    assert "nothing was installed" in capsys.readouterr().out


def test_a_daemon_outside_the_service_is_told_to_stand_in_its_way(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home.default()
    home.create()
    with Lock(home):
        assert cli.main(["install"]) == Busy.exit_code
    shown = capsys.readouterr()
    assert shown.out == "" and f"process {os.getpid()}" in shown.err and "kvd stop" in shown.err
    assert cli.main(["install"]) == 0
