"""A mixture of experts in place of a layer's MLP: a router, its experts, and perhaps one expert that all tokens share.

Of `num_experts` gated MLPs, each token goes through the `experts_per_token` that its router likes best, and their
outputs are added with the router's probabilities as weights (https://arxiv.org/abs/1701.06538; as in Qwen3-MoE,
Qwen3-Next and Qwen3.5-MoE). The router's probabilities are float32 throughout: a rounded one may pick another expert.

Axis letters: b batch, t tokens, d model width, e experts, k experts of a token, f an expert's width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config import ModelConfig
from jaxspec.models.layers import Param, expert_stack, linear
from jaxspec.pallas.experts import experts_mlp
from jaxspec.pallas.top_experts import top_experts


def parameters(config: ModelConfig, prefix: str) -> dict[str, Param]:
    """One layer's mixture, whose tensors are called `prefix...` in the checkpoint.

    Experts are stacked, `experts_gate_up` [e, 2f, d] (gate's rows first) and `experts_down` [e, d, f], in checkpoints'
    own orientation: their many small matrices are never transposed. Checkpoints have them one by one, or stacked like
    this already.
    """
    d, e, f, s = config.hidden_size, config.num_experts, config.expert_size, config.shared_expert_size
    each, shared = prefix + "experts.{}.", prefix + "shared_expert."
    tree = {
        "router": linear(d, {prefix + "gate.weight": e}),
        "experts_gate_up": expert_stack(
            e, d, prefix + "experts.gate_up_proj", {each + "gate_proj.weight": f, each + "up_proj.weight": f}
        ),
        "experts_down": expert_stack(e, f, prefix + "experts.down_proj", {each + "down_proj.weight": d}),
    }
    if s:
        halves = {shared + "gate_proj.weight": s, shared + "up_proj.weight": s}
        tree["shared_gate_up"] = expert_stack(1, d, "", halves)
        tree["shared_down"] = expert_stack(1, s, "", {shared + "down_proj.weight": d})
        tree["shared_gate"] = linear(d, {prefix + "shared_expert_gate.weight": 1})
    return tree


def moe(
    layer: dict[str, Array],
    config: ModelConfig,
    x: Float[Array, "b t d"],
    positions: Int[Array, "b t"],
    residual: Float[Array, "b t d"],
) -> Float[Array, "b t d"]:
    """The residual stream and the weighted sum of each token's experts, and of the shared expert if there is one.

    Padding, at negative positions, chooses no expert: its weights would be read for nothing.
    """
    # One array for the router and the experts, which XLA would otherwise normalise rows for once each.
    rows = jax.lax.optimization_barrier(x.reshape(-1, x.shape[-1]))
    logits = jnp.matmul(rows, layer["router"], preferred_element_type=jnp.float32)
    return mix(layer, config, rows, logits, positions, residual.reshape(rows.shape)).reshape(x.shape)


def mix(
    layer: dict[str, Array],
    config: ModelConfig,
    rows: Float[Array, "r d"],
    logits: Float[Array, "r e"],
    positions: Int[Array, "*b"],
    residual: Float[Array, "r d"],
    real: int | None = None,
) -> Float[Array, "r d"]:
    """The same of flat rows from the router's logits, float32; of the first `real` rows alone, if that is given."""
    positions, k = positions.reshape(-1), config.experts_per_token
    stacks, shared = [(layer["experts_gate_up"], layer["experts_down"])], None
    if config.shared_expert_size:  # one expert more, that every token chooses
        stacks.append((layer["shared_gate_up"], layer["shared_down"]))
        shared = rows, layer["shared_gate"]
    ids, weights = top_experts(logits, positions, shared, k, config.norm_topk_prob)
    each = k + (shared is not None)
    rows, ids, weights = (a[:real] for a in (rows, ids, weights))
    return experts_mlp(rows, stacks, ids, weights, each, residual)
