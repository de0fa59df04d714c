"""Products of rows with a layer's weights: by our kernel where XLA's takes longer, else in plain jnp.

The weight of a gated MLP holds gate and up as alternating runs of columns, so that a tile of it has both.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas import tile_matmul
from jaxspec.pallas.hopper import chosen
from jaxspec.weights import run_length


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def project(
    x: Float[Array, "*b k"],
    weight: Float[Array, "k n"],
    real: Int[Array, "1"],
    residual: Float[Array, "*b n"] | None = None,
    gated: bool = False,
) -> Float[Array, "*b o"]:
    """`residual + x @ weight`; `gated`, without a residual, silu(gate) * up of the product, half as wide.

    Rows from `real` on are padding, and may be anything finite.
    """
    flat = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
    rows = flat(x)
    if chosen(tile_matmul.supported(len(rows), weight.dtype, *weight.shape)):
        before = None if residual is None else flat(residual)
        return tile_matmul.matmul(rows, weight, real, before, gated=gated).reshape(*x.shape[:-1], -1)
    return reference(x, weight, residual, gated)


def reference(
    x: Float[Array, "*b k"],
    weight: Float[Array, "k n"],
    residual: Float[Array, "*b n"] | None = None,
    gated: bool = False,
) -> Float[Array, "*b o"]:
    """The same in plain jnp, of all rows."""
    product = gate(x @ weight) if gated else x @ weight
    return product if residual is None else residual + product


def _forward(x, weight, real, residual, gated):
    return project(x, weight, real, residual, gated), (x, weight, residual)


def _backward(gated, kept, gradient):
    x, weight, residual = jax.vjp(partial(reference, gated=gated), *kept)[1](gradient)
    return x, weight, None, residual


project.defvjp(_forward, _backward)


def gate(gate_up: Float[Array, "*b n"]) -> Float[Array, "*b o"]:
    """silu(gate) * up of alternating runs of both."""
    *batch, width = gate_up.shape
    runs = gate_up.reshape(*batch, -1, 2, run_length(width // 2))
    return (jax.nn.silu(runs[..., 0, :]) * runs[..., 1, :]).reshape(*batch, width // 2)


def real_rows(positions: Int[Array, "b t"]) -> Int[Array, "1"]:
    """How many rows there are up to the last that isn't padding, which has a negative position."""
    row = jnp.arange(1, positions.size + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(positions.reshape(-1) >= 0, row, 0), keepdims=True)
