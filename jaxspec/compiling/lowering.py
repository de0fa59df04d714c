"""Programs lowered by other processes, beside this one.

To trace a program and lower it is Python, half a second or so, and threads of a process take turns at Python. So a
first start has processes that do nothing else, and this one serves meanwhile. They need no GPU. A program comes back as
a module that this process calls in a program of its own, which takes it some hundredths of a second.
`lowering_process` is the other side.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import CancelledError
from multiprocessing.connection import Pipe
from typing import Any, NamedTuple

import jax
from jax import export

from jaxspec.compiling.ladder import One
from jaxspec.pallas import hopper
from jaxspec.pallas.hopper import export as once
from jaxspec.pallas.hopper.export import cores

log = logging.getLogger("jaxspec")

MOST = 10  # processes, each of some 400 MB
CORES = 3  # processors for each of them
PATIENCE = 60  # seconds in which one of them should come up
# jax's options that decide what a program is lowered to, and that code may have set. Processes inherit the environment.
OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)

ASKS, UP = "asks", "up"  # what a process says before it answers


class Given(NamedTuple):
    """Inputs that programs are made of: arguments of `Programs`, arrays by shape, and this process's settings."""

    made_of: tuple  # config, drafter, shapes, params, draft_params, None, division
    state: Any
    kernels: str  # as `hopper.requested_kernels` says
    processors: int | None  # of the Hopper GPU that programs are for; None: they are for a CPU
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, made_of: tuple, state: Any, kernels: str, processors: int | None) -> Given:
        options = tuple((name, getattr(jax.config, name)) for name in OPTIONS)
        made_of = jax.tree.map(shape_of, made_of)
        return cls(made_of, jax.tree.map(shape_of, state), kernels, processors, options)

    def packed(self) -> bytes | None:
        """For another process; None if a part can't go there, as a class of a function's can't."""
        try:
            data = pickle.dumps(self)
            if b"__main__" in data:
                raise pickle.PicklingError("a class is the script's, which another process doesn't run")
            return data
        except Exception as error:
            log.debug("programs are lowered by this process alone: %s", error)
            return None


def shape_of(x: Any, sharded: bool = False) -> Any:
    """An array's shape, and where its parts are if it is `sharded`; what is none is left as it is."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if sharded else None)


class Module(NamedTuple):
    """A program that was lowered elsewhere."""

    exported: bytes  # takes and gives leaves
    result: Any  # numbers in place of the result's leaves
    handed: tuple  # shapes of the arguments behind the packed array
    kernels: Counter
    alone: list[once.Kernel]  # kernels that were lowered for it first
    warnings: list[str]

    @classmethod
    def of(cls, jitted: Callable, arguments: tuple, handed: Callable[[], tuple], platform: str) -> Module:
        """Export a jitted function. `handed` gives the last of its arguments, and may trace what has kernels."""
        trees = []

        def flat(*leaves):
            results, tree = jax.tree.flatten(jitted(*jax.tree.unflatten(given, leaves)))
            trees.append(tree)
            return results

        flat.__name__ = getattr(jitted, "__name__", "program")
        with hopper.counting() as kernels, once.handing_over() as alone, _warnings() as warnings:
            handed = handed()
            leaves, given = jax.tree.flatten((*arguments, *handed))
            exported = export.export(jax.jit(flat), platforms=[platform], disabled_checks=[once.MOSAIC, once.TRITON])(
                *leaves
            )
        result = jax.tree.unflatten(trees[0], range(trees[0].num_leaves))
        shapes = jax.tree.map(shape_of, handed)
        return cls(bytes(exported.serialize()), result, shapes, kernels, alone, warnings)

    def lower(self, arguments: tuple, donated: int) -> tuple[jax.stages.Lowered, Counter]:
        """Lower as the function itself would be; its kernels begin to compile. `arguments`: all but those handed."""
        for warning in self.warnings:
            _warn(warning)
        for kernel in self.alone:
            once.compile_beside(kernel)
        hopper.KERNELS.update(self.kernels)
        exported = export.deserialize(bytearray(self.exported))
        tree = jax.tree.structure(self.result)

        def program(*given):
            return jax.tree.unflatten(tree, exported.call(*jax.tree.leaves(given)))

        program.__name__ = exported.fun_name
        return jax.jit(program, donate_argnums=donated).lower(*arguments, *self.handed), self.kernels


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect what is logged, for the log of another process."""
    handler, messages = logging.Handler(logging.WARNING), []
    handler.emit = lambda record: messages.append(record.getMessage())
    log.addHandler(handler)
    try:
        yield messages
    finally:
        log.removeHandler(handler)


@functools.cache
def _warn(message: str) -> None:
    """Once, whichever processes say so."""
    log.warning("%s", message)


class Order:
    """Programs that are to be lowered, in order, but for this: a process takes those first that share kernels with what
    it has lowered, then what shares none with others', since each process lowers a kernel for itself."""

    def __init__(self, programs: Sequence[One]):
        self._left, self._guard = list(programs), threading.Lock()
        self._groups: dict[Any, Any] = {}  # by group of kernels, who has lowered some

    def take(self, process: Any) -> One | None:
        """None if nothing is left."""
        with self._guard:
            owner = lambda one: self._groups.get(_group(one))  # noqa: E731
            mine = (one for one in self._left if process is not None and owner(one) is process)
            free = (one for one in self._left if owner(one) is None)
            one = next(mine, None) or next(free, None) or next(iter(self._left), None)
            if one is not None:
                self._left.remove(one)
                if process is not None:
                    self._groups.setdefault(_group(one), process)
            return one

    def keep(self, programs: Set[One]) -> None:
        """Leave out the others."""
        with self._guard:
            self._left = [one for one in self._left if one in programs]


def _group(one: One) -> tuple[bool, int]:
    """Programs of prompts and those of so many requests have kernels of the same shapes."""
    kind, size = one
    return kind in ("prefill", "score"), size


class Processes:
    """`count` processes that lower `programs`, the first of them first, from when they come up until all are lowered.
    They don't wait for anybody to take one."""

    def __init__(self, count: int, given: bytes, programs: Sequence[One]):
        self._rank, self._order = {one: i for i, one in enumerate(programs)}, Order(programs)
        self._wanted: Set[One] = self._rank.keys()
        self._lowered: dict[One, Module | None] = {}  # that nobody has taken
        self._changed = threading.Condition()
        self._late = time.monotonic() + PATIENCE
        self._warned = self._stopped = False
        self.all = tuple(Process(given) for _ in range(count))
        self._threads = [threading.Thread(target=self._serve, args=[one], daemon=True) for one in self.all]
        for thread in self._threads:
            thread.start()

    @classmethod
    def begin(cls, made_of: tuple, state: Any, kernels: str, programs: Sequence[One]) -> Processes | None:
        """For programs of these, as in `Given`; None where this process lowers alone: it has few processors, or runs
        other kernels than Hopper's."""
        count = min(MOST, cores() // CORES) if hopper.kernels_run_here(kernels) else 0
        given = Given.of(made_of, state, kernels, hopper.processors()).packed() if count else None
        return None if given is None else cls(count, given, programs)

    def keep(self, programs: Set[One]) -> None:
        """Lower no others."""
        self._order.keep(programs)
        with self._changed:
            self._wanted = programs
            self._lowered = {one: module for one, module in self._lowered.items() if one in programs}

    def take(self, go_on: Callable[[], None] = lambda: None) -> tuple[One, Module | None]:
        """A program, once it is lowered; of those that are, the first in order. No module if it is to be lowered here:
        its process couldn't, or all have died, or none comes up. `go_on` raises what ends the wait.

        **Raises:** `CancelledError` if they were stopped.
        """
        with self._changed:
            while True:
                go_on()
                if self._stopped:
                    raise CancelledError
                if self._lowered:
                    one = min(self._lowered, key=self._rank.__getitem__)
                    return one, self._lowered.pop(one)
                if (reason := self._idle()) and (one := self._order.take(None)) is not None:
                    self._warn(reason)
                    return one, None
                self._changed.wait(0.1)  # one may come up, or die

    def _idle(self) -> str | None:
        """Why nothing comes of them, if nothing does."""
        if not any(thread.is_alive() for thread in self._threads):
            return self.all[0].died
        late = time.monotonic() > self._late and not any(process.up for process in self.all)
        return f"none came up in {PATIENCE} s" if late else None

    def _warn(self, reason: str) -> None:
        if not self._warned:
            log.warning("programs are lowered here, more slowly, without other processes: %s", reason)
        self._warned = True

    def _serve(self, process: Process) -> None:
        """Have one process lower what is left, in a thread of its own."""
        try:
            process.come_up()
            while process.alive and (one := self._order.take(process)) is not None:
                module = None
                try:
                    module = process.lower(one)
                finally:  # whatever went wrong, somebody waits for it
                    with self._changed:
                        if one in self._wanted:
                            self._lowered[one] = module
                        self._changed.notify_all()
        except CancelledError:
            pass
        finally:
            process.stop()

    def stop(self) -> None:
        self._stopped = True
        for process in self.all:
            process.stop()


class Process:
    """One of them, as seen from here. It ends with this process, which holds the pipe's other end."""

    def __init__(self, given: bytes):
        self._given = given
        self._pipe, theirs = Pipe()
        environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [
            sys.executable,
            "-c",
            # Without garbage collection (`no_garbage_collection`): it doesn't live long.
            "import gc; gc.disable(); from jaxspec.compiling.lowering_process import answer; "
            f"answer({theirs.fileno()})",
        ]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=os.environ | environment)
        theirs.close()
        self.alive, self.up, self._stopped = True, False, False
        self.died = "it died"  # or why it couldn't begin

    def come_up(self) -> None:
        """Wait until it takes programs, or has died. It asks for what they are made of once it is there, and says when
        it has that."""
        while self.alive and not self.up:
            answer = self._receive()
            if answer == ASKS:
                self._send(self._given)
            elif answer == UP:
                self.up = True
            elif self.alive:
                self.alive, self.died = False, answer

    def lower(self, one: One) -> Module | None:
        """None if it couldn't, about which a warning tells: whoever tries again here learns why.

        **Raises:** `CancelledError` if it was stopped.
        """
        self._send(pickle.dumps(one))
        answer = self._receive() if self.alive else None
        if isinstance(answer, Module):
            return answer
        if self._stopped:
            raise CancelledError
        log.warning("%s %d is lowered here, more slowly: another process couldn't: %s", *one, answer or self.died)
        return None

    def _send(self, data: bytes) -> None:
        try:
            self._pipe.send_bytes(data)
        except OSError:
            self.alive = False

    def _receive(self) -> Any:
        try:
            return pickle.loads(self._pipe.recv_bytes())
        except (OSError, EOFError):
            self.alive = False
            return None

    def stop(self) -> None:
        self.alive, self._stopped = False, True
        self._process.kill()
        self._process.wait()
