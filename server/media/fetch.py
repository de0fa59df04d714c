"""One picture from the web, for a client that the server doesn't trust.

Invariants: a connection goes only to an address that was checked, for a host that the operator allowed, on that host's
own port; each redirect is checked as the first URL was. No fetch outlasts `SECONDS`, or reads beyond `MAX_FILE` bytes.
"""

from __future__ import annotations

import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from urllib.parse import SplitResult, urljoin, urlsplit

from jaxspec.config.request import RequestError, shown
from jaxspec.images.reading import MAX_FILE

SECONDS = 10.0
REDIRECTS = 3
MAX_URL = 8192
PORTS = {"http": 80, "https": 443}
_URL = re.compile(r"[!-\[\]-~]+")  # printable ASCII without backslashes, which parsers take in different ways
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def fetch(url: str, domains: Collection[str]) -> bytes:
    """Fetch a picture. `domains`: the hosts that may be asked, each perhaps with a port.

    **Raises:** `RequestError`.
    """
    end = time.monotonic() + SECONDS
    for _ in range(REDIRECTS + 1):
        parts = _allowed(url, domains)
        body, url = _get(parts, end)
        if url is None:
            return body
    raise RequestError(f"the picture's URL redirects more than {REDIRECTS} times")


def _allowed(url: str, domains: Collection[str]) -> SplitResult:
    """A URL's parts. **Raises:** `RequestError` unless it is of an allowed host."""
    try:
        if len(url) > MAX_URL or not _URL.fullmatch(url):
            raise ValueError("it must be printable ASCII without backslashes, of at most 8192 characters")
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port or PORTS.get(parts.scheme)
        if parts.scheme not in PORTS or not host:
            raise ValueError("it must begin with http:// or https:// and have a host")
        if parts.username is not None or parts.password is not None:
            raise ValueError("it must not have a user or a password")
    except ValueError as error:
        raise RequestError(f"the picture's URL {shown(url)} can't be used: {error}") from None
    usual = port == PORTS[parts.scheme]
    if f"{host}:{port}" not in domains and not (usual and host in domains):
        at = host if usual else f"{host}:{port}"
        raise RequestError(
            f"pictures of {shown(at)} are not fetched; the server's --allowed-media-domains lists the hosts that "
            "may be asked. Send the picture as a data: URL"
        )
    return parts


def public_address(host: str, port: int) -> str:
    """An address of a host. **Raises:** `RequestError` if any of its addresses isn't public."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise RequestError(f"the host {shown(host)} of the picture's URL can't be found: {error}") from None
    addresses = [each[4][0] for each in found]
    if not all(map(is_public, addresses)):
        raise RequestError(f"the host {shown(host)} of the picture's URL has a private address, which is not allowed")
    return addresses[0]


def is_public(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        elif address.sixtofour or address.teredo or address in _NAT64:  # another network's address within
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _get(parts: SplitResult, end: float) -> tuple[bytes, str | None]:
    """The body that a URL has, or the URL that it redirects to."""
    port = parts.port or PORTS[parts.scheme]
    address = public_address(parts.hostname, port)
    connection = _Connection(parts.hostname, port, address, parts.scheme == "https", end)
    timer = threading.Timer(max(end - time.monotonic(), 0.0), connection.cut)  # which no slow sender escapes
    timer.start()
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", target, headers={"User-Agent": "jaxspec", "Accept": "image/*"})
        answer = connection.getresponse()
        if answer.status in (301, 302, 303, 307, 308) and (place := answer.headers.get("Location")):
            return b"", urljoin(parts.geturl(), place)
        if answer.status != 200:
            raise RequestError(f"the picture's host answers with status {answer.status}")
        if (answer.length or 0) > MAX_FILE or len(body := answer.read(MAX_FILE + 1)) > MAX_FILE:
            raise RequestError(f"the picture's file has more than {MAX_FILE} bytes")
        if connection.was_cut:
            raise TimeoutError
        if answer.length:  # what is still to come, as the host said
            raise OSError("the host ended it early")
        return body, None
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        if connection.was_cut or isinstance(error, TimeoutError):
            raise RequestError(f"the picture took longer to fetch than {SECONDS:g} seconds") from error
        raise RequestError(f"the picture can't be fetched: {error}") from error
    finally:
        timer.cancel()
        connection.close()


class _Connection(http.client.HTTPConnection):
    """A connection to an address that was checked, whatever its host's name means by now."""

    def __init__(self, host: str, port: int, address: str, tls: bool, end: float):
        super().__init__(host, port, timeout=max(end - time.monotonic(), 0.001))
        self.default_port = PORTS["https" if tls else "http"]
        self._address, self._tls = address, tls
        self.was_cut = False

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self.timeout)
        if self._tls:
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)
        if self.was_cut:
            raise TimeoutError

    def cut(self) -> None:
        self.was_cut = True
        if (held := self.sock) is not None:
            with suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)
