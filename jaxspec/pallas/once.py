"""Kernels that are lowered once for all programs that call them with the same shapes.

Lowering a Mosaic kernel is Python and takes half a second to two, most of a program's lowering. jax's own caches of it
end with the program. But a ladder has each round three times (greedy, sampled, with logprobs), with the same kernels.
So a kernel is exported by itself, and each call gets its module.

It is also compiled at once, beside the next lowering. A process compiles a kernel once, so programs find it done.
Otherwise each would compile its own one after the other, up to half of the time that XLA takes for it. A process that
lowers for another hands its kernels over in place of that (`handing_over`).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
from jax import export

from jaxspec.compiling import cores, not_in_jax_cache
from jaxspec.pallas import hopper, layouts, modules
from jaxspec.progress import took

# Exporting vouches for custom calls that stay the same over versions. This one needn't: it is used by this start.
MOSAIC = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")

TOGETHER = 4  # kernels of a program that compiles them for others
_compiling = ThreadPoolExecutor(cores(), "kernels")
_begun: dict[str, Future | None] = {}  # kernels that compile or did, by their calls
_guard = threading.Lock()
_handed: contextvars.ContextVar[list[Kernel] | None] = contextvars.ContextVar("handed", default=None)


class Kernel(NamedTuple):
    """One that is lowered."""

    name: str
    call: str  # that it is for; modules of equal calls differ in the lines that they come from alone
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
        modules.install()
        exported = export.export(jax.jit(flat), platforms=["cuda"], disabled_checks=[MOSAIC])(*self.shapes)
        return exported, trees[0]


class _Lowered:
    """A kernel for arguments of certain shapes, once somebody has asked for it. Others wait meanwhile."""

    def __init__(self):
        self._lock = threading.Lock()
        self._function: Callable | None = None

    def function(self, name: str, call: Call) -> Callable:
        """What takes the leaves of the call's arguments and gives its result. `name`: the kernel's, for the log."""
        if self._function is None:
            with self._lock:
                if self._function is None:
                    self._function = self._lowered(name, call)
        return self._function

    def _lowered(self, name: str, call: Call) -> Callable:
        with took(f"lowered kernel {name}"):
            exported, tree = call.lower()
        if hopper.platform() == "gpu":
            told = str((call.function.__qualname__, *call[1:]))
            if (handed := _handed.get()) is None:
                compile_beside([Kernel(name, told, exported)])
            else:
                handed.append(Kernel(name, told, bytes(exported.serialize())))
        run = jax.jit(exported.call)  # jit: a function in a program, however often it is called
        return lambda *leaves: jax.tree.unflatten(tree, run(*leaves))


def compile_beside(kernels: Sequence[Kernel]) -> None:
    """Compile kernels in threads of their own, but for those that were begun.

    Several are one program: XLA's part of it and each kernel shut one another out, as long as others compile, and so
    there are few of XLA's.
    """
    with _guard:
        new = [kernel for kernel in kernels if kernel.call not in _begun]
        _begun.update((kernel.call, None) for kernel in new)
    for i in range(0, len(new), TOGETHER):
        some = new[i : i + TOGETHER]
        done = _compiling.submit(_compile, ", ".join(kernel.name for kernel in some), _calling([*map(_read, some)]))
        _begun.update((kernel.call, done) for kernel in some)


def _read(kernel: Kernel) -> export.Exported:
    exported = kernel.exported
    return export.deserialize(bytearray(exported)) if isinstance(exported, bytes) else exported


def _calling(kernels: Sequence[export.Exported]) -> jax.stages.Lowered:
    """A program that calls all of them. They share arguments of equal shapes, and what one writes in place goes on to
    the next: with a cache for each, XLA would warn on every start that what goes in is larger than the device."""
    shapes: list[jax.ShapeDtypeStruct] = []
    places = []  # of each kernel's arguments
    for kernel in kernels:
        places.append(own := [])
        for x in kernel.in_avals:
            equal = (i for i, y in enumerate(shapes) if i not in own and (x.shape, x.dtype) == (y.shape, y.dtype))
            if (place := next(equal, None)) is None:
                place = len(shapes)
                shapes.append(jax.ShapeDtypeStruct(x.shape, x.dtype))
            own.append(place)
    written = [
        {result: own[argument] for result, argument in _in_place(kernel.in_avals, kernel.out_avals).items()}
        for kernel, own in zip(kernels, places, strict=True)
    ]
    last = sorted({place for each in written for place in each.values()})

    def call(*given):
        given, made = list(given), []
        for kernel, own, places_of in zip(kernels, places, written, strict=True):
            for i, result in enumerate(kernel.call(*(given[place] for place in own))):
                if i in places_of:
                    given[places_of[i]] = result
                else:
                    made.append(result)
        return [given[place] for place in last], made

    return jax.jit(call, donate_argnums=last).lower(*shapes)


def wait_for_compiled() -> None:
    """Wait until no kernel compiles that was begun before."""
    with _guard:
        begun = set(_begun.values()) - {None}
    wait(begun)


def _compile(name: str, program: jax.stages.Lowered) -> None:
    """For what it leaves behind: programs tell of any error."""
    with took(f"compiled kernel {name}"), not_in_jax_cache():
        program.compile()


def _in_place(given: Sequence[Any], made: Sequence[Any]) -> dict[int, int]:
    """Which results may take the place of which arguments, by their numbers. XLA would count a cache twice."""
    rest = dict(enumerate((x.shape, x.dtype) for x in made))
    places = {}
    for i, x in enumerate(given):
        if (result := next((j for j, told in rest.items() if told == (x.shape, x.dtype)), None)) is not None:
            places[result] = i
            del rest[result]
    return places
