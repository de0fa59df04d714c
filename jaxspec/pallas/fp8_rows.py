"""Products of few rows with FP8 weights, dequantised on their way to the tensor cores, on Hopper.

At few rows a product takes as long as reading its weight, which in e4m3 is half of bfloat16's bytes. A block makes 64
outputs from one part of the inputs. It keeps a ring of pieces of the weight in flight, 64 outputs x 128 inputs each,
with the rows' inputs and the scales that belong to them. A piece goes from shared memory to registers and becomes
bfloat16 there, which is exact. Its products are summed in float32, multiplied by the scales, and added to the total.

XLA adds the parts' sums, in float32, together with what follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxspec.fp8 import BLOCK, E4M3
from jaxspec.pallas.hopper import MULTIPROCESSORS, WGMMA_ROWS
from jaxspec.pallas.once import lower_once

TILE = WGMMA_ROWS  # outputs of a block
GROUP = 8  # rows are padded to a multiple of these
MAX_ROWS = 64
ENOUGH = 2 * MULTIPROCESSORS  # blocks, so that each multiprocessor has some bytes on their way while another one ends
SLOTS = 6  # of the ring
_i32, _f32 = jnp.int32, jnp.float32


def supported(rows: int, dtype: Any, block: int | None, outputs: int, inputs: int) -> str | None:
    """Why the kernel can't multiply so many rows of `dtype` by such a weight, or None if it can."""
    if dtype != jnp.bfloat16:
        return f"rows in {jnp.dtype(dtype).name}; supported: bfloat16"
    if rows > MAX_ROWS:
        return f"{rows} rows; supported: up to {MAX_ROWS}"
    if block != BLOCK:
        return f"scales that aren't for {BLOCK} inputs each"
    if outputs % TILE or inputs % BLOCK:
        return f"a weight of {inputs} x {outputs}, not a multiple of {BLOCK} x {TILE}"
    return None


@dataclass(frozen=True)
class Share:
    """How a product is divided: `tiles` of outputs, inputs in `splits` parts of `chunks` blocks."""

    rows: int
    tiles: int
    splits: int
    chunks: int

    @classmethod
    def of(cls, rows: int, outputs: int, inputs: int) -> Share:
        """As few parts as give every multiprocessor work."""
        tiles, chunks = outputs // TILE, inputs // BLOCK
        divisors = [n for n in range(1, chunks + 1) if chunks % n == 0]
        splits = next((n for n in divisors if tiles * n >= ENOUGH), divisors[-1])
        return cls(rows, tiles, splits, chunks // splits)

    @property
    def slots(self) -> int:
        return min(SLOTS, self.chunks)


@lower_once("fp8_rows")
def product(
    x: Float[Array, "r k"], values: Float[Array, "n k"], scales: Float[Array, "a b"], *, interpret: Any = False
) -> Float[Array, "r n"]:
    """x @ (values * scales)', in float32: `fp8.dequantise` in blocks of 128 inputs, with nothing rounded on the way."""
    (r, k), n = x.shape, len(values)
    x = jnp.pad(x, ((0, -r % GROUP), (0, 0)))
    share = Share.of(len(x), n, k)
    spread = jnp.repeat(scales, n // len(scales), axis=0).T  # [k / 128, n]: a block's are contiguous
    parts = plgpu.kernel(
        partial(_tile, share),
        kernel_name="fp8_rows",
        out_type=jax.ShapeDtypeStruct((share.splits, share.rows, n), _f32),
        grid=(share.tiles, share.splits),
        grid_names=("tile", "split"),
        scratch_types=dict(
            values_s=plgpu.SMEM((share.slots, TILE, BLOCK), E4M3),
            rows_s=plgpu.SMEM((share.slots, share.rows, BLOCK), jnp.bfloat16),
            scales_s=plgpu.SMEM((share.slots, TILE), _f32),
            ready=plgpu.Barrier(num_arrivals=3, num_barriers=share.slots),
            # Interpret mode takes a matmul's left operand from shared memory alone.
            **({"staged_s": plgpu.SMEM((TILE, BLOCK), jnp.bfloat16)} if interpret else {}),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(x, values, spread)
    return parts.sum(0)[:r]


def _tile(share, x_g, values_g, scales_g, out_g, *, values_s, rows_s, scales_s, ready, staged_s=None):
    """64 outputs of all rows, of one part of the inputs."""
    tile, split = lax.axis_index("tile"), lax.axis_index("split")
    outputs, slots = pl.ds(tile * TILE, TILE), share.slots

    def fetch(i, slot):
        chunk = split * share.chunks + i
        inputs = pl.ds(chunk * BLOCK, BLOCK)
        plgpu.copy_gmem_to_smem(values_g.at[outputs, inputs], values_s.at[slot], ready.at[slot])
        plgpu.copy_gmem_to_smem(x_g.at[:, inputs], rows_s.at[slot], ready.at[slot])
        plgpu.copy_gmem_to_smem(scales_g.at[chunk, outputs], scales_s.at[slot], ready.at[slot])

    for i in range(slots):
        fetch(_i32(i), i)

    def step(i, total):
        slot = lax.rem(i, _i32(slots))
        plgpu.barrier_wait(ready.at[slot])
        products = pl.run_scoped(partial(multiply, slot), plgpu.ACC((TILE, share.rows), _f32))
        scale = plgpu.load(scales_s.at[slot], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        plgpu.commit_smem()  # a barrier: no warp still reads the slot that is copied to
        pl.when(i + slots < share.chunks)(lambda: fetch(i + slots, slot))
        return total + products * lax.broadcast_in_dim(scale, products.shape, [0])

    def multiply(slot, total):
        weight = plgpu.load(values_s.at[slot], layout=plgpu.Layout.WGMMA_UPCAST_2X, optimized=False)
        weight = plgpu.layout_cast(weight.astype(_f32).astype(jnp.bfloat16), plgpu.Layout.WGMMA)
        if staged_s is not None:
            staged_s[...] = weight
            plgpu.commit_smem()
            weight = staged_s
        plgpu.wgmma(total, weight, rows_s.at[slot].transpose((1, 0)))
        return total[...]

    start = plgpu.layout_cast(jnp.zeros((TILE, share.rows), _f32), plgpu.Layout.WGMMA)
    total = lax.fori_loop(_i32(0), _i32(share.chunks), step, start)
    out_g.at[split, :, outputs].transpose((1, 0))[...] = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
