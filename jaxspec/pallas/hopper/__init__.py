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

log = logging.getLogger("jaxspec")

MULTIPROCESSORS = 132  # of an H100 or H200; smaller Hopper cards have 114
SHARED_BYTES = 227 * 1024  # of shared memory, the most that a block can have
WARPS = 4  # of a warpgroup
LANES = 32  # of a warp
THREADS = 128  # of a warpgroup
WGMMA_ROWS = 64  # the M of a warpgroup's matmul
SWIZZLED = 64  # bfloat16 numbers in 128 bytes, the widest swizzle
BULK_COPY = 256  # numbers along one axis that a bulk copy can bring

_pretended: int | None = None
KERNELS: Counter = Counter()  # by a kernel's own name: how many times a trace has called it
_traced: contextvars.ContextVar[Counter | None] = contextvars.ContextVar("traced", default=None)
_asked: contextvars.ContextVar[str] = contextvars.ContextVar("asked", default="auto")


@contextlib.contextmanager
def counting() -> Iterator[Counter]:
    """Count the kernels of this thread's traces apart as well, so that they can be kept with a program."""
    token = _traced.set(Counter())
    try:
        yield _traced.get()
    finally:
        _traced.reset(token)


def asked() -> str:
    """Which kernels may run: "auto", "portable" or "plain", as `--kernels` says. A new thread begins with "auto"."""
    return _asked.get()


@contextlib.contextmanager
def using(kernels: str) -> Iterator[None]:
    """Let `asked` say this while programs are traced."""
    token = _asked.set(kernels)
    try:
        yield
    finally:
        _asked.reset(token)


def as_asked(function: Callable) -> Callable:
    """Decorate a function of which an argument has `kernels`: it runs under these."""

    @functools.wraps(function)
    def run(*args, **named):
        options = next(each for each in (*args, *named.values()) if hasattr(each, "kernels"))
        with using(options.kernels):
            return function(*args, **named)

    return run


def kernels_here() -> str | None:
    """Why this process's default device doesn't run the kernels, or None if it does."""
    return not_hopper() if asked() == "auto" else f"--kernels {asked()}"


def runs(kernels: str) -> bool:
    """Whether programs with these kernels, a value of `--kernels`, have Hopper's here."""
    with using(kernels):
        return kernels_here() is None


def not_hopper() -> str | None:
    """Why this process's default device can't run the kernels. None: it can, or the one that it lowers for can."""
    if _pretended:
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
    """How many of this process's default device can run the kernels: 0 if it is no Hopper GPU."""
    return processors() if kernels_here() is None else 0


def processors() -> int:
    """How many this process's default device has, or the one that it lowers for (`pretend`). Of a CPU, an H100's."""
    return _pretended or getattr(jax.devices()[0], "core_count", None) or MULTIPROCESSORS


def too_few_processors(needed: int) -> str | None:
    """Why this device can't run so many blocks at once that wait for one another, or None if it can."""
    return f"{processors()} multiprocessors; {needed} are needed" if processors() < needed else None


def platform() -> str:
    """This process's, "cpu" or "gpu", or that of the device that it lowers for."""
    return "gpu" if _pretended else jax.default_backend()


def pretend(count: int | None) -> None:
    """Lower for a Hopper GPU of so many multiprocessors, which another process has; None: for this process's device."""
    global _pretended
    _pretended = count


def chosen(reason: str | None, processors: int = 1) -> bool:
    """Whether a kernel runs, given `reason` why it can't take these shapes (None: it can).

    `processors` is how many multiprocessors it needs.
    """
    return reason is None and multiprocessors() >= processors


@functools.cache
def tell(operation: str, reason: str) -> None:
    """Log, once, that a device with kernels runs the slow plain path of an operation, and why."""
    if kernels_here() is None:
        log.warning("%s runs in plain jax.numpy, which is slow: %s", operation, reason)
