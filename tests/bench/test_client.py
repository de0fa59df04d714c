"""The HTTP client against a server with a script: when output came, how much, and what went wrong."""

import asyncio
import json
import time

import pytest

from jaxspec.bench import latency, serve
from jaxspec.bench.client import Client, Reply
from jaxspec.bench.results import BenchError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
GAP = 0.05


def chunk(text):
    return b"%x\r\n%s\r\n" % (len(text), text)


def token(text="a"):
    return chunk(b'data: {"choices":[{"index":0,"text":"%s"}],"usage":null}\n\n' % text.encode())


def usage(prompt=7, output=3):
    counts = {"prompt_tokens": prompt, "completion_tokens": output}
    return chunk(b'data: {"choices":[],"usage":%s}\n\n' % json.dumps(counts).encode()) + chunk(b"data: [DONE]\n\n")


def talk(script, requests=1):
    """Send requests one after the other to a server that writes `script`; (replies, what it read, connections)."""
    heard, connections = [], 0

    async def answer(reader, writer):
        nonlocal connections
        connections += 1
        while head := await reader.readuntil(b"\r\n\r\n"):
            size = int(head.lower().partition(b"content-length:")[2].split()[0])
            heard.append((head.decode(), await reader.readexactly(size)))
            for part in script:
                if part is None:
                    writer.close()
                    return
                if isinstance(part, float):
                    await asyncio.sleep(part)
                else:
                    writer.write(part)
                    await writer.drain()

    async def main():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", api_key="secret")
        replies = [await client.stream("/v1/completions", {"prompt": [1, 2]}) for _ in range(requests)]
        await client.close()
        server.close()
        return replies

    return asyncio.run(main()), heard, connections


def test_output_is_timed_as_it_comes():
    began = time.perf_counter()
    (reply,), heard, _ = talk([HEAD, GAP, token() + token(), 2 * GAP, token(), usage() + END])
    assert reply.error is None and (reply.prompt_tokens, reply.output_tokens) == (7, 3)
    first, _, last = reply.arrivals  # the usage that comes last is no output
    assert first - reply.sent >= GAP and last - first > GAP  # of 2 GAP, since the first may be noticed late
    assert began <= reply.sent and last <= reply.ended <= time.perf_counter()
    head, body = heard[0]
    assert head.startswith("POST /v1/completions HTTP/1.1\r\n") and "authorization: Bearer secret" in head
    assert json.loads(body) == {"prompt": [1, 2], "stream": True, "stream_options": {"include_usage": True}}


def test_events_may_be_cut_anywhere_and_come_together():
    event = b'data: {"choices":[{"index":0,"text":"a"}],"usage":null}\n\n'
    cut = [chunk(event[:9]), GAP, chunk(event[9:] + event[:-1]), GAP, chunk(event[-1:])]
    (reply,), _, _ = talk([HEAD, *cut, usage() + END])
    assert reply.error is None
    assert len(reply.arrivals) == 2 and reply.arrivals[1] - reply.arrivals[0] >= GAP / 2


def test_a_role_and_an_end_are_no_output():
    role = chunk(b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n')
    text = chunk('data: {"choices":[{"index":0,"delta":{"content":"\u2028"}}]}\n\n'.encode())
    end = chunk(b'data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":"length"}]}\n\n')
    (reply,), _, _ = talk([HEAD, role, GAP, text, end + usage() + END])
    assert reply.error is None and len(reply.arrivals) == 1
    assert reply.arrivals[0] - reply.sent >= GAP / 2


@pytest.mark.parametrize("change", [
    lambda part: part.replace(b"\n\n", b"\r\n\r\n"),  # as sse-starlette ends lines
    lambda part: part.replace(b"data: ", b"data:"),
    lambda part: part.replace(b"data: [DONE]\n\n", b""),
])  # fmt: skip
def test_other_servers_events(change):
    body = b"".join(change(event) for event in (
        b'data: {"choices":[{"index":0,"text":"a"}],"usage":null}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n',
        b"data: [DONE]\n\n",
    ))  # fmt: skip
    head = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"  # as long as the connection
    (first, _), _, connections = talk([head, body, None], requests=2)
    assert first.error is None and first.output_tokens == 3 and len(first.arrivals) == 1
    assert connections == 2
    replies, _, connections = talk([HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), chunk(body) + END], 2)
    assert [reply.error for reply in replies] == [None] * 2 and connections == 2


def test_a_connection_is_used_again():
    replies, heard, connections = talk([HEAD + token() + usage() + END], requests=3)
    assert [reply.error for reply in replies] == [None] * 3
    assert len(heard) == 3 and connections == 1


@pytest.mark.parametrize("script, said", [
    ([b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nnope"], "status 404: nope"),
    ([HEAD + token(), None], "IncompleteReadError"),
    ([HEAD + token() + END], "not with its usage"),
    ([b"220 mail.example ESMTP\r\n"], "the answer is not HTTP"),
    ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnope\r\n"], "ValueError"),
    ([HEAD + token() + chunk(b'data: {"error":{"message":"boom"}}\n\n') + END], "boom"),
])  # fmt: skip
def test_what_goes_wrong_is_told(script, said):
    (reply,), _, _ = talk(script)
    assert said in reply.error
    assert latency.figures([reply])["completed"] == 0


@pytest.mark.parametrize(
    "url", ["https://host", "host:30000", "http://host/v2", "http://", "http://host:port", "http://[::1"]
)
def test_other_addresses_are_refused(url):
    with pytest.raises(BenchError, match=r"must look like http://127\.0\.0\.1:30000"):
        Client(url)


def test_a_server_that_is_not_there():
    async def ask():
        await Client("http://127.0.0.1:9").get("/server_info")

    with pytest.raises(BenchError, match="is the server running"):
        asyncio.run(ask())


@pytest.mark.parametrize("body, said", [
    ("<html>", "gives no JSON object: '<html>'"),
    ("[1]", r"gives no JSON object: '\[1\]'"),
    ('{"data": []}', "names no model"),
])  # fmt: skip
def test_a_server_of_another_kind(body, said):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body.encode()))

    async def main():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        try:
            await serve.over_http(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, None)
        finally:
            server.close()

    with pytest.raises(BenchError, match=f"GET /v1/models {said}"):
        asyncio.run(main())


def test_latencies():
    replies = [
        Reply(10.0, 5, 4, [10.5, 10.7, 11.1], 11.2),
        Reply(11.0, 5, 1, [11.1], 11.1),
        Reply(11.0, 5, 0, [], 12.0, error="no"),
    ]
    row = latency.figures(replies)
    assert (row["completed"], row["prompt_tokens"], row["output_tokens"]) == (2, 10, 5)
    assert row["seconds"] == pytest.approx(1.2) and row["output_tokens_per_s"] == pytest.approx(5 / 1.2)
    assert row["ttft_mean_ms"] == pytest.approx(300) and row["ttft_p50_ms"] == pytest.approx(300)
    assert row["tpot_mean_ms"] == pytest.approx(200)  # 0.6 s for the three tokens after the first
    assert row["itl_p50_ms"] == pytest.approx(300) and row["itl_p99_ms"] == pytest.approx(398)
    assert row["e2e_mean_ms"] == pytest.approx(650)
    assert row["peak_concurrency"] == 2 and row["mean_concurrency"] == pytest.approx(1.3 / 1.2)
    assert row["tokens_per_s_per_user"] == pytest.approx(5 / 1.2 / 2)
    assert latency.figures([])["ttft_p99_ms"] is None
