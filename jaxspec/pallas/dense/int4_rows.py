"""Products of up to 128 rows with integers of four bits, dequantised on their way to the tensor cores, on Hopper.

As `fp8_rows`, of which it has the sizes: a block makes 64 outputs from one part of the inputs, and keeps a ring of
pieces of the weight in flight, with the rows' inputs that belong to them. Words go from shared memory to registers. A
shift and a mask make two bfloat16 of them, 128 more than the numbers, from which 128 and the zero point are subtracted:
so numbers less zero points are exact. Products of each group are summed by themselves, in float32, and then multiplied
by the group's scales, one for each output.

XLA adds the parts' sums, in float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jaxtyping import Array, Float, UInt8

from jaxspec.models import int4
from jaxspec.pallas.dense.fp8_rows import ENOUGH, GROUP, MAX_ROWS, RING_BYTES, TILE, WIDE_RING_BYTES, WIDE_ROWS
from jaxspec.pallas.hopper.export import lower_once

CHUNK = 128  # inputs of a piece
# Pair i of a word: its numbers, in the low bits of two bfloat16 that are 128, less 128 and the zero point.
PAIR = "{{ .reg .b32 a; shr.b32 a, $1, {}; lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA; sub.bf16x2 $0, a, $2; }}"
TWICE, LESS = 0x00010001, 0x43004300  # a zero point for both numbers, from a bfloat16's bits of 128 on
_i32, _f32 = jnp.int32, jnp.float32


def supported(rows: int, dtype: Any, outputs: int, inputs: int, group: int | None) -> str | None:
    """Why the kernel can't multiply so many rows of `dtype` by such a weight, or None if it can; `group` inputs share a
    scale."""
    if dtype != jnp.bfloat16:
        return f"rows in {jnp.dtype(dtype).name}; supported: bfloat16"
    if rows > MAX_ROWS:
        return f"{rows} rows; supported: up to {MAX_ROWS}"
    if outputs % TILE or inputs % CHUNK:
        return f"a weight of {inputs} x {outputs}; supported: multiples of {CHUNK} x {TILE}"
    group = group or inputs
    if CHUNK % group and group % CHUNK:
        return f"scales for {group} inputs; supported: 32, 64, and multiples of {CHUNK}"
    return None


def product(
    x: Float[Array, "r k"],
    values: UInt8[Array, "n k2"],
    scales: Float[Array, "s n"],
    *,
    zeros: bool = False,
    interpret: Any = False,
) -> Float[Array, "r n"]:
    """`x @ int4.dequantise(values, scales, zeros)'`, in float32, with nothing rounded on the way."""
    return _parts(x, values, scales, zeros=zeros, interpret=interpret).sum(0)[: len(x)]


@lower_once("int4_rows", "zeros")
def _parts(x, values, scales, *, zeros, interpret):
    (r, k), n = x.shape, len(values)
    x = jnp.pad(x, ((0, -r % GROUP), (0, 0)))
    rows, tiles, chunks = len(x), n // TILE, k // CHUNK
    divisors = [count for count in range(1, chunks + 1) if chunks % count == 0]
    splits = next((count for count in divisors if tiles * count >= ENOUGH), divisors[-1])
    ring = WIDE_RING_BYTES if rows > WIDE_ROWS else RING_BYTES
    slots = min(chunks // splits, max(2, ring // (CHUNK * (TILE // 2 + 2 * rows))))
    group = k // (len(scales) // (2 if zeros else 1))
    return plgpu.kernel(
        partial(_tile, chunks // splits, group, zeros),
        kernel_name="int4_rows",
        out_type=jax.ShapeDtypeStruct((splits, rows, n), _f32),
        grid=(tiles, splits),
        grid_names=("tile", "split"),
        scratch_types=dict(
            values_s=plgpu.SMEM((slots, TILE, CHUNK // 2), jnp.int8),
            rows_s=plgpu.SMEM((slots, rows, CHUNK), jnp.bfloat16),
            ready=plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            # Interpret mode takes a matmul's left operand from shared memory alone.
            **({"staged_s": plgpu.SMEM((TILE, min(group, CHUNK)), jnp.bfloat16)} if interpret else {}),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(x, lax.bitcast_convert_type(values, jnp.int8), scales)


def _tile(chunks, group, zeros, x_g, values_g, scales_g, out_g, *, values_s, rows_s, ready, staged_s=None):
    """Compute a block's outputs of all rows, from one part of the inputs."""
    tile, split, (slots, rows, _) = lax.axis_index("tile"), lax.axis_index("split"), rows_s.shape
    outputs, part, each = pl.ds(tile * TILE, TILE), min(group, CHUNK), 2 if zeros else 1
    by_output = plgpu.Layout.WGMMA.reduce(1)

    def fetch(i, slot):
        at = split * chunks + i
        piece = values_g.at[outputs, pl.ds(at * (CHUNK // 2), CHUNK // 2)]
        plgpu.copy_gmem_to_smem(piece, values_s.at[slot], ready.at[slot])
        plgpu.copy_gmem_to_smem(x_g.at[:, pl.ds(at * CHUNK, CHUNK)], rows_s.at[slot], ready.at[slot])

    def of_outputs(i, j, which):
        """Scales (0) or zero points (1) of the j-th part of a chunk."""
        at = lax.div((split * chunks + i) * CHUNK + j * part, _i32(group)) * each + which
        return plgpu.load(scales_g.at[at, outputs], layout=by_output, optimized=False).astype(_f32)

    def step(i, total):
        slot = lax.rem(i, _i32(slots))
        plgpu.barrier_wait(ready.at[slot])
        for j in range(CHUNK // part):

            def multiply(product, j=j):
                zero = of_outputs(i, j, 1).astype(_i32) if zeros else None
                packed = values_s.at[slot, :, pl.ds(j * part // 2, part // 2)]
                weight = _numbers(packed, zero, staged_s)
                plgpu.wgmma(product, weight, rows_s.at[slot, :, pl.ds(j * part, part)].transpose((1, 0)))
                return product[...]

            product = pl.run_scoped(multiply, plgpu.ACC((TILE, rows), _f32))
            total += product * lax.broadcast_in_dim(of_outputs(i, j, 0), total.shape, [0])
        pl.when(i + slots < chunks)(lambda: fetch(i + slots, slot))
        return total

    for i in range(slots):
        fetch(_i32(i), i)
    start = plgpu.layout_cast(jnp.zeros((TILE, rows), _f32), plgpu.Layout.WGMMA)
    total = lax.fori_loop(_i32(0), _i32(chunks), step, start)
    out_g.at[split, :, outputs].transpose((1, 0))[...] = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)


def _numbers(packed_s, zero, staged_s):
    """Numbers less their zero points as bfloat16, [TILE, k], in the layout of a left operand."""
    inputs = 2 * packed_s.shape[1]
    if staged_s is not None:
        numbers = int4.numbers(lax.bitcast_convert_type(packed_s[...], jnp.uint8)).astype(_f32)
        staged_s[...] = (numbers - (int4.MIDDLE if zero is None else zero[:, None])).astype(jnp.bfloat16)
        plgpu.commit_smem()
        return staged_s
    layout = plgpu.Layout.WGMMA_8BIT
    words = plgpu.load(packed_s, layout=layout, optimized=False)
    more = () if zero is None else (zero,)
    types = (layout, *[plgpu.Layout.WGMMA.reduce(1)] * len(more))
    result = plgpu.ShapeDtypeStruct((TILE, inputs), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(_convert)(words, *more)


def _convert(_, words, *zero):
    """Convert: a thread makes four pairs of each word that it has."""
    i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
    inputs = words.shape[1] * 2
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((TILE, inputs)), dtype=object)
    for at, vector in np.ndenumerate(words.registers):
        word, less = mgpu.utils.bitcast(vector, i32), mgpu.c(LESS + int4.MIDDLE * TWICE, i32)
        if zero:
            own = zero[0].registers[0, 0, at[4], 0, 0]
            own = own if own.type == i32 else mgpu.utils.bitcast(own, i32)
            less = arith.addi(arith.muli(own, mgpu.c(TWICE, i32)), mgpu.c(LESS, i32))
        for i in range(4):
            out = mgpu.utils.inline_ptx(PAIR.format(4 * i), word, less, result_types=i32)
            registers[(at[0], at[1] * 4 + i, *at[2:])] = mgpu.utils.bitcast(out, pair)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)
