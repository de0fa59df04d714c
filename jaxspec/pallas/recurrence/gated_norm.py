"""The norm and the gate behind gated delta-rule attention of prompts, on Hopper: norm(read) silu(z), a head at a time.

The norm that `delta_step` has after its rule (`delta_around`), as a kernel of its own: a row's bits don't depend on how
many rows there are. A warpgroup takes `ROWS` rows of a head, each in the lanes of one warp.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxspec.pallas.hopper.export import lower_once
from jaxspec.pallas.recurrence import gates_and_norm

ROWS = 16


@lower_once("gated_norm", "eps")
def gated_norm(
    read: Float[Array, "b t n v"],
    rows: Float[Array, "b t w"],
    scale: Float[Array, " v"],
    *,
    eps: float,
    interpret: Any = False,
) -> Float[Array, "b t n v"]:
    """Compute norm(read) silu(z) of each head, all in bfloat16.

    `rows` end in z, one head after the other. `t` is a multiple of `ROWS`, heads are 128 wide.
    """
    shape = read.shape
    read, rows = read.reshape(-1, ROWS, *shape[2:]), rows.reshape(-1, ROWS, rows.shape[2])
    out = plgpu.kernel(
        partial(_head, eps),
        kernel_name="gated_norm",
        out_type=jax.ShapeDtypeStruct(read.shape, read.dtype),
        grid=(len(read), shape[2]),
        grid_names=("b", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(read, rows, scale)
    return out.reshape(shape)


def _head(eps, read_g, rows_g, scale_g, out_g):
    b, head = lax.axis_index("b"), lax.axis_index("head")
    z, scale = gates_and_norm.load_z((rows_g, scale_g), b, ROWS, 1, head, read_g.shape[2])
    gates_and_norm.write_normed(read_g.at[b, :, pl.ds(head, 1)], out_g.at[b], z, scale, head, eps)
