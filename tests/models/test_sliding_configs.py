"""Configs of families whose layers slide, read as transformers reads them, and refused where they make no sense."""

from __future__ import annotations

import dataclasses
import math

import pytest

from jaxspec.checkpoint.load import text_name
from jaxspec.config.options import ConfigError
from jaxspec.models.description import Attention, ClampedSwiglu, Mixture, Mlp, Norm
from jaxspec.models.memory import PagedRows
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.rope_scaling import LinearScaling, NoRotation, Proportional, Rope, Yarn
from tests.support.tiny import tiny_config


@pytest.mark.parametrize("family,keys,windows", [
    ("mistral", {}, [4096, 4096]),  # as transformers' config class has it
    ("mistral", {"sliding_window": None}, [None, None]),
    ("mistral", {"sliding_window": 512}, [512, 512]),
    ("mistral", {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]}, [512, None]),
    ("qwen2", {"sliding_window": 512, "max_window_layers": 0}, [None, None]),
    ("qwen2", {"sliding_window": 512, "max_window_layers": 1, "use_sliding_window": True}, [None, 512]),
    ("qwen2", {"use_sliding_window": True}, [None, None]),
    ("qwen2", {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, [4096, 4096]),
    ("cohere2", {}, [20, None]),
    ("cohere2", {"sliding_window": None}, [None, None]),
    ("gemma2", {}, [20, None]),
    ("gemma2", {"sliding_window": None}, [None, None]),
    ("gemma3", {}, [20, None]),
    ("gemma4", {"layer_types": ["full_attention", "sliding_attention"]}, [None, None]),  # the last sees all
    ("gpt_oss", {}, [20, None]),
    ("gpt_oss", {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, [None, 64]),
    ("gemma3", {"layer_types": ["full_attention", "sliding_attention"]}, [None, 20]),
])  # fmt: skip
def test_windows_by_layer(family, keys, windows):
    decoder = ModelConfig.from_hf(tiny_config(family, **keys)).decoder
    assert [layer.mixing.window for layer in decoder.layers] == windows


@pytest.mark.parametrize("family,keys,words", [
    ("mistral", {"sliding_window": 0}, "sliding_window must be a positive integer"),
    ("mistral", {"sliding_window": None, "layer_types": ["sliding_attention"] * 2}, "says that no layer slides"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "says that no layer slides"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types must name 2 layers"),
    ("qwen2", {"layer_types": ["full_attention", "chunked"]}, "each full_attention or sliding_attention; got"),
    ("qwen2", {"max_window_layers": "x"}, "max_window_layers must be"),
    ("cohere2", {"use_qk_norm": True}, "use_qk_norm True is not supported for model_type 'cohere2'; supported: False"),
    ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping must be a positive number"),
    ("gemma2", {"final_logit_softcapping": "x"}, "final_logit_softcapping must be a positive number"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
    ("gemma3", {"sliding_window": None}, "sliding_window must be a positive integer"),
    ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported"),
    ("gemma3", {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters are by kind of layer"),
    ("gemma3", {"rope_parameters": {"full_attention": 3}}, "rope_parameters of full_attention"),
    ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
    ("gemma4", {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.01}}},
     "partial_rotary_factor 0.01 of head_dim 32 is 0 pairs"),
    ("gemma4", {"num_kv_shared_layers": 1}, "num_kv_shared_layers 1 of 2 leaves some kind of layer_types without keys"),
    ("gemma4", {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 63}, "must be at least vocab_size"),
    ("gemma4", {"per_layer_config": {"0": {"head_dim": 32}}}, "per_layer_config must have head_dim and num_key_value"),
    ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported; supported: silu, gelu_py"),
])  # fmt: skip
def test_windows_that_make_no_sense(family, keys, words):
    with pytest.raises(ConfigError, match=words):
        ModelConfig.from_hf(tiny_config(family, **keys))


COMMAND_R7B = {  # as published, but for keys that change nothing here
    "architectures": ["Cohere2ForCausalLM"],
    "eos_token_id": 255001,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "logit_scale": 0.25,
    "max_position_embeddings": 132096,
    "model_type": "cohere2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_theta": 50000,
    "rotary_pct": 1.0,
    "torch_dtype": "bfloat16",
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
    "vocab_size": 256000,
}


def test_command_r7b_rotates_where_it_sees_a_window():
    decoder = ModelConfig.from_hf(COMMAND_R7B).decoder
    assert decoder.tied and decoder.logit_scale == 0.25 and decoder.norm == Norm(1e-5, mean=True)
    window, whole = decoder.layers[2:4]
    assert (window.mixing.window, window.mixing.rope) == (4096, Rope(5e4, interleaved=True))
    assert (whole.mixing.window, whole.mixing.rope.scaling) == (None, NoRotation())
    assert decoder.layers == (window, window, window, whole) * 8 and window.parallel
    silent = {key: value for key, value in COMMAND_R7B.items() if key != "logit_scale"}
    assert ModelConfig.from_hf(silent).decoder.logit_scale == 0.0625


GEMMA3_4B = {  # as published: all else is the config class's own
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
}


def test_gemma3_where_its_config_is_silent():
    config = ModelConfig.from_hf(GEMMA3_4B)
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert config.max_position == 131072 and config.eos_token_ids == (1, 106) and config.decoder.tied
    assert config.decoder.embed_scale == 2560**0.5
    layers = config.decoder.layers
    assert [i for i, layer in enumerate(layers) if layer.mixing.window is None] == [5, 11, 17, 23, 29]
    assert (layers[0].mixing.rope, layers[0].mixing.window) == (Rope(1e4), 1024)
    assert layers[5].mixing.rope == Rope(1e6, LinearScaling(8.0)) and layers[5].mixing.scale is None
    assert layers[0].feed == Mlp(10240, activation="gelu_tanh") and layers[0].post_norm
    assert layers[0].norm == layers[0].mixing.qk_norm == Norm(1e-6, centred=True)


def test_gemma3_in_the_keys_of_either_version_of_transformers():
    kinds = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    text = {key: value for key, value in GEMMA3_4B["text_config"].items() if key != "rope_scaling"}
    newer = GEMMA3_4B | {"text_config": text | {"rope_parameters": kinds}}
    assert ModelConfig.from_hf(newer) == ModelConfig.from_hf(GEMMA3_4B)
    larger = GEMMA3_4B | {"text_config": text | {"query_pre_attn_scalar": 168, "head_dim": 128}}
    assert ModelConfig.from_hf(larger).decoder.attention.scale == 168**-0.5


GEMMA4_31B = {  # as published, but for keys that change nothing here
    "architectures": ["Gemma4ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma4",
    "text_config": {
        "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_size": 5376,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 21504,
        "max_position_embeddings": 262144,
        "model_type": "gemma4_text",
        "num_attention_heads": 32,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
    },
}


def test_gemma4_has_two_kinds_of_heads():
    config = ModelConfig.from_hf(GEMMA4_31B)
    decoder, (near, *_, far) = config.decoder, config.decoder.layers
    assert [i for i, layer in enumerate(decoder.layers) if layer.mixing.window is None] == list(range(5, 60, 6))
    assert decoder.groups(PagedRows) == {PagedRows(16, 256): 50, PagedRows(4, 512): 10}
    norm, kept = Norm(1e-6), dict(qk_norm=Norm(1e-6), v_norm=Norm(1e-6), scale=1.0)
    assert near.mixing == Attention(32, 16, 256, Rope(1e4), window=1024, **kept)
    assert far.mixing == Attention(32, 4, 512, Rope(1e6, Proportional(64)), k_is_v=True, **kept)
    assert far.norm == norm and far.post_norm and far.output_scaled and far.feed == Mlp(21504, activation="gelu_tanh")
    assert (decoder.embed_scale, decoder.logit_cap, decoder.tied) == (5376**0.5, 30.0, True)
    text = dict(GEMMA4_31B["text_config"])
    own = {"head_dim": text.pop("global_head_dim"), "num_key_value_heads": text.pop("num_global_key_value_heads")}
    saved = GEMMA4_31B | {"text_config": text | {"per_layer_config": {f"{i:02}": own for i in range(5, 60, 6)}}}
    assert ModelConfig.from_hf(saved) == config  # as transformers 5.23 writes it
    unified = GEMMA4_31B | {"text_config": GEMMA4_31B["text_config"] | {"model_type": "gemma4_unified_text"}}
    assert ModelConfig.from_hf(unified).decoder == decoder


def test_the_last_layers_of_gemma4_share_keys_and_values():
    """E2B's do. Its files have matrices for keys and values of them all, which nobody reads."""
    sizes = dict(num_hidden_layers=35, num_kv_shared_layers=20, hidden_size_per_layer_input=256, num_key_value_heads=1)
    sizes |= dict(vocab_size_per_layer_input=64, use_double_wide_mlp=True, attention_k_eq_v=False)
    sizes |= dict(layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7)
    decoder = ModelConfig.from_hf(tiny_config("gemma4", **sizes)).decoder
    assert decoder.groups(PagedRows) == {PagedRows(1, 16): 12, PagedRows(1, 32): 3}
    assert decoder.sharing == frozenset(range(15, 35))
    assert decoder.memory_index[13:21] == ((0, 11), (1, 2), *[(0, 11)] * 4, (1, 2), (0, 11))
    assert [decoder.layers[i].feed.width for i in (14, 15)] == [64, 128]
    assert text_name("model.language_model.layers.15.self_attn.k_norm.weight", 35, decoder.sharing) is None
    for kept in ("layers.14.self_attn.k_norm.weight", "layers.15.self_attn.q_norm.weight"):
        assert text_name(f"model.language_model.{kept}", 35, decoder.sharing) == f"model.{kept}"


GPT_OSS_20B = {  # as published, but for keys that change nothing here
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def test_gpt_oss_20b():
    config = ModelConfig.from_hf(GPT_OSS_20B)
    assert (config.max_position, config.eos_token_ids) == (131072, (200002,))
    first, second = config.decoder.layers[:2]
    rope = Rope(150000.0, Yarn(32.0, 4096, 0.1 * math.log(32) + 1, truncate=False))
    assert second.mixing == Attention(64, 8, 64, rope, bias=True, out_bias=True, sinks=True)
    assert first.mixing == dataclasses.replace(second.mixing, window=128)
    experts = Mixture(32, 4, 2880, bias=True, router_bias=True, activation=ClampedSwiglu(1.702, 7.0))
    assert first.feed == second.feed == experts and first.norm == Norm(1e-5)
    silent = {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32, "eos_token_id": 200002}
    assert ModelConfig.from_hf(silent) == config


@pytest.mark.parametrize("change,words", [
    ({"num_experts_per_tok": 33}, r"num_experts_per_tok \(33\) must not exceed num_local_experts \(32\)"),
    ({"hidden_act": "gelu_pytorch_tanh"}, "'gelu_pytorch_tanh' is not supported for experts; supported: silu"),
    ({"swiglu_limit": 0}, "swiglu_limit must be a positive number"),
    ({"sliding_window": None}, "says that no layer slides"),
])  # fmt: skip
def test_gpt_oss_that_makes_no_sense(change, words):
    with pytest.raises(ConfigError, match=words):
        ModelConfig.from_hf(GPT_OSS_20B | change)
