"""The page at `/`: three files beside this one, served as they are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

HERE: Final = Path(__file__).parent
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FILES: Final = {
    "/": "index.html", "/page/page.js": "page.js", "/page/plots.js": "plots.js", "/page/page.css": "page.css",
}  # fmt: skip


def routes() -> list[Route]:
    return [Route(path, _file(name), methods=["GET"]) for path, name in FILES.items()]


def _file(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        headers = {"content-security-policy": POLICY, "x-content-type-options": "nosniff", "cache-control": "no-cache"}
        return FileResponse(HERE / name, headers=headers)

    return serve
