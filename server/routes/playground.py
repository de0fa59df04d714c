"""`/`: the playground for a browser, and for anything else a line on where the API is.

Invariant: the page runs its own style and script and no others, and connects to this server alone.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from server.routes.serving import Serving

PAGE = Path(__file__).parent.parent / "playground" / "index.html"


def add(app: FastAPI, serving: Serving) -> None:
    page = PAGE.read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": _policy(page),
        "Cache-Control": "no-cache",  # a newer server has a newer page
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Vary": "Accept",
    }
    pointer = {"model": serving.name, "api": "/v1", "docs": "/docs", "health": "/health", "metrics": "/metrics"}

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def root(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(page, headers=headers)
        return JSONResponse({**pointer, "playground": "open this address in a browser"}, headers={"Vary": "Accept"})


def _policy(page: str) -> str:
    """Allow the page's own `<style>` and `<script>` by their hashes, and calls to the server that it came from."""

    def hashes(tag: str) -> str:
        blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(b.encode()).digest()).decode()}'" for b in blocks)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
