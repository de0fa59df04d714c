"""Products of float32 numbers on tensor cores that take bfloat16: a number enters as a sum of pieces, 8 bits each."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def product(x, operands, *, pieces: int, interpreted: bool):
    """x @ sum(operands) for x f32[64, k] in registers, laid out as `WGMMA`, and operands bf16[k, n] in shared memory.

    x is cut into `pieces`. The operands are pieces of one matrix, largest first; products of pieces that are as small
    as the rest of x after its pieces are left out. `interpreted`: the interpreter's matmul takes no left operand in
    registers, so there it is done by `lax.dot_general`. No element of x may be known when compiling: see
    `delta_within`.
    """
    terms = []

    def cut(multiply, rest):
        for i in range(pieces):
            piece = rest.astype(jnp.bfloat16)
            for operand in operands[: pieces - i]:
                multiply(piece, operand)
            rest = rest - piece.astype(jnp.float32)

    def add(piece, operand):
        pair = piece.astype(jnp.float32), operand[...].astype(jnp.float32)
        terms.append(lax.dot_general(*pair, (((1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST))

    if interpreted:
        cut(add, x)
        return sum(terms)

    def run(acc):
        def multiply(piece, operand):
            plgpu.wgmma(acc, piece, operand)
            plgpu.wgmma_wait(0)  # frees the piece's registers: with fewer, more blocks share a multiprocessor

        cut(multiply, x)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((x.shape[0], operands[0].shape[1]), jnp.float32))
