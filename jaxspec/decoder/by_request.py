"""Layers whose requests are divided among devices (`--dp-attention`): each mixes the rows of its own.

All devices have all rows of the residual stream. A layer takes its device's requests out of them, mixes these, and puts
their output projections among zeros, so that the sum over devices, which would follow it anyway, gathers them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.decoder.feed import add_product
from jaxspec.decoder.matmul import valid_count
from jaxspec.decoder.mixings.kind import Weights
from jaxspec.decoder.stack import Ops


def mix(
    ops: Ops, mix: Callable, weights: Weights, x: Float[Array, "b t d"], given: Any, cache: Any, devices: int
) -> tuple[Float[Array, "b t d"], Any]:
    """This device's part of the sum that is added to the residual stream, and the cache.

    `mix(ops, x, given, cache)` is the layer's mixing of some requests. As many as a device's share are mixed at once;
    where devices may have more, each goes on until it is through with its own.
    """
    b, mixer = len(x), ops.mixer
    here = mixer.here(cache)
    order, count, share = jnp.argsort(~here, stable=True), here.sum(), -(-b // devices)
    order = jnp.pad(order, (0, share * devices - b))

    def some(i: Any, carry: tuple[Array, Any]) -> tuple[Array, Any]:
        out, cache = carry
        at = jax.lax.dynamic_slice_in_dim(order, i * share, share)
        valid = i * share + jnp.arange(share) < count
        positions = jnp.where(valid[:, None], ops.positions[at], -1)
        own = dataclasses.replace(ops, positions=positions, mixer=mixer.taken(cache, at, valid))
        mixed, cache = mix(own, x[at], None if given is None else given[at], cache)
        part = add_product(None, mixed, weights, "out", valid_count(positions))
        return out.at[jnp.where(valid, at, b)].set(part.astype(out.dtype), mode="drop"), cache

    nothing = jnp.zeros_like(x), cache
    return jax.lax.fori_loop(0, -(-count // share), some, nothing) if mixer.uneven else some(0, nothing)
