"""The experts of a few tokens as one kernel on Hopper, from the tokens to their weighted sums.

At one token a mixture's weights are read in some 12 us, so reading must never pause: no kernel gathers rows before or
adds results up after, and no block has more to read than another.

- `up`: all blocks share the chosen experts' hidden columns in waves. In each wave a block makes a tile of 64 weight
  rows for the tensor cores, half of them gate; the tokens are the narrow side, eight. The rest that doesn't fill a wave
  is divided `PART` columns at a time. Parts of several experts make up a tile, since all of them multiply the same
  rows. So the first experts' hidden rows are done long before the last's, and a block that is done early has work. The
  first waves are of the first token's experts: meanwhile a block finds out which other experts there are.
- `down`: a block has `COLUMNS` outputs of all experts. Four experts' make up a tile, which is multiplied by the hidden
  rows of all four; each expert's own rows of the product are used. The block adds its results by weight, adds that to
  the residual stream, and writes its columns.

Weights go through a ring in shared memory. Its producer prefetches: while a block waits for other blocks' hidden rows,
its weights of `down` are loaded, and at one token all of them fit. Only a few copies are in flight at a time: with
more, everything is slower, presumably because writes queue behind the reads. Copies are few and large, because all of a
warpgroup's threads announce each of them.

FP8 weights (`fp8`) take half the bytes. For `up` each token's row becomes a pair of e4m3 rows whose sum is the same
row, so that FP8 tensor cores take both operands as they are. For `down`, and for one token, weights become bfloat16 in
registers. There a warp has one expert's outputs, and multiplies that expert's rows alone. Two warpgroups alternate
between steps, and the first one adds up both results (`turns`). Weights of four bits (`four`) go the second way.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.models.fp8 import BLOCK, E4M3
from jaxspec.models.weights import Weight
from jaxspec.pallas.dense.few_rows import Fp8Weight
from jaxspec.pallas.dense.few_rows.four_bits import four_bits_of
from jaxspec.pallas.dense.few_rows.layer import Scaled
from jaxspec.pallas.experts.expert_few import four
from jaxspec.pallas.experts.expert_few.kernel import kernel
from jaxspec.pallas.experts.expert_few.plan import (
    ARRIVALS,
    BLOCKS,
    COLUMNS,
    ODD,
    PAIRS,
    PART,
    PARTS,
    ROWS,
    STEP,
    TILE,
    Plan,
    Stack,
    shape_of,
    supported,
)
from jaxspec.pallas.hopper import WARPS
from jaxspec.pallas.hopper.export import lower_once

__all__ = ["BLOCKS", "COLUMNS", "ROWS", "Stack", "mix", "supported"]

_i32, _f32 = jnp.int32, jnp.float32


def mix(
    x: Float[Array, "t d"],
    stacks: list[Stack],
    ids: Int[Array, "t w"],
    weights: Float[Array, "t w"],
    residual: Float[Array, "n d"] | None = None,
    scale: Float[Array, " d"] | None = None,
    *,
    each: int | None = None,
    centred: bool = False,
    fused: bool = True,
    interpret: Any = False,
) -> Float[Array, "n d"] | tuple[Float[Array, "n d"], Scaled]:
    """Compute `experts_mlp.experts_mlp`. An id that is no expert's number counts for nothing.

    With the `scale` of the norm that comes next, the sums come as `Scaled` rows as well, whose squares are summed over
    `COLUMNS`; there must be a residual stream of `ROWS` rows then. `centred`: as in `few_rows.add_product`.

    `fused=False` makes each of the two matmuls a kernel of its own, for interpret mode, which has no counters between
    blocks.

    **Raises:** `ValueError` if `supported` has a reason against it.
    """
    each = each or ids.shape[1]
    if reason := supported(len(x if residual is None else residual), each, x.dtype, stacks):
        raise ValueError(f"the kernel for a few tokens' experts can't run: {reason}")
    gate_ups, downs = (list(part) for part in zip(*stacks, strict=True))
    if scale is not None and (residual is None or len(residual) != ROWS):
        given = "none" if residual is None else f"one of {len(residual)}"
        raise ValueError(f"a norm's scale goes with a residual stream of {ROWS} rows, not with {given}")
    launch = partial(_launch, ids, weights, shape=(len(x), each), centred=centred, interpret=interpret)
    if fused:
        _, out, *scaled = launch(up=(x, gate_ups), down=(None, downs, residual, scale))
    else:
        (hidden,) = launch(up=(x, gate_ups), down=None)
        out, *scaled = launch(up=None, down=(hidden, downs, residual, scale))
    return (out, Scaled(*scaled)) if scaled else out


@lower_once("expert_few", "shape", "centred")
def _launch(ids, weights, *, up, down, shape, centred, interpret):
    """Launch `up`, `down`, or both as one kernel, and return their results.

    `up`: (tokens' rows, weights); it makes hidden rows. `down`: (hidden rows, or None for `up`'s; weights; the residual
    stream or None; the scale of a norm or None).
    """
    stacks, dtype = (down if up is None else up)[1], (up or down)[0].dtype
    first, (_, outputs, inputs) = stacks[0], shape_of(stacks[0])
    d, f = (outputs, inputs) if up is None else (inputs, outputs // 2)
    stored = tuple(four_bits_of(part[1][0]) for part in (up or down, down or up)) if isinstance(first, Weight) else None
    plan = Plan(*shape, d, f, tuple(shape_of(stack)[0] for stack in stacks), isinstance(first, Fp8Weight), stored)
    outs = {}
    if up:
        outs["hidden"] = jax.ShapeDtypeStruct((plan.groups * plan.beside, f), dtype)
    if down:
        outs["out"] = jax.ShapeDtypeStruct((plan.t if down[2] is None else len(down[2]), d), dtype)
        if down[3] is not None:
            outs |= {"scaled": outs["out"], "squares": jax.ShapeDtypeStruct((plan.blocks, ROWS), _f32)}
    held = {"ids": ids, "weights": weights if down else None, "x": up and up[0], "hidden": down and down[0]}
    held |= {"residual": down and down[2], "scale": down and down[3]}
    for name, part in (("up", up), ("down", down)):
        held |= _operands(name, part[1] if part else ())
    held = {name: value for name, value in held.items() if value is not None}
    barrier = partial(plgpu.Barrier, num_barriers=plan.slots)
    two = dict(sums_s=plgpu.SMEM((TILE, ROWS), _f32), sent=plgpu.Barrier(), taken=plgpu.Barrier())
    weight_s = plgpu.SMEM((plan.slots, TILE, STEP), E4M3 if plan.fp8 else dtype)
    if plan.four:
        weight_s = plgpu.SMEM((plan.slots, TILE, STEP // 2), jnp.int8)
        two |= dict(
            scales_s=plgpu.SMEM((plan.scale_slots, WARPS, *plan.scales), jnp.dtype(plan.four[0].dtype)),
            scale_full=plgpu.Barrier(num_arrivals=WARPS, num_barriers=plan.scale_slots),
            scale_empty=plgpu.Barrier(num_arrivals=plan.multipliers, num_barriers=plan.scale_slots),
        )
    blocks = STEP // BLOCK
    if plan.pairs:
        rows_s = dict(
            pieces_s=plgpu.SMEM((d // STEP, blocks, 2 * ROWS, BLOCK), E4M3),
            factors_s=plgpu.SMEM((d // STEP, blocks, ROWS), _f32),
        )
    else:
        x_full = plgpu.Barrier(num_arrivals=d // STEP if plan.t == ROWS else 1)
        rows_s = dict(x_s=plgpu.SMEM((d // STEP, ROWS, STEP), dtype), x_full=x_full)
    return plgpu.kernel(
        partial(kernel, plan, centred, bool(interpret), tuple(held), tuple(outs)),
        kernel_name="expert_few",
        out_type=list(outs.values()),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=2 + plan.multipliers,
        thread_name="warpgroup",
        scratch_types=dict(
            weight_s=weight_s,
            **rows_s,
            hidden_s=plgpu.SMEM((plan.hidden_slots, plan.beside, STEP), dtype),
            both_s=plgpu.SMEM((ROWS, TILE), _f32),
            part_s=plgpu.SMEM((PARTS, ROWS, PART), dtype),
            each_s=plgpu.SMEM((ODD + plan.made + ROWS, TILE), dtype),
            out_s=plgpu.SMEM((ROWS, COLUMNS), dtype),
            rank_s=plgpu.SMEM((2, PAIRS), _i32),
            experts_s=plgpu.SMEM((2, PAIRS), _i32),
            known=plgpu.Barrier(),
            weight_full=barrier(num_arrivals=ARRIVALS),
            weight_empty=barrier(num_arrivals=1),
            residual_full=plgpu.Barrier(),
            hidden_full=plgpu.Barrier(num_barriers=plan.hidden_slots),
            hidden_empty=plgpu.Barrier(num_barriers=plan.hidden_slots),
            **(two if plan.multipliers > 1 else {}),
        ),
        # Safe here: every hand-over within a block goes through a barrier or `commit_smem`, written out below.
        # Reductions stay within a warp.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(*held.values())


def _operands(name, weights):
    """The arrays that the kernel takes for each stack's weight, by name."""
    held = {}
    for i, weight in enumerate(weights):
        if isinstance(weight, Weight):
            arrays = four.operands(weight)
        elif isinstance(weight, Fp8Weight):
            by_output = weight.scales.shape[1:] == (weight.values.shape[1], 1)
            scales = {"_factors": weight.scales[..., 0]} if by_output else {"_scales": weight.scales}
            arrays = {"": weight.values} | scales
        else:
            arrays = {"": weight}
        held |= {f"{name}{what}{i}": array for what, array in arrays.items()}
    return held
