"""Kernels lowered by other processes, beside this one.

Lowering a Mosaic kernel is Python, half a second to two, and threads of a process take turns at Python. A first start
has some forty kernels to lower, so for its time it has processes that do nothing else. They need no GPU. A kernel comes
back as its module, the same that this process would have made (tests/test_lowering.py).
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from operator import attrgetter
from typing import Any, NamedTuple

import jax
from jax import export

from jaxspec.pallas import hopper, layouts

log = logging.getLogger("jaxspec")

# Exporting vouches for custom calls that stay the same over versions. This one needn't: it is used by this start.
MOSAIC = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
MOST = 6  # processes, each of some 400 MB
PATIENCE = 0.1  # seconds

_processes: contextvars.ContextVar[Processes | None] = contextvars.ContextVar("processes", default=None)


@contextlib.contextmanager
def lowering_by(processes: Processes | None) -> Iterator[None]:
    """Have these lower the kernels that this thread's traces call, and take turns with other such threads.

    One thread traces at a time, for as long as it needs no kernel: many would go no faster, and leave the rest of the
    process a small share of Python. None: this process lowers alone.
    """
    token = _processes.set(processes)
    try:
        with contextlib.nullcontext() if processes is None else processes.turn.taken():
            yield
    finally:
        _processes.reset(token)


def waiting() -> contextlib.AbstractContextManager:
    """Others may have this thread's turn while it waits for a kernel."""
    processes = _processes.get()
    return contextlib.nullcontext() if processes is None else processes.turn.left()


class Turn:
    """Of the threads that trace. Who left it goes on without it after `PATIENCE` seconds: the one that has it may be
    waiting for a function that this thread is tracing, which jax traces once for all."""

    def __init__(self):
        self._lock, self._mine = threading.Lock(), threading.local()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        self._mine.held = self._lock.acquire()
        try:
            yield
        finally:
            self._release()

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        self._release()
        try:
            yield
        finally:
            self._mine.held = self._lock.acquire(timeout=PATIENCE)

    def _release(self) -> None:
        if self._mine.held:
            self._mine.held = False
            self._lock.release()


def lowered(call: Call) -> tuple[export.Exported, Any]:
    """As `call.lower`, by whichever process has room."""
    processes = _processes.get()
    return call.lower() if processes is None else processes.lower(call)


class Call(NamedTuple):
    """A kernel's call: the function, decorated with `lower_once`, its static arguments, and the others by shape."""

    function: Callable
    static: dict[str, Any]
    tree: Any
    shapes: tuple[jax.ShapeDtypeStruct, ...]

    def run(self, *leaves: Any) -> Any:
        """The function's result, of arguments with these leaves."""
        args, named = jax.tree.unflatten(self.tree, leaves)
        return self.function.jitted(*args, **named, **self.static, interpret=False)

    def lower(self) -> tuple[export.Exported, Any]:
        """What takes the arguments' leaves and gives the result's, and the result's tree."""
        trees = []

        def flat(*leaves):
            made, tree = jax.tree.flatten(self.run(*leaves))
            trees.append(tree)
            return made

        layouts.install()
        with lowering_by(None):  # a kernel inside of it is part of this one's turn
            exported = export.export(jax.jit(flat), platforms=["cuda"], disabled_checks=[MOSAIC])(*self.shapes)
        return exported, trees[0]

    def packed(self) -> bytes | None:
        """For another process; None if it couldn't find the function or take an argument."""
        try:
            name = self.function.__module__, self.function.__qualname__
            return pickle.dumps((name, self.static, self.tree, [(x.shape, x.dtype) for x in self.shapes]))
        except Exception as error:
            log.debug("%s is lowered here: %s", self.function.__qualname__, error)
            return None

    @classmethod
    def unpacked(cls, data: bytes) -> Call:
        (module, name), static, tree, shapes = pickle.loads(data)
        function = attrgetter(name)(importlib.import_module(module))
        return cls(function, static, tree, tuple(jax.ShapeDtypeStruct(*each) for each in shapes))


class Processes:
    """`count` processes that lower kernels. Until the first is up, this process does, one kernel at a time."""

    def __init__(self, count: int):
        self._free: list[_Process] = [_Process() for _ in range(count)]
        self._all = tuple(self._free)
        self._changed = threading.Condition()
        self._here = False  # whether this process lowers a kernel
        self.turn = Turn()

    def lower(self, call: Call) -> tuple[export.Exported, Any]:
        """As `call.lower`, by whichever of them is free first."""
        if (packed := call.packed()) is None:
            return call.lower()
        process = self._take()
        try:
            if process is not None:
                if (made := process.lower(packed)) is not None:
                    return made
                log.warning("%s is lowered here, more slowly: another process couldn't", call.function.__qualname__)
            return call.lower()
        finally:
            self._give(process)

    def stop(self) -> None:
        for process in self._all:
            process.stop()

    def _take(self) -> _Process | None:
        """One that is free, or None for this process, which has more to do than that once others are up."""
        with self._changed:
            while True:
                for process in self._free:
                    if process.is_up():
                        self._free.remove(process)
                        return process
                if not self._here and not any(process.up and process.alive for process in self._all):
                    self._here = True
                    return None
                self._changed.wait(0.1)  # one may come up, or die

    def _give(self, process: _Process | None) -> None:
        with self._changed:
            if process is None:
                self._here = False
            elif process.alive:
                self._free.append(process)
            self._changed.notify_all()


class _Process:
    """One of them, `answer` below, as seen from here. It ends with this process, which holds the pipe's other end."""

    def __init__(self):
        self._pipe, theirs = Pipe()
        told = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        asked = f"answer({theirs.fileno()}, {hopper.processors()})"
        command = [sys.executable, "-c", f"from jaxspec.pallas.lowering import answer; {asked}"]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=os.environ | told)
        theirs.close()
        self.alive, self.up = True, False

    def is_up(self) -> bool:
        """Whether it takes calls. It says so once it does."""
        if not self.up and self.alive and self._pipe.poll():
            self.up = self._receive() is not None
        return self.up and self.alive

    def lower(self, packed: bytes) -> tuple[export.Exported, Any] | None:
        """None if it couldn't: whoever tries again here learns why."""
        try:
            self._pipe.send_bytes(packed)
        except OSError:
            self.alive = False
            return None
        if (answer := self._receive()) is None:
            return None
        module, tree = pickle.loads(answer)
        return export.deserialize(module), tree

    def _receive(self) -> bytes | None:
        try:
            return self._pipe.recv_bytes() or None
        except (OSError, EOFError):
            self.alive = False
            return None

    def stop(self) -> None:
        self.alive = False
        self._process.kill()
        self._process.wait()


def answer(descriptor: int, processors: int) -> None:
    """Lower what is asked for on the pipe, for a device of so many multiprocessors, until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the pipe's end is what counts
    pipe = Connection(descriptor)
    hopper.pretend(processors)
    pipe.send_bytes(b"up")
    while True:
        try:
            data = pipe.recv_bytes()
        except (OSError, EOFError):
            return
        try:
            exported, tree = Call.unpacked(data).lower()
            answer = pickle.dumps((exported.serialize(), tree))
        except Exception:  # whoever asked lowers it, and learns why
            answer = b""
        pipe.send_bytes(answer)
