"""Tiny random checkpoints for tests: Hugging Face folders written with numpy in a few milliseconds.

They differ from real ones in size alone: every tensor is random (norm weights and biases included, which a fresh model
has at one and zero, where many mistakes don't show), and greedy output wanders instead of repeating one token.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxspec.models.families import MODELS
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import is_param

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTE_VOCAB = 256 + len(SPECIAL_TOKENS)  # what a checkpoint with a tokenizer needs at least
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

ARCHITECTURES = {
    "arcee": "ArceeForCausalLM",
    "bailing_moe": "BailingMoeV2ForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "gemma4_unified": "Gemma4UnifiedForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "hy_v3": "HYV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen4_exp": "Qwen4ExpForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "solar_open": "SolarOpenForCausalLM",
}
LINEAR = dict(
    full_attention_interval=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=4,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=16)
LATENT = dict(
    q_lora_rank=12,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=12,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    first_k_dense_replace=1,
)
GEMMA4 = dict(
    global_head_dim=32,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    sliding_window=20,
    final_logit_softcapping=2.0,
    hidden_size_per_layer_input=0,
)
GEMMA4_ALL = dict(  # that some Gemma 4 or other has
    num_hidden_layers=4,
    layer_types=["sliding_attention", "full_attention"] * 2,
    num_kv_shared_layers=2,
    use_double_wide_mlp=True,
    hidden_size_per_layer_input=8,
    enable_moe_block=True,
    num_experts=8,
    top_k_experts=2,
    moe_intermediate_size=32,
)
GRANITE = dict(embedding_multiplier=6.0, attention_multiplier=0.4, residual_multiplier=0.3, logits_scaling=3.0)
FEW_EXPERTS = dict(num_local_experts=8, num_experts_per_tok=2, intermediate_size=24)
SIGMOID = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, routed_scaling_factor=1.5)
# what a family's config has beside the keys that all have
EXTRA = {
    "arcee": dict(hidden_act="relu2"),
    "bailing_moe": SIGMOID | dict(num_experts=8, n_group=2, topk_group=1, score_function="sigmoid"),
    "dots1": SIGMOID | dict(n_shared_experts=1, first_k_dense_replace=1),
    "solar_open": SIGMOID,
    "ernie4_5_moe": dict(moe_num_experts=8, moe_k=2, moe_intermediate_size=24, moe_layer_start_index=0),
    "exaone_moe": SIGMOID | dict(num_experts=8, first_k_dense_replace=0, sliding_window=20, sliding_window_pattern=2),
    "hy_v3": dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=0),
    "deepseek_v2": LATENT | dict(q_lora_rank=None),
    "deepseek_v3": LATENT | dict(n_group=4, topk_group=2),
    "glm4_moe_lite": LATENT,
    "mistral4": LATENT,
    "kimi_k2": LATENT | dict(n_group=1, topk_group=1),
    "kimi_linear": LATENT
    | dict(
        q_lora_rank=None,
        num_experts=8,
        num_experts_per_token=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_heads=8,
        linear_head_dim=16,
    ),
    "cohere2": dict(sliding_window=20, sliding_window_pattern=2, logit_scale=0.25),
    "exaone4": dict(sliding_window=20, sliding_window_pattern=2),
    "gemma2": dict(
        query_pre_attn_scalar=24, sliding_window=20, attn_logit_softcapping=0.8, final_logit_softcapping=2.0
    ),
    "gemma3": dict(query_pre_attn_scalar=24, sliding_window=20, sliding_window_pattern=2, rope_local_base_freq=100.0),
    "gemma4": GEMMA4,
    "gemma4_unified": GEMMA4,
    "glm4_moe": SIGMOID,
    "granite": GRANITE,
    "granitemoe": GRANITE | FEW_EXPERTS,
    "granitemoehybrid": GRANITE
    | FEW_EXPERTS
    | dict(
        shared_intermediate_size=32,
        layer_types=["linear_attention", "full_attention"],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=16,
    ),
    "granitemoeshared": GRANITE | FEW_EXPERTS | dict(shared_intermediate_size=32),
    "hunyuan_v1_moe": dict(num_experts=8, moe_topk=2, intermediate_size=24),
    "llama4": dict(
        num_local_experts=8,
        intermediate_size=24,
        intermediate_size_mlp=48,
        no_rope_layer_interval=2,
        attention_chunk_size=16,
        floor_scale=8,
        attn_scale=0.5,
    ),
    "minicpm": dict(scale_emb=6.0, scale_depth=1.4, dim_model_base=16),
    "mixtral": FEW_EXPERTS,
    "olmoe": dict(num_experts=8, num_experts_per_tok=2, intermediate_size=24),
    "qwen2_moe": EXPERTS,
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=32, sliding_window=20),
    "mimo_v2_flash": dict(
        num_key_value_heads=1,
        head_dim=24,
        v_head_dim=16,
        sliding_window_size=20,
        hybrid_layer_pattern=[0, 1],
        moe_layer_freq=[0, 1],
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
    ),
    "minimax_m2": dict(num_local_experts=8, num_experts_per_tok=2, intermediate_size=24, rotary_dim=8),
    "nemotron_h": dict(
        hybrid_override_pattern="M*EM-",
        n_groups=8,
        ssm_state_size=16,
        mamba_num_heads=16,
        mamba_head_dim=8,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=16,
        moe_latent_size=16,
    ),
    "olmo3": dict(sliding_window=20),
    "qwen3_5": LINEAR,
    "qwen3_5_moe": LINEAR | EXPERTS,
    "qwen3_moe": dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True),
    "qwen3_next": LINEAR | EXPERTS,
    "qwen3_vl_moe": dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24),
    "qwen4_exp": LINEAR
    | EXPERTS
    | dict(
        hc_count=2,
        hc_lowrank=8,
        ple_layer_ids=[1],
        ple_embed_dim=32,
        ple_conv_kernel_size=3,
        heads_per_ngram=2,
        ngram_vocab_size_base=20,
        make_ngram_vocab_size_divisible_by=8,
        split_ngram_parts=2,
        indexer_n_heads=6,
        indexer_kv_heads=1,
        indexer_head_dim=12,
        indexer_budget=16,
        indexer_compress_ratio=4,
        output_gate_type="sigmoid",
        eos_token_id=1,
    ),
    "smollm3": dict(no_rope_layer_interval=2),
}

_root = tempfile.TemporaryDirectory(prefix="jaxspec-tiny-")  # removed when the process ends


def tiny_config(family: str = "qwen3", vocab: int = 64, eos: int | None = None, **overrides: Any) -> dict[str, Any]:
    """A `config.json` as a dict: hidden 32, 2 layers, 4 heads of width 16 (not hidden/heads), 2 KV heads.

    `overrides` are keys of the file, for example `num_hidden_layers=1` or `tie_word_embeddings=True`.
    """
    return {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "eos_token_id": eos,
        "torch_dtype": "float32",
        **EXTRA.get(family, {}),
        **overrides,
    }


def tiny_checkpoint(
    family: str = "qwen3", vocab: int = 64, seed: int = 0, tokenizer: bool = False, eos: int | None = None, **overrides
) -> Path:
    """Write a random float32 checkpoint and return its folder; the same arguments return the same folder.

    `tokenizer` adds a byte-level one (token id = UTF-8 byte, then `SPECIAL_TOKENS`) with a chat template; the
    vocabulary must then hold `BYTE_VOCAB` tokens. A test that changes the files must copy the folder first.
    """
    if tokenizer and vocab < BYTE_VOCAB:
        raise ValueError(f"a byte-level tokenizer needs vocab >= {BYTE_VOCAB}, got {vocab}")
    return _written(json.dumps(tiny_config(family, vocab, eos, **overrides), indent=1), seed, tokenizer)


@functools.cache
def _written(config: str, seed: int, tokenizer: bool) -> Path:
    hf = json.loads(config)
    prefix = f"{hf['model_type']}-{hf['vocab_size']}-{seed}-"
    folder = Path(tempfile.mkdtemp(dir=_root.name, prefix=prefix))
    (folder / "config.json").write_text(config)
    save_file(random_tensors(hf, seed), folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer:
        write_byte_tokenizer(folder)
    return folder


def random_tensors(hf: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Checkpoint tensors by Hugging Face name, float32, drawn so that activations and logits keep a spread near one."""
    config = ModelConfig.from_hf(hf)
    rng = np.random.default_rng(seed)
    declared = jax.tree.leaves(MODELS[config.model_type].tensors(config.decoder), is_leaf=is_param)
    tensors = {}
    for param in declared:
        for name, shape in param.stored().items():
            noise = rng.standard_normal(shape, dtype=np.float32)
            if param.init != "normal":
                tensors[name] = (param.init == "ones") + 0.2 * noise
            elif param.transpose or param.stacked:
                tensors[name] = noise * shape[1] ** -0.5
            else:  # a tied embedding is also the head: small, or every token's likeliest successor is itself
                tensors[name] = noise * (0.2 if config.decoder.tied else 1.0)
    return {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()}


def rewrite(folder: Path, more: Mapping[str, np.ndarray] | None = None, drop: Collection[str] = ()) -> None:
    """Rewrite a checkpoint's tensors: add or replace `more`, leave out `drop`."""
    held = load_file(folder / "model.safetensors")
    assert held.keys() >= set(drop), drop
    tensors = {name: tensor for name, tensor in held.items() if name not in drop} | (more or {})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def shaken(target: Path, by: float) -> Path:
    """A copy with noise on each tensor: as a draft model it agrees with its target often, but not always."""
    folder = shutil.copytree(target, target.with_name(f"{target.name}-noisy"), dirs_exist_ok=True)
    rng, tensors = np.random.default_rng(3), load_file(target / "model.safetensors")
    noise = {name: np.float32(by) * rng.standard_normal(v.shape, np.float32) for name, v in tensors.items()}
    rewrite(folder, {name: tensors[name] + noise[name] for name in tensors})
    return folder


def write_byte_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: one token a byte, so any text round-trips and none merges."""
    alphabet = _byte_characters()
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself where printable, otherwise 256 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
