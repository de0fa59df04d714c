"""Which pages in a browser may reach a server that asks for no key: by the server's name, and by their own origin.

Invariant: without a key, a page of another origin changes nothing here. A request that changes something is refused if
such a page sent it. A server on a loopback address answers to names of this machine alone, since a page's own domain
may be made to point here, and the page would then be of the server's origin (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from starlette.datastructures import Headers

from server.http.errors import ApiError
from server.protocol.base import shown

SAFE = ("GET", "HEAD", "OPTIONS")
CHANGING_GETS = ("/flush_cache",)  # SGLang's clients may empty the cache so
_HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:]+))(?::\d*)?")


def is_loopback(name: str) -> bool:
    """Whether a name or address is of the machine itself, wherever it is looked up."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def check_host(headers: Headers, allowed: Sequence[str]) -> None:
    """**Raises:** `ApiError` for a request to a name that is neither `allowed` nor this machine's own."""
    for host in headers.getlist("host"):
        found = _HOST.fullmatch(host.strip().lower())
        name = (found[1] or found[2]).rstrip(".") if found else ""
        if not (is_loopback(name) or name in allowed):
            message = f"this server doesn't answer to the host name {shown(host)}, but to localhost and 127.0.0.1"
            raise ApiError(403, f"{message}; --allowed-hosts allows more names, as does a server with an API key")


def check_origin(method: str, path: str, headers: Headers, allowed: Sequence[str]) -> None:
    """**Raises:** `ApiError` for what would change something, and was sent by a page whose origin isn't `allowed`."""
    if (method in SAFE and path not in CHANGING_GETS) or not _foreign(headers, allowed, method in SAFE):
        return
    sender = headers.get("origin") or "another site"
    hint = "send it from elsewhere, or start the server with --allowed-origins or with an API key"
    raise ApiError(403, f"{method} {path} was sent by a page of {shown(sender)}, and may change something; {hint}")


def _foreign(headers: Headers, allowed: Sequence[str], is_get: bool) -> bool:
    """Whether a page of another origin sent a request. Only browsers send these headers, and no page can change them:
    not over plain HTTP to other machines, where an Origin comes with all but GETs."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site in ("same-origin", "none"):
        return False
    if origin is None:
        return site is not None or (is_get and headers.get("user-agent", "").startswith("Mozilla/"))
    scheme, _, authority = origin.lower().partition("://")
    if (scheme not in ("http", "https") and origin != "null") or "*" in allowed or origin in allowed:
        return False  # an application or an extension, which needs no page; or an allowed page
    host = headers.get("host", "").lower()
    if ":" not in host:  # a proxy may leave the port out
        authority = authority.partition(":")[0]
    return authority != host
