"""Drills on a real engine behind HTTP: faults are put in, and what was asked is answered or told why it isn't.

After each, pages balance. Those of a whole process check what its supervisor sees: the exit status, in time.
"""

import asyncio
import contextlib
import json
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial

import httpx
import jax
import pytest

from jaxspec import AsyncLLM
from jaxspec.scheduling.audit import audit
from server.app import create_app
from server.http.connections import Connection, allow_open_files
from tests.server.fake import FakeLLM
from tests.server.live import ENGINE, as_here, meanwhile, serving, wait_for
from tests.support.tiny import BYTE_VOCAB, tiny_checkpoint

QUICK = {"prompt": "abcabcabcabc", "max_tokens": 12, "temperature": 0}
LONG = {"prompt": "abcabcabcabc", "max_tokens": 4000, "temperature": 0, "ignore_eos": True}


def checkpoint():
    return str(tiny_checkpoint(vocab=BYTE_VOCAB, tokenizer=True, max_position_embeddings=4096, num_hidden_layers=1))


@pytest.fixture(scope="module")
def llm():
    llm = AsyncLLM(checkpoint(), "ngram", **ENGINE)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def url(llm):
    limits = partial(Connection, max_connections=100, idle_timeout=30)
    with serving(create_app(llm, served_name="tiny"), http=limits) as url:
        yield url


@pytest.fixture(autouse=True)
def pages_balance(request):
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        wait_for(lambda: not llm.engine.busy and not llm._admitted.held)
        audit(llm.engine.scheduler)
        assert llm.error is None and llm.stats()["ready"]


def ask(url, body, stream=False):
    return httpx.post(f"{url}/v1/completions", json={**body, "stream": stream}, timeout=60)


def ask_all(url, bodies):
    """Replies to requests sent at once, every other one streamed."""
    with meanwhile(lambda i: ask(url, bodies[i], stream=bool(i % 2)), *range(len(bodies))) as replies:
        pass
    return replies


def failure(reply):
    """Error that a reply reports, whole or as a stream's event."""
    events = [line for line in reply.text.split("\n\n") if '"error"' in line]
    return json.loads(events[0].removeprefix("data: "))["error"]


@pytest.fixture
def expected(url):
    return ask(url, QUICK).json()["choices"][0]["text"]


@pytest.mark.parametrize("where", ["round", "prefill", "first"])
def test_a_program_that_fails_takes_its_requests_and_no_others(url, llm, expected, monkeypatch, where):
    run, failures = getattr(llm.engine.runner.programs, where), llm.stats()["engine_failures_total"]

    def exhausted(state, *args):
        monkeypatch.undo()
        run(state, *args)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory while trying to allocate 9 bytes")

    monkeypatch.setattr(llm.engine.runner.programs, where, exhausted)
    replies = ask_all(url, [{**QUICK, "max_tokens": 200}] * 3)
    for reply in replies:
        if "error" not in reply.text:  # begun after the failure
            continue
        assert failure(reply)["code"] == "request_failed" and "send it again" in failure(reply)["message"]
        assert reply.status_code in (200, 500)
    assert llm.stats()["engine_failures_total"] == failures + 1
    assert any("error" in reply.text for reply in replies)
    assert ask(url, QUICK).json()["choices"][0]["text"] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_tokenising_that_fails_is_one_requests_failure(url, llm, expected, monkeypatch, stream):
    encode = llm.tokenizer.encode

    def broken(text, *args):
        return 1 // 0 if text == "bad" else encode(text, *args)

    monkeypatch.setattr(llm.tokenizer, "encode", broken)
    with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}, timeout=60) as going:
        lines = going.iter_lines()
        next(lines)
        reply = ask(url, {"prompt": "bad"}, stream)
        assert reply.status_code == 500 and reply.json()["error"]["type"] == "server_error"
        assert "ZeroDivision" not in reply.text
        assert ask(url, QUICK).json()["choices"][0]["text"] == expected
        next(lines)


@pytest.mark.parametrize("stream", [False, True])
def test_detokenising_that_fails_is_one_requests_failure(url, llm, expected, monkeypatch, stream):
    from jaxspec.text.detokenizer import Detokenizer

    push = Detokenizer.push

    def broken(self, tokens):
        return 1 // 0 if self._stops is not None and self._pushed > 4 else push(self, tokens)

    monkeypatch.setattr(Detokenizer, "push", broken)
    reply = ask(url, {**LONG, "stop": "bad"}, stream)
    assert failure(reply)["code"] == "request_failed" and reply.status_code == (200 if stream else 500)
    assert ask(url, QUICK).json()["choices"][0]["text"] == expected
    assert llm.stats()["requests_total"]["error"] >= 1


async def test_clients_that_leave_at_any_time_leave_nothing_behind(url, llm):
    """In mid-stream, and while their prompt is tokenised."""

    async def one(client, i):
        long = {**LONG, "prompt": "abc" * 2500, "max_tokens": 1} if i % 3 == 0 else LONG
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05 * (i + 1)):  # httpx's own is of each read, and a stream is read often
                await client.post(f"{url}/v1/completions", json={**long, "stream": bool(i % 2)}, timeout=None)

    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=50)) as client:
        await asyncio.gather(*(one(client, i) for i in range(12)))
    assert ask(url, QUICK).status_code == 200


def test_the_queue_is_bounded(llm, monkeypatch):
    """Four requests run and one waits, none of which goes on before the others are refused."""
    monkeypatch.setattr(llm._admitted, "queued", 5 - llm.config.max_running_requests)
    go, before = threading.Event(), llm._admitted.refused
    dispatch = llm.engine.runner.round
    monkeypatch.setattr(llm.engine.runner, "round", lambda *args: (go.wait(60), dispatch(*args))[1])
    one = lambda i: ask(url, QUICK, stream=bool(i % 2))  # noqa: E731
    with serving(create_app(llm, served_name="tiny")) as url, meanwhile(one, *range(8)) as replies:
        wait_for(lambda: llm._admitted.refused == before + 3)
        go.set()
    assert sorted(reply.status_code for reply in replies) == [200] * 5 + [429] * 3
    for reply in replies:
        if reply.status_code == 429:
            assert reply.headers["retry-after"] == "1" and reply.json()["error"]["code"] == "queue_full"
    assert llm.stats()["refused_total"] == before + 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_told(url, llm, monkeypatch, stream):
    monkeypatch.setattr(llm, "request_timeout", 0.3)
    dispatch = llm.engine.runner.round
    monkeypatch.setattr(llm.engine.runner, "round", lambda *args: (time.sleep(0.02), dispatch(*args))[1])
    reply = ask(url, LONG, stream)
    assert failure(reply)["code"] == "request_timeout" and reply.status_code == (200 if stream else 504)


async def test_many_connections_at_once():
    """Each open before any is served, each answered."""
    count = 2000
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 3 * count:
        pytest.skip(f"the system allows {hard} open files")
    allow_open_files(3 * count)
    llm = FakeLLM(open=False)
    limits = partial(Connection, max_connections=count, idle_timeout=120)
    body = json.dumps({"prompt": "a", "max_tokens": 3, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    sent = f"{head}Content-Type: application/json\r\n\r\n{body}".encode()

    async def one(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        whole = await reader.read()
        writer.close()
        return whole

    with serving(create_app(llm), http=limits) as url:
        asking = [asyncio.create_task(one(int(url.rpartition(":")[2]))) for _ in range(count)]
        while llm.running < count:
            await asyncio.sleep(0.01)
        llm.open = True
        replies = await asyncio.gather(*asking)
    assert all(reply.startswith(b"HTTP/1.1 200") and b"[DONE]" in reply for reply in replies)
    assert llm.running == llm.aborted == 0


FAULTY = """
import ctypes, sys, time
from jaxspec.engine.runner import Runner
from server import __main__ as command

fault, *argv = sys.argv[1:]
round_, reset, rounds = Runner.round, Runner.reset, []

def faulty(self, *args):
    rounds.append(0)
    if fault == "stuck" and len(rounds) > 5:
        time.sleep(1000)
    if fault == "held" and len(rounds) > 5:
        print("held", file=sys.stderr, flush=True)
        ctypes.PyDLL(None).usleep(10**9)  # unlike CDLL, it keeps the interpreter's lock
    if fault == "dead" and len(rounds) > 5:
        raise RuntimeError("the device is gone")
    time.sleep(0.01)
    return round_(self, *args)

def gone(self):
    raise RuntimeError("the device is gone")

Runner.round = faulty
if fault == "dead":
    Runner.reset = gone
sys.argv[1:] = argv
command.run()
"""


@contextmanager
def process(fault, *flags, env=None):
    """A server process with a fault in it, and its address."""
    env = env or as_here()
    options = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items() if value is not True]
    argv = [fault, "--model", checkpoint(), "--draft", "ngram", "--port", "0", *options, *flags]
    argv += ["--skip-warmup", "--few-programs"]
    server = subprocess.Popen([sys.executable, "-c", FAULTY, *argv], stderr=subprocess.PIPE, text=True, env=env)
    lines = []
    try:
        for line in server.stderr:
            lines.append(line)
            if " is ready at " in line:
                break
        assert server.poll() is None, "".join(lines)
        url = lines[-1].split(" is ready at ")[1].split("/v1")[0]
        thread = threading.Thread(target=lambda: lines.extend(server.stderr), daemon=True)
        thread.start()
        yield server, url, lines
    finally:
        server.kill()
        server.wait()
    thread.join()


def test_told_to_stop_under_load_a_server_finishes_what_it_can():
    with process("none", "--drain-seconds", "4") as (server, url, lines):
        ask(url, {**QUICK, "max_tokens": 30})  # compiles
        with meanwhile(partial(ask_all, url), [LONG, LONG, {**QUICK, "max_tokens": 30}, QUICK]) as replies:
            wait_for(lambda: httpx.get(f"{url}/server_info").json()["stats"]["num_running"] > 1)
            began = time.monotonic()
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 0
        assert time.monotonic() - began < 4 + 5 + 5
        assert "Traceback" not in "".join(lines)
    long, streamed, quick, also_quick = replies[0]
    assert long.status_code == 503 and "shutting down" in failure(long)["message"]
    assert "shutting down" in failure(streamed)["message"] and streamed.text.endswith("data: [DONE]\n\n")
    assert quick.status_code == 200 and "[DONE]" in also_quick.text and "error" not in also_quick.text


@pytest.mark.exhaustive  # test_shutdown.py sends a second signal, in a process without an engine
def test_told_to_stop_twice_a_server_ends_without_a_traceback():
    with process("none") as (server, _, lines):
        server.send_signal(signal.SIGINT)
        time.sleep(0.05)
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0
    assert "stopped" in "".join(lines) and "Traceback" not in "".join(lines)


@pytest.mark.soak
def test_a_server_whose_step_never_returns_says_so_and_ends():
    flags = "--watchdog-timeout", "1.5", "--drain-seconds", "2", "--log-format", "json"
    with process("stuck", *flags) as (server, url, lines), meanwhile(partial(ask_all, url), [LONG, LONG]) as replies:
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 503)
        assert server.wait(20) == 1
    assert all("EngineDead" in failure(reply)["message"] for reply in replies[0])
    said = [json.loads(line) for line in lines if line.startswith("{")]
    assert any("--watchdog-timeout" in each["message"] and each["level"] == "CRITICAL" for each in said)


@pytest.mark.exhaustive  # test_shutdown.py has a stuck step and a loop that hangs; above, a process is told to stop
def test_a_server_with_a_stuck_step_can_be_stopped():
    running = process("stuck", "--drain-seconds", "1")
    with running as (server, url, _), meanwhile(partial(ask_all, url), [LONG]) as replies:
        wait_for(lambda: httpx.get(f"{url}/server_info").json()["stats"]["step_seconds"] > 0.5)
        server.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert server.wait(20) == 1 and time.monotonic() - began < 1 + 5 + 5
    assert replies[0][0].status_code == 503


@pytest.mark.exhaustive
def test_a_server_whose_interpreter_is_held_hears_and_ends():
    running = process("held", "--drain-seconds", "1")
    with running as (server, url, lines), meanwhile(partial(ask_all, url), [LONG]):
        wait_for(lambda: "held\n" in lines)
        server.send_signal(signal.SIGTERM)
        began = time.monotonic()
        wait_for(lambda: any("told to stop, but a call into C" in line for line in lines), 20)
        assert server.wait(20) == -signal.SIGKILL and time.monotonic() - began < 1 + 5 + 3 + 5


@pytest.mark.exhaustive
def test_servers_that_start_at_once_share_an_empty_cache_and_damage_costs_a_compilation(tmp_path):
    env = {name: value for name, value in as_here().items() if name != "JAX_COMPILATION_CACHE_DIR"}
    env |= {"JAXSPEC_CACHE": str(tmp_path / "cache")}

    def said(_):
        with process("none", env=env) as (_, url, _):
            return [ask(url, QUICK | {"temperature": heat, "seed": 1}).json()["choices"][0]["text"] for heat in (0, 1)]

    with meanwhile(said, 0, 1) as texts:
        pass
    assert texts[0] == texts[1] == said(2)
    kept = [path for path in (tmp_path / "cache").rglob("*-cache") if path.is_file()]
    assert len(kept) > 5 and kept[0].parent.stat().st_mode & 0o077 == 0
    for place, path in enumerate(kept):
        data = bytearray(path.read_bytes())
        data[len(data) * place // len(kept)] ^= 1 << place % 8
        path.write_bytes(data)
    assert said(3) == texts[0]


@pytest.mark.soak
def test_a_server_whose_device_is_gone_ends():
    with process("dead") as (server, url, _), meanwhile(partial(ask_all, url), [LONG, LONG]) as replies:
        assert server.wait(20) == 1
    assert all(failure(reply)["code"] == "engine_dead" for reply in replies[0])
