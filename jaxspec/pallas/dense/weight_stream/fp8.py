"""The chain with FP8 weights, which become bfloat16 in registers: half the bytes to read."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxspec.models.fp8 import BLOCK
from jaxspec.pallas.dense.fp8_rows import weight_supported
from jaxspec.pallas.dense.weight_stream.chain import MAX_ROWS, run, run_stages
from jaxspec.pallas.dense.weight_stream.fp8_sums import Fp8
from jaxspec.pallas.hopper.export import lower_once

MIN_ROWS = 33  # with fewer, `fp8_rows` and kernels of their own beside it take no longer (docs/experiments.md)


def supported(rows: int, dtype: Any, weights: list[tuple[int | None, int, int, int]]) -> str | None:
    """Why a chain can't run with rows of `dtype`, or None if it can.

    `weights` has for each: inputs that share a scale, None if all do; outputs; inputs; outputs that share a scale.
    """
    if dtype != jnp.bfloat16:
        return f"rows in {jnp.dtype(dtype).name}; supported: bfloat16"
    if not MIN_ROWS <= rows <= MAX_ROWS:
        return f"{rows} rows, not {MIN_ROWS} to {MAX_ROWS}"
    for block, outputs, inputs, unit in weights:
        if reason := weight_supported(block, outputs, inputs, unit):
            return reason
        if outputs % BLOCK or inputs % BLOCK or min(outputs, inputs) < 2 * BLOCK:
            return f"a weight of {inputs} x {outputs}, not multiples of {BLOCK} from {2 * BLOCK} on"
    return None


@lower_once("fp8_stream", "eps")
def stream_fp8(
    x: Float[Array, "b d"],
    rows: Float[Array, "b k"],
    weights: list[tuple[Float[Array, "_ _"], Float[Array, "_ _"]]],
    scales: list[Float[Array, " d"]],
    *,
    eps: float,
    interpret: Any = False,
) -> tuple[Float[Array, "b d"], Float[Array, "s b n"]]:
    """Run `stream` with FP8 weights: each has values [outputs, inputs], and scales for blocks of 128 inputs.

    Products are those of the weight times its scales, rounded to bfloat16 once, as `Weight.dequantised` does.
    """
    return run(Fp8, x, rows, _operands(weights), scales, eps, interpret)


@lower_once("fp8_stream", "stages", "eps")
def stream_part_fp8(
    x: Float[Array, "p d"],
    rows: Float[Array, "p k"] | None,
    weights: list[tuple[Float[Array, "_ _"], Float[Array, "_ _"]]],
    scales: list[Float[Array, " d"]],
    *,
    stages: tuple[str, ...],
    eps: float,
    interpret: Any = False,
) -> Float[Array, "s p n"]:
    """Run `stream_part` with FP8 weights, each as in `stream_fp8`."""
    return run_stages(Fp8, stages, len(x), x, rows, _operands(weights), scales, eps, interpret)[1]


def _operands(weights: list[tuple]) -> list[tuple]:
    return [(lax.bitcast_convert_type(values, jnp.int8), each) for values, each in weights]
