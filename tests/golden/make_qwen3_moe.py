"""Add tiny mixtures, and what transformers computes, to tests/golden/checkpoints and tests/golden/expected.

Runs in the same environment as make_llama_qwen3.py, and makes files of the same kind. Each variant stores its experts
in one of the layouts that published checkpoints have: `single`, a tensor for each matrix of each expert, over several
files; `stacked`, all experts of a layer in one. `moe/shared.safetensors` holds an MoE block with a shared expert
(Qwen3-Next's and Qwen3.5's), its input and its output.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from make_llama_qwen3 import EPS, HERE, SIZES, expected, randomise
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    ExaoneMoeConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    HunYuanMoEV1Config,
    HYV3Config,
    Llama4TextConfig,
    MiMoV2FlashConfig,
    MiniMaxM2Config,
    Mistral4Config,
    Mistral4ForCausalLM,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SolarOpenConfig,
)
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

ROUTED = dict(num_experts_per_tok=3, moe_intermediate_size=24, head_dim=16)
EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, head_dim=16)
LATENT = SIZES | dict(
    num_key_value_heads=4,
    kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16, moe_intermediate_size=24,
    num_experts_per_tok=3, n_routed_experts=12, first_k_dense_replace=1, rms_norm_eps=EPS,
)  # fmt: skip
OF_MIXTRAL = SIZES | dict(intermediate_size=24, num_local_experts=8, num_experts_per_tok=3)
OF_OLMOE = SIZES | dict(intermediate_size=24, num_experts=8, num_experts_per_tok=3, pad_token_id=0, eos_token_id=1)
OF_GRANITE = OF_MIXTRAL | dict(
    embedding_multiplier=6.0, attention_multiplier=0.4, residual_multiplier=0.7, logits_scaling=3.0
)
OF_SOLAR = {k: v for k, v in SIZES.items() if k != "intermediate_size"} | ROUTED
# Prompts of 33 tokens and more have several chunks, and queries of several factors.
OF_LLAMA4 = SIZES | dict(
    head_dim=16,
    intermediate_size=24,
    intermediate_size_mlp=80,
    num_local_experts=8,
    attention_chunk_size=32,
    floor_scale=16,
    attn_scale=0.7,
)
# Within 150 tokens some frequencies are kept, some divided and some on the ramp between.
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32, mscale_all_dim=1.0)
VARIANTS = {
    "qwen3-moe-single": (
        "single",
        Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True, tie_word_embeddings=True, mlp_only_layers=[1]),
    ),
    "qwen3-moe-stacked": (
        "stacked",
        Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=False, decoder_sparse_step=2, attention_bias=True),
    ),
    "glm4-moe-single": (
        "single",
        Glm4MoeConfig(
            **SIZES,
            **ROUTED,
            n_routed_experts=12,
            n_group=4,
            topk_group=2,
            n_shared_experts=2,
            use_qk_norm=True,
            routed_scaling_factor=2.5,
            first_k_dense_replace=1,
            rms_norm_eps=EPS,
            num_mtp_layers=0,
        ),
    ),
    "glm4-moe-stacked": (
        "stacked",
        Glm4MoeConfig(
            **SIZES,
            **ROUTED,
            n_routed_experts=8,
            norm_topk_prob=False,
            attention_bias=True,
            num_mtp_layers=0,
            first_k_dense_replace=0,
            tie_word_embeddings=True,
        ),
    ),
    "minimax-m2-single": (
        "mixtral",
        MiniMaxM2Config(
            **{**SIZES, "intermediate_size": 24},
            num_local_experts=8,
            num_experts_per_tok=3,
            head_dim=16,
            rotary_dim=8,
            rms_norm_eps=EPS,
        ),
    ),
    "deepseek-v3-yarn": (
        "single",
        DeepseekV3Config(
            **LATENT,
            q_lora_rank=28,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            num_mtp_layers=0,
            rope_parameters={**YARN, "mscale": 1.0, "beta_fast": 4.0},
        ),
    ),
    "deepseek-v3-tied": (
        "single",
        DeepseekV3Config(
            **LATENT,
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            n_shared_experts=2,
            num_mtp_layers=0,
            tie_word_embeddings=True,
            rope_interleave=False,
        ),
    ),
    "kimi-k2-single": (
        "single",
        DeepseekV3Config(
            **LATENT,
            q_lora_rank=28,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=2.827,
            num_mtp_layers=0,
            rope_parameters={**YARN, "mscale": 1.0, "beta_fast": 1.0, "beta_slow": 1.0},
        ),
    ),
    "deepseek-v2-lite": (
        "single",
        DeepseekV2Config(
            **LATENT, q_lora_rank=None, rope_parameters={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
        ),
    ),
    "glm4-moe-lite": (
        "stacked",
        Glm4MoeLiteConfig(**LATENT, q_lora_rank=28),
    ),
    "mimo-v2-flash": (
        "single",
        MiMoV2FlashConfig(
            **SIZES | dict(num_key_value_heads=1),
            head_dim=24,
            v_head_dim=16,
            sliding_window=21,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            n_routed_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            rms_norm_eps=EPS,
        ),
    ),
    "mixtral-single": ("mixtral", MixtralConfig(**OF_MIXTRAL, head_dim=16, rms_norm_eps=EPS)),
    "mixtral-window": ("mixtral", MixtralConfig(**OF_MIXTRAL, tie_word_embeddings=True, sliding_window=20)),
    "qwen2-moe-single": (
        "single",
        Qwen2MoeConfig(
            **{**SIZES, **EXPERTS}, shared_expert_intermediate_size=40, mlp_only_layers=[1], tie_word_embeddings=True
        ),
    ),
    "qwen2-moe-window": (
        "single",
        Qwen2MoeConfig(
            **SIZES,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            norm_topk_prob=True,
            shared_expert_intermediate_size=40,
            rms_norm_eps=EPS,
            qkv_bias=False,
            use_sliding_window=True,
            sliding_window=33,
            max_window_layers=2,
        ),
    ),
    "olmoe-single": ("single", OlmoeConfig(**OF_OLMOE, attention_bias=True, rms_norm_eps=EPS)),
    "olmoe-stacked": ("stacked", OlmoeConfig(**OF_OLMOE, norm_topk_prob=True, tie_word_embeddings=True)),
    "granitemoe-untied": ("granite", GraniteMoeConfig(**OF_GRANITE, attention_bias=True, rms_norm_eps=EPS)),
    "granitemoe-tied": ("granite", GraniteMoeConfig(**OF_GRANITE, tie_word_embeddings=True)),
    "granitemoeshared-tied": (
        "granite",
        GraniteMoeSharedConfig(
            **OF_GRANITE, shared_intermediate_size=40, tie_word_embeddings=True, attention_bias=True
        ),
    ),
    "granitemoeshared-untied": ("granite", GraniteMoeSharedConfig(**OF_GRANITE, shared_intermediate_size=24)),
    "hunyuan-moe": (
        "single",
        HunYuanMoEV1Config(
            **SIZES | dict(intermediate_size=24),
            num_experts=8,
            moe_topk=3,
            head_dim=16,
            attention_bias=True,
            rope_parameters=dict(rope_type="dynamic", rope_theta=500.0, alpha=50.0, factor=1.0),
        ),
    ),
    "hunyuan-moe-tied": (
        "single",
        HunYuanMoEV1Config(
            **SIZES | dict(intermediate_size=24),
            num_experts=8,
            moe_topk=3,
            head_dim=12,
            tie_word_embeddings=True,
            rms_norm_eps=EPS,
        ),
    ),
    "dots1-single": (
        "single",
        Dots1Config(
            **SIZES,
            **ROUTED,
            n_routed_experts=12,
            n_group=4,
            topk_group=2,
            n_shared_experts=2,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            first_k_dense_replace=1,
            rms_norm_eps=EPS,
            attention_bias=True,
            sliding_window=20,
            max_window_layers=2,
        ),
    ),
    "dots1-tied": (
        "single",
        Dots1Config(**SIZES, **ROUTED, n_routed_experts=8, n_shared_experts=1, tie_word_embeddings=True),
    ),
    "solar-open": (
        "single",
        SolarOpenConfig(
            **OF_SOLAR,
            n_routed_experts=8,
            attention_bias=True,
            norm_topk_prob=False,
            rope_parameters=dict(rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=64),
        ),
    ),
    "solar-open-tied": (
        "single",
        SolarOpenConfig(**OF_SOLAR, n_routed_experts=12, n_group=4, topk_group=2, tie_word_embeddings=True),
    ),
    "bailing": (
        "bailing",
        Glm4MoeConfig(
            **SIZES,
            **ROUTED,
            n_routed_experts=12,
            n_group=4,
            topk_group=2,
            use_qk_norm=True,
            rms_norm_eps=EPS,
            routed_scaling_factor=2.5,
            first_k_dense_replace=1,
            num_mtp_layers=0,
        ),
    ),
    "exaone-moe": (
        "exaone",
        ExaoneMoeConfig(
            **SIZES,
            **ROUTED,
            num_experts=12,
            n_group=4,
            topk_group=2,
            num_shared_experts=2,
            rms_norm_eps=EPS,
            sliding_window=20,
            sliding_window_pattern=3,
        ),
    ),
    "exaone-moe-tied": (
        "exaone",
        ExaoneMoeConfig(
            **SIZES,
            **ROUTED,
            num_experts=8,
            tie_word_embeddings=True,
            sliding_window=7,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            mlp_layer_types=["sparse", "dense", "sparse"],
        ),
    ),
    "hy-v3": ("hy_v3", HYV3Config(**SIZES, **ROUTED, num_experts=8, num_shared_experts=2, attention_bias=True)),
    "hy-v3-tied": (
        "hy_v3",
        HYV3Config(
            **SIZES,
            **ROUTED,
            num_experts=8,
            router_scaling_factor=1.5,
            rms_norm_eps=EPS,
            tie_word_embeddings=True,
            mlp_layer_types=["sparse", "dense", "sparse"],
        ),
    ),
    "ernie4-5-moe": (
        "ernie",
        Ernie4_5_MoeConfig(
            **SIZES, head_dim=16, moe_intermediate_size=24, moe_k=3, moe_num_experts=8, tie_word_embeddings=False
        ),
    ),
    "ernie4-5-moe-tied": (
        "ernie",
        Ernie4_5_MoeConfig(
            **SIZES,
            head_dim=16,
            moe_intermediate_size=24,
            moe_k=3,
            moe_num_experts=8,
            moe_num_shared_experts=1,
            moe_layer_end_index=1,
            rms_norm_eps=EPS,
        ),
    ),
    "mistral4": (
        "single",
        Mistral4Config(
            **LATENT,
            **dict(q_lora_rank=28, pad_token_id=0),
            rope_parameters={**YARN, "mscale": 1.0, "llama_4_scaling_beta": 0.7, "partial_rotary_factor": 0.4},
        ),
    ),
    "llama4-scout": (
        "llama4",
        Llama4TextConfig(
            **OF_LLAMA4,
            no_rope_layers=[1, 0, 1],
            rms_norm_eps=EPS,
            tie_word_embeddings=True,
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=10000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=1.0,  # as Scout's
                original_max_position_embeddings=64,
            ),
        ),
    ),
    "llama4-maverick": (
        "stacked",
        Llama4TextConfig(
            **OF_LLAMA4,
            no_rope_layer_interval=2,
            interleave_moe_layer_step=2,
            use_qk_norm=False,
            attention_bias=True,
        ),
    ),
}

LAYOUTS = {  # names of checkpoints where they aren't transformers' own
    "mixtral": {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
    "granite": {
        "experts.gate_up_proj": "input_linear.weight",
        "experts.down_proj": "output_linear.weight",
        "router.weight": "router.layer.weight",
    },
    "hy_v3": {
        "mlp.gate.weight": "mlp.router.gate.weight",
        "mlp.e_score_correction_bias": "mlp.expert_bias",
        "shared_experts": "shared_mlp",
    },
    "ernie": {"gate.moe_statics": "moe_statics"},
    "exaone": {"gate.e_score_correction_bias": "e_score_correction_bias"},
    "bailing": {
        "embed_tokens": "word_embeddings",
        "self_attn.o_proj": "attention.dense",
        "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm",
        "gate.e_score_correction_bias": "gate.expert_bias",
    },
}
# Of Ling 2, which is GLM-4.5's class under names of its own.
BAILING = {
    "model_type": "bailing_moe",
    "architectures": ["BailingMoeV2ForCausalLM"],
    "score_function": "sigmoid",
    "num_experts": 12,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.5,
}


def save(model: torch.nn.Module, layout: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model.config.save_pretrained(folder)
    if folder.name.startswith("kimi"):  # which is DeepSeek-V3's class under a name of its own
        config = json.loads((folder / "config.json").read_text()) | {"model_type": "kimi_k2"}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if layout == "llama4":  # the text model within one that sees pictures
        text = json.loads((folder / "config.json").read_text())
        outer = {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"], "text_config": text}
        (folder / "config.json").write_text(json.dumps(outer, indent=2) + "\n")
    if layout == "bailing":
        config = json.loads((folder / "config.json").read_text())
        config = {key: value for key, value in config.items() if key not in ("n_routed_experts", "n_shared_experts")}
        (folder / "config.json").write_text(json.dumps(config | BAILING, indent=2) + "\n")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, _, leaf = name.rpartition(".")
        if layout in ("stacked", "granite", "llama4") or not stem.endswith(".experts"):
            tensors[name] = tensor
        elif leaf == "down_proj":
            tensors |= {f"{stem}.{i}.down_proj.weight": matrix for i, matrix in enumerate(tensor)}
        else:
            for i, matrix in enumerate(tensor):
                gate, up = matrix.chunk(2)
                tensors |= {f"{stem}.{i}.gate_proj.weight": gate, f"{stem}.{i}.up_proj.weight": up}
    if layout == "bailing":
        for name in [name for name in tensors if name.endswith("q_proj.weight")]:
            parts = [tensors.pop(name.replace("q_proj", each)) for each in ("q_proj", "k_proj", "v_proj")]
            tensors[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat(parts)
    for ours, theirs in LAYOUTS.get(layout, {}).items():
        tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    if layout == "llama4":
        tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        tensors["vision_model.class_embedding"] = torch.ones(4)  # of a tower, which nobody reads
    tensors = {name.replace("attn.sinks", "attn.attention_sink_bias"): tensor for name, tensor in tensors.items()}
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    if layout == "stacked":
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    # an expert's tensors are spread over the files, as where a published shard ends within a layer
    files = {name: f"model-0000{1 + i % 3}-of-00003.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        part = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def shared_block() -> dict[str, torch.Tensor]:
    """Weights by the names that a layer of a checkpoint gives them, `x` [3, 5, d] and `out`."""
    torch.manual_seed(10)
    config = Qwen3NextConfig(
        hidden_size=48, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24,
        shared_expert_intermediate_size=40, norm_topk_prob=True,
    )  # fmt: skip
    block = Qwen3NextSparseMoeBlock(config).float().eval()
    randomise(block, False)
    with torch.no_grad():
        x = torch.randn(3, 5, 48)
        out = block(x)
    return {**{name: p.detach().clone() for name, p in block.named_parameters()}, "x": x, "out": out.contiguous()}


def main() -> None:
    (HERE / "expected").mkdir(exist_ok=True)
    for seed, (name, (layout, config)) in enumerate(VARIANTS.items(), start=20):
        if name not in (sys.argv[1:] or VARIANTS):
            continue
        torch.manual_seed(seed)
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        make = Mistral4ForCausalLM if name.startswith("mistral4") else AutoModelForCausalLM.from_config
        model = make(config).float().eval()
        randomise(model, config.tie_word_embeddings)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape))
        if layout == "llama4":  # else each token's likeliest successor is itself
            model.model.embed_tokens.weight.data.mul_(0.08)
        if layout == "ernie":  # of whose scores one in eight is the mean
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("e_score_correction_bias"):
                    parameter.data.mul_(0.3)
        save(model, layout, HERE / "checkpoints" / name)
        tensors = expected(model)
        save_file(tensors, HERE / "expected" / f"{name}.safetensors")
        print(name, f"logits spread {tensors['logits_150'].std():.2f}", tensors["greedy_33"].unique().numel())
    (HERE / "moe").mkdir(exist_ok=True)
    save_file(shared_block(), HERE / "moe" / "shared.safetensors")


if __name__ == "__main__":
    main()
