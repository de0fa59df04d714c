"""Kernels that are lowered once for all programs that call them with the same shapes.

Lowering a Mosaic kernel is Python and takes half a second to two, most of a program's lowering. jax's own caches of it
end with the program. But a ladder has each round three times (greedy, sampled, with logprobs), with the same kernels.
So a kernel is exported by itself, and each call gets its module. Other processes may do that (`lowering.py`).

It is also compiled at once, beside the next lowering. A process compiles a kernel once, so programs find it done.
Otherwise each would compile its own one after the other, up to half of the time that XLA takes for it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jaxspec.compiling import cores
from jaxspec.pallas import hopper
from jaxspec.pallas.lowering import Call, lowered, waiting
from jaxspec.progress import took

_compiling = ThreadPoolExecutor(cores(), "kernels")


def lower_once(kernel: str, *static: str) -> Callable[[Callable], Callable]:
    """Decorate a function that calls a kernel, as `jax.jit` does; `static` names those arguments, given by keyword.

    Each call in a trace counts as one of `kernel` (`hopper.KERNELS`). With `interpret`, a keyword argument that all of
    them take, it is `jax.jit`.
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


class _Lowered:
    """A kernel for arguments of certain shapes, once somebody has asked for it. Others wait meanwhile."""

    def __init__(self):
        self._lock = threading.Lock()
        self._function: Callable | None = None

    def function(self, name: str, call: Call) -> Callable:
        """What takes the leaves of the call's arguments and gives its result. `name`: the kernel's, for the log."""
        if self._function is None:
            with waiting(), self._lock:
                if self._function is None:
                    self._function = self._lowered(name, call)
        return self._function

    def _lowered(self, name: str, call: Call) -> Callable:
        with took(f"lowered kernel {name}"):
            exported, tree = lowered(call)
        run = jax.jit(exported.call)  # jit: a function in a program, however often it is called
        if jax.default_backend() == "gpu":
            donated = _in_place(call.shapes, exported.out_avals)
            alone = jax.jit(exported.call, donate_argnums=donated).lower(*call.shapes)
            _compiling.submit(_compile, name, alone)
        return lambda *leaves: jax.tree.unflatten(tree, run(*leaves))


def _compile(name: str, program: jax.stages.Lowered) -> None:
    """For what it leaves behind: programs tell of any error."""
    with took(f"compiled kernel {name}"):
        program.compile()


def _in_place(given: Sequence[jax.ShapeDtypeStruct], made: Sequence[jax.ShapeDtypeStruct]) -> list[int]:
    """Which arguments a result may take the place of. XLA would count a cache twice, and say on every start that what
    goes in and comes out is larger than the device."""
    rest = [(x.shape, x.dtype) for x in made]
    places = []
    for i, x in enumerate(given):
        if (x.shape, x.dtype) in rest:
            rest.remove((x.shape, x.dtype))
            places.append(i)
    return places
