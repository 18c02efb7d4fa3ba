"""`kv` as a process."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from tests.client.fake import FakeDaemon

KV = [sys.executable, "-c", "import sys; from kvclient.cli import main; sys.exit(main())"]
LIMIT_S = 60


def kv(*words: str, stdin: bytes = b"", **more: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*KV, *words], input=stdin, capture_output=True, timeout=LIMIT_S, **more)


def asked(daemon: FakeDaemon) -> dict[str, Any]:
    return daemon.next("generate").body


def content(daemon: FakeDaemon) -> str:
    [message] = asked(daemon)["messages"]
    assert message["role"] == "user"
    return str(message["content"])
