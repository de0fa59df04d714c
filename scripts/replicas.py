"""Two replicas of the demo model on a CPU, and one is killed under load.

    python scripts/replicas.py sglang-router|vllm-router|ray --bin FOLDER

`FOLDER` has the programs of a virtual environment in which the router, or Ray and jaxspec, are installed. It checks
that conversations find their prefixes cached, that no request is lost that the client sends once more, and that the
other replica goes on serving. The exit status is 1 if not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm2-135m-instruct"
OPTIONS = {"context_length": 1024, "max_running_requests": 4, "max_total_tokens": 8192, "skip_warmup": True}
OPTIONS |= {"few_programs": True, "disable_structured_output": True}
SESSIONS, TURNS, WORDS = 5, 4, 50  # odd: round robin over two replicas must not keep a session by chance
REQUESTS, CLIENTS, BEFORE = 40, 4, 10  # under load; how many are answered before the kill
RETRY_SECONDS = 2


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def process(command: list[str], log: Path, **env: str) -> Iterator[subprocess.Popen]:
    """A process in a group of its own, ended with all of the group."""
    with log.open("wb") as file:
        started = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=file, env=os.environ | env, start_new_session=True
        )
    try:
        yield started
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(20)


def wait(url: str, log: Path, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        time.sleep(0.3)
    sys.exit(f"{url} isn't ready after {seconds:g} seconds; the end of its log:\n{log.read_text()[-2000:]}")


@contextlib.contextmanager
def behind_router(kind: str, folder: Path, logs: Path, policy: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Two plain servers behind a router: its address, and what kills one of them."""
    flags = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in OPTIONS.items()]
    with contextlib.ExitStack() as stack:
        servers, urls = [], []
        for i in range(2):
            port, log = free_port(), logs / f"server-{i}.log"
            command = [sys.executable, "-m", "server", "--port", str(port), "--draft", "ngram", *flags]
            servers.append(stack.enter_context(process(command, log)))
            urls.append(f"http://127.0.0.1:{port}")
            wait(f"{urls[i]}/health", log)  # one after the other: the second finds compiled programs
        port, log = free_port(), logs / "router.log"
        own = ["--policy", policy, "--host", "127.0.0.1", "--port", str(port)]
        own += ["--prometheus-port", str(free_port())]
        command = [str(folder / kind), *(["launch"] if kind == "sglang-router" else []), "--worker-urls", *urls, *own]
        stack.enter_context(process(command, log))
        wait(f"http://127.0.0.1:{port}/v1/models", log)
        yield f"http://127.0.0.1:{port}", lambda: os.kill(servers[0].pid, signal.SIGKILL)


@contextlib.contextmanager
def on_ray(folder: Path, logs: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Two replicas of Ray Serve: their address, and what kills one of them."""
    mark, port, log = uuid.uuid4().hex, free_port(), logs / "serve.log"
    env = {"JAXSPEC_GPUS": "0", "JAXSPEC_DRAFT": "ngram", "JAXSPEC_OPTIONS": json.dumps(OPTIONS)}
    env |= {"JAXSPEC_CHECK": mark, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}

    app = {"name": "jaxspec", "route_prefix": "/", "import_path": "examples.ray_serve:app"}
    config = logs / "serve.yaml"  # JSON is YAML; `serve run` has no flag for the port
    config.write_text(json.dumps({"http_options": {"host": "127.0.0.1", "port": port}, "applications": [app]}))

    def kill() -> None:
        os.kill(replicas(mark)[0], signal.SIGKILL)

    with process([str(folder / "serve"), "run", str(config)], log, **env):
        url = f"http://127.0.0.1:{port}"
        wait(f"{url}/health", log)
        yield url, kill


def replicas(mark: str) -> list[int]:
    """The processes of this Ray's replicas, by what their environment says."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ours = f"JAXSPEC_CHECK={mark}".encode() in (folder / "environ").read_bytes()
            if ours and (folder / "cmdline").read_bytes().startswith(b"ray::ServeReplica"):
                found.append(int(folder.name))
    return found


def ask(url: str, text: str, session: str) -> dict:
    """A reply. **Raises:** `httpx.HTTPError`."""
    body = {"model": MODEL, "prompt": text, "max_tokens": 12, "temperature": 0}
    reply = httpx.post(f"{url}/v1/completions", json=body, headers={"x-session-id": session}, timeout=60)
    reply.raise_for_status()
    return reply.json()


def affinity(url: str) -> float:
    """The share of conversations' prompt tokens that were found cached, of those that an earlier turn had."""
    texts = [f"{session} " * WORDS for session in range(1000, 1000 + SESSIONS)]
    known = dict.fromkeys(range(SESSIONS), 0)
    cached = possible = 0
    for _turn in range(TURNS):
        for i, text in enumerate(texts):
            reply = ask(url, text, f"session-{i}")
            usage = reply["usage"]
            cached += min((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0), known[i])
            possible += known[i]
            known[i] = usage["prompt_tokens"]
            texts[i] = text + reply["choices"][0]["text"] + " And then?"
    return cached / possible


def load(url: str, kill: Callable[[], None]) -> tuple[int, int, int]:
    """Requests answered, those among them that were sent a second time, and those answered after the kill."""
    lock, left, answered, again, after, killed = threading.Lock(), list(range(REQUESTS)), [], [], [], threading.Event()

    def client() -> None:
        while True:
            with lock:
                if not left:
                    return
                i = left.pop()
            for attempt in range(2):
                try:
                    ask(url, f"Question {i}: what is {i} and {i}?", f"load-{i}")
                except httpx.HTTPError as error:
                    again.append(i)
                    print(f"request {i}, attempt {attempt + 1}: {error}", flush=True)
                    time.sleep(RETRY_SECONDS)
                    continue
                answered.append(i)
                if killed.is_set():
                    after.append(i)
                break

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    while len(answered) < BEFORE and any(thread.is_alive() for thread in threads):
        time.sleep(0.01)
    kill()
    killed.set()
    for thread in threads:
        thread.join()
    return len(answered), len(set(again)), len(after)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("sglang-router", "vllm-router", "ray"))
    parser.add_argument("--bin", type=Path, required=True)
    parser.add_argument("--policy", default="cache_aware", help="of a router; round_robin fails (%(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as where:
        logs = Path(where)
        made = on_ray(args.bin, logs) if args.kind == "ray" else behind_router(args.kind, args.bin, logs, args.policy)
        with made as (url, kill):
            share = affinity(url)
            print(f"{args.kind}: {share:.0%} of the tokens of earlier turns were cached", flush=True)
            answered, again, after = load(url, kill)
            print(f"{args.kind}: {answered} of {REQUESTS} answered, {again} sent again, {after} after the kill")
    return int(share < 0.8 or answered < REQUESTS or after < REQUESTS // 4)


if __name__ == "__main__":
    sys.exit(main())
