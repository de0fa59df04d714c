"""SigLIP with Gemma 3's projector: pictures of one size, whose patches have a learnt position each.

Each token is the mean of a square of patches (https://arxiv.org/abs/2303.15343, https://arxiv.org/abs/2503.19786).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxspec.decoder.functions import normed
from jaxspec.decoder.towers.layers import by_layer, layer_norm, linear
from jaxspec.models.description import Norm
from jaxspec.models.vision import SiglipTower
from jaxspec.pallas.attention.picture_attention import picture_attention


def embed(
    tower: SiglipTower, params: dict[str, Any], pixels: Float[Array, "p v"], patches: None
) -> Float[Array, "t d"]:
    """The tower's rows, `fills` for each picture."""
    p, n, of_one, norm = len(pixels), tower.heads, tower.side**2, partial(layer_norm, eps=tower.eps)
    positions = params["embeddings.position_embedding.weight"]
    x = linear(params, "embeddings.patch_embedding", pixels.astype(positions.dtype))
    x = x + jnp.tile(positions, (p // of_one, 1))
    begin = np.arange(p, dtype=np.int32) // of_one * of_one

    def layer(x, weights):
        y = norm(weights, "layer_norm1", x)
        heads = (linear(weights, f"self_attn.{name}_proj", y).reshape(p, n, -1) for name in "qkv")
        mixed = picture_attention(*heads, begin, begin + of_one)
        x = x + linear(weights, "self_attn.out_proj", mixed.reshape(p, -1))
        hidden = jax.nn.gelu(linear(weights, "mlp.fc1", norm(weights, "layer_norm2", x)), approximate=True)
        return x + linear(weights, "mlp.fc2", hidden), None

    x, _ = jax.lax.scan(layer, x, by_layer(tower, params))
    x = norm(params, "post_layernorm", x)
    tokens, pooled = tower.side // tower.pooled, tower.pooled
    x = x.reshape(-1, tokens, pooled, tokens, pooled, tower.width).astype(jnp.float32).mean((2, 4)).astype(x.dtype)
    x = normed(x.reshape(-1, tower.width), params["mm_soft_emb_norm.weight"], Norm(tower.eps, centred=True))
    return jnp.einsum("td,do->to", x, params["mm_input_projection_weight"])
