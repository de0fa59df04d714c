"""A thread's integers and addresses as MLIR, in parts of kernels that are below Pallas (`plgpu.inline_mgpu`).

All numbers are unsigned, of 32 bits.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jaxlib.mlir.dialects import llvm


def i32() -> Any:
    """The type of a number or a word."""
    return ir.IntegerType.get_signless(32)


def const(x: int) -> Any:
    return mgpu.c(x, i32())


def mul(x: Any, y: int) -> Any:
    return arith.muli(x, const(y))


def div(x: Any, y: int) -> Any:
    return arith.divui(x, const(y))


def rem(x: Any, y: int) -> Any:
    return arith.remui(x, const(y))


def byte_at(pointer: Any, offset: Any) -> Any:
    """The pointer, so many bytes further."""
    return mgpu.utils.getelementptr(pointer, [offset], ir.IntegerType.get_signless(8))


def load_words(pointer: Any, offset: Any, count: int = 4) -> list[Any]:
    """Load so many words that lie side by side, at a multiple of their size."""
    words = llvm.load(ir.VectorType.get((count,), i32()), byte_at(pointer, offset), alignment=4 * count)
    return [llvm.extractelement(words, const(i)) for i in range(count)]
