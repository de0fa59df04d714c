"""Qwen3.5-27B, Qwen3.6-27B and Qwen3.8-27B, too large for a test: their published config, and the tensors it asks for.

The three share their sizes. The mathematics is held to transformers by small models: tests/golden/hybrid/qwen3_5 is a
multimodal one, whose rotary positions have three axes, alike for text; tests/golden/rope.json has YaRN's tables.
"""

from __future__ import annotations

import copy
import math

import jax
import pytest

from jaxspec.checkpoint.load import text_name
from jaxspec.config.options import ConfigError
from jaxspec.drafters import mtp
from jaxspec.models.description import Attention, Decoder, DeltaRule, Layer, Mlp, Norm
from jaxspec.models.families import MODELS
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.rope_scaling import Rope, Yarn
from jaxspec.models.weights import Param

TEXT = dict(
    attention_bias=False,
    attention_dropout=0.0,
    attn_output_gate=True,
    bos_token_id=248044,
    dtype="bfloat16",
    eos_token_id=248044,
    full_attention_interval=4,
    head_dim=256,
    hidden_act="silu",
    hidden_size=5120,
    initializer_range=0.02,
    intermediate_size=17408,
    layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 16,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=48,
    linear_value_head_dim=128,
    mamba_ssm_dtype="float32",
    max_position_embeddings=262144,
    mlp_only_layers=[],
    model_type="qwen3_5_text",
    mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False,
    num_attention_heads=24,
    num_hidden_layers=64,
    num_key_value_heads=4,
    output_gate_type="swish",
    pad_token_id=None,
    partial_rotary_factor=0.25,
    rms_norm_eps=1e-06,
    rope_parameters=dict(
        mrope_interleaved=True,
        mrope_section=[11, 11, 10],
        partial_rotary_factor=0.25,
        rope_theta=10000000,
        rope_type="default",
    ),
    tie_word_embeddings=False,
    use_cache=True,
    vocab_size=248320,
)
WHOLE = dict(
    architectures=["Qwen3_5ForConditionalGeneration"],
    eos_token_id=[248046, 248044],
    image_token_id=248056,
    model_type="qwen3_5",
    text_config=TEXT,
    tie_word_embeddings=False,
    video_token_id=248057,
    vision_config=dict(depth=27, hidden_size=1152, intermediate_size=4304, model_type="qwen3_5", out_hidden_size=5120),
    vision_end_token_id=248054,
    vision_start_token_id=248053,
)
# What the models' pages tell users to put over the text's rope parameters, for a million tokens.
MILLION = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=262144)


def read(rope=(), **text) -> ModelConfig:
    hf = copy.deepcopy(WHOLE)
    hf["text_config"].update(text)
    hf["text_config"]["rope_parameters"].update(rope)
    return ModelConfig.from_hf(hf)


def stored(declared) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree.leaves(declared, is_leaf=lambda leaf: isinstance(leaf, Param))
    return {name: shape for leaf in leaves for name, shape in leaf.stored().items()}


def test_the_config_says_what_the_model_computes():
    norm, rope = Norm(1e-6, centred=True), Rope(1e7, columns=64, sections=(11, 11, 10))
    mixing = Attention(24, 4, 256, rope, qk_norm=norm, gated=True)
    linear = DeltaRule(key_heads=16, value_heads=48, key_dim=128, value_dim=128, taps=4)
    block = (*(Layer(linear, Mlp(17408), norm),) * 3, Layer(mixing, Mlp(17408), norm))
    config = read()
    assert config.decoder == Decoder(248320, 5120, block * 16, norm)
    assert (config.model_type, config.dtype, config.max_position) == ("qwen3_5", "bfloat16", 262144)
    assert (config.eos_token_ids, config.mtp_layers) == ((248046, 248044), 1)
    assert (config.num_kv_layers, config.num_linear_layers) == (16, 48)
    assert read(layer_types=None) == config  # by the interval alone
    assert ModelConfig.from_hf(TEXT).decoder == config.decoder


def test_a_million_tokens_by_yarn():
    config = read(MILLION)
    yarn = Yarn(4.0, 262144, attention_factor=0.1 * math.log(4) + 1)
    assert config.decoder.attention.rope == Rope(1e7, yarn, columns=64, sections=(11, 11, 10))
    assert config.max_position == 1_048_576
    # under the older key, beside what was saved
    assert read(rope_scaling={**MILLION, "mrope_section": [11, 11, 10]}).decoder == config.decoder


def test_the_tensors_are_the_checkpoints():
    """851 of the text model, by the names that they have beside the vision tower's and the MTP module's."""
    config = read()
    declared = stored(MODELS["qwen3_5"].tensors(config.decoder))
    assert len(declared) == 851
    published = lambda name: name.replace("model.", "model.language_model.", 1)  # noqa: E731
    assert all(text_name(published(name), 64) == name for name in declared)
    assert text_name("model.visual.blocks.0.attn.qkv.weight", 64) is None and text_name("mtp.fc.weight", 64) is None
    linear, full = "model.layers.62.linear_attn.", "model.layers.63.self_attn."
    expected = {
        "model.embed_tokens.weight": (248320, 5120),
        "lm_head.weight": (248320, 5120),
        "model.norm.weight": (5120,),
        linear + "in_proj_qkv.weight": (2 * 2048 + 6144, 5120),
        linear + "in_proj_z.weight": (6144, 5120),
        linear + "in_proj_a.weight": (48, 5120),
        linear + "in_proj_b.weight": (48, 5120),
        linear + "conv1d.weight": (2 * 2048 + 6144, 1, 4),
        linear + "A_log": (48,),
        linear + "dt_bias": (48,),
        linear + "norm.weight": (128,),
        linear + "out_proj.weight": (5120, 6144),
        full + "q_proj.weight": (2 * 24 * 256, 5120),
        full + "k_proj.weight": (4 * 256, 5120),
        full + "v_proj.weight": (4 * 256, 5120),
        full + "o_proj.weight": (5120, 24 * 256),
        full + "q_norm.weight": (256,),
        full + "k_norm.weight": (256,),
        "model.layers.63.mlp.gate_proj.weight": (17408, 5120),
        "model.layers.63.mlp.down_proj.weight": (5120, 17408),
    }
    assert {name: declared.get(name) for name in expected} == expected


def test_the_sizes_add_up_to_the_published_file():
    """55.56 GB of bfloat16 are published: the text, the MTP module, and a vision tower of 0.46 billion."""
    config = read()
    text = stored(MODELS["qwen3_5"].tensors(config.decoder))
    module = stored(mtp.parameters(mtp.module_config(config)))
    assert module["mtp.fc.weight"] == (5120, 2 * 5120) and len(module) == 15
    total = sum(math.prod(shape) for shape in (*text.values(), *module.values()))
    width, depth, inner, merged = 1152, 27, 4304, 4 * 1152
    vision = depth * (4 * width**2 + 2 * width * inner) + merged * (merged + 5120)
    assert (total + vision) * 2 / 1e9 == pytest.approx(55.56, abs=0.01)


def test_another_gate_of_linear_layers_is_refused():
    with pytest.raises(ConfigError, match="output_gate_type 'sigmoid' is not supported for model_type 'qwen3_5'"):
        read(output_gate_type="sigmoid")
