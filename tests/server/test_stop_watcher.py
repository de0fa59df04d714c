"""Signals to a process in which a thread holds the interpreter's lock, and its end."""

import json
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.server.live import wait_for

PROCESS = """
import ctypes, signal, sys, threading
from server.stop_watcher import StopWatcher

seconds, holds, log_format = sys.argv[1:]
watcher = StopWatcher()

def handler(*_):
    watcher.heard()
    print("heard", flush=True)

for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, handler)
watcher.start(float(seconds), log_format)
print("ready", flush=True)
thread = threading.Thread(target=ctypes.PyDLL(None).usleep, args=(int(float(holds) * 1e6),))
thread.start()  # unlike CDLL, it keeps the interpreter's lock
thread.join()
print("free", flush=True)
sys.stdin.read()
watcher.stop()
"""


@contextmanager
def process(seconds, holds=0.0, log_format="text"):
    command = [sys.executable, "-c", PROCESS, str(seconds), str(holds), log_format]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as running:
        try:
            assert running.stdout.readline() == "ready\n"
            time.sleep(0.3)
            yield running
        finally:
            running.kill()


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_process_that_cannot_hear_says_so_and_ends(log_format):
    with process(1.8, 60, log_format) as running:
        running.terminate()
        began = time.monotonic()
        first = running.stderr.readline()
        heard = time.monotonic() - began
        out, rest = running.communicate(timeout=60)
        assert running.returncode == -signal.SIGKILL and out == ""
    assert heard < 60 and "told to stop, but a call into C" in first and "it is killed" in rest
    if log_format == "json":
        assert [json.loads(line)["level"] for line in (first, rest)] == ["CRITICAL"] * 2


def test_a_process_that_hears_late_ends_by_itself():
    with process(30, 2.0) as running:
        running.terminate()
        assert "told to stop, but" in running.stderr.readline()
        assert {running.stdout.readline(), running.stdout.readline()} == {"heard\n", "free\n"}
        assert running.communicate("", timeout=60) == ("", "") and running.returncode == 0


def test_a_process_that_hears_and_one_told_something_else_are_left_alone():
    with process(30) as running:
        running.send_signal(signal.SIGUSR1)
        running.terminate()
        assert [running.stdout.readline() for _ in range(3)] == ["free\n", "heard\n", "heard\n"]
        time.sleep(1.3)
        assert running.communicate("", timeout=60) == ("", "") and running.returncode == 0
    with process(0.1) as running:
        running.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        running.communicate("", timeout=60)
        assert running.returncode == 0


def test_a_process_that_is_killed_leaves_nobody_behind():
    with process(30) as running:
        (child,) = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        running.kill()
        running.wait()
        wait_for(lambda: not runs(child), 30)


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
