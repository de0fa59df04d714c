"""Layers of vision towers, whose parameters go by their names in a checkpoint."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.models.vision import Tower


def by_layer(tower: Tower, params: dict[str, Any]) -> dict[str, Array]:
    """Parameters with a leading axis of layers, by their names within one."""
    prefix = tower.per_layer
    return {name.removeprefix(prefix): each for name, each in params.items() if name.startswith(prefix)}


def linear(params: dict[str, Any], name: str, x: Float[Array, "p i"]) -> Float[Array, "p o"]:
    return jnp.einsum("pi,oi->po", x, params[f"{name}.weight"]) + params[f"{name}.bias"]


def layer_norm(params: dict[str, Any], name: str, x: Float[Array, "p d"], eps: float) -> Float[Array, "p d"]:
    """Layer norm, in float32."""
    x32 = x.astype(jnp.float32)
    x32 = x32 - x32.mean(-1, keepdims=True)
    x32 = x32 * jax.lax.rsqrt((x32 * x32).mean(-1, keepdims=True) + eps)
    return (x32 * params[f"{name}.weight"] + params[f"{name}.bias"]).astype(x.dtype)
