"""Kernels that are lowered once for all programs that call them with the same shapes.

Lowering a Mosaic kernel is Python and takes half a second to two, most of a program's lowering. jax's own caches of it
end with the program. But a ladder has each round three times (greedy, sampled, with logprobs), with the same kernels.
So a kernel is exported by itself, and each call gets its module.

It is also compiled at once, beside the next lowering. A process compiles a kernel once, so programs find it done.
Otherwise each program would compile its kernels one after the other, up to half of the time that XLA takes for it. A
process that lowers for another hands its kernels over instead (`handing_over`).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from jax import export
from jax._src.config import persistent_cache_min_compile_time_secs  # jax's public option is the whole process's

from jaxspec.config.progress import took
from jaxspec.pallas import hopper
from jaxspec.pallas.hopper import jax_patches

# Exporting checks for custom calls that stay the same over versions. This one needn't: only this start uses it.
MOSAIC = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
TRITON = export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")


def cores() -> int:
    """How many processors this process may use: fewer than there are in a container that has some to itself."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def not_in_jax_cache() -> contextlib.AbstractContextManager:
    """Have this thread read jax's own cache and write nothing to it. Serialising a program stops all of Python, and jax
    would do it a second time, in the midst of lowering."""
    return persistent_cache_min_compile_time_secs(float("inf"))


_compiling = ThreadPoolExecutor(cores(), "kernels")
_begun: set[str] = set()  # calls of kernels
_guard = threading.Lock()
_handed: contextvars.ContextVar[list[Kernel] | None] = contextvars.ContextVar("handed", default=None)


class Kernel(NamedTuple):
    """A lowered kernel."""

    name: str
    call: str  # the call that it is for; modules of equal calls differ in source lines alone
    exported: export.Exported | bytes  # bytes: by another process


@contextlib.contextmanager
def handing_over() -> Iterator[list[Kernel]]:
    """Collect the kernels that this thread's traces lower, for another process to compile."""
    token = _handed.set([])
    try:
        yield _handed.get()
    finally:
        _handed.reset(token)


def lower_once(kernel: str, *static: str) -> Callable[[Callable], Callable]:
    """Decorate a function that calls a kernel, as `jax.jit` does; `static` names those arguments, given by keyword.

    Each call in a trace counts as one of `kernel` (`hopper.KERNELS`). With `interpret`, a keyword argument of all such
    functions, it is `jax.jit`.
    """

    def decorate(function: Callable) -> Callable:
        jitted = jax.jit(function, static_argnames=("interpret", *static))
        known: dict[Any, _Lowered] = {}
        guard = threading.Lock()

        @functools.wraps(function)
        def call(*args, interpret: Any = False, **named):
            hopper.count(kernel)
            if interpret:
                return jitted(*args, interpret=interpret, **named)
            fixed = {name: named.pop(name) for name in static if name in named}
            leaves, tree = jax.tree.flatten((args, named))
            shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in map(jax.typeof, leaves))
            with guard:
                one = known.setdefault((tuple(fixed.items()), tree, shapes), _Lowered())
            return one.function(kernel, Call(call, fixed, tree, shapes))(*leaves)

        call.jitted = jitted
        return call

    return decorate


class Call(NamedTuple):
    """A kernel's call: the function, decorated with `lower_once`, its static arguments, and the others by shape."""

    function: Callable
    static: dict[str, Any]
    tree: Any
    shapes: tuple[jax.ShapeDtypeStruct, ...]

    def run(self, *leaves: Any) -> Any:
        """Call the function with arguments that have these leaves."""
        args, named = jax.tree.unflatten(self.tree, leaves)
        return self.function.jitted(*args, **named, **self.static, interpret=False)

    def lower(self) -> tuple[export.Exported, Any]:
        """Export a function from the arguments' leaves to the result's leaves; also returns the result's tree."""
        trees = []

        def flat(*leaves):
            results, tree = jax.tree.flatten(self.run(*leaves))
            trees.append(tree)
            return results

        jax_patches.install()
        exported = export.export(jax.jit(flat), platforms=["cuda"], disabled_checks=[MOSAIC])(*self.shapes)
        return exported, trees[0]


class _Lowered:
    """A kernel for arguments of certain shapes, lowered at its first use. Other threads wait meanwhile."""

    def __init__(self):
        self._lock = threading.Lock()
        self._function: Callable | None = None

    def function(self, name: str, call: Call) -> Callable:
        """The lowered kernel, from the leaves of the call's arguments to its result. `name`: for the log."""
        if self._function is None:
            with self._lock:
                if self._function is None:
                    self._function = self._lowered(name, call)
        return self._function

    def _lowered(self, name: str, call: Call) -> Callable:
        with took(f"lowered kernel {name}"):
            exported, tree = call.lower()
        if hopper.platform() == "gpu":
            call_text = str((call.function.__qualname__, *call[1:]))
            if (handed := _handed.get()) is None:
                compile_beside(Kernel(name, call_text, exported))
            else:
                handed.append(Kernel(name, call_text, bytes(exported.serialize())))
        run = jax.jit(exported.call)  # jit: a function in a program, however often it is called
        return lambda *leaves: jax.tree.unflatten(tree, run(*leaves))


def compile_beside(kernel: Kernel) -> None:
    """Compile a kernel in a thread of its own, unless one for such a call was."""
    with _guard:
        if kernel.call in _begun:
            return
        _begun.add(kernel.call)
    exported = kernel.exported
    if isinstance(exported, bytes):
        exported = export.deserialize(bytearray(exported))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in exported.in_avals]
    donated = _in_place(shapes, exported.out_avals)
    alone = jax.jit(exported.call, donate_argnums=donated).lower(*shapes)
    _compiling.submit(_compile, kernel.name, alone)


def _compile(name: str, program: jax.stages.Lowered) -> None:
    """Compile a kernel for this process's programs, which report any error. What XLA adds to it isn't timed: it is for
    nobody, and devices that wait for one another would wait for that."""
    with took(f"compiled kernel {name}"), not_in_jax_cache():
        program.compile({"xla_gpu_autotune_level": 0})


def _in_place(given: Sequence[jax.ShapeDtypeStruct], results: Sequence[jax.ShapeDtypeStruct]) -> list[int]:
    """The indices of arguments that a result may overwrite. Otherwise XLA would count a cache twice, and warn on every
    start that arguments and results are larger than the device."""
    rest = [(x.shape, x.dtype) for x in results]
    aliased = []
    for i, x in enumerate(given):
        if (x.shape, x.dtype) in rest:
            rest.remove((x.shape, x.dtype))
            aliased.append(i)
    return aliased
