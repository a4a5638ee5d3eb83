"""The status page's files: they hold no data, and are read when somebody asks for them, never before.

Owns their addresses and the headers that keep a browser from running or loading anything else.
"""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

FOLDER = Path(__file__).with_name("page")
FILES = {
    "/": ("index.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/page/page.js": ("page.js", "text/javascript"),
    "/page/draw.js": ("draw.js", "text/javascript"),
    "/page/timeline.js": ("timeline.js", "text/javascript"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""Path to file and type."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def table() -> list[web.RouteDef]:
    """Every route of the page."""
    return [web.get(path, _file) for path in FILES]


async def _file(request: web.Request) -> web.FileResponse:
    name, kind = FILES[request.path]
    return web.FileResponse(FOLDER / name, headers=HEADERS | {"Content-Type": f"{kind}; charset=utf-8"})
