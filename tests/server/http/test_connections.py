"""Connections: how many, and what becomes of those that stand still."""

import contextlib
import json
import resource
import socket
import time
from functools import partial

import httpx
import pytest

from server.app import create_app
from server.http import connections
from server.http.connections import Connection, allow_open_files
from server.http.gate import LINES, Refusals
from tests.server.fake import FakeLLM
from tests.server.live import serving, wait_for

IDLE = 0.5


@pytest.fixture(scope="module")
def shared():
    """A server for three clients, one for many, and their engine."""
    llm, limits = FakeLLM(), partial(Connection, idle_timeout=IDLE)
    app = create_app(llm)
    few, many = (partial(limits, max_connections=count) for count in (3, 400))
    with serving(app, http=few) as url, serving(app, http=many) as crowded:
        yield llm, url, crowded


@pytest.fixture
def llm(shared):
    llm = shared[0]
    llm.__init__()
    yield llm
    llm.open, llm.endless = True, False


@pytest.fixture
def url(shared, llm):
    wait_for(lambda: httpx.get(f"{shared[1]}/health").status_code == 200)  # clients of the test before have left
    return shared[1]


def connect(url, receive_buffer=None):
    host, port = url.removeprefix("http://").split(":")
    client = socket.socket()
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(20)
    client.connect((host, int(port)))
    return client


def request(body, length=None):
    body = json.dumps(body)
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length or len(body)}\r\n\r\n{body}".encode()


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", request({"prompt": "a"}, length=999)])
def test_a_client_that_sends_no_more_is_cut_off(url, sent):
    with connect(url) as client:
        client.sendall(sent)
        began = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(100) == b""
        assert IDLE * 0.8 < time.monotonic() - began < 10


def test_a_client_that_sends_slowly_is_served(url):
    with connect(url) as client:
        for part in range(0, len(whole := request({"prompt": "a"})), 40):
            client.sendall(whole[part : part + 40])
            time.sleep(IDLE / 2)
        assert client.recv(100).startswith(b"HTTP/1.1 200")


def drip(url, head, byte):
    """Send a byte in every second idle time and a half; returns the seconds until the server cut that off."""
    with connect(url) as client:
        began = time.monotonic()
        client.sendall(head)
        client.settimeout(IDLE / 2)
        while time.monotonic() - began < 20:
            with contextlib.suppress(TimeoutError):
                if client.recv(1000) == b"":
                    break
            client.sendall(byte)
        return time.monotonic() - began


ENDLESS = (
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)


@pytest.mark.parametrize("head, byte", [
    (b"GET /health HT", b"T"),
    (b"GET /health HTTP/1.1\r\nX: ", b"x"),
    (request({"prompt": "a"}, length=9999), b" "),
    (ENDLESS, b"1\r\n \r\n"),
    (ENDLESS + b"1;", b"x"),
    (ENDLESS + b"0\r\nX: ", b"x"),
    (b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", b"\r\n"),  # between two requests
    (b"GET /health HTTP/1.1\r\nHost: a\r\n\r\nGET /health HTTP/1.1\r\nX: ", b"x"),
    (b"GET /health HTTP/1.1\r\nHost: a\r\nContent-Length: 9999\r\n\r\n", b"x"),  # answered before it is whole
])  # fmt: skip
def test_a_client_that_sends_a_byte_now_and_then_is_cut_off(url, head, byte):
    with contextlib.suppress(ConnectionError):
        assert drip(url, head, byte) < 10 * IDLE


def test_dripping_clients_leave_others_served(shared):
    crowded = shared[2]
    with contextlib.ExitStack() as opened, httpx.Client(base_url=crowded, timeout=30) as other:
        clients = [opened.enter_context(connect(crowded)) for _ in range(300)]
        left, end = set(clients), time.monotonic() + 30
        while left and time.monotonic() < end:
            for client in [*left]:
                try:
                    client.sendall(b"GET /health HTTP/1.1\r\nX: ")  # a header that grows, after the first time
                except OSError:
                    left.remove(client)
            assert other.get("/health").status_code == 200
            time.sleep(IDLE / 2)
        assert not left


def test_a_client_that_stops_while_the_server_does_not_read_is_cut_off(url):
    """A body over 64 KiB makes uvicorn stop reading until the application has taken the bytes."""
    with connect(url) as client:
        client.sendall(request({"prompt": "a" * 100_000}, length=10**6))
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(100) == b""


def answer(client):
    """Status and body of the response to what was sent, if the connection ends behind it."""
    parts = []
    while part := client.recv(2**16):
        parts.append(part)
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize("sent, status", [
    (b"GET /" + b"a" * 70_000, 414),
    (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
    (b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000, 431),
    (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 12_000 + b"\r\n", 431),
    (b"GET / HTTP/1.1\r\n" + b"a" * 70_000, 431),
    (ENDLESS + b"1\r\n{\r\n0\r\nX: " + b"a" * 350_000, 431),
    (ENDLESS + b"1;" + b"a" * 350_000, 431),
    (b"\r\n" * 40_000, 431),
    (b"nonsense\r\n\r\n", 400),
])  # fmt: skip
def test_a_head_that_is_too_large_is_refused_before_it_has_all_come(url, sent, status):
    with connect(url) as client:
        client.sendall(sent)
        got, body = answer(client)
    assert got == status and json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_growing_header_costs_neither_time_nor_memory(url):
    """The server reads no more than 64 kB of it, whatever comes, and answers others."""
    with connect(url) as client:
        client.sendall(b"GET / HTTP/1.1\r\nX: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(300):
                client.sendall(b"a" * 2**16)
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("sent", [
    b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 60_000 + b"\r\nConnection: close\r\n\r\n",
    b"GET /health?" + b"a" * 60_000 + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
])  # fmt: skip
def test_a_head_of_60_kb_is_served(url, sent):
    with connect(url) as client:
        client.sendall(sent)
        assert answer(client)[0] == 200


def test_requests_behind_one_another_have_limits_of_their_own(url):
    """Three heads of 40 kB may come in one piece of data."""
    with connect(url) as client:
        one = b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 40_000 + b"\r\n"
        client.sendall((one + b"\r\n") * 2 + one + b"Connection: close\r\n\r\n")
        whole = b""
        while part := client.recv(2**16):
            whole += part
        assert whole.count(b"HTTP/1.1 200") == 3


def test_a_trailer_is_no_header(url):
    """It comes after the checks of headers: here of the body's coding."""
    body = b'{"prompt": "a"}'
    with connect(url) as client:
        client.sendall(ENDLESS + b"%x\r\n%b\r\n0\r\nX-Request-Id: t\r\n\r\n" % (len(body), body))
        assert client.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_response_that_takes_long_is_waited_for(url, llm):
    """It is not the client who stands still."""
    llm.open = False
    with connect(url) as client:
        client.sendall(request({"prompt": "a"}))
        time.sleep(3 * IDLE)
        llm.open = True
        assert client.recv(100).startswith(b"HTTP/1.1 200")


def test_a_client_that_reads_nothing_is_cut_off_and_its_request_aborted(url, llm):
    llm.endless = True
    with connect(url, receive_buffer=4096) as client:
        client.sendall(request({"prompt": "a", "stream": True}))
        wait_for(lambda: llm.aborted == 1)
        parts = []
        with contextlib.suppress(ConnectionResetError):
            while part := client.recv(2**20):
                parts.append(part)
        assert b"[DONE]" not in b"".join(parts)


def test_one_connection_too_many_is_answered(url):
    with connect(url), connect(url), connect(url) as kept:
        reply = httpx.get(f"{url}/health")
        assert reply.status_code == 503 and reply.headers["retry-after"] == "1"
        assert reply.json()["error"]["code"] == "too_many_connections"
        assert "3 connections are open" in reply.json()["error"]["message"]
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert kept.recv(100).startswith(b"HTTP/1.1 200")
    wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)


@pytest.mark.parametrize("soft,hard,limit,allowed", [
    (4096, 4096, None, 1000),
    (512, 4096, 1256, 1000),
    (512, 1024, 1024, 768),
    (512, resource.RLIM_INFINITY, 1256, 1000),
])  # fmt: skip
def test_the_limit_of_open_files_is_raised_and_told_if_too_low(monkeypatch, caplog, soft, hard, limit, allowed):
    set_to = []
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(connections.resource, "setrlimit", lambda _, limits: set_to.append(limits))
    assert allow_open_files(1000) == allowed
    assert set_to == ([] if limit is None else [(limit, hard)])
    assert ("768 connections instead of 1000" in caplog.text) == (allowed < 1000)


def test_a_flood_of_connections_has_few_lines(caplog):
    caplog.set_level("INFO", "jaxspec.server")
    limits = partial(Connection, max_connections=200, idle_timeout=30, refusals=Refusals())
    with serving(create_app(FakeLLM()), http=limits) as url:
        before = len(caplog.records)
        for _ in range(LINES + 20):
            with connect(url) as client:
                client.sendall(b"nonsense\r\n\r\n")
                assert answer(client)[0] == 400
    lines = [record.getMessage() for record in caplog.records[before:]]
    assert len(lines) == LINES and lines[0].startswith("127.0.0.1 was sent 400: this is not a valid HTTP/1.1 request")
