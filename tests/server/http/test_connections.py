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
from tests.server.fake import FakeLLM
from tests.server.live import serving, wait_for

IDLE = 0.5


@pytest.fixture
def llm():
    return FakeLLM()


@pytest.fixture
def url(llm):
    with serving(create_app(llm), http=partial(Connection, max_connections=3, idle_timeout=IDLE)) as url:
        yield url


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
