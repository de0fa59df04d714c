"""Have grammars compiled by another process within limits, and say in words what became of each.

The library can't hand a compiled grammar from one process to another. So the other process proves that a grammar
compiles within its time and memory; then this one compiles it too, off the event loop and without Python's lock.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jaxspec.config.request import Busy, RequestError, StructuredOutput
from jaxspec.structured.compile_server import DONE, STACK_BYTES, STATUS, WALL_SECONDS
from jaxspec.structured.limits import COMPILE_BYTES, COMPILE_SECONDS

AT_ONCE = 2  # grammars that compile
WAIT_SECONDS = 3.0  # for a turn
START_SECONDS = 60.0  # that reading the vocabulary may take
KINDS = {"json": "the JSON schema", "regex": "the regular expression", "choice": "the choices"}
# The package without its `__init__`, which imports jax.
START = """
import sys, types
package = types.ModuleType("jaxspec")
package.__path__ = [sys.argv[1]]
sys.modules["jaxspec"] = package
from jaxspec.structured.compile_server import main
main(int(sys.argv[2]))
"""

_REASONS = tuple(  # messages of the library, and what they say to someone who doesn't know it
    (re.compile(pattern), words)
    for pattern, words in (
        (
            r"patternProperty regexes /(.*)/ and /(.*)/ are not disjoint",
            r"patternProperties \1 and \2 have names in common but different schemas, which can't be enforced; "
            "write patterns that exclude each other",
        ),
        (
            r"lookarounds not supported yet; \w+ in regex /(.*)/",
            r"the pattern \1 has an anchor or a word boundary within, which can't be enforced",
        ),
        (r"Unsatisfiable schema: Regex is empty", "no text follows it"),
        (r"Unsatisfiable schema: (.*)", r"no value follows it: \1"),
    )
)

_stack = threading.Lock()  # its size is every new thread's


class Refused(Exception):
    """A grammar that doesn't compile within its limits; the message says why, without its field."""


@dataclass(frozen=True)
class Proven:
    """Text of a grammar that compiles: in so many seconds of CPU time, to so many bytes."""

    text: str
    seconds: float
    bytes: int


class Compiler:
    """Compiles in another process, which starts with the first grammar. Thread-safe.

    `vocabulary` gives what that process reads: the tokenizer as JSON, size, end tokens, ids of added tokens.
    """

    def __init__(self, vocabulary: Callable[[], tuple[str, int, list[int], dict[str, int]]]):
        self._vocabulary = vocabulary
        self._starting, self._turns = threading.Lock(), threading.BoundedSemaphore(AT_ONCE)
        self._control: socket.socket | None = None
        self._closed = False
        self._end: Callable[[], None] = lambda: None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Within, this caller is one of the few that compile. **Raises:** `Busy`."""
        if not self._turns.acquire(timeout=WAIT_SECONDS):
            raise Busy("the server is compiling other grammars, as many as it can; send the request again later")
        try:
            yield
        finally:
            self._turns.release()

    def prove(self, wanted: StructuredOutput) -> Proven:
        """Have a grammar compiled within its limits.

        **Raises:** `Refused` if it doesn't compile; `Busy` if the process couldn't try.
        """
        answer = self._ask(wanted) or self._ask(wanted)
        done, status = STATUS.unpack(answer[-STATUS.size :].rjust(STATUS.size))
        if done != DONE:
            raise Busy("the process that compiles grammars has ended; send the request again")
        if status == -signal.SIGALRM:
            raise Busy(f"compiling took longer than {WALL_SECONDS} seconds on a busy machine; send the request again")
        if status:
            raise Refused(_ending(status))
        said = json.loads(answer[: -STATUS.size])
        if "costly" in said:
            raise Refused(said["costly"])
        if "error" in said:
            what = said.get("part") or f"{KINDS.get(wanted.kind, 'the grammar')} can't be compiled"
            raise Refused(f"{what}: {reason(said['error'])}")
        return Proven(**said)

    def close(self) -> None:
        """End the process; who waits for it hears `Busy`."""
        self._closed = True
        self._end()

    def _ask(self, wanted: StructuredOutput) -> bytes:
        """The answer of the process, its fork's status at the end; b"" if it isn't there any more."""
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(WALL_SECONDS + COMPILE_SECONDS)
            with theirs:
                control = self._started()
                try:
                    socket.send_fds(control, [b"j"], [theirs.fileno()])
                except OSError:
                    return self._lost(control)
            try:
                ours.sendall(pickle.dumps((wanted, COMPILE_SECONDS, COMPILE_BYTES)))
                ours.shutdown(socket.SHUT_WR)
                return b"".join(iter(lambda: ours.recv(2**16), b"")) or self._lost(control)
            except OSError:  # it answers nothing, not even that the time is over
                return self._lost(control)

    def _lost(self, control: socket.socket) -> bytes:
        with self._starting:
            if control is self._control:
                self._end()
                self._control = None
        return b""

    def _started(self) -> socket.socket:
        """The socket of the process, which is started if it isn't there."""
        with self._starting:
            if self._closed:
                raise Busy("the engine was closed")
            if self._control is None:
                self._control = self._start()
            return self._control

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        package = str(Path(__file__).parents[1])
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, package, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # the library writes there where it fails
                process_group=0,  # which ends with it; a terminal's Ctrl-C isn't for it
            )
        self._end = weakref.finalize(self, _end, process, ours)
        if self._closed:
            self._end()
        ours.settimeout(START_SECONDS)
        try:
            ours.sendall(pickle.dumps(self._vocabulary()))
            said = ours.recv(2**12).decode()
        except OSError as error:
            said = f"{error}"
        if said != "ready":
            self._end()
            if said.startswith("unreadable: "):
                raise unreadable(said.removeprefix("unreadable: "))
            raise Busy(
                f"the process that compiles grammars doesn't start: {said or 'it ended'}; send the request again"
            )
        ours.settimeout(None)
        return ours


def deeply[T](work: Callable[[], T]) -> Future[T]:
    """Call `work` in a thread with a stack as deep as the other process had, and more. No exit waits for it."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # one of those who wait can't cancel it for the others

    def call() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=call, name="jaxspec-grammar", daemon=True)
    with _stack:
        usual = threading.stack_size(STACK_BYTES + 8 * 2**20)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    return result


def _end(process: subprocess.Popen, control: socket.socket) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    control.close()


def _ending(status: int) -> str:
    """Why a grammar's fork ended before it had answered."""
    if status == -signal.SIGXCPU:
        return f"it takes longer than {COMPILE_SECONDS} seconds to compile"
    if status in (-signal.SIGABRT, -signal.SIGKILL, 1):
        return f"it takes more than {COMPILE_BYTES >> 20} MiB to compile"
    return "its rules are nested too deep to compile"


def unreadable(text: str) -> Refused:
    return Refused(f"the grammar library can't read this model's tokenizer: {reason(text)}")


@contextmanager
def refusals(wanted: StructuredOutput) -> Iterator[None]:
    """Within, a refusal becomes a `RequestError` that names the field, as this request wrote it."""
    try:
        yield
    except Refused as error:
        raise RequestError(f"{wanted.field}: {error}", wanted.field) from error


def reason(text: str) -> str:
    """The library's message as one line: its first one, and what a regular expression's parser says at the end."""
    for pattern, words in _REASONS:
        if found := pattern.search(text):
            return found.expand(words)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("<")]
    reasons = [line[:200] for line in (*lines[:1], *lines[1:]) if line is lines[0] or line.startswith("error:")]
    return " ".join(reasons[:2]) or "the grammar library gives no reason"
