"""What `import kvclient` shows and what it costs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import kvclient
from kvclient import KvdError

SURFACE = {
    "AsyncClient", "AsyncStream", "BadRequest", "Busy", "Cancelled", "Choice", "Client", "Completion",
    "ContextLengthExceeded", "Divergence", "Event", "Internal", "KvdError", "OutOfMemory", "Progress", "ProtocolError",
    "Stats", "StoreError", "Stream", "Timeout", "TokenLogprob", "ToolCall", "UnknownModel", "Unreachable",
    "UnsupportedModel", "WorkerLost",
}  # fmt: skip
HEAVY = {"mlx", "numpy", "transformers", "mlx_lm", "rich", "kvd"}


def loaded(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after `code`."""
    script = f"{code}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_surface_is_exactly_this() -> None:
    assert set(kvclient.__all__) == SURFACE
    for name in SURFACE:
        assert getattr(kvclient, name).__name__ == name
    assert set(dir(kvclient)) > SURFACE


def test_every_error_is_on_the_surface() -> None:
    kinds = [KvdError]
    while kinds:
        kind = kinds.pop()
        kinds += [child for child in kind.__subclasses__() if child.__module__ == "kvclient.errors"]
        assert kind.__name__ in SURFACE


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Kraken'"):
        _ = kvclient.Kraken


def test_importing_kvclient_loads_only_itself() -> None:
    before, after = loaded("import typing"), loaded("import kvclient")
    assert {name for name in after - before if name.startswith("kvclient")} == {"kvclient"}


@pytest.mark.parametrize("code", [
    "from kvclient import *", "import kvclient.cli, kvclient.answer, kvclient.completions",
    "from kvclient.aio import AsyncClient",
])  # fmt: skip
def test_nothing_heavy_is_ever_loaded(code: str) -> None:
    assert not {name.split(".")[0] for name in loaded(code)} & HEAVY


def test_the_blocking_client_does_without_asyncio() -> None:
    assert "asyncio" not in loaded("from kvclient import Client; Client('/tmp/x/kvd.sock').close()")


def test_version_is_that_of_the_package() -> None:
    project = Path(kvclient.__file__).parent.parent / "pyproject.toml"
    assert tomllib.loads(project.read_text())["project"]["version"] == kvclient.__version__


def test_version_costs_less_than_150_ms_of_cpu() -> None:
    """The least of a few runs: CPU seconds do not count the neighbours."""
    import resource

    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    costs = []
    deadline = time.monotonic() + 20
    while len(costs) < 5 or (min(costs) >= 0.15 and time.monotonic() < deadline):
        before = cpu()
        script = "import sys; from kvclient.cli import main; sys.exit(main(['--version']))"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
        costs.append(cpu() - before)
    assert done.stdout == f"kv {kvclient.__version__}\n".encode()
    assert min(costs) < 0.15
