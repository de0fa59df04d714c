"""Which web pages of other origins may call the server, and by which names: vLLM's flags, Starlette's middleware.

Invariant: without `--allowed-origins` no answer has a CORS header. With it, a browser's preflight is answered before
the API key is asked for, since browsers send none with it, and refusals carry the headers that let a page read them.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from jaxspec.config.flags import checked
from server.http.origin import is_loopback

EXPOSED = ("X-Request-Id", "Retry-After", "WWW-Authenticate")


def add_cors_flags(group: argparse._ArgumentGroup) -> None:
    for name, default, text in (
        ("--allowed-origins", None, 'origins of pages that may call the server, as \'["https://a.example"]\' or "*"'),
        ("--allowed-methods", ["*"], "methods that those pages may use"),
        ("--allowed-headers", ["*"], "headers that those pages may send"),
    ):
        shown = "none" if default is None else "*"
        group.add_argument(name, type=names, default=default, metavar="LIST", help=f"{text} (default: {shown})")
    hosts = 'host names that the server answers to beside localhost, or "*" for any (default: "*"; none on a loopback '
    group.add_argument("--allowed-hosts", type=names, metavar="LIST", help=f"{hosts}address without a key)")
    group.add_argument("--allow-credentials", action="store_true", help="let those pages send cookies (default: off)")


def cors_options(args: argparse.Namespace) -> dict[str, Any] | None:
    """Options of the CORS middleware, from the flags; None if no origin is allowed."""
    if not args.allowed_origins:
        return None
    allowed = {f"allow_{what}": getattr(args, f"allowed_{what}") for what in ("origins", "methods", "headers")}
    return {**allowed, "allow_credentials": args.allow_credentials}


def host_names(args: argparse.Namespace, address: str, has_key: bool) -> list[str] | None:
    """Names that a server at `address` answers to, beside this machine's own; None: any."""
    given = args.allowed_hosts
    if "*" in (given or ()) or (given is None and (has_key or not is_loopback(address))):
        return None
    return [name.lower().rstrip(".") for name in given or ()]


names = checked(
    lambda text: json.loads(text) if text.startswith("[") else [text],
    "must be a JSON list of strings or one name",
    lambda names: all(isinstance(name, str) for name in names),
)
