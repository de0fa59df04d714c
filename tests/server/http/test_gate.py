"""Gate before the routes: sizes refused unread, request ids, and a line in the log for each refusal."""

import asyncio
import gzip
import logging
import re

import httpx
import pytest

from server.app import create_app
from server.http import gate
from server.http.gate import LINES, MAX_BODY_BYTES, Refusals, safe
from tests.server.fake import FakeLLM
from tests.server.live import serving, wait_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def ask(app, headers, receive, path=TEXT, client=None):
    """The status and headers that `app` answers a POST with, called without a server."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {
        **{"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""},
        **{"headers": headers, "http_version": "1.1", "scheme": "http", "root_path": "", "client": client},
    }
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], dict(sent[0]["headers"])


@pytest.mark.parametrize("length", [str(MAX_BODY_BYTES + 1), "9" * 30])
def test_a_body_announced_too_large_is_refused_unread(length):
    async def receive():
        pytest.fail("the body was read")

    headers = [(b"content-type", b"application/json"), (b"content-length", length.encode())]
    status, answered = ask(create_app(FakeLLM()), headers, receive)
    assert status == 413 and b"x-request-id" in answered


def test_a_body_of_the_greatest_size_is_read():
    read = []

    async def receive():
        read.append(1)
        return {"type": "http.request", "body": b"[]", "more_body": False}

    headers = [(b"content-type", b"application/json"), (b"content-length", str(MAX_BODY_BYTES).encode())]
    status, _ = ask(create_app(FakeLLM()), headers, receive)
    assert status == 400 and read


def test_a_client_is_known_by_its_key_or_else_its_address():
    fake = FakeLLM()
    app, keyed = create_app(fake), create_app(fake, api_key="secret")

    def client(app, key=None, address="10.0.0.1"):
        headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        receive = lambda: asyncio.sleep(0, {"type": "http.request", "body": b'{"prompt": "a"}', "more_body": False})  # noqa: E731
        status, _ = ask(app, [*headers, (b"content-type", b"application/json")], receive, client=(address, 5))
        assert status == 200
        return fake.clients[-1]

    assert client(app) == client(app) != client(app, address="10.0.0.2")
    assert client(app, "a") == client(app, "a", "10.0.0.2") != client(app, "b")
    assert client(keyed, "secret") == client(app) != client(keyed, "secret", "10.0.0.2"), (
        "a key that all have says nothing"
    )
    assert "secret" not in "".join(fake.clients)


def test_a_body_that_is_compressed_is_refused_by_its_header(http):
    reply = http.post(TEXT, content=gzip.compress(b'{"prompt": "a"}'), headers={"Content-Encoding": "gzip"})
    assert reply.status_code == 415 and "Content-Encoding 'gzip'" in reply.json()["error"]["message"]
    assert http.post(TEXT, json={"prompt": "a"}, headers={"Content-Encoding": "identity"}).status_code == 200


@pytest.mark.parametrize("given", ["mine-1", "a" * 128, "9f/8:7._=+@"])
def test_a_clients_request_id_is_in_the_answer(http, given):
    for method, path, body in (("POST", TEXT, {"prompt": "a"}), ("POST", TEXT, {}), ("GET", "/health", None)):
        reply = http.request(method, path, json=body, headers={"X-Request-Id": given})
        assert reply.headers["x-request-id"] == given
    whole = http.post(CHAT, json={"messages": [{"role": "user", "content": "a"}]}, headers={"X-Request-Id": given})
    assert whole.json()["id"] == f"chatcmpl-{given}"
    stream = http.post(TEXT, json={"prompt": "a", "stream": True}, headers={"X-Request-Id": given})
    assert set(re.findall(r'"id":"([^"]*)"', stream.text)) == {f"cmpl-{given}"}


@pytest.mark.parametrize("given", ["", "a" * 129, "a b", "<script>", "a\tb", b"caf\xe9"])
def test_another_request_id_is_replaced(http, given):
    found = [http.get("/health", headers={"X-Request-Id": given}).headers["x-request-id"] for _ in range(2)]
    assert found[0] != found[1] and all(re.fullmatch("[0-9a-f]{32}", each) for each in found)


@pytest.mark.parametrize(
    "path,body", [(CHAT, {"messages": [{"role": "user", "content": "a"}]}), (TEXT, {"prompt": "a"})]
)
def test_a_body_may_name_its_response(http, path, body):
    """By vLLM's field, which has a prefix, or by SGLang's."""
    prefix = {CHAT: "chatcmpl-", TEXT: "cmpl-"}[path]
    for fields, name in (({"request_id": "mine"}, f"{prefix}mine"), ({"rid": "mine"}, "mine")):
        assert http.post(path, json=body | fields).json()["id"] == name
        stream = http.post(path, json=body | fields | {"stream": True})
        assert f'"id":"{name}"' in stream.text
    for field in ("request_id", "rid"):
        for bad in ("", "two words", "a" * 129, ["a", "b"], 5):
            reply = http.post(path, json=body | {field: bad})
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (400, field) and "1 to 128 letters" in error["message"]


def test_a_request_id_may_come_twice_at_once(http, fake):
    fake.open = False
    headers = {"X-Request-Id": "twice"}
    asked = {"method": "POST", "url": TEXT, "json": {"prompt": "a", "stream": True}, "headers": headers}
    with http.stream(**asked) as first, http.stream(**asked) as other:
        wait_for(lambda: fake.running == 2)
        fake.open = True
        assert b"[DONE]" in first.read() and b"[DONE]" in other.read()


@pytest.fixture
def alone():
    """A client of a server that nobody else has asked anything, so that it may still log."""
    with serving(create_app(FakeLLM())) as url, httpx.Client(base_url=url) as client:
        yield client


def test_each_refusal_has_a_line(alone, caplog):
    caplog.set_level(logging.INFO, logger="jaxspec.server")
    alone.post(TEXT, json={"prompt": "a private text", "temprature": 1}, headers={"X-Request-Id": "req-7"})
    alone.get("/nowhere%0A%1B[2J")
    wait_for(lambda: len(caplog.messages) >= 2)
    bad, missing = caplog.messages[:2]
    assert bad == (
        "400 POST /v1/completions, field temprature: unknown field 'temprature'; did you mean temperature? "
        "(request id req-7)"
    )
    assert missing.startswith(r"404 GET /nowhere\n\x1b[2J: no such route") and "\n" not in missing
    assert "private" not in caplog.text
    caplog.clear()
    alone.post(TEXT, json={"prompt": "a"})
    assert caplog.messages == [], "what went well has none"


def test_a_failure_is_logged_with_its_request_id(alone, caplog):
    reply = alone.post(TEXT, json={"prompt": "boom"}, headers={"X-Request-Id": "req-8"})
    assert reply.status_code == 500 and reply.headers["x-request-id"] == "req-8"
    assert any(message.startswith("500 POST") and "req-8" in message for message in caplog.messages)


def test_what_nobody_foresaw_is_an_error_in_our_format(caplog):
    llm = FakeLLM()
    llm.stats = lambda: 1 // 0
    app = create_app(llm)
    with serving(app) as url:
        reply = httpx.get(f"{url}/server_info", headers={"X-Request-Id": "req-9"})
    assert reply.status_code == 500 and reply.json()["error"]["type"] == "server_error"
    assert reply.headers["x-request-id"] == "req-9"
    assert "ZeroDivisionError" in caplog.text and "req-9" in caplog.text


async def test_a_flood_has_few_lines_and_a_count(caplog, monkeypatch):
    monkeypatch.setattr(gate, "PERIOD", 0.2)
    caplog.set_level(logging.INFO, logger="jaxspec.server")
    log = Refusals()
    for period in (1, 2):
        for _ in range(LINES + 40):
            log.note(400, "POST /x", "id", b'{"error":{"message":"no","param":null}}')
        await asyncio.sleep(0.4)
        assert len(caplog.messages) == period * (LINES + 1)
        assert caplog.messages[-1] == "40 more requests were refused or failed within 0.2 s"


@pytest.mark.parametrize("text", ["a\nb\r\x00", "\x1b]0;title\x07", "\u2028\u202e", "\ud800", "x" * 1000])
def test_a_line_is_one_line_of_printable_text(text):
    line = safe(text, 300)
    assert line.isprintable() and len(line) <= 300 and len(line.splitlines()) == 1
