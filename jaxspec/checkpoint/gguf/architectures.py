"""How llama.cpp's converter stores each architecture that is read: names of tensors, and what is different in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp's converter stores one architecture."""

    family: str = ""  # model_type, where it has another name
    interleaved: bool = False  # rows of q and k are in the interleaved rotary order; in the checkpoint they aren't
    centred: bool = False  # norms' weights are stored with 1 added
    partial: bool = False  # `rope.dimension_count` may be less than the head width
    names: Mapping[str, str] = field(
        default_factory=dict
    )  # of parts of a layer, or of tensors, where `LAYER` has others
    experts: bool = False  # the family has experts
    # Experts' tensors that the checkpoint has with inputs first and outputs of all of these alternating.
    alternating: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    own_ropes: bool = False  # each kind of layer has heads and a rope of its own


# By general.architecture. Mistral is "llama" too; so is Mixtral, whose file has experts.
ARCHITECTURES = {
    "llama": Architecture(interleaved=True),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "gemma3": Architecture(
        centred=True,
        names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    "glm4": Architecture(
        partial=True,
        names={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "gemma4": Architecture(
        experts=True,
        own_ropes=True,
        names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_gate_up_exps.weight": "experts.gate_up_proj",
            "ffn_gate_exps": "experts.{}.gate_proj",
            "ffn_up_exps": "experts.{}.up_proj",
            "ffn_down_exps.weight": "experts.down_proj",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "layer_output_scale.weight": "layer_scalar",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
        },
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        experts=True,
        names={
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        alternating={
            "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
            "mlp.experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
            "mlp.experts.down_proj": ("ffn_down_exps.weight",),
            "mlp.experts.down_proj_bias": ("ffn_down_exps.bias",),
        },
    ),
    "qwen3moe": Architecture("qwen3_moe", experts=True),
    "glm4moe": Architecture(
        "glm4_moe",
        partial=True,
        experts=True,
        names={
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        },
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        partial=True,
        experts=True,
        names={
            "ffn_gate_inp": "block_sparse_moe.gate",
            "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        },
    ),
}
MIXTRAL = Architecture(
    "mixtral",
    interleaved=True,
    experts=True,
    names={
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
)
TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    # Of all experts in one tensor, in checkpoints one by one.
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
GATING = {
    "gemma4": 1,
    "gpt-oss": 3,
    "qwen3moe": 1,
    "glm4moe": 2,
    "minimax-m2": 2,
}  # expert_gating_func: a softmax, sigmoids, a softmax of the chosen
