"""The kernels' target, Hopper (H100, H200): its numbers, and how often each kernel was built into a program.

This is the one place for the hardware's numbers. On any other device the plain jax.numpy form of the same operation
serves; `kernels_here` says why, and the runner logs it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator

import jax
from jax.sharding import AbstractDevice

log = logging.getLogger("jaxspec")

MULTIPROCESSORS = 132  # of an H100 or H200; smaller Hopper cards have 114
SHARED_BYTES = 227 * 1024  # of shared memory, the most that a block can have
WARPS = 4  # of a warpgroup
LANES = 32  # of a warp
THREADS = 128  # of a warpgroup
WGMMA_ROWS = 64  # the M of a warpgroup's matmul
SWIZZLED = 64  # bfloat16 numbers in 128 bytes, the widest swizzle
BULK_COPY = 256  # numbers along one axis that a bulk copy can load

_lowered_for: int | None = None
KERNELS: Counter = Counter()  # by a kernel's own name: how many times a trace has called it
_traced: contextvars.ContextVar[Counter | None] = contextvars.ContextVar("traced", default=None)
_requested: contextvars.ContextVar[str] = contextvars.ContextVar("requested", default="auto")


@contextlib.contextmanager
def counting() -> Iterator[Counter]:
    """Count the kernels of this thread's traces apart as well, so that they can be kept with a program."""
    token = _traced.set(Counter())
    try:
        yield _traced.get()
    finally:
        _traced.reset(token)


def requested_kernels() -> str:
    """Which kernels may run: "auto", "portable" or "plain", as `--kernels` says. A new thread begins with "auto"."""
    return _requested.get()


@contextlib.contextmanager
def use_kernels(kernels: str) -> Iterator[None]:
    """Make `requested_kernels` return this while programs are traced."""
    token = _requested.set(kernels)
    try:
        yield
    finally:
        _requested.reset(token)


def with_requested_kernels(function: Callable) -> Callable:
    """Decorate a function one of whose arguments has a field `kernels`: it runs with these requested."""

    @functools.wraps(function)
    def run(*args, **named):
        options = next(each for each in (*args, *named.values()) if hasattr(each, "kernels"))
        with use_kernels(options.kernels):
            return function(*args, **named)

    return run


def kernels_here() -> str | None:
    """Why this process's default device doesn't run the kernels, or None if it does."""
    return not_hopper() if requested_kernels() == "auto" else f"--kernels {requested_kernels()}"


def kernels_run_here(kernels: str) -> bool:
    """Whether programs with this value of `--kernels` have Hopper's kernels here."""
    with use_kernels(kernels):
        return kernels_here() is None


def not_hopper() -> str | None:
    """Why this process's default device can't run the kernels. None: it can, or the one that it lowers for can."""
    if _lowered_for:
        return None
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"the device is a {device.platform.upper()}"
    capability = str(getattr(device, "compute_capability", "unknown"))
    if not capability.startswith("9."):
        return f"{device.device_kind} has compute capability {capability}, not 9.0 (Hopper)"
    return None


def count(kernel: str) -> None:
    """Note that a program's trace calls a kernel."""
    for counter in (KERNELS, _traced.get()):
        if counter is not None:
            counter[kernel] += 1


def multiprocessors() -> int:
    """Multiprocessors of this process's default device that can run the kernels: 0 if it is no Hopper GPU."""
    return processors() if kernels_here() is None else 0


def processors() -> int:
    """How many this process's default device has, or the one that it lowers for (`lower_for`). Of a CPU, an H100's."""
    return _lowered_for or getattr(jax.devices()[0], "core_count", None) or MULTIPROCESSORS


def too_few_processors(needed: int) -> str | None:
    """Why this device can't run so many blocks at once that wait for one another, or None if it can."""
    return f"{processors()} multiprocessors; {needed} are needed" if processors() < needed else None


def platform() -> str:
    """This process's, "cpu" or "gpu", or that of the device that it lowers for."""
    return "gpu" if _lowered_for else jax.default_backend()


def abstract_device() -> AbstractDevice | None:
    """The GPU that this process lowers for (`lower_for`), as Triton's lowering asks for it; None: its own device."""
    return AbstractDevice("NVIDIA H200", None, "cuda") if _lowered_for else None


def lower_for(multiprocessors: int | None) -> None:
    """Lower for another process's Hopper GPU, which has so many multiprocessors; None: for this process's device."""
    global _lowered_for
    _lowered_for = multiprocessors
