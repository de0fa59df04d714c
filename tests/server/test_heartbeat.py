"""No body holds up the event loop, whatever it has in it: a task of every 5 ms goes on while one is refused."""

import asyncio
import socket
import time

import pytest
import uvicorn

from server.app import create_app
from tests.server.fake import FakeLLM

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# On an idle machine the loop is late by 10 to 30 ms. The margin is for neighbours on the same cores.
LATE = 0.5


def repeated(unit, size, start, end):
    return start + unit * (size // len(unit)) + end


def fields(size, value):
    return b",".join(b'"f%07d":%s' % (i, value) for i in range(size // (12 + len(value))))


HOSTILE = {
    "empty messages": (CHAT, lambda n: repeated(b"{},", n, b'{"messages":[', b"{}]}")),
    "deep arrays": (CHAT, lambda n: b'{"messages":' + b"[" * n),
    "deep objects": (CHAT, lambda n: b'{"a":' * (n // 5)),
    "a huge integer": (TEXT, lambda n: b'{"prompt":"a","seed":' + b"9" * n + b"}"),
    "a huge fraction": (TEXT, lambda n: b'{"prompt":"a","seed":0.' + b"9" * n + b"}"),
    "a huge string": (TEXT, lambda n: b'{"prompt":"' + b"a" * n + b'"}'),
    "huge strings": (TEXT, lambda n: b'{"prompt":[' + (b'"' + b"a" * 2**21 + b'",') * (n // 2**21) + b'""]}'),
    "escapes": (TEXT, lambda n: repeated(rb"\u00e9", n, b'{"prompt":"', b'"}')),
    "escaped quotes": (TEXT, lambda n: repeated(rb"\"", n, b'{"prompt":"', b'"}')),
    "four-byte characters": (TEXT, lambda n: repeated("😀".encode(), n, b'{"prompt":"', b'"}')),
    "space": (TEXT, lambda n: b" " * n + b"{}"),
    "a long key": (TEXT, lambda n: b'{"prompt":"a","' + b"k" * n + b'":1}'),
    "unknown fields": (TEXT, lambda n: b'{"prompt":"a",' + fields(n, b"1") + b"}"),
    "null fields": (TEXT, lambda n: b'{"prompt":3,' + fields(n, b"null") + b"}"),
    "mixed prompts": (TEXT, lambda n: repeated(b'1,"a",[],', n, b'{"prompt":[', b"1]}")),
    "token ids": (TEXT, lambda n: repeated(b"1000,", n, b'{"prompt":[', b"1]}")),
    "fractions": (TEXT, lambda n: repeated(b"1.5,", n, b'{"prompt":[', b"1]}")),
    "prompts of nothing": (TEXT, lambda n: repeated(b"[],", n, b'{"prompt":[', b"[]]}")),
    "biases": (TEXT, lambda n: b'{"prompt":"a","logit_bias":{' + fields(n, b"1") + b"}}"),
    "stop strings": (TEXT, lambda n: repeated(b'"x",', n, b'{"prompt":"a","stop":[', b'"x"]}')),
    "parts": (CHAT, lambda n: repeated(b'{"type":"text","text":"a"},', n, b'{"messages":[{"content":[', b"{}]}]}")),
    "template variables": (CHAT, lambda n: b'{"messages":[{}],"chat_template_kwargs":{' + fields(n, b"1") + b"}}"),
}


@pytest.fixture(scope="module")
def refuse():
    """A function that posts a body and returns (status, how late the loop was at most, seconds)."""
    llm = FakeLLM()
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    server = uvicorn.Server(uvicorn.Config(create_app(llm), log_level="critical"))

    async def measured(path, body):
        late = 0.0

        async def beat():
            nonlocal late
            while True:
                due = time.perf_counter() + 0.005
                await asyncio.sleep(0.005)
                late = max(late, time.perf_counter() - due)

        beating = asyncio.create_task(beat())
        start = time.perf_counter()
        status = await asyncio.to_thread(post, address, path, body)
        took = time.perf_counter() - start
        beating.cancel()
        return status, late, took

    with asyncio.Runner() as runner:
        serving = runner.get_loop().create_task(server.serve(sockets=[listener]))
        while not server.started:
            runner.run(asyncio.sleep(0.01))
        yield lambda path, body: runner.run(measured(path, body))
        server.should_exit = True
        runner.run(asyncio.wait([serving]))


def post(address, path, body):
    """The status of the answer. A plain socket: a client in this process mustn't keep the loop waiting itself."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(head.encode())
        connection.sendall(body)
        return int(connection.recv(4096).split()[1])


@pytest.mark.parametrize("kind", HOSTILE)
def test_the_loop_runs_on_while_two_megabytes_are_refused(refuse, kind):
    path, body = HOSTILE[kind]
    status, late, took = refuse(path, body(2 * 10**6))
    assert status == 400
    assert late < LATE and took < 10


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", HOSTILE)
def test_the_loop_runs_on_while_sixty_megabytes_are_refused(refuse, kind):
    path, body = HOSTILE[kind]
    status, late, took = refuse(path, body(60 * 10**6))
    assert status == 400
    assert late < LATE and took < 20
