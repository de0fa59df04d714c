"""A uvicorn server in a thread, on a free port of this machine."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import jax
import uvicorn
from fastapi import FastAPI

ENGINE = dict(
    context_length=4096,
    max_running_requests=4,
    max_total_tokens=8192,
    chunked_prefill_size=64,
    prefill_sizes="64",
    page_size=8,
    skip_warmup=True,
    few_programs=True,
)


def as_here() -> dict[str, str]:
    """The environment of a process that compiles as this one does, and reads what this one has compiled."""
    options = "compilation_cache_dir", "persistent_cache_min_compile_time_secs", "default_matmul_precision"
    return os.environ | {f"JAX_{name.upper()}": str(getattr(jax.config, f"jax_{name}")) for name in options}


@contextmanager
def serving(app: FastAPI, **options: Any) -> Iterator[str]:
    """Serve `app`; yields its address, "http://127.0.0.1:port"."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1, **options))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@contextmanager
def meanwhile(function: Callable, *each: Any) -> Iterator[list]:
    """Call a function in threads of their own, once for each argument; the results, or errors, are there after the
    block."""
    results: list = [None] * len(each)

    def call(i: int) -> None:
        try:
            results[i] = function(each[i])
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(each))]
    for thread in threads:
        thread.start()
    yield results
    for thread in threads:
        thread.join()


def up(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Return once `condition` holds; fail if it doesn't in time, which is long: on a busy machine programs compile."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
