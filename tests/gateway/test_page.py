"""The page at `/` in a real browser: loads, updates by itself, no console errors, no asset from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvclient.gateway import page
from kvclient.gateway.auth import Guard
from kvclient.gateway.history import largest_prefixes
from kvclient.gateway.settings import Settings
from tests.gateway.browser import Browser, chromium
from tests.gateway.conftest import Served
from tests.gateway.fake import STATUS

Serve = Callable[..., Served]
BODY: Any = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
needs_browser = pytest.mark.skipif(chromium() is None, reason="no Chromium here: the page is not looked at")
LIVE: dict[str, Any] = {
    "uptime_s": 60, "memory": {"budget_bytes": 1e9, "used_bytes": 4e8, "by_model": {"demo": 4e8}},
    "store": {"used": 5e6, "limit": 1e9, "models": {"demo": 5e6}},
    "models": [{"name": "demo", "state": "loaded", "blocks_total": 8, "blocks_live": 2, "blocks_cached": 4}],
    "requests": [
        {"id": "a" * 32, "kind": "generate", "model": "demo", "stage": "running", "age_s": 1.0,
         "progress": {"done": 1234, "total": 4000, "cached": 900}},
        {"id": "b" * 32, "kind": "generate", "model": "<img src=x>", "stage": "waiting", "age_s": 1.0,
         "queued": {"position": 0}},
    ],
}  # fmt: skip


@pytest.fixture
def browser() -> Iterator[Browser]:
    program = chromium()
    assert program is not None
    with Browser(program) as opened:
        yield opened


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (1200, "dark"), (390, "light")])
def test_it_loads_shows_figures_and_fits_without_a_console_error(
    serve: Serve, browser: Browser, width: int, scheme: str
) -> None:
    served = serve()
    served.daemon.status.update(LIVE)
    httpx.post(served.url + "/v1/chat/completions", json=BODY)
    browser.look(width, 900, scheme)
    browser.open(served.url + "/")
    browser.until("document.querySelector('#recent table') !== null && document.querySelector('#tokens svg') !== null")
    text = browser.js("document.body.innerText")
    for shown in ("75 %", "1,234 / 4,000", "place 1 in line", "<img src=x>", "not stored", "400 MB", "prefill saved"):
        assert shown in text, shown
    assert browser.js("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
    ground = browser.js("getComputedStyle(document.body).backgroundColor")
    dark = sum(int(part) for part in re.findall(r"\d+", ground)) < 300
    assert dark == (scheme == "dark")
    assert browser.problems == []


@needs_browser
def test_it_updates_by_itself(serve: Serve, browser: Browser) -> None:
    served = serve()
    browser.open(served.url + "/")
    browser.until("document.body.innerText.includes('Nothing runs.')")
    served.daemon.status.update(LIVE)
    browser.until("document.body.innerText.includes('1,234 / 4,000')")
    served.daemon.status.update(STATUS)
    browser.until("document.body.innerText.includes('Nothing runs.')")
    assert browser.problems == []


@needs_browser
def test_with_keys_it_asks_for_one_first(serve: Serve, browser: Browser) -> None:
    served = serve(settings=Settings(Guard(["alpha"])))
    browser.open(served.url + "/")
    browser.until("document.querySelector('#key') !== null && !document.querySelector('#key').hidden")
    assert browser.problems == []
    browser.js("document.querySelector('#key-text').value = 'alpha'; document.querySelector('#key button').click(); 1")
    browser.until("document.body.innerText.includes('of prompt tokens reused')")
    assert browser.problems == []


def test_nothing_comes_from_elsewhere_and_the_policy_says_so(serve: Serve) -> None:
    url = serve().url
    for path in page.FILES:
        reply = httpx.get(url + path)
        assert reply.status_code == 200 and reply.text
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert not re.search(r"(?:src|href)=.https?:|url\(|@import|from .https?:", reply.text), path
    for name in page.FILES.values():
        assert len((Path(page.__file__).parent / name).read_text().split("\n")) <= 300


def test_samples_are_sent_once(serve: Serve) -> None:
    url = serve().url
    first = httpx.get(url + "/page/data").json()
    assert first["samples"][0]["cached_memory"] == 20
    again = httpx.get(url + "/page/data", params={"since": first["samples"][-1]["t"]}).json()
    assert again["samples"] == []
    assert httpx.get(url + "/page/data?since=soon").status_code == 400


def test_a_prefix_is_shown_with_all_that_continues_it() -> None:
    def node(depth: int, preview: str, tokens: int, words: str = "") -> dict[str, Any]:
        sums = {"tokens": tokens, "bytes": 10 * tokens, "hits": 1}
        return {"depth": depth, "preview": preview, "model": "m", "words": words, **sums}

    tree = [
        node(0, "small", 5), node(0, "same", 256, "big"), node(1, "x", 256), node(2, "y", 3), node(1, "z", 7),
        node(0, "mid", 20),
    ]  # fmt: skip
    found = largest_prefixes(tree, 2)
    assert [(one["preview"], one["tokens"], one["bytes"], one["hits"]) for one in found] == [
        ("big", 522, 5220, 4), ("mid", 20, 200, 1)
    ]  # fmt: skip
