"""Pictures of the web: only allowed hosts, only at addresses that were checked."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from jaxspec.config.request import RequestError
from server.cli.options import UsageError, parse
from server.media import fetch as module
from server.media.fetch import fetch, is_public
from server.media.flags import media_rules

HOST = "pictures.example"


@contextmanager
def answering(*replies: bytes, pause: float = 0.0) -> Iterator[tuple[int, list[bytes]]]:
    """A server that gives each connection the next reply, a byte at a time if there is a pause."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for reply in replies:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                with peer:
                    asked.append(peer.recv(65536))
                    try:
                        for piece in [reply[i : i + 1] for i in range(len(reply))] if pause else [reply]:
                            peer.sendall(piece)
                            time.sleep(pause)
                    except OSError:
                        pass

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1], asked


def ok(body: bytes, head: str = "") -> bytes:
    return f"HTTP/1.1 200 OK\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def moved(place: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n".encode()


@pytest.fixture
def resolves(monkeypatch):
    """All names are this machine, whose address counts as public; the names that were asked for."""
    asked = []

    def getaddrinfo(host, port, **_):
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(module.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(module, "is_public", lambda address: True)
    monkeypatch.setattr(module.socket, "create_connection", _connect)
    return asked


def _connect(address, timeout):
    """Connect to an address alone, without a name to look up."""
    connected = socket.socket()
    connected.settimeout(timeout)
    connected.connect(address)
    return connected


def test_a_picture_is_fetched_from_an_allowed_host(resolves):
    with answering(ok(b"picture")) as (port, asked):
        assert fetch(f"http://{HOST}:{port}/a/b.png?c=1", {f"{HOST}:{port}"}) == b"picture"
    assert asked[0].startswith(b"GET /a/b.png?c=1 HTTP/1.1\r\n") and f"Host: {HOST}:{port}".encode() in asked[0]
    assert resolves == [HOST], "a name is resolved once, so that it can't mean another address afterwards"


@pytest.mark.parametrize("url", [
    f"http://{HOST}.evil.example/a",
    f"http://sub.{HOST}/a",
    f"http://{HOST}:8080/a",
    f"https://{HOST}:80/a",
    f"http://{HOST}@evil.example/a",
    f"http://evil.example\\@{HOST}/a",
    f"http://user:word@{HOST}/a",
    f"http://evil.example#@{HOST}/a",
    f"http://evil.example?@{HOST}/a",
    f"http://{HOST} .evil.example/a",
    f"http://{HOST}\n.evil.example/a",
    f"http://{HOST}:99999/a",
    "http:///a",
    "http://[::1/a",
    "http://pictures。example/a",
    f"http://{HOST}/" + "a" * 9000,
])  # fmt: skip
def test_other_hosts_and_odd_urls_are_refused_before_a_name_is_resolved(resolves, url):
    with pytest.raises(RequestError, match=r"are not fetched|can't be used"):
        fetch(url, {HOST})
    assert not resolves


def test_redirects_are_checked_as_the_first_url(resolves):
    with answering(moved("/b.png"), ok(b"there")) as (port, asked):
        assert fetch(f"http://{HOST}:{port}/a.png", {f"{HOST}:{port}"}) == b"there"
        assert asked[1].startswith(b"GET /b.png")
    for place in ("http://169.254.169.254/latest", "file:///etc/passwd", "//evil.example/a", "http://localhost:1/"):
        with answering(moved(place)) as (port, _), pytest.raises(RequestError):
            fetch(f"http://{HOST}:{port}/a.png", {f"{HOST}:{port}"})
    with answering(*[moved("/a")] * 9) as (port, asked), pytest.raises(RequestError, match="redirects more than 3"):
        fetch(f"http://{HOST}:{port}/a", {f"{HOST}:{port}"})
    assert len(asked) == 4


@pytest.mark.parametrize("address,public", [
    ("93.184.216.34", True),
    ("2606:2800:220:1::1", True),
    *((address, False) for address in (
        "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
        "2002:7f00:1::", "64:ff9b::7f00:1", "2001:0:7f00:1::", "198.18.0.1", "240.0.0.1",
    )),
])  # fmt: skip
def test_private_addresses_are_known(address, public):
    assert is_public(address) == public


def test_a_name_with_any_private_address_is_refused(monkeypatch):
    found = [(0, 0, 0, "", (address, 80)) for address in ("93.184.216.34", "10.0.0.1")]
    monkeypatch.setattr(module.socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(RequestError, match="private address"):
        fetch(f"http://{HOST}/a", {HOST})


@pytest.mark.parametrize("reply,says", [
    (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "status 404"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n", "more than 20971520 bytes"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1600000\r\n" + bytes(0x1600000), "more than"),
    (b"nonsense\r\n\r\n", "can't be fetched"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", "can't be fetched"),
    (b"", "can't be fetched"),
])  # fmt: skip
def test_answers_that_are_no_picture_are_refused(resolves, reply, says):
    with answering(reply) as (port, _), pytest.raises(RequestError, match=says):
        fetch(f"http://{HOST}:{port}/a", {f"{HOST}:{port}"})


@pytest.mark.parametrize("reply", [ok(b"x" * 100), b"HTTP/1.1 200 OK\r\nX-A: " + b"y" * 100], ids=["body", "head"])
def test_a_slow_sender_is_cut_off(resolves, monkeypatch, reply):
    monkeypatch.setattr(module, "SECONDS", 0.3)
    began = time.monotonic()
    with answering(reply, pause=0.05) as (port, _), pytest.raises(RequestError, match="longer to fetch"):
        fetch(f"http://{HOST}:{port}/a", {f"{HOST}:{port}"})
    assert time.monotonic() - began < 4  # all of it takes 5 s


def test_the_flags(tmp_path):
    given = ["--allowed-media-domains", '["A.example", "b.example:8080"]', "--allowed-media-path", str(tmp_path),
             "--limit-images-per-prompt", "0"]  # fmt: skip
    rules = media_rules(parse(given))
    assert rules.domains == {"a.example", "b.example:8080"} and (rules.folder, rules.most) == (tmp_path, 0)
    domains = media_rules(parse(["--allowed-media-domains", '["[2606:2800::1]"]'])).domains
    assert module._allowed("http://[2606:2800::1]/a.png", domains).hostname == "2606:2800::1"
    assert media_rules(parse([])).domains == frozenset() and media_rules(parse([])).folder is None
    for bad in ("*", "https://a.example", "a b", "a/b"):
        with pytest.raises(UsageError, match="takes host names"):
            parse(["--allowed-media-domains", bad])
    with pytest.raises(UsageError, match="must be a folder"):
        parse(["--allowed-media-path", str(tmp_path / "none")])
