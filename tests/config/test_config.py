"""Configs read real files in both spellings, and refuse what can't work by naming the key or flag."""

from __future__ import annotations

import math

import pytest

from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.options import ConfigError
from jaxspec.models.description import (
    Attention,
    Decoder,
    DeltaRule,
    KimiDelta,
    Layer,
    Mixture,
    Mlp,
    Norm,
    SigmoidScores,
)
from jaxspec.models.families import MODELS
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.rope import of_context
from jaxspec.models.rope_scaling import LinearScaling, LongRope, NoRotation, Rope, RopeScaling, Yarn
from tests.support.tiny import tiny_config

LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192, rope_type="llama3")
LLAMA_31_8B = dict(
    architectures=["LlamaForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    bos_token_id=128000,
    eos_token_id=[128001, 128008, 128009],
    hidden_act="silu",
    hidden_size=4096,
    initializer_range=0.02,
    intermediate_size=14336,
    max_position_embeddings=131072,
    mlp_bias=False,
    model_type="llama",
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=8,
    pretraining_tp=1,
    rms_norm_eps=1e-05,
    rope_scaling=dict(factor=8.0, **LLAMA3),
    rope_theta=500000.0,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.42.3",
    use_cache=True,
    vocab_size=128256,
)
LLAMA_32_1B = {
    **LLAMA_31_8B,
    **dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64, tie_word_embeddings=True),
    **dict(rope_scaling=dict(factor=32.0, **LLAMA3), transformers_version="4.45.0.dev0"),
}
QWEN3_8B = dict(
    architectures=["Qwen3ForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    bos_token_id=151643,
    eos_token_id=151645,
    head_dim=128,
    hidden_act="silu",
    hidden_size=4096,
    initializer_range=0.02,
    intermediate_size=12288,
    max_position_embeddings=40960,
    max_window_layers=36,
    model_type="qwen3",
    num_attention_heads=32,
    num_hidden_layers=36,
    num_key_value_heads=8,
    rms_norm_eps=1e-06,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=None,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.51.0",
    use_cache=True,
    use_sliding_window=False,
    vocab_size=151936,
)
QWEN3_06B = {
    **QWEN3_8B,
    **dict(
        hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_hidden_layers=28, max_window_layers=28
    ),
    **dict(tie_word_embeddings=True),
}

QWEN3_30B_A3B = {
    **QWEN3_8B,
    **dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144),
    **dict(num_hidden_layers=48, num_key_value_heads=4, max_window_layers=48, decoder_sparse_step=1),
    **dict(moe_intermediate_size=768, mlp_only_layers=[], norm_topk_prob=True, num_experts=128, num_experts_per_tok=8),
    **dict(output_router_logits=False, router_aux_loss_coef=0.001),
}

LONGROPE = dict(rope_type="longrope", short_factor=[1.0] * 64, long_factor=[4.0] * 64)
PHI4_MINI = {
    **dict(model_type="phi3", vocab_size=200064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32),
    **dict(num_attention_heads=24, num_key_value_heads=8, partial_rotary_factor=0.75, rope_theta=10000.0),
    **dict(max_position_embeddings=131072, original_max_position_embeddings=4096, sliding_window=262144),
    **dict(rms_norm_eps=1e-5, tie_word_embeddings=True),
    "rope_scaling": dict(type="longrope", short_factor=[1.0] * 48, long_factor=[1 + i / 4 for i in range(48)]),
}


def as_transformers_5(hf: dict) -> dict:
    """Convert a config to transformers 5's form: theta and scaling under `rope_parameters`, `dtype`."""
    new = {key: value for key, value in hf.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    rope = dict(hf["rope_scaling"] or {"rope_type": "default"}, rope_theta=hf["rope_theta"])
    return {**new, "rope_parameters": rope, "dtype": hf["torch_dtype"]}


@pytest.mark.parametrize("spelling", [dict, as_transformers_5])
def test_llama_31_8b(spelling):
    norm, rope = Norm(1e-5), Rope(500000.0, RopeScaling(8.0, 1.0, 4.0, 8192))
    layer = Layer(Attention(32, 8, 128, rope), Mlp(14336), norm)  # heads are hidden/heads wide
    assert ModelConfig.from_hf(spelling(LLAMA_31_8B)) == ModelConfig(
        model_type="llama",
        decoder=Decoder(vocab_size=128256, width=4096, layers=(layer,) * 32, norm=norm),
        max_position=131072,
        eos_token_ids=(128001, 128008, 128009),
        bos_token_id=128000,
        dtype="bfloat16",
    )


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_phi_4_mini_rotates_by_the_factors_of_its_context(kind):
    """`su` and `yarn` are what early configs of Phi-3 call it. Its original context stands beside the rope's settings,
    and counts before theirs."""
    scaling = PHI4_MINI["rope_scaling"] | dict(type=kind, original_max_position_embeddings=8192)
    config = ModelConfig.from_hf(PHI4_MINI | dict(rope_scaling=scaling))
    rope, short, long = config.decoder.attention.rope, *(tuple(scaling[f"{k}_factor"]) for k in ("short", "long"))
    assert rope == Rope(1e4, LongRope(short, long, 4096, math.sqrt(1 + math.log(32) / math.log(4096)), True), 96)
    of = {length: of_context(config.decoder, length).attention.rope.scaling for length in (4096, 4097)}
    assert (of[4096].divisors, of[4097].divisors) == (short, long)
    given = dict(rope_scaling=scaling | dict(attention_factor=1.5), max_position_embeddings=4096)
    scaling = ModelConfig.from_hf(PHI4_MINI | given).decoder.attention.rope.scaling
    assert (scaling.attention_factor, scaling.divisors) == (1.5, short)


@pytest.mark.parametrize("spelling", [dict, as_transformers_5])
def test_llama_32_1b(spelling):
    config = ModelConfig.from_hf(spelling(LLAMA_32_1B))
    decoder = config.decoder
    assert (config.head_dim, decoder.tied, decoder.attention.qk_norm) == (64, True, None)
    assert decoder.attention.rope.scaling == RopeScaling(32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("spelling", [dict, as_transformers_5])
def test_qwen3_8b(spelling):
    config = ModelConfig.from_hf(spelling(QWEN3_8B))
    decoder = config.decoder
    assert (config.model_type, decoder.attention.qk_norm, decoder.tied) == ("qwen3", Norm(1e-6), False)
    assert (decoder.attention.rope, decoder.norm) == (Rope(1e6), Norm(1e-6))
    assert (config.eos_token_ids, config.max_position, decoder.layers[0].feed) == ((151645,), 40960, Mlp(12288))


@pytest.mark.parametrize("spelling", [dict, as_transformers_5])
def test_qwen3_06b_heads_are_wider_than_hidden_over_heads(spelling):
    config = ModelConfig.from_hf(spelling(QWEN3_06B))
    assert (config.hidden_size, config.num_heads, config.head_dim) == (1024, 16, 128)
    assert config.decoder.tied


@pytest.mark.parametrize("spelling", [dict, as_transformers_5])
def test_qwen3_30b_a3b(spelling):
    config = ModelConfig.from_hf(spelling(QWEN3_30B_A3B))
    assert {layer.feed for layer in config.decoder.layers} == {Mixture(128, 8, 768, renormalised=True, shared=0)}
    assert (config.decoder.attention.qk_norm, config.num_layers, config.num_kv_heads) == (Norm(1e-6), 48, 4)


def test_experts_in_other_spellings():
    read = lambda **change: ModelConfig.from_hf({**QWEN3_30B_A3B, **change})  # noqa: E731
    renamed = {k: v for k, v in QWEN3_30B_A3B.items() if k not in ("num_experts", "norm_topk_prob")}
    config = ModelConfig.from_hf(renamed | {"num_local_experts": 64})
    assert (config.decoder.mixture.experts, config.decoder.mixture.renormalised) == (64, False)
    dense = lambda config: [i for i, layer in enumerate(config.decoder.layers) if isinstance(layer.feed, Mlp)]  # noqa: E731
    assert dense(read(decoder_sparse_step=2)) == list(range(0, 48, 2))
    assert dense(read(mlp_only_layers=[0, 3], decoder_sparse_step=1)) == [0, 3]
    assert read(shared_expert_intermediate_size=512).decoder.mixture.shared == 512
    assert dense(read(intermediate_size=None)) == []  # no layer reads it
    with pytest.raises(ConfigError, match="intermediate_size"):
        read(intermediate_size=None, mlp_only_layers=[0])


@pytest.mark.parametrize("change,words", [
    (dict(num_experts_per_tok=129), r"num_experts_per_tok \(129\) must not exceed num_experts \(128\)"),
    (dict(num_experts=None), "num_experts must be a positive integer, got None"),
    (dict(moe_intermediate_size=0), "moe_intermediate_size"),
    (dict(decoder_sparse_step=0), "decoder_sparse_step"),
    (dict(mlp_only_layers=[48]), "mlp_only_layers must be a list of layers, 0 to 47"),
    (dict(shared_expert_intermediate_size=-1), "shared_expert_intermediate_size"),
])  # fmt: skip
def test_experts_that_make_no_sense(change, words):
    with pytest.raises(ConfigError, match=words):
        ModelConfig.from_hf({**QWEN3_30B_A3B, **change})


def test_keys_that_a_file_may_leave_out():
    required = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    hf = {key: LLAMA_31_8B[key] for key in (*required, "num_attention_heads")}
    config = ModelConfig.from_hf(hf)
    decoder = config.decoder
    assert decoder.attention == Attention(32, 32, 128, Rope(10000.0), bias=False)
    assert (decoder.tied, decoder.layers[0].feed.bias) == (False, False)
    assert (config.eos_token_ids, config.bos_token_id, config.dtype) == ((), None, "bfloat16")
    for key in hf:
        with pytest.raises(ConfigError, match=key):
            ModelConfig.from_hf({k: v for k, v in hf.items() if k != key})


def test_biases_and_a_null_head_dim():
    config = ModelConfig.from_hf({**LLAMA_31_8B, "attention_bias": True, "mlp_bias": True, "head_dim": None})
    decoder = config.decoder
    assert (decoder.attention.bias, decoder.layers[0].feed.bias, config.head_dim) == (True, True, 128)


def test_rope_scaling_counts_beside_rope_parameters():
    saved = as_transformers_5({**LLAMA_31_8B, "rope_scaling": None})
    config = ModelConfig.from_hf({**saved, "rope_scaling": LLAMA_31_8B["rope_scaling"]})
    assert config.decoder.attention.rope == Rope(500000.0, RopeScaling(8.0, 1.0, 4.0, 8192))


def test_scaling_that_a_model_page_tells_users_to_add():
    """Scale as Qwen's pages say: the config's positions stay as they are, and the context grows by the factor."""
    read = lambda **scaling: ModelConfig.from_hf({**QWEN3_8B, "rope_scaling": scaling})  # noqa: E731
    config = read(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)
    yarn = Yarn(4.0, 32768, attention_factor=0.1 * math.log(4) + 1)
    assert config.decoder.attention.rope == Rope(1e6, yarn) and config.max_position == 131072
    given = read(rope_type="yarn", factor=2.0, original_max_position_embeddings=1024, attention_factor=1.5, beta_slow=2)
    assert given.decoder.attention.rope.scaling == Yarn(2.0, 1024, attention_factor=1.5, beta_slow=2.0)
    assert given.max_position == 40960
    inverse = read(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=32768, attn_factor=1 / 1.138629436111989
    )
    assert math.isclose(inverse.decoder.attention.rope.scaling.attention_factor, 1.0)  # DeepSeek-R1-0528-Qwen3-8B
    config = read(type="linear", factor=2.0)
    assert (config.decoder.attention.rope.scaling, config.max_position) == (LinearScaling(2.0), 81920)
    with pytest.raises(ConfigError, match="type linear lacks factor"):
        read(rope_type="linear")


def test_qwen2_has_biases_on_queries_keys_and_values():
    attention = ModelConfig.from_hf(tiny_config("qwen2")).decoder.attention
    assert (attention.bias, attention.out_bias) == (True, False)


def test_glm4_where_its_config_is_silent():
    """Default as transformers' Glm4Config: half of each head rotates in neighbouring pairs; q, k, v have biases."""
    silent = ("attention_bias", "head_dim", "rms_norm_eps", "rope_theta")
    hf = {key: value for key, value in tiny_config("glm4").items() if key not in silent}
    layer = ModelConfig.from_hf(hf).decoder.layers[0]
    assert layer.mixing == Attention(4, 2, 128, Rope(10000.0, columns=64, interleaved=True), bias=True)
    assert layer.post_norm and layer.norm == Norm(1.5625e-07) and not layer.feed.bias
    given = ModelConfig.from_hf({**hf, "attention_bias": False, "partial_rotary_factor": 0.25}).decoder.attention
    assert (given.bias, given.rope.columns) == (False, 32)


def test_a_share_of_heads_that_rotates_is_read_or_refused():
    """Where heads rotate whole in transformers, it passes over the key, and other servers read it."""
    partly = {"bailing_moe", "glm4", "glm4_moe", "mimo_v2_flash", "minimax_m2", "phi3", "qwen3_5", "qwen3_5_moe"}
    partly |= {"qwen3_next", "qwen4_exp", "solar_open"}
    for family in partly:
        assert ModelConfig.from_hf(tiny_config(family, partial_rotary_factor=0.5)).decoder.attention.rope.columns
    for family in MODELS.keys() - partly - {"nemotron_h"}:  # which doesn't rotate
        with pytest.raises(ConfigError, match=f"partial_rotary_factor must be 1 for model_type '{family}'.*got 0.5"):
            ModelConfig.from_hf(tiny_config(family, partial_rotary_factor=0.5))


def test_older_name_of_the_rope_kind():
    scaling = {key: value for key, value in LLAMA_31_8B["rope_scaling"].items() if key != "rope_type"}
    config = ModelConfig.from_hf({**LLAMA_31_8B, "rope_scaling": {**scaling, "type": "llama3"}})
    assert config.decoder.attention.rope.scaling == RopeScaling(8.0, 1.0, 4.0, 8192)


def test_a_torch_prefix_on_the_dtype_is_dropped():
    assert ModelConfig.from_hf({**QWEN3_8B, "torch_dtype": "torch.float16"}).dtype == "float16"


KIMI_LINEAR_48B = {
    "model_type": "kimi_linear",
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 72,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [i for i in range(1, 27) if i % 4],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "model_max_length": 1048576,
    "num_nextn_predict_layers": 0,
}


def test_kimi_linear_as_moonshot_writes_it():
    """Layers are counted from one; heads of linear attention from a mapping; nothing rotates."""
    config = ModelConfig.from_hf(KIMI_LINEAR_48B)
    linear = [i for i, layer in enumerate(config.decoder.layers) if layer.mixing == KimiDelta(32, 128, 4)]
    assert linear == [i for i in range(26) if (i + 1) % 4] and config.num_kv_layers == 7
    assert config.decoder.attention.rope.scaling == NoRotation() and math.isclose(
        config.decoder.attention.scale, 192**-0.5
    )
    experts = config.decoder.mixture
    assert (experts.experts, experts.per_token, experts.shared) == (256, 8, 1024)
    assert experts.scores == SigmoidScores(1, 1, 2.446) and isinstance(config.decoder.layers[0].feed, Mlp)
    assert (config.max_position, config.mtp_layers) == (1048576, 0)
    later = {k: v for k, v in KIMI_LINEAR_48B.items() if k != "linear_attn_config"}  # as transformers 5 saves it
    kinds = ["linear_attention" if i in linear else "full_attention" for i in range(27)]
    assert ModelConfig.from_hf({**later, "layer_types": kinds}).decoder == config.decoder


@pytest.mark.parametrize("change,words", [
    (dict(mla_use_nope=False), "mla_use_nope False.*supported: True"),
    (dict(moe_router_activation_func="softmax"), "moe_router_activation_func 'softmax'.*'sigmoid'"),
    (dict(num_nextn_predict_layers=1), "num_nextn_predict_layers 1"),
    (dict(linear_attn_config=7), "linear_attn_config must be a mapping"),
    (dict(linear_attn_config=dict(full_attn_layers=[4], kda_layers=[1, 2])), "each layer, 1 to 27.*kda_layers"),
    (dict(linear_attn_config=dict(full_attn_layers=[], kda_layers=[*range(1, 28)])), "no full_attention layer"),
    (dict(layer_types=["linear_attention"]), "layer_types must name 27 layers"),
    (dict(n_group=3, num_expert_group=3), r"n_group \(3\) must divide"),
])  # fmt: skip
def test_kimi_linear_that_is_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        ModelConfig.from_hf({**KIMI_LINEAR_48B, **change})


MIMO_V2_FLASH = {
    "model_type": "mimo_v2_flash",
    "vocab_size": 152576,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "hybrid_layer_pattern": [int(i > 0 and (i + 1) % 6 > 0) for i in range(48)],
    "moe_layer_freq": [0] + [1] * 47,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "rope_theta": 5000000,
    "swa_rope_theta": 10000,
    "partial_rotary_factor": 0.334,
    "attention_value_scale": 0.707,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "n_routed_experts": 256,
    "n_shared_experts": None,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "layernorm_epsilon": 1e-5,
}


def test_mimo_v2_as_xiaomi_writes_it():
    """A window counts the tokens before a token; keys and values take up rows of one width, which kernels have."""
    decoder = ModelConfig.from_hf(MIMO_V2_FLASH).decoder
    full, sliding = (decoder.layers[i].mixing for i in (0, 1))
    shared = dict(head_dim=192, value_dim=128, value_scale=0.707)
    assert full == Attention(64, 4, rope=Rope(5e6, columns=64), **shared)
    assert sliding == Attention(64, 8, rope=Rope(1e4, columns=64), window=129, sinks=True, pool=1, **shared)
    assert [layer.mixing == full for layer in decoder.layers] == [i == 0 or i % 6 == 5 for i in range(48)]
    assert decoder.layers[0].feed == Mlp(16384) and decoder.norm == Norm(1e-5)
    assert decoder.mixture == Mixture(256, 8, 2048, shared_gated=False, scores=SigmoidScores())
    assert (full.memory.width, full.memory.heads, sliding.memory.heads) == (256, 4, 8)
    bare = {key: value for key, value in MIMO_V2_FLASH.items() if not key.startswith(("swa_", "hybrid", "moe_layer"))}
    assert ModelConfig.from_hf(bare).decoder == decoder, "as transformers' config where it is silent"


@pytest.mark.parametrize("change,words", [
    (dict(add_full_attention_sink_bias=True), "add_full_attention_sink_bias True.*supported: False"),
    (dict(scoring_func="softmax"), "scoring_func 'softmax'.*'sigmoid'"),
    (dict(n_shared_experts=1), "n_shared_experts 1"),
    (dict(hybrid_layer_pattern=[0, 1]), "hybrid_layer_pattern must have a 0 or a 1 for each of 48 layers"),
    (dict(moe_layer_freq=1), "moe_layer_freq must have a 0 or a 1"),
    (dict(partial_rotary_factor=0.33), "partial_rotary_factor 0.33 of head_dim 192 is 63"),
    (dict(v_head_dim=0), "v_head_dim"),
    (dict(partial_rotary_factor=None, rope_scaling=dict(type="linear", factor=4.0)),
     "full_attention, of type linear, lacks partial_rotary_factor; give it .0.334 in"),
])  # fmt: skip
def test_mimo_v2_that_is_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        ModelConfig.from_hf({**MIMO_V2_FLASH, **change})


@pytest.mark.parametrize("change,words", [
    (dict(model_type="qwen3_5moe"), ["'qwen3_5moe'", "docs/models.md", "among them qwen3_5_moe, qwen3_moe"]),
    (dict(model_type=None), ["None", "docs/models.md"]),
    (dict(hidden_size=0), ["hidden_size", "positive integer", "0"]),
    (dict(num_hidden_layers="36"), ["num_hidden_layers", "'36'"]),
    (dict(vocab_size=True), ["vocab_size", "True"]),
    (dict(num_key_value_heads=5), ["num_attention_heads (32)", "num_key_value_heads (5)"]),
    (dict(head_dim=127), ["head_dim", "even", "127"]),
    (dict(hidden_act="gelu"), ["hidden_act", "'gelu'", "silu"]),
    (dict(model_type="glm4", hidden_act="relu2"), ["hidden_act", "'relu2'", "silu"]),
    (dict(use_sliding_window=True), ["use_sliding_window"]),
    (dict(rope_scaling=dict(rope_type="ntk", factor=4.0)), ["'ntk'", "default, linear, llama3, yarn, longrope"]),
    (dict(rope_scaling=dict(rope_type="longrope", factor=4.0)), ["type longrope lacks short_factor, long_factor"]),
    (dict(rope_scaling=dict(type="su", short_factor=[1.0], long_factor=[2.0])), ["short_factor", "64 numbers, one"]),
    (dict(rope_scaling=LONGROPE | dict(long_factor=[0.0] * 64)), ["long_factor[0]", "positive", "0.0"]),
    (dict(rope_scaling=LONGROPE | dict(short_mscale=1.2)), ["short_mscale", "attention_factor is"]),
    (dict(rope_scaling=LONGROPE | dict(original_max_position_embeddings=1)), ["original_max", "at least 2", "1"]),
    (dict(rope_scaling=dict(type="dynamic", factor=2.0)), ["'dynamic'"]),
    (  # as a model's page tells users to add, beside what transformers 5 saved
        dict(
            rope_parameters=dict(rope_type="default", rope_theta=1e6),
            rope_scaling=dict(type="dynamic", factor=4.0),
        ),
        ["'dynamic'"],
    ),
    (dict(rope_parameters=dict(full_attention=dict(rope_theta=1e6))), ["rope_parameters", "full_attention"]),
    (dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), ["lacks", "low_freq_factor", "original_max_position"]),
    (dict(rope_scaling=dict(rope_type="yarn")), ["config.json: rope_scaling of type yarn lacks factor"]),
    (dict(rope_parameters=dict(rope_type="linear")), ["config.json: rope_scaling of type linear lacks factor"]),
])  # fmt: skip
def test_an_unsupported_model_is_refused_by_name(change, words):
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_hf({**QWEN3_8B, **change})
    for word in words:
        assert word in str(error.value)


def test_configs_are_frozen_and_hashable_so_jit_can_take_them_as_static():
    config = ModelConfig.from_hf(LLAMA_31_8B)
    assert hash(config) == hash(ModelConfig.from_hf(as_transformers_5(LLAMA_31_8B)))
    with pytest.raises(AttributeError):
        config.vocab_size = 1
    assert len({EngineConfig(), EngineConfig(page_size=None), EngineConfig(page_size=32)}) == 2


@pytest.mark.parametrize("change,named", [
    ({"rms_norm_eps": None}, "rms_norm_eps"),
    ({"rope_scaling": 5}, "rope_scaling"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
    ({"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention' is not supported .* 'qwen3'"),
    ({"rope_theta": -1.0}, "rope_theta"),
    ({"eos_token_id": "</s>"}, "eos_token_id"),
    ({"torch_dtype": "float8"}, "dtype"),
])  # fmt: skip
def test_a_senseless_value_in_a_config_is_named(change, named):
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_hf({**QWEN3_8B, **change})


def test_hybrids():
    """Read the text model of a multimodal config; either key says which layer is which."""
    rope = {"rope_theta": 5e6, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    text = tiny_config("qwen3_5_moe", full_attention_interval=3, num_hidden_layers=6, rope_parameters=rope)
    text |= {"model_type": "qwen3_5_moe_text", "eos_token_id": 3}
    whole = {"model_type": "qwen3_5_moe", "text_config": text, "eos_token_id": [4]}
    config = ModelConfig.from_hf(whole | {"tie_word_embeddings": True})
    assert (config.model_type, config.eos_token_ids, config.decoder.tied) == ("qwen3_5_moe", (4, 3), True)
    assert (config.decoder.attention.rope, config.decoder.mixture.experts) == (
        Rope(5e6, columns=8, sections=(2, 1, 1)),
        4,
    )
    assert [isinstance(layer.mixing, DeltaRule) for layer in config.decoder.layers] == [True, True, False] * 2
    assert (config.num_kv_layers, config.num_linear_layers) == (2, 4)
    assert config.decoder.layers[0].mixing.channels == 2 * 2 * 8 + 4 * 12
    del text["torch_dtype"]
    assert ModelConfig.from_hf(whole | {"torch_dtype": "float16"}).dtype == "float16"
    named = {key: value for key, value in text.items() if key != "full_attention_interval"}
    kinds = ["linear_attention", "linear_attention", "full_attention"] * 2
    assert ModelConfig.from_hf({**named, "layer_types": kinds}).decoder.layers == config.decoder.layers


@pytest.mark.parametrize("change,words", [
    ({"layer_types": ["linear_attention"] * 2}, "no full_attention layer"),
    ({"layer_types": ["full_attention"]}, "must name 2 layers"),
    ({"layer_types": ["full_attention", "conv"]}, "full_attention or linear_attention"),
    ({"linear_num_value_heads": 3}, "multiple of linear_num_key_heads"),
    ({"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim must be a positive integer"),
    ({"attn_output_gate": False}, "attn_output_gate"),
    ({"attention_bias": True}, "attention_bias"),
    ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act 'gelu_pytorch_tanh'.*supported: 'silu'"),
    ({"partial_rotary_factor": 0.1}, "partial_rotary_factor 0.1 of head_dim 16 is 1"),
    ({"partial_rotary_factor": 2.0}, "partial_rotary_factor 2 of head_dim 16 is 32, not an even number from 2 to 16"),
])  # fmt: skip
def test_hybrids_that_are_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        ModelConfig.from_hf(tiny_config("qwen3_5") | change)
