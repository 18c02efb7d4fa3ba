"""The command: flags, refusals, a start and a stop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from kvclient.gateway.main import main
from tests.gateway.fake import FakeDaemon


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "refusing to listen on 0.0.0.0 without --api-key"),
        (["--host", "::"], "refusing to listen"),
        (["--volatile", "demo"], "MODEL=RULE"),
        (["--volatile", "demo=nothing"], "unknown volatile rule"),
        (["--api-key", " "], "must not be empty"),
        (["--api-key-file", "/nonexistent/keys"], "cannot be read"),
        (["--max-body", "0"], "at least 1"),
        (["--port", "70000"], "a port is 0 to 65535"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_2(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVD_HOME", str(tmp_path))
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_rules_for_a_model_that_is_not_here_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVD_HOME", str(tmp_path))
    (tmp_path / "models" / "demo").mkdir(parents=True)
    given = [word for name in ("demo", "*", "nosuch") for word in ("--volatile", f"{name}=date")]
    assert main([*given, "--port", "70000"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "kv-gateway: --volatile: there is no model 'nosuch' yet, only demo" and len(told) == 2


def test_a_port_in_use_is_told_with_the_flag_that_changes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVD_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--port", str(port)]) == 2
    assert capsys.readouterr().err == f"kv-gateway: port {port} of 127.0.0.1 is in use; take another with --port\n"


def test_the_configuration_gives_defaults_and_its_host_needs_a_key_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVD_HOME", str(tmp_path))
    (tmp_path / "kvd.toml").write_text('[gateway]\nhost = "0.0.0.0"\n')
    assert main([]) == 2
    assert "refusing to listen on 0.0.0.0" in capsys.readouterr().err
    (tmp_path / "kvd.toml").write_text("[gateway\n")
    assert main([]) == 2


def test_without_the_http_extra_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVD_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["--port", "0"]) == 2
    assert "extra `http`" in capsys.readouterr().err


def test_it_starts_says_where_serves_and_stops_on_sigterm_without_mlx() -> None:
    with FakeDaemon() as daemon:
        code = (
            "import sys; from kvclient.gateway.main import main; code = main(sys.argv[1:]); "
            "print(sorted({'mlx', 'numpy', 'transformers', 'openai', 'anthropic'} & set(sys.modules))); sys.exit(code)"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code, "--port", "0"], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "KVD_SOCKET": str(daemon.socket), "KVD_HOME": str(daemon.folder)},
        )  # fmt: skip
        try:
            assert process.stdout is not None
            url = process.stdout.readline().removeprefix("kv-gateway: ").strip()
            assert httpx.get(url + "/healthz", timeout=20).json()["status"] == "ok"
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) in (0, -signal.SIGTERM)
            assert process.stdout.read().strip() in ("[]", "")
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def test_ctrl_c_ends_it_without_a_traceback(tmp_path: Path) -> None:
    code = "import sys; from kvclient.gateway.main import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "KVD_SOCKET": "/tmp/kvd-none.sock", "KVD_HOME": str(tmp_path)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix("kv-gateway: ").strip()
        assert httpx.get(url + "/", timeout=20).status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == ("", "")
        assert process.returncode == 130
    finally:
        process.kill()
        process.wait()


def test_it_takes_more_descriptors_than_a_shell_of_macos_gives(tmp_path: Path) -> None:
    """256 there: each request has half a dozen, and 256 requests at once are allowed."""
    code = (
        "import resource, sys\nfrom kvclient.gateway import main\n"
        "main._listen = lambda *where: sys.exit(str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))\n"
        "main.main(['--port', '0'])"
    )
    limited = ["sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh", sys.executable, "-c", code]
    env = {**os.environ, "KVD_HOME": str(tmp_path), "KVD_SOCKET": "/tmp/kvd-none.sock"}
    done = subprocess.run(limited, capture_output=True, text=True, env=env)
    assert int(done.stderr) > 1000
