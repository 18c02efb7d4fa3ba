"""A headless Chromium, spoken to over a pipe in its own debugging protocol: no driver, no further package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Any, Final, Self

NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
LIMIT_S: Final = 30.0
FLAGS: Final = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe", "--hide-scrollbars",
)
SHIM: Final = """
import os, sys
read, write = os.dup(int(sys.argv[1])), os.dup(int(sys.argv[2]))  # neither is 3 or 4 after this: those are taken
while min(read, write) < 5:
    read, write = (os.dup(fd) if fd < 5 else fd for fd in (read, write))
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The protocol's pipe: commands on descriptor 3, answers on 4."""


def chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. `problems` are the errors its console showed: exceptions, failed loads, refused policies."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.mkdtemp(prefix="kvdpage", dir="/tmp")
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        command = [program, *FLAGS, f"--user-data-dir={self._folder}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", SHIM, str(read), str(write), *command],
            pass_fds=(read, write), stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(read)
        os.close(write)
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.problems: list[str] = []

    def __enter__(self) -> Self:
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # its helpers too: they would write into the folder again
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        shutil.rmtree(self._folder, ignore_errors=True)

    def look(self, width: int, height: int, scheme: str) -> None:
        """Window size in CSS pixels and the colour scheme the system asks for."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def js(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """The value of `expression` once it is true."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if value := self.js(f"document.body !== null && ({expression})"):  # null while a page is on its way
                return value
            time.sleep(0.05)
        raise AssertionError(f"never true: {expression}; the page says {self.js('document.body.innerText')!r}")

    def picture(self) -> bytes:
        """A PNG of the whole page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(found["data"])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], LIMIT_S)
            data = os.read(self._read, 1 << 20) if ready else b""
            assert data, "the browser has ended or does not answer"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\0", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:500])
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(json.dumps(params["entry"])[:500])
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(json.dumps(params["args"])[:500])
