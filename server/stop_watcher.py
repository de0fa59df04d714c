"""A small process that hears SIGTERM and SIGINT when the server's own threads can't.

Python runs a signal's handler between two instructions of its main thread, so a thread that holds the interpreter's
lock in one long call into C keeps the signal waiting. The part of the handler that is in C runs at once all the same:
it writes the signal's number to a socket (`signal.set_wakeup_fd`), whose other end this process reads.

Invariant: it does nothing unless such a signal came. Then a line is in the log within `HEARD_SECONDS`, the server's own
or this process's, and the server ends within the seconds given, by SIGKILL if it must.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from server import logs

log = logging.getLogger("jaxspec.server")

HEARD_SECONDS = 1.0
LOOK_SECONDS = 10.0  # between two looks at whether the server is still this process's parent
STOPS = {signal.SIGTERM, signal.SIGINT}
HEARD = 0  # in place of a signal's number: Python's handler has run


class StopWatcher:
    """The server's side."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def start(self, seconds: float, log_format: str) -> None:
        """Let this process live `seconds` from the first SIGTERM or SIGINT on. To be called by the main thread."""
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        command = [sys.executable, "-P", "-S", "-m", "server.stop_watcher"]
        given = [str(theirs.fileno()), str(os.getpid()), str(seconds), log_format]
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        with theirs:
            try:
                self._process = subprocess.Popen([*command, *given], pass_fds=[theirs.fileno()], env=env)
            except OSError as error:
                log.warning("no process can be started that hears SIGTERM whatever hangs here: %s", error)
                self._socket.close()
                self._socket = None
                return
        signal.set_wakeup_fd(self._socket.fileno(), warn_on_full_buffer=False)

    def heard(self) -> None:
        """Say that a handler of this process has run."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.send(bytes([HEARD]))

    def stop(self) -> None:
        """Do without it from now on."""
        if self._socket is not None:
            signal.set_wakeup_fd(-1)
            self._socket.close()
            self._process.wait()
            self._socket = None


def watch(end: socket.socket, server: int, seconds: float) -> None:
    """Wait for a signal to the process `server`, then for its end."""
    began, heard, told = None, False, False
    while os.getppid() == server:
        passed = 0.0 if began is None else time.monotonic() - began
        if began is not None and not (heard or told) and passed >= HEARD_SECONDS:
            told = True
            log.critical("told to stop, but a call into C keeps Python from hearing it; it has %g seconds", seconds)
        if passed >= seconds:
            log.critical("told to stop %g seconds ago, the server still runs: it is killed", seconds)
            os.kill(server, signal.SIGKILL)
            return
        wait = LOOK_SECONDS if began is None else min(LOOK_SECONDS, seconds - passed)
        if began is not None and not (heard or told):
            wait = min(wait, HEARD_SECONDS - passed)
        if not select.select([end], [], [], max(wait, 0.0))[0]:
            continue
        got = end.recv(64)
        if not got:
            return
        heard |= HEARD in got
        if began is None and STOPS & {*got}:
            began = time.monotonic()


def main() -> None:
    for number in STOPS:  # they are sent to all processes of a terminal or a service
        signal.signal(number, signal.SIG_IGN)
    end, server, seconds, log_format = sys.argv[1:]
    logs.set_up("info", log_format)
    watch(socket.socket(fileno=int(end)), int(server), float(seconds))


if __name__ == "__main__":
    main()
