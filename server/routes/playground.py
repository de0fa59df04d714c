"""`/`: the playground for a browser, and for anything else a line on where the API is. `/playground/`: its files.

Invariants: the page runs the files of `server/playground` and nothing else, makes markup of text through DOMPurify
alone, and connects to this server alone.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from server.routes.serving import Serving

FOLDER = Path(__file__).parent.parent / "playground"
PAGE = FOLDER / "index.html"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify",
    "Cache-Control": "no-cache",  # a newer server has a newer page
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add(app: FastAPI, serving: Serving) -> None:
    page = PAGE.read_text(encoding="utf-8")
    files = StaticFiles(directory=FOLDER)
    pointer = {"model": serving.name, "api": "/v1", "docs": "/docs", "health": "/health", "metrics": "/metrics"}

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def root(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(page, headers={**HEADERS, "Vary": "Accept"})
        return JSONResponse({**pointer, "playground": "open this address in a browser"}, headers={"Vary": "Accept"})

    @app.api_route("/playground/{path:path}", methods=["GET", "HEAD"], include_in_schema=False)
    async def file(path: str, request: Request) -> Response:
        """Serve a script, a style or a library; the page itself is at `/` alone, since its links are relative."""
        if path == PAGE.name:
            raise HTTPException(404)
        response = await files.get_response(path, request.scope)
        response.headers.update(HEADERS)
        return response
