"""Sizes of the models and drafters that scripts lower and time: `python scripts/configs.py OUT` writes a folder of each
with its config.json, for `--load-format dummy`. `-16` is cut to so many layers. `python scripts/configs.py --small OUT`
makes each so small that four virtual CPU devices can rehearse a benchmark."""

import json
import sys
from pathlib import Path

QWEN3_8B = dict(
    model_type="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, rope_theta=1e6, max_position_embeddings=40960,
)  # fmt: skip
QWEN3_30B = dict(
    model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48,
    num_attention_heads=32, num_key_value_heads=4, head_dim=128, rope_theta=1e6, max_position_embeddings=40960,
    num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
)  # fmt: skip
QWEN35_35B = dict(
    model_type="qwen3_5_moe", vocab_size=248320, hidden_size=2048, num_hidden_layers=40,
    num_attention_heads=16, num_key_value_heads=2, head_dim=256, rope_theta=1e7, max_position_embeddings=262144,
    num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512,
    linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
    linear_conv_kernel_dim=4, mtp_num_hidden_layers=1,
)  # fmt: skip
QWEN35_35B_SEES = QWEN35_35B | dict(
    vision_config=dict(depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16, out_hidden_size=2048)
)
GPT_OSS_20B = dict(
    model_type="gpt_oss", vocab_size=201088, num_hidden_layers=24, num_local_experts=32,
    quantization_config=dict(quant_method="mxfp4"),
)  # fmt: skip
SMOLLM2 = dict(
    model_type="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
    num_attention_heads=9, num_key_value_heads=3, rope_theta=1e5, max_position_embeddings=8192,
    tie_word_embeddings=True,
)  # fmt: skip
QWEN3_0_6B = QWEN3_8B | dict(
    hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, tie_word_embeddings=True
)
EAGLE3 = dict(architectures=["LlamaForCausalLMEagle3"], model_type="llama", num_hidden_layers=1)
EAGLE3_8B = QWEN3_8B | EAGLE3 | dict(num_key_value_heads=8, draft_vocab_size=32000)
EAGLE3_SMALL = SMOLLM2 | EAGLE3 | dict(num_attention_heads=9, draft_vocab_size=16384, tie_word_embeddings=False)
EAGLE = dict(architectures=["EagleLlamaForCausalLM"], num_hidden_layers=1, bias=False)
EAGLE_SMALL = SMOLLM2 | EAGLE
DFLASH = dict(architectures=["DFlashDraftModel"], mask_token_id=5, block_size=16, model_type="qwen3")
DFLASH_8B = QWEN3_8B | DFLASH | dict(num_hidden_layers=3)
DFLASH_SMALL = SMOLLM2 | DFLASH | dict(num_hidden_layers=3, head_dim=64)
DSPARK = dict(
    architectures=["Qwen3DSparkModel"], mask_token_id=5, block_size=7, model_type="qwen3", markov_rank=256,
    enable_confidence_head=True, confidence_head_with_markov=True,
)  # fmt: skip
DSPARK_8B = QWEN3_8B | DSPARK | dict(num_hidden_layers=5)
DFLASH2 = dict(
    architectures=["DFlash2DraftModel"], mask_token_id=5, block_size=8, model_type="qwen3", conv_kernel_size=2,
    conv_group_size=16, selector_rank=256, selector_top_k=16, is_causal=False, use_sliding_window=True,
    sliding_window=2048, max_window_layers=0,
)  # fmt: skip
DFLASH2_8B = QWEN3_8B | DFLASH2 | dict(num_hidden_layers=5)
DOMINO = dict(
    architectures=["DominoDraftModel"], mask_token_id=5, block_size=16, model_type="qwen3", emb_dim=256,
    gru_hidden_dim=1024, pure_draft_prefix_len=1, shift_label=True,
)  # fmt: skip
DOMINO_8B = QWEN3_8B | DOMINO | dict(num_hidden_layers=5)
LILICORR = dict(
    architectures=["LiLiCorrDraftModel"], mask_token_id=5, block_size=16, model_type="qwen3",
    lilicorr_candidate_topk=16, lilicorr_hidden_size=1024, lilicorr_num_layers=2, lilicorr_num_heads=16,
    lilicorr_mlp_ratio=2.0, lilicorr_factor_dim=128, lilicorr_vector_eps=1e-6, lilicorr_logit_scale=10.0,
)  # fmt: skip
LILICORR_8B = QWEN3_8B | LILICORR | dict(num_hidden_layers=5)

GPT_OSS_120B = GPT_OSS_20B | dict(num_hidden_layers=36, num_local_experts=128)
LLAMA_8B = dict(
    model_type="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, rope_theta=5e5, max_position_embeddings=131072,
)  # fmt: skip
LLAMA_70B = LLAMA_8B | dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64)
LLAMA2_70B = LLAMA_70B | dict(vocab_size=32000, rope_theta=1e4, max_position_embeddings=4096)
QWEN3_235B = QWEN3_30B | dict(
    hidden_size=4096, intermediate_size=12288, num_hidden_layers=94, num_attention_heads=64, moe_intermediate_size=1536
)
QWEN3_NEXT = QWEN35_35B | dict(
    model_type="qwen3_next", vocab_size=151936, num_hidden_layers=48, num_experts=512, num_experts_per_tok=10,
    partial_rotary_factor=0.25, norm_topk_prob=True,
)  # fmt: skip
QWEN35_397B = QWEN35_35B | dict(
    hidden_size=4096, num_hidden_layers=60, num_attention_heads=32, num_experts=512, num_experts_per_tok=10,
    moe_intermediate_size=1024, shared_expert_intermediate_size=1024, linear_num_value_heads=64,
)  # fmt: skip
QWEN38_27B = dict(
    model_type="qwen3_5_text", vocab_size=248320, hidden_size=5120, intermediate_size=17408, num_hidden_layers=64,
    num_attention_heads=24, num_key_value_heads=4, head_dim=256, partial_rotary_factor=0.25, rope_theta=1e7,
    max_position_embeddings=262144, linear_num_key_heads=16, linear_num_value_heads=48, linear_key_head_dim=128,
    linear_value_head_dim=128, linear_conv_kernel_dim=4, full_attention_interval=4, mtp_num_hidden_layers=1,
    attn_output_gate=True, tie_word_embeddings=False,
)  # fmt: skip

GEMMA4_31B = dict(
    model_type="gemma4_text", vocab_size=262144, hidden_size=5376, intermediate_size=21504, num_hidden_layers=60,
    num_attention_heads=32, num_key_value_heads=16, num_global_key_value_heads=4, attention_k_eq_v=True,
    sliding_window=1024, final_logit_softcapping=30.0, hidden_size_per_layer_input=0, max_position_embeddings=262144,
)  # fmt: skip
GEMMA4_26B = GEMMA4_31B | dict(
    hidden_size=2816,
    intermediate_size=2112,
    num_hidden_layers=30,
    num_attention_heads=16,
    num_key_value_heads=8,
    num_global_key_value_heads=2,
    enable_moe_block=True,
    num_experts=128,
    top_k_experts=8,
    moe_intermediate_size=704,
)
GEMMA4_31B_ASSISTANT = dict(
    model_type="gemma4_assistant", architectures=["Gemma4AssistantForCausalLM"], backbone_hidden_size=5376,
    text_config=GEMMA4_31B | dict(
        hidden_size=1024, intermediate_size=8192, num_hidden_layers=4, num_kv_shared_layers=4,
        layer_types=[*["sliding_attention"] * 3, "full_attention"], final_logit_softcapping=None,
    ),
)  # fmt: skip
KIMI_LINEAR_48B = dict(
    model_type="kimi_linear", vocab_size=163840, hidden_size=2304, intermediate_size=9216, num_hidden_layers=27,
    num_attention_heads=32, num_key_value_heads=32, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128, mla_use_nope=True, model_max_length=1048576, rms_norm_eps=1e-5,
    linear_attn_config=dict(
        full_attn_layers=[4, 8, 12, 16, 20, 24, 27], kda_layers=[i for i in range(1, 27) if i % 4],
        head_dim=128, num_heads=32, short_conv_kernel_size=4,
    ),
    num_experts=256, num_experts_per_token=8, num_shared_experts=1, moe_intermediate_size=1024, moe_renormalize=True,
    routed_scaling_factor=2.446, first_k_dense_replace=1,
)  # fmt: skip
GLM45_AIR_FP8 = dict(
    model_type="glm4_moe", vocab_size=151552, hidden_size=4096, intermediate_size=10944, num_hidden_layers=46,
    num_attention_heads=96, num_key_value_heads=8, head_dim=128, attention_bias=True, rope_theta=1e6,
    max_position_embeddings=131072, n_routed_experts=128, num_experts_per_tok=8, moe_intermediate_size=1408,
    num_nextn_predict_layers=1,
    quantization_config=dict(
        quant_method="compressed-tensors", format="float-quantized", ignore=["lm_head"],
        config_groups=dict(group_0=dict(
            targets=["Linear"],
            weights=dict(num_bits=8, type="float", strategy="channel", symmetric=True),
            input_activations=dict(num_bits=8, type="float", strategy="token", symmetric=True, dynamic=True),
        )),
    ),
)  # fmt: skip
MINIMAX_M2_FP8 = dict(
    model_type="minimax_m2", vocab_size=200064, hidden_size=3072, intermediate_size=1536, num_hidden_layers=62,
    num_attention_heads=48, num_key_value_heads=8, head_dim=128, rotary_dim=64, rope_theta=5e6,
    max_position_embeddings=196608, num_local_experts=256, num_experts_per_tok=8,
    quantization_config=dict(
        quant_method="fp8", weight_block_size=[128, 128], modules_to_not_convert=["gate", "lm_head"]
    ),
)  # fmt: skip
DEEPSEEK_V3_FP8 = dict(
    model_type="deepseek_v3", vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
    num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048,
    n_shared_experts=1, n_group=8, topk_group=4, first_k_dense_replace=3, routed_scaling_factor=2.5,
    max_position_embeddings=163840, norm_topk_prob=True,
    quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128]),
)  # fmt: skip
NEMOTRON3_NANO = dict(
    model_type="nemotron_h", vocab_size=131072, hidden_size=2688, num_attention_heads=32, num_key_value_heads=2,
    head_dim=128, max_position_embeddings=262144,
    hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    mamba_num_heads=64, mamba_head_dim=64, n_groups=8, ssm_state_size=128, conv_kernel=4, n_routed_experts=128,
    num_experts_per_tok=6, moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
    routed_scaling_factor=2.5,
)  # fmt: skip

FOLDERS = {
    "qwen3-8b": QWEN3_8B, "qwen3-8b-eagle3": EAGLE3_8B, "qwen3-8b-dflash": DFLASH_8B, "qwen3-8b-dspark": DSPARK_8B,
    "qwen3-8b-domino": DOMINO_8B, "qwen3-8b-lilicorr": LILICORR_8B,
    "qwen3-30b-a3b": QWEN3_30B, "qwen3-235b-a22b": QWEN3_235B, "qwen3-next-80b": QWEN3_NEXT,
    "qwen3.5-35b-a3b": QWEN35_35B, "qwen3.5-35b-a3b-sees": QWEN35_35B_SEES, "qwen3.5-397b-a17b": QWEN35_397B,
    "qwen3.8-27b": QWEN38_27B, "qwen3.8-27b-16": QWEN38_27B | dict(num_hidden_layers=16),
    "gpt-oss-20b": GPT_OSS_20B, "gpt-oss-120b": GPT_OSS_120B, "llama-3.1-8b": LLAMA_8B, "llama-3.3-70b": LLAMA_70B,
    "gemma-4-31b": GEMMA4_31B, "gemma-4-31b-assistant": GEMMA4_31B_ASSISTANT, "gemma-4-26b-a4b": GEMMA4_26B,
    "kimi-linear-48b-a3b": KIMI_LINEAR_48B, "glm-4.5-air-fp8": GLM45_AIR_FP8, "nemotron-3-nano-30b-a3b": NEMOTRON3_NANO,
    "deepseek-v3": DEEPSEEK_V3_FP8,
    "minimax-m2": MINIMAX_M2_FP8, "minimax-m2-16": MINIMAX_M2_FP8 | dict(num_hidden_layers=16),
    "llama-2-70b": LLAMA2_70B, "llama-2-70b-eagle": LLAMA2_70B | EAGLE,
}  # fmt: skip


SMALL = dict(
    vocab_size=1024, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, head_dim=128, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=1024,
    shared_expert_intermediate_size=1024, linear_num_key_heads=8, linear_num_value_heads=8, linear_key_head_dim=64,
    linear_value_head_dim=64, draft_vocab_size=512,
)  # fmt: skip


def main() -> None:
    out, small = sys.argv[-1], sys.argv[1:-1] == ["--small"]
    if len(sys.argv) != 2 + small or out.startswith("-"):
        sys.exit(__doc__)
    for name, config in FOLDERS.items():
        if small:
            config = {key: min(value, SMALL[key]) if key in SMALL else value for key, value in config.items()}
        folder = Path(out, name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}, indent=1) + "\n")


if __name__ == "__main__":
    main()
