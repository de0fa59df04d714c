"""What the kernels are built for, and how often each was built into a program.

The kernels are written for Hopper (H100, H200). On any other device the plain jax.numpy path of the same operation
serves; `kernels_here` says so in words, and the runner logs them.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
from collections import Counter
from collections.abc import Iterator

import jax

log = logging.getLogger("jaxspec")

KERNELS: Counter = Counter()  # by operation: how many times a program's trace chose its kernel
_traced: contextvars.ContextVar[Counter | None] = contextvars.ContextVar("traced", default=None)


@contextlib.contextmanager
def counting() -> Iterator[Counter]:
    """Counts the choices of this thread's traces apart as well, so that they can be kept with a program."""
    token = _traced.set(Counter())
    try:
        yield _traced.get()
    finally:
        _traced.reset(token)


def kernels_here() -> str | None:
    """Why this process's default device can't run the kernels, or None if it can."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"the device is a {device.platform.upper()}"
    capability = str(getattr(device, "compute_capability", "unknown"))
    if not capability.startswith("9."):
        return f"{device.device_kind} has compute capability {capability}, not 9.0 (Hopper)"
    return None


def chosen(operation: str, reason: str | None, processors: int = 1) -> bool:
    """Whether to use the kernel of `operation`, given `reason` why its shapes can't (None: they can). Counts it.

    `processors` is how many multiprocessors it needs: smaller Hopper cards have 114 instead of 132.
    """
    if reason is not None or kernels_here() is not None:
        return False
    if (getattr(jax.devices()[0], "core_count", None) or processors) < processors:
        return False
    for counter in (KERNELS, _traced.get()):
        if counter is not None:
            counter[operation] += 1
    return True


@functools.cache
def tell(operation: str, reason: str) -> None:
    """Log, once, that a device with kernels runs the slow plain path of an operation, and why."""
    if kernels_here() is None:
        log.warning("%s runs in plain jax.numpy, which is slow: %s", operation, reason)
