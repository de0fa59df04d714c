"""A case of `bench kernels`, and the sizes that all cases share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxspec.models import fp8
from jaxspec.models.weights import Fp8, Unquantised

PAGE = 64  # tokens, as on a GPU
BLOCK = 64  # prompt tokens per row of a prefill
EXACT, BLOCKS = Unquantised(), Fp8(fp8.BLOCK)  # formats of weights


@dataclass(frozen=True)
class Case:
    """One operation at one size: `op(*operands of a layer)`, and the same in plain jax.numpy.

    `build(key)` makes the operands: (what all layers share, what is each layer's own). An operation is called as
    `op(layer, shared, own)`, so it finds its layer's data in `own` as its kernel does.
    """

    name: str
    group: str
    layers: int
    build: Callable[[jax.Array], tuple[Any, Any]]
    op: Callable[[int, Any, Any], jax.Array]
    plain: Callable[[int, Any, Any], jax.Array]
    size: float  # bytes of one call
    flops: float
    kernel: str | None = None  # that `op` calls itself; None: the operation chooses one, and counts it
    speed: int = 1  # of the tensor cores, in multiples of theirs with bfloat16
    in_place: bool = False  # operations change `own`: they return it after their result
