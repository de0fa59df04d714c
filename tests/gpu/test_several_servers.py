"""Servers on several GPUs: one model over two hosts' processes, two engines behind one port, and what a kill leaves."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import jax
import pytest

from tests.support import heads
from tests.support.tiny import BYTE_VOCAB, tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(jax.local_device_count() < 2, reason="one GPU")]

ROOT = Path(__file__).resolve().parent.parent.parent
# A share of memory that leaves room for the other process, and for this one.
ENVIRONMENT = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
ENVIRONMENT |= {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
OPTIONS = ["--skip-warmup", "--few-programs", "--max-running-requests", "4", "--max-total-tokens", "4096"]
OPTIONS += ["--context-length", "1024", "--page-size", "16", "--num-draft-tokens", "3", "--dtype", "float32"]
ENDS = 15.0  # seconds after a kill


@functools.cache
def model() -> tuple[str, str]:
    """A tiny model's folder, and an EAGLE-3 drafter for it."""
    folder = tiny_checkpoint("llama", BYTE_VOCAB, 2, tokenizer=True, num_attention_heads=8,
                             max_position_embeddings=1024)  # fmt: skip
    return str(folder), f"eagle3:{heads.random_eagle3(folder, tuple(range(3, BYTE_VOCAB, 2)), (0, 1))}"


def start(gpus: str, port: int, *flags: str) -> subprocess.Popen:
    folder, draft = model()
    command = [sys.executable, "-m", "server", folder, "--draft", draft, "--port", str(port), *OPTIONS, *flags]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": gpus})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def ended(*processes: subprocess.Popen):
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def asked(port: int, path: str, body: dict | None = None) -> tuple[int, str]:
    """Status and body of the answer; 0 if the connection is refused or cut off."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Content-Type": "application/json"})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(request, data, timeout=120) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def complete(port: int, **body) -> tuple[int, str]:
    return asked(port, "/v1/completions", {"prompt": "hello", "max_tokens": 24, "temperature": 0} | body)


def text(port: int, **body) -> str:
    status, reply = complete(port, **body)
    assert status == 200, reply
    return json.loads(reply)["choices"][0]["text"]


def wait_for(condition, seconds: float = 120.0) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + seconds, "waited in vain"
        time.sleep(0.05)
    return time.monotonic() - began


def in_background(count: int, port: int, **body) -> tuple[list[threading.Thread], list[tuple[int, str]]]:
    """Long requests of different prompts, of which all are under way."""
    replies = []
    long = {"max_tokens": 900, "ignore_eos": True}
    ask = lambda i: replies.append(complete(port, prompt=chr(97 + i) * 40, **long | body))  # noqa: E731
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    wait_for(lambda: json.loads(asked(port, "/load")[1])["server_load"] == count)
    return threads, replies


ASKED = {"greedy": {}, "sampled": {"temperature": 0.9, "seed": 3}, "other": {"prompt": "the quick brown fox " * 3}}


def test_two_processes_serve_one_model_as_one_does(figures):
    """Each has one GPU. A follower that is killed ends the leader, and requests are answered with an error."""
    ports = [free_port() for _ in range(3)]
    several = ("--tp-size", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{ports[2]}")
    leader, follower = (start(str(i), ports[0], *several, "--node-rank", str(i)) for i in range(2))
    with ended(leader, follower, alone := start("0", ports[1])):
        wait_for(lambda: all(asked(port, "/health")[0] == 200 for port in ports[:2]))
        for name, body in ASKED.items():
            assert text(ports[0], **body) == text(ports[1], **body), name
        threads, replies = in_background(1, ports[0])
        follower.kill()
        killed = time.monotonic()
        assert leader.wait(ENDS) != 0
        figures["a follower killed: the leader ends after"] = f"{time.monotonic() - killed:.1f} s"
        for thread in threads:
            thread.join()
        assert [status for status, _ in replies] == [503], replies
        assert alone.poll() is None


def test_two_engines_behind_one_port(figures):
    """Requests spread over both; an engine that is killed takes its own requests along, and no others."""
    port = free_port()
    with ended(server := start("0,1", port, "--dp-size", "2")):
        wait_for(lambda: asked(port, "/health")[0] == 200)
        engines = lambda: json.loads(asked(port, "/server_info")[1])["stats"]["engines"]  # noqa: E731
        for name, body in ASKED.items():
            assert text(port, **body) == text(port, **body), name
        threads, replies = in_background(4, port)
        wait_for(lambda: [each["num_running"] for each in engines()] == [2, 2])
        os.kill(engines_of(server)[1], signal.SIGKILL)
        killed = time.monotonic()
        for thread in threads:
            thread.join()
        assert sorted(status for status, _ in replies) == [200, 200, 500, 500], replies
        wait_for(lambda: sorted(each["ready"] for each in engines()) == [False, True], ENDS)
        figures["an engine killed: noticed after"] = f"{time.monotonic() - killed:.1f} s"
        assert [complete(port, prompt="z" * i)[0] for i in range(1, 5)] == [200] * 4


def engines_of(server: subprocess.Popen) -> list[int]:
    """The processes of a server's engines."""
    tasks = Path(f"/proc/{server.pid}/task").glob("*/children")
    children = [int(pid) for task in tasks for pid in task.read_text().split()]
    return [pid for pid in children if b"engine_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_caller_that_leaves_frees_a_divided_model(figures):
    """Over two GPUs of one process. A reader that goes away in mid-stream changes nobody else's text."""
    port = free_port()
    with ended(server := start("0,1", port, "--tp-size", "2")):
        wait_for(lambda: asked(port, "/health")[0] == 200)
        want = text(port, prompt="abc" * 9, max_tokens=200, ignore_eos=True)
        body = {"prompt": "xyz" * 9, "max_tokens": 900, "ignore_eos": True, "stream": True, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        reply = urllib.request.urlopen(request, timeout=60)
        reply.readline()
        made = []
        thread = threading.Thread(
            target=lambda: made.append(text(port, prompt="abc" * 9, max_tokens=200, ignore_eos=True))
        )
        thread.start()
        reply.close()
        figures["a caller left: freed after"] = f"{wait_for(lambda: _load(port) <= 1, ENDS):.1f} s"
        thread.join()
        assert made == [want]
        threads, replies = in_background(2, port)
        server.kill()
        server.wait(ENDS)
        for thread in threads:
            thread.join()
        assert [status for status, _ in replies] == [0, 0]


def _load(port: int) -> int:
    return json.loads(asked(port, "/load")[1])["server_load"]
