"""What the repository as a whole promises: its shape, its imports, its lock, its README."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from kvd.settings import settings

ROOT = Path(__file__).resolve().parents[2]
TOP = {
    "pyproject.toml", "README.md", "LICENSE", "requirements.lock", "kvd", "kvclient", "tests", "launchd", "tools",
}  # fmt: skip
HEAVY = ("mlx", "mlx_lm", "transformers", "numpy", "torch")


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return listed.stdout.splitlines()


def test_the_top_level_is_what_the_layout_says() -> None:
    names = {name.split("/", 1)[0] for name in tracked()}
    assert {name for name in names if not name.startswith(".")} == TOP


def test_nothing_big_or_generated_is_tracked() -> None:
    sizes = {name: (ROOT / name).stat().st_size for name in tracked() if (ROOT / name).is_file()}
    big = {name: size for name, size in sizes.items() if size > 150_000}
    assert big.pop("requirements.lock", 0) < 300_000, "hashes for every platform"
    assert big == {}
    assert [name for name in sizes if name.endswith((".gguf", ".whl", ".npz", ".pyc"))] == []


def test_the_locks_pin_and_hash_everything_and_name_no_index() -> None:
    for lock in (ROOT / "requirements.lock", ROOT / "tools/cuda12.lock", ROOT / "tools/cuda13.lock"):
        text = lock.read_text()
        assert "://" not in text, lock.name
        entries = re.split(r"\n(?=[a-z0-9])", text.strip())
        assert len(entries) > 5
        for entry in entries:
            assert re.match(r"[a-z0-9-]+==\S+", entry), entry[:60]
            assert "--hash=sha256:" in entry, entry[:60]


def test_the_locks_of_gpu_machines_have_what_their_extras_add() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("cuda12", "cuda13"):
        locked = set(re.findall(r"^([a-z0-9-]+)==", (ROOT / f"tools/{name}.lock").read_text(), re.M))
        added = {re.split(r"[\[<>=;~! ]", line, maxsplit=1)[0] for line in extras[name]} - {"mlx"}
        assert added and added <= locked


def test_every_dependency_of_the_project_is_in_the_lock() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["cpu"], *extras["http"], *extras["dev"]]
    names = {re.split(r"[\[<>=;~! ]", line, maxsplit=1)[0].lower() for line in wanted}
    locked = set(re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    assert names - locked == set()
    mlx = re.search(r"^mlx==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert mlx is not None
    for cuda in ("12", "13"):
        assert f"mlx-cuda-{cuda}=={mlx[1]} " in (ROOT / f"tools/cuda{cuda}.lock").read_text()


def imports(package: str) -> Iterator[tuple[Path, str]]:
    """Every module imported anywhere in the package, at module level or inside functions."""
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield path.relative_to(ROOT), alias.name
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                for name in [f"kvd.{alias.name}" for alias in node.names] if node.module == "kvd" else [node.module]:
                    yield path.relative_to(ROOT), name


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def test_the_clients_import_nothing_of_the_daemon_and_nothing_heavy() -> None:
    assert [(str(path), name) for path, name in imports("kvclient") if within(name, "kvd", *HEAVY)] == []


def test_the_front_and_the_store_import_no_mlx_and_no_numpy() -> None:
    found = [*imports("kvd/front"), *imports("kvd/store"), *imports("kvd/service")]
    assert [(str(path), name) for path, name in found if within(name, *HEAVY)] == []


def test_the_front_reaches_neither_worker_nor_cache() -> None:
    found = [*imports("kvd/front"), *imports("kvd/store")]
    allowed = {"kvd.cache.chain", "kvd.cache.layout", "kvd.cache.precision"}
    bad = [(str(path), name) for path, name in found if within(name, "kvd.worker", "kvd.cache") and name not in allowed]
    assert bad == []


def test_no_package_of_the_daemon_reaches_back_to_itself() -> None:
    packages = {path.parent.name for path in (ROOT / "kvd").glob("*/__init__.py")}
    reached: dict[str, set[str]] = {package: set() for package in packages}
    for path, name in imports("kvd"):
        package, other = path.parts[1], name.split(".")[1:2]
        if package in packages and name.startswith("kvd.") and other[0] in packages - {package}:
            reached[package].add(other[0])
    assert {"front", "worker", "cache", "store"} <= packages
    TopologicalSorter(reached).prepare()  # raises CycleError


@pytest.mark.parametrize("module", ["kvclient", "kvclient.client", "kvclient.aio", "kvclient.cli", "kvd.front.app"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_only_the_store_opens_lmdb() -> None:
    found = {str(path) for path, name in imports("kvd") if within(name, "lmdb")}
    assert found
    assert all(path.startswith("kvd/store/") for path in found), found


def test_no_host_name_of_an_index_or_hub_is_in_the_code() -> None:
    pattern = re.compile(r"pypi\.org|pythonhosted|huggingface\.co")
    names = [n for n in tracked() if n.startswith(("kvd/", "kvclient/", "tools/", ".ci/")) and (ROOT / n).is_file()]
    assert [n for n in names if pattern.search((ROOT / n).read_text(encoding="utf-8", errors="replace"))] == []


def test_the_readme_documents_every_key_as_the_code_does() -> None:
    from kvd.cli.config import markdown

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for setting in settings():
        assert f"`{setting.name}`" in readme, setting.path
    assert markdown() in readme, "run `kvd config doc --markdown` and put its output into the README"


def test_ci_runs_the_suite_by_the_one_command() -> None:
    assert "tools/test" in (ROOT / ".ci/run").read_text()
    for script in (".ci/run", "tools/test", "tools/quickstart"):
        assert (ROOT / script).stat().st_mode & 0o111, script
