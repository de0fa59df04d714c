"""Kernels for any NVIDIA GPU of compute capability 8.0 or later: Pallas through Triton.

Each has the semantics and the reference of an operation whose Hopper kernel is beside this folder. They serve on GPUs
that aren't Hopper, and on any with `--kernels portable`. XLA does the rest there: products with weights, norms,
rotations, writes to pages.

jax 0.11 warns that its Triton backend is to go. Where it is gone, `missing` says so, and the plain path serves.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import types
import warnings
from collections.abc import Iterator
from unittest import mock

import jax
from jax.experimental import pallas as pl

from jaxspec.pallas import hopper

_interpreted: contextvars.ContextVar[bool] = contextvars.ContextVar("interpreted", default=False)
LEAST = 8.0  # compute capability: asynchronous copies and bfloat16 on the tensor cores


def triton() -> types.ModuleType:
    """jax's Triton primitives. A later jax may lack them, so no module imports them at its start."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas import triton
    return triton


@functools.cache
def missing() -> str | None:
    """Why this jax can't compile the kernels, or None if it can."""
    try:
        triton()
    except ImportError:
        return f"jax {jax.__version__} has no Triton backend"
    return None


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Serve these kernels on any device, in Pallas' interpreter. It is slow, and meant to compare small arrays."""
    token, launch = _interpreted.set(True), pl.pallas_call
    run = lambda *args, **how: launch(*args, **how | {"interpret": True})  # noqa: E731
    try:
        with mock.patch.object(pl, "pallas_call", run), hopper.use_kernels("portable"):
            yield
    finally:
        _interpreted.reset(token)


def kernels_here() -> str | None:
    """Why this process's default device doesn't run these kernels, or None if it does."""
    if (requested := hopper.requested_kernels()) == "plain":
        return "--kernels plain"
    if _interpreted.get():
        return missing()
    if requested == "auto" and hopper.not_hopper() is None:
        return "Hopper's kernels serve"
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"the device is a {device.platform.upper()}"
    if capability() < LEAST:
        version = getattr(device, "compute_capability", "unknown")
        return f"{device.device_kind} has compute capability {version}; {LEAST} and later are supported"
    return missing()


def capability() -> float:
    """The compute capability of this process's default device, or the one that it lowers for; 0 where it has none."""
    if hopper.abstract_device() is not None:
        return 9.0
    try:
        return float(jax.devices()[0].compute_capability)
    except (AttributeError, ValueError):
        return 0.0


def operands_stay() -> bool:
    """Whether tensor cores read operands from shared memory: on Hopper, and on Blackwell but for desktops' cards."""
    return 9 <= capability() < 12


def kernel_choice() -> str:
    """Which kernels this process's programs have, and why no faster ones, for the log."""
    if (hopper_lacks := hopper.kernels_here()) is None:
        return "hopper"
    if (lacks := kernels_here()) is None:
        return f"portable ({hopper_lacks})"
    return f"none, so attention and matmuls run in plain jax.numpy ({lacks})"


def parts_of(steps: int, tiles: int) -> int:
    """In how many parts to divide a product's steps, so that two programs run on each multiprocessor."""
    most = max(2 * multiprocessors() // tiles, 1)
    return max(each for each in range(1, steps + 1) if steps % each == 0 and each <= most)


def multiprocessors() -> int:
    """Count them on this process's default device, or the one that it lowers for; of a CPU, an H200's."""
    return hopper.processors()
