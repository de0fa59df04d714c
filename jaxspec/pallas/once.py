"""Kernels that are lowered once for all programs that call them with the same shapes.

Lowering a Mosaic kernel is Python and takes half a second to two, most of a program's lowering. jax's own caches of it
end with the program. But a ladder has each round three times (greedy, sampled, with logprobs), with the same kernels.
So a kernel is exported by itself, and each call gets its module.

It is also compiled at once, beside the next lowering. A process compiles a kernel once, so programs find it done.
Otherwise each would compile its own one after the other, up to half of the time that XLA takes for it.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax import export

from jaxspec.pallas import hopper, layouts
from jaxspec.progress import took

# Exporting vouches for custom calls that stay the same over versions. This one needn't: it is used by this process.
MOSAIC = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")

_compiling = ThreadPoolExecutor(os.cpu_count(), "kernels")


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
                lowered = known.setdefault((tuple(fixed.items()), tree, shapes), _Lowered())
            return lowered.function(kernel, functools.partial(jitted, interpret=False, **fixed), tree, shapes)(*leaves)

        return call

    return decorate


class _Lowered:
    """A kernel for arguments of certain shapes, once somebody has asked for it. Others wait meanwhile."""

    def __init__(self):
        self._lock = threading.Lock()
        self._function: Callable | None = None

    def function(self, name: str, jitted: Callable, tree: Any, shapes: tuple[jax.ShapeDtypeStruct, ...]) -> Callable:
        """What takes the leaves of the arguments `tree` and gives the result. `name`: the kernel's, for the log."""

        def flat(*leaves):
            args, named = jax.tree.unflatten(tree, leaves)
            return jitted(*args, **named)

        with self._lock:
            if self._function is None:
                layouts.install()
                with took(f"lowered kernel {name}"):
                    exported = export.export(jax.jit(flat), platforms=["cuda"], disabled_checks=[MOSAIC])(*shapes)
                self._function = jax.jit(exported.call)  # jit: a function in a program, however often it is called
                if jax.default_backend() == "gpu":
                    alone = jax.jit(exported.call, donate_argnums=_in_place(shapes, exported.out_avals)).lower(*shapes)
                    _compiling.submit(_compile, name, alone)
            return self._function


def _compile(name: str, lowered: jax.stages.Lowered) -> None:
    """For what it leaves behind: programs tell of any error."""
    with took(f"compiled kernel {name}"):
        lowered.compile()


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
