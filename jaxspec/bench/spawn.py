"""`python -m server` as a child process, from its start to its end."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxspec.bench.results import BenchError
from jaxspec.config.options import flag

STDERR = 2
POLL_SECONDS = 0.1
STOP_SECONDS = 20  # from the polite signal to the other one


@contextmanager
def running_server(options: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """A server with these engine options on a free port; yields its address, and seconds until it could serve.

    Its log goes to stderr. **Raises:** `BenchError` if it ends before it can serve.
    """
    port = _free_port()
    command = [sys.executable, "-m", "server", "--host", "127.0.0.1", "--port", str(port), "--wait-for-programs"]
    command += _flags(options)
    command.append("--sampling-defaults=openai")  # a request is the same over HTTP and without
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=STDERR)  # stdout is for figures
    try:
        url = f"http://127.0.0.1:{port}"
        while not _healthy(url):
            if (status := process.poll()) is not None:
                raise BenchError(f"the server ended with status {status} before it was ready; it said why above")
            time.sleep(POLL_SECONDS)
        yield url, time.perf_counter() - started
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _flags(options: Mapping[str, Any]) -> list[str]:
    argv = []
    for name, value in options.items():
        if value is True:
            argv.append(flag(name))
        elif isinstance(value, tuple):
            argv += [flag(name), *map(str, value)] if value else []
        elif value is not None and value is not False:
            argv.append(f"{flag(name)}={value}")
    return argv


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False
