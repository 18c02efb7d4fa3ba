"""Pulls from a hub, which is a small server here, told by HF_ENDPOINT."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvclient.errors import BadRequest
from kvd.models.fingerprint import identify
from kvd.models.hub import wanted
from kvd.models.pull import pull
from kvd.models.record import find, names, read_record
from tests.tiny import tiny_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the server holds and does: files by repository, repositories that are gated, a status for everything."""

    files: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    cut: str = ""
    asked: list[str] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_GET(self, body: bool = True) -> None:
        path = self.path.partition("?")[0].strip("/").split("/")
        self.hub.asked.append(self.path)
        api = path[:2] == ["api", "models"]
        repo = "/".join(path[2:4] if api else path[:2])
        folder = self.hub.files.get(repo)
        if repo in self.hub.broken:
            self.answer(503, b"out of order", {}, body)
        elif repo in self.hub.gated:
            self.answer(401, b"{}", {"X-Error-Code": "GatedRepo"}, body)
        elif folder is None:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        elif api and "tree" in path:
            files = sorted(folder.iterdir())
            entries = [{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": sha1(p)} for p in files]
            self.answer(200, json.dumps(entries).encode(), {}, body)
        elif api:
            self.answer(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": []}).encode(), {}, body)
        else:
            file = folder / path[-1]
            headers = {"ETag": f'"{sha1(file)}"', "X-Repo-Commit": COMMIT}
            self.answer(200, file.read_bytes(), headers, body, cut=self.hub.cut == file.name)

    def answer(self, status: int, content: bytes, headers: dict[str, str], body: bool, cut: bool = False) -> None:
        self.send_response(status)
        for name, text in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, text)
        self.end_headers()
        if body:
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.close_connection = True


def sha1(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    found = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": found}))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def bring(repo: str, home: Path, **options: Any) -> Any:
    return pull(repo, home, say=lambda line: None, backend="cpu", **options)


def test_a_repository_comes_whole_and_without_code_or_pickles(tmp_path: Path, hub: Hub, home: Path) -> None:
    folder = tiny_model(tmp_path / "served", "qwen3")
    for name in ("modeling.py", "pytorch_model.bin", "picture.png", "README.md"):
        (folder / name).write_text("unwanted")
    hub.files["org/Tiny-Model"] = folder
    pulled = bring("org/Tiny-Model", home)
    assert pulled.name == "Tiny-Model"
    assert find(home, "Tiny-Model")[0].source == "org/Tiny-Model"
    wanted_files = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in pulled.folder.iterdir()) == sorted([*wanted_files, "kvd.json"])
    assert pulled.fingerprint == identify(folder).whole
    assert not [path for path in hub.asked if path.endswith((".py", ".bin", ".png", ".md"))]


@pytest.mark.parametrize(
    ("repo", "said"),
    [
        ("org/none", "no such repository, or it is private"),
        ("org/gated", "gated: accept its terms"),
        ("org/broken", "answered 503"),
        ("org/empty", "none of the files that a model needs"),
    ],
)
def test_what_stands_in_the_way_is_said(tmp_path: Path, hub: Hub, home: Path, repo: str, said: str) -> None:
    hub.gated.add("org/gated")
    hub.broken.add("org/broken")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "README.md").write_text("nothing")
    hub.files["org/empty"] = tmp_path / "empty"
    with pytest.raises(BadRequest, match=said) as caught:
        bring(repo, home)
    assert "\n" not in caught.value.message
    assert names(home) == [] and not list((home / "models").glob(".pull-*"))


def test_a_download_that_breaks_off_leaves_nothing(tmp_path: Path, hub: Hub, home: Path) -> None:
    hub.files["org/tiny"] = tiny_model(tmp_path / "served")
    hub.cut = "model.safetensors"
    with pytest.raises(BadRequest, match="cannot fetch org/tiny"):
        bring("org/tiny", home)
    assert names(home) == [] and not list((home / "models").glob(".pull-*"))


def test_a_hub_that_cannot_be_reached_is_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(BadRequest, match="cannot be reached"):
        bring("org/any", home)


@pytest.mark.parametrize("before, after", [
    ("https://huggingface.co/", ""), ("https://huggingface.co/", "/tree/main"), ("hf.co/", "/"),
])  # fmt: skip
def test_the_address_of_a_models_page_is_the_model(
    tmp_path: Path, hub: Hub, home: Path, before: str, after: str
) -> None:
    hub.files["org/tiny"] = tiny_model(tmp_path / "served")
    assert bring(f"{before}org/tiny{after}", home).name == "tiny"
    assert read_record(home / "models" / "tiny").source == "org/tiny"


def test_files_at_the_top_that_make_a_model() -> None:
    assert wanted("model-00001-of-00002.safetensors") and wanted("chat_template.jinja") and wanted("tokenizer.model")
    assert not any(wanted(name) for name in ("model.py", "pytorch_model.bin", "kvd.json", "consolidated.safetensors"))
