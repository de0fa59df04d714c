"""Make tests/golden/checkpoints and tests/golden/expected: tiny dense models and what transformers computes.

Needs PyTorch, which jaxspec and its tests do not. Make an environment for it once, then run this from anywhere:

    python3.12 -m venv torch-venv
    torch-venv/bin/pip install torch transformers==5.23.0 safetensors
    torch-venv/bin/python tests/golden/make_llama_qwen3.py [NAME ...]

`checkpoints/NAME` is a Hugging Face folder in float32. `expected/NAME.safetensors` holds, for each prompt length T in
LENGTHS: `ids_T` i32[T], `logits_T` f32[T, v], and `hidden_T` f32[len(LAYERS), T, d], the residual stream that leaves
the decoder layers LAYERS (0-based), before any norm. Prompts begin alike, so a batch of them can be padded and cut.
`greedy_T` i32[48], of T in CONTINUED, goes on from `ids_T`: each token is the argmax after those before it.

LongRoPE's texts have its long factors at any length, where a longer context is configured; `short_T` f32[T, v] are the
logits of transformers' own choice at T = 33.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    GraniteConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)

HERE = Path(__file__).resolve().parent
LENGTHS = (1, 2, 7, 16, 17, 33, 64, 150)
CONTINUED = (1, 7, 33, 150)
NEW = 48
LAYERS = (0, 2)  # the first, and the last: there Hugging Face's own `hidden_states` shows the normed output instead

SIZES = dict(
    vocab_size=64,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    dtype="float32",
)
# Within 150 tokens some frequencies are kept, some divided and some interpolated only if the original context is short.
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = dict(rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=64, beta_fast=4.0)
EPS = 0.02  # large enough that leaving it out, or using another, shows
IDS = dict(pad_token_id=0, eos_token_id=1)  # GLM's own lie beyond such a vocabulary
MUP = dict(embedding_multiplier=3.0, residual_multiplier=1.4 / 3**0.5, logits_scaling=3.0)
LONGROPE = dict(
    rope_type="longrope", rope_theta=500.0, partial_rotary_factor=0.75,
    short_factor=[1.0, 1.1, 1.3, 1.5, 1.8, 2.0], long_factor=[1.0, 1.4, 2.5, 4.0, 6.0, 9.0],
)  # fmt: skip
NEAR = dict(rope_type="default", rope_theta=50.0)
PARTIAL = dict(rope_type="proportional", rope_theta=500.0, partial_rotary_factor=0.25)
WITHOUT_INPUTS = dict(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)
VARIANTS = {
    "llama-untied": LlamaConfig(**SIZES, head_dim=16, tie_word_embeddings=False),
    "llama-tied-llama3": LlamaConfig(**SIZES, head_dim=32, tie_word_embeddings=True, rope_parameters=LLAMA3),
    "llama-biases": LlamaConfig(
        **{**SIZES, "num_key_value_heads": 1}, attention_bias=True, mlp_bias=True, rms_norm_eps=EPS
    ),
    "qwen3-tied": Qwen3Config(**SIZES, head_dim=12, tie_word_embeddings=True),
    "qwen3-untied": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False, attention_bias=True, rms_norm_eps=EPS),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-yarn": Qwen2Config(**SIZES, tie_word_embeddings=False, rms_norm_eps=EPS, rope_parameters=YARN),
    "mistral-untied": MistralConfig(**SIZES, head_dim=16, tie_word_embeddings=False, sliding_window=None),
    "mistral-tied-linear": MistralConfig(
        **SIZES, head_dim=32, tie_word_embeddings=True, sliding_window=None, rms_norm_eps=EPS,
        rope_parameters=dict(rope_type="linear", rope_theta=500.0, factor=4.0),
    ),
    "glm4-untied": Glm4Config(**SIZES, head_dim=16, attention_bias=True, **IDS),
    "glm4-tied": Glm4Config(
        **SIZES, head_dim=24, tie_word_embeddings=True, attention_bias=False, rms_norm_eps=EPS, **IDS
    ),
    "mistral-window": MistralConfig(**SIZES, head_dim=16, tie_word_embeddings=False, sliding_window=20),
    "qwen2-window": Qwen2Config(
        **SIZES, tie_word_embeddings=False, use_sliding_window=True, sliding_window=33, max_window_layers=1
    ),
    "gemma3-tied": Gemma3TextConfig(
        **SIZES, head_dim=16, query_pre_attn_scalar=24, sliding_window=20, sliding_window_pattern=3,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", rope_theta=500.0, factor=4.0),
            sliding_attention=dict(rope_type="default", rope_theta=50.0),
        ),
    ),
    "gemma3-untied": Gemma3TextConfig(
        **SIZES, head_dim=32, query_pre_attn_scalar=32, sliding_window=7, attention_bias=True, rms_norm_eps=EPS,
        tie_word_embeddings=False, layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "granite-untied": GraniteConfig(
        **SIZES, embedding_multiplier=6.0, attention_multiplier=0.4, residual_multiplier=0.3, logits_scaling=3.0,
    ),
    "granite-tied": GraniteConfig(
        **SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rms_norm_eps=EPS,
        embedding_multiplier=12.0, attention_multiplier=0.1, residual_multiplier=0.7, logits_scaling=0.5,
    ),
    "smollm3-tied": SmolLM3Config(**SIZES, no_rope_layer_interval=2, **IDS),
    "smollm3-untied": SmolLM3Config(
        **SIZES, tie_word_embeddings=False, no_rope_layers=[0, 1, 1], attention_bias=True, rms_norm_eps=EPS,
        rope_parameters=YARN, **IDS,
    ),
    "seed_oss-untied": SeedOssConfig(**SIZES, head_dim=16),
    "seed_oss-tied": SeedOssConfig(
        **SIZES, head_dim=32, tie_word_embeddings=True, attention_out_bias=True, rms_norm_eps=EPS,
    ),
    "ernie4_5-tied": Ernie4_5Config(**SIZES, head_dim=16),
    "ernie4_5-untied": Ernie4_5Config(
        **SIZES, head_dim=24, tie_word_embeddings=False, use_bias=True, rms_norm_eps=EPS,
    ),
    "olmo2-untied": Olmo2Config(**SIZES, **IDS),
    "olmo2-tied": Olmo2Config(
        **{**SIZES, "num_key_value_heads": 4}, tie_word_embeddings=True, attention_bias=True, rms_norm_eps=EPS, **IDS,
    ),
    "olmo3-untied": Olmo3Config(
        **SIZES, sliding_window=20, layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters=dict(full_attention=YARN, sliding_attention=dict(rope_type="default", rope_theta=500.0)), **IDS,
    ),
    "olmo3-tied": Olmo3Config(
        **SIZES, tie_word_embeddings=True, attention_bias=True, sliding_window=33, rms_norm_eps=EPS, **IDS
    ),
    "exaone4-untied": Exaone4Config(
        **SIZES, sliding_window=None, layer_types=["full_attention"] * 3, rms_norm_eps=EPS, rope_parameters=LLAMA3,
    ),
    "exaone4-tied": Exaone4Config(**SIZES, tie_word_embeddings=True, sliding_window=20, sliding_window_pattern=3),
    "hunyuan_v1_dense-tied": HunYuanDenseV1Config(
        **SIZES, head_dim=16, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="dynamic", rope_theta=500.0, alpha=50.0, factor=1.0),
    ),
    "hunyuan_v1_dense-untied": HunYuanDenseV1Config(
        **SIZES, head_dim=24, attention_bias=True, rms_norm_eps=EPS,
    ),
    "phi3-untied": Phi3Config(**SIZES, **IDS),
    "phi3-tied": Phi3Config(
        **SIZES, tie_word_embeddings=True, sliding_window=33, rms_norm_eps=EPS,
        rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5), **IDS,
    ),
    "gemma4-tied": Gemma4TextConfig(
        **SIZES, **WITHOUT_INPUTS, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
        sliding_window=20, final_logit_softcapping=0.4, layer_types=["sliding_attention"] * 2 + ["full_attention"],
        rope_parameters=dict(sliding_attention=NEAR, full_attention=PARTIAL), **IDS,
    ),
    "gemma4-untied": Gemma4TextConfig(
        **SIZES, **WITHOUT_INPUTS, head_dim=32, global_head_dim=16, sliding_window=7, rms_norm_eps=EPS,
        attention_bias=True, tie_word_embeddings=False,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters=dict(sliding_attention=NEAR, full_attention=PARTIAL | dict(factor=4.0)), **IDS,
    ),
    "gemma4-inputs": Gemma4TextConfig(
        **SIZES | dict(num_hidden_layers=5), hidden_size_per_layer_input=8, vocab_size_per_layer_input=64, head_dim=16,
        global_head_dim=32, sliding_window=20, num_kv_shared_layers=3, use_double_wide_mlp=True, rms_norm_eps=EPS,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters=dict(sliding_attention=NEAR, full_attention=PARTIAL), **IDS,
    ),
    "gemma4-experts": Gemma4TextConfig(
        **SIZES, **WITHOUT_INPUTS, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
        sliding_window=20, enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=24,
        layer_types=["sliding_attention"] * 2 + ["full_attention"], tie_word_embeddings=False,
        rope_parameters=dict(sliding_attention=NEAR, full_attention=PARTIAL), **IDS,
    ),
    "phi3-longrope": Phi3Config(
        **SIZES | dict(hidden_size=64), original_max_position_embeddings=64, rope_parameters={**LONGROPE}, **IDS,
    ),
    "phi3-longrope-short": Phi3Config(
        **SIZES | dict(hidden_size=64), original_max_position_embeddings=512, tie_word_embeddings=True,
        rope_parameters={**LONGROPE, "attention_factor": 1.3}, **IDS,
    ),
    "arcee-untied": ArceeConfig(**SIZES, **IDS, head_dim=16, attention_bias=True, rms_norm_eps=EPS),
    "arcee-tied": ArceeConfig(**SIZES, **IDS, head_dim=16, tie_word_embeddings=True, mlp_bias=True),
    "minicpm-tied": GraniteConfig(
        **SIZES, **MUP, tie_word_embeddings=True, attention_multiplier=12**-0.5, rms_norm_eps=EPS,
        rope_parameters={**LONGROPE, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 64},
    ),
    "minicpm-untied": GraniteConfig(**SIZES, **MUP, attention_multiplier=12**-0.5),
    "cohere2-tied": Cohere2Config(
        **SIZES, sliding_window=20, sliding_window_pattern=2, logit_scale=1.5, rope_parameters=LLAMA3, **IDS
    ),
    "cohere2-untied": Cohere2Config(
        **SIZES | dict(num_attention_heads=2), sliding_window=7, attention_bias=True, tie_word_embeddings=False,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"], layer_norm_eps=EPS, logit_scale=0.75,
        **IDS,
    ),
    "ministral3-untied": Ministral3Config(
        **SIZES, **IDS, head_dim=16, rms_norm_eps=EPS, rope_parameters=YARN | dict(llama_4_scaling_beta=0.7),
    ),
    "ministral3-tied": Ministral3Config(
        **SIZES, **IDS, head_dim=16, tie_word_embeddings=True, sliding_window=33,
        rope_parameters=YARN | dict(original_max_position_embeddings=32, llama_4_scaling_beta=0.4, mscale=1.0),
    ),
    # Caps so low that they bind, of scores and of logits; then none of scores.
    "gemma2-tied": Gemma2Config(
        **SIZES, head_dim=16, query_pre_attn_scalar=24, sliding_window=20, attn_logit_softcapping=0.8,
        final_logit_softcapping=2.0,
    ),
    "gemma2-untied": Gemma2Config(
        **SIZES, head_dim=32, query_pre_attn_scalar=32, sliding_window=7, attention_bias=True, rms_norm_eps=EPS,
        tie_word_embeddings=False, layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        attn_logit_softcapping=None, rope_parameters=dict(rope_type="linear", rope_theta=500.0, factor=4.0),
    ),
}  # fmt: skip
# MiniCPM is Granite's class under names of its own.
MINICPM = dict(
    model_type="minicpm", architectures=["MiniCPMForCausalLM"], scale_emb=3, scale_depth=1.4, dim_model_base=16,
    mup_denominator=3,
)  # fmt: skip


def randomise(model: torch.nn.Module, tied: bool) -> None:
    """Draw every parameter: transformers starts biases at 0 and norms at 1, where leaving them out goes unnoticed."""
    gemma = type(model).__name__.startswith("Gemma")
    centre = 0 if type(model).__name__.startswith("Gemma3") else 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if name.endswith(".bias"):
                parameter.copy_(0.3 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(centre + 0.3 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise * ((0.05 if gemma else 0.3) if tied else 1.0))
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.3 * torch.randn(buffer.shape))


def expected(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    captured: dict[int, torch.Tensor] = {}
    for i in LAYERS:
        model.model.layers[i].register_forward_hook(lambda module, args, out, i=i: captured.update({i: out[0]}))
    ids = torch.randint(0, model.config.vocab_size, (max(LENGTHS),))
    tensors, rope = {}, model.config.rope_parameters
    if rope.get("rope_type") == "longrope" and rope["original_max_position_embeddings"] < max(LENGTHS):
        with torch.no_grad():
            tensors["short_33"] = model(ids[None, :33]).logits[0].clone()
            natural = model(ids[None]).logits[0]
        rope["original_max_position_embeddings"] = 0  # shorter than any text
        with torch.no_grad():
            assert torch.equal(model(ids[None]).logits[0], natural)
    for length in LENGTHS:
        with torch.no_grad():
            logits = model(ids[None, :length]).logits[0]
        tensors[f"ids_{length}"] = ids[:length].to(torch.int32).clone()
        tensors[f"logits_{length}"] = logits.clone()
        tensors[f"hidden_{length}"] = torch.stack([captured[i] for i in LAYERS])
    for length in CONTINUED:
        tensors[f"greedy_{length}"] = continuation(model, tensors[f"ids_{length}"])
    return tensors


def continuation(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    for _ in range(NEW):
        with torch.no_grad():
            newest = model(ids[None].long()).logits[0, -1].argmax()
        ids = torch.cat([ids, newest[None].to(ids.dtype)])
    return ids[-NEW:].clone()


def main() -> None:
    (HERE / "expected").mkdir(exist_ok=True)
    wanted = sys.argv[1:] or VARIANTS
    for seed, (name, config) in enumerate(VARIANTS.items()):
        if name not in wanted:
            continue
        torch.manual_seed(seed)
        config._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_config(config).float().eval()
        randomise(model, config.tie_word_embeddings)
        shutil.rmtree(HERE / "checkpoints" / name, ignore_errors=True)
        model.save_pretrained(HERE / "checkpoints" / name)
        (HERE / "checkpoints" / name / "generation_config.json").unlink(missing_ok=True)
        if name.startswith("minicpm"):
            file = HERE / "checkpoints" / name / "config.json"
            saved = {k: v for k, v in json.loads(file.read_text()).items() if not k.endswith(("plier", "_scaling"))}
            file.write_text(json.dumps(saved | MINICPM, indent=2) + "\n")
        tensors = expected(model)
        save_file(tensors, HERE / "expected" / f"{name}.safetensors")
        print(name, f"logits spread {tensors['logits_150'].std():.2f}", tensors["greedy_33"].unique().numel())


if __name__ == "__main__":
    main()
