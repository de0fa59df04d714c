"""Makes interpreted kernels cheap: their callbacks get numpy arrays as they are.

A kernel in interpret mode calls Python for every load, store and barrier. jax puts each argument of such a call on a
device, one by one, and its interpreter reads all of them back: four fifths of the time that a kernel took. It looks up
the fields of a buffer's key at each call, too. What is replaced here are private functions of the jax that the lock
names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import jax
import numpy as np
from jax._src import callback as callbacks
from jax._src.pallas.mosaic_gpu.interpret import shared_memory


def install() -> None:
    callbacks.io_callback_impl = _call
    shared_memory._to_int = _number
    shared_memory.HostAllocationRequest.from_array = classmethod(_key)


def _call(*args: np.ndarray, callback: Callable, **_: Any) -> Sequence[Any]:
    return callback(*args)  # jax's caller makes numpy arrays of what this returns


def _key(kind: type, array: np.ndarray) -> Any:
    """Read a `kind` from `array`: one number a field."""
    return kind(**dict(zip(_names(kind), array.tolist(), strict=True)))


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _number(x: Any) -> Any:
    """A part of a place in the grid: a traced one as it is, any other as an int. jax's own refuses numpy's."""
    return x if isinstance(x, jax.core.Tracer) else int(x)
