"""Published configs of families that differ from others in a few keys: their layers, and variants that are refused."""

from __future__ import annotations

import math

import jax
import pytest

from jaxspec.config.options import ConfigError
from jaxspec.models.description import Mamba2, Mixture, Mlp, SigmoidScores
from jaxspec.models.families import MODELS
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.positions import Chunks, ScaleByPosition
from jaxspec.models.rope import of_context
from jaxspec.models.rope_scaling import LongRope, NoRotation, RopeScaling, Yarn
from tests.support.tiny import tiny_config


def config(**keys) -> ModelConfig:
    return ModelConfig.from_hf({"torch_dtype": "bfloat16", "rms_norm_eps": 1e-5, **keys})


def test_mixtral_8x7b():
    read = config(
        model_type="mixtral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32000, max_position_embeddings=32768, sliding_window=None, eos_token_id=2,
    ).decoder  # fmt: skip
    assert {layer.feed for layer in read.layers} == {Mixture(8, 2, 14336)}
    assert (read.attention.rope.theta, read.attention.window, read.attention.bias) == (1e6, None, False)


def test_gemma_2_27b():
    read = config(
        model_type="gemma2", hidden_size=4608, intermediate_size=36864, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=16, head_dim=128, vocab_size=256000, query_pre_attn_scalar=144, sliding_window=4096,
        hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0, cache_implementation="hybrid",
    ).decoder  # fmt: skip
    assert [layer.mixing.window for layer in read.layers] == [4096, None, 4096, None]
    assert (read.attention.score_cap, read.attention.scale, read.logit_cap) == (50.0, 1 / 12, 30.0)
    assert read.tied and read.embed_scale == 4608**0.5 and read.norm.centred and read.layers[0].post_norm


def test_qwen2_57b_a14b():
    read = config(
        model_type="qwen2_moe", hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=151936, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=2560,
        shared_expert_intermediate_size=20480, norm_topk_prob=False, rope_theta=1e6, sliding_window=65536,
        use_sliding_window=False, max_window_layers=28, decoder_sparse_step=1,
    ).decoder  # fmt: skip
    assert {layer.feed for layer in read.layers} == {Mixture(64, 8, 2560, renormalised=False, shared=20480)}
    assert (read.attention.bias, read.attention.out_bias, read.attention.window) == (True, False, None)


def test_qwen2_moe_layers_that_see_a_window():
    """Every other one of the first, as transformers; in dense Qwen2, all of the last."""
    read = ModelConfig.from_hf(
        tiny_config("qwen2_moe", num_hidden_layers=4, use_sliding_window=True, sliding_window=9, max_window_layers=2)
    )
    assert [layer.mixing.window for layer in read.decoder.layers] == [9, None, None, None]


def test_granite_4_h_tiny():
    kinds = ["mamba"] * 5 + ["attention"] + ["mamba"] * 3
    read = config(
        model_type="granitemoehybrid", hidden_size=1536, intermediate_size=512, num_hidden_layers=9, vocab_size=100352,
        num_attention_heads=12, num_key_value_heads=4, num_local_experts=64, num_experts_per_tok=6,
        shared_intermediate_size=1024, layer_types=kinds, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128,
        mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2, position_embedding_type="nope", tie_word_embeddings=True,
        embedding_multiplier=12, attention_multiplier=0.0078125, residual_multiplier=0.22, logits_scaling=6,
    ).decoder  # fmt: skip
    assert [layer.mixing == Mamba2(48, 64, 1, 128, 4) for layer in read.layers] == [kind == "mamba" for kind in kinds]
    assert read.layers[0].feed == Mixture(64, 6, 512, shared=1024, shared_gated=False)
    assert (read.attention.rope.scaling, read.attention.scale) == (NoRotation(), 0.0078125)
    assert (read.embed_scale, read.layers[0].residual_scale, read.logit_scale) == (12, 0.22, 1 / 6)


def test_devices_share_a_group_of_state_space_heads():
    """Where there are fewer groups than devices; Granite 4's hybrids have one."""

    def states(size: int, **sizes) -> Mamba2:
        whole = ModelConfig.from_hf(tiny_config("nemotron_h", num_attention_heads=8, **sizes))
        return whole.on_one_of(size).decoder.layers[0].mixing

    own = [states(size, n_groups=4) for size in (2, 4, 8)]
    assert [(m.heads, m.groups, m.group_devices) for m in own] == [(8, 2, 1), (4, 1, 1), (2, 1, 2)]
    groups = r"--tp-size 2: 3 groups of heads can't be divided .* 1, 3, and multiples of 3, are possible"
    with pytest.raises(ConfigError, match=groups):
        states(2, n_groups=3, mamba_num_heads=6)
    with pytest.raises(ConfigError, match=r"--tp-size 8: 4 state-space heads can't be divided .* 1, 2, 4 are possible"):
        states(8, n_groups=1, mamba_num_heads=4)


def test_granite_4_micro_has_no_states():
    read = config(
        model_type="granitemoehybrid", hidden_size=2560, intermediate_size=8192, num_hidden_layers=4, vocab_size=100352,
        num_attention_heads=40, num_key_value_heads=8, num_local_experts=0, num_experts_per_tok=0,
        shared_intermediate_size=8192, layers_block_type=["attention"] * 4, position_embedding_type="rope",
    ).decoder  # fmt: skip
    assert not read.recurrent and read.attention.rope.scaling is None and read.layers[0].feed == Mlp(8192)


def test_hunyuan_a13b_has_lists_of_equal_numbers():
    each = lambda number: [number] * 32  # noqa: E731
    read = config(
        model_type="hunyuan_v1_moe", hidden_size=4096, intermediate_size=3072, num_hidden_layers=32, vocab_size=128167,
        num_attention_heads=32, num_key_value_heads=8, attention_head_dim=128, num_experts=64, moe_topk=each(8),
        moe_intermediate_size=each(3072), num_shared_expert=each(1), use_qk_norm=True, use_mixed_mlp_moe=True,
        rope_scaling=dict(type="dynamic", alpha=1000.0, factor=1.0), tie_word_embeddings=True,
    ).decoder  # fmt: skip
    assert {layer.feed for layer in read.layers} == {Mixture(64, 8, 3072, shared=3072, shared_gated=False)}
    assert read.attention.qk_norm_rotated and read.attention.rope.theta > 1e7


def test_ling_mini_2():
    read = config(
        model_type="bailing_moe", hidden_size=2048, intermediate_size=5120, num_hidden_layers=3, vocab_size=157184,
        num_attention_heads=16, num_key_value_heads=4, head_dim=128, num_experts=256, num_experts_per_tok=8,
        num_shared_experts=1, moe_intermediate_size=512, moe_shared_expert_intermediate_size=512, n_group=8,
        topk_group=4, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5, score_function="sigmoid",
        moe_router_enable_expert_bias=True, partial_rotary_factor=0.5, rope_theta=6e5, use_qk_norm=True,
        use_qkv_bias=False, use_bias=False,
    ).decoder  # fmt: skip
    experts = Mixture(256, 8, 512, shared=512, shared_gated=False, scores=SigmoidScores(8, 4, 2.5))
    assert [layer.feed for layer in read.layers] == [Mlp(5120), experts, experts]
    assert (read.attention.rope.columns, read.attention.qk_norm) == (64, read.norm)


def test_minicpm4_8b():
    scaling = dict(rope_type="longrope", long_factor=[2.0] * 64, short_factor=[1.0] * 64)
    read = config(
        model_type="minicpm", hidden_size=4096, intermediate_size=16384, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=2, vocab_size=73448, scale_emb=12, scale_depth=1.4, dim_model_base=256, mup_denominator=32,
        max_position_embeddings=32768, rope_scaling=scaling | dict(original_max_position_embeddings=32768),
        tie_word_embeddings=False,
    ).decoder  # fmt: skip
    assert read.attention.rope.scaling == LongRope((1.0,) * 64, (2.0,) * 64, 32768, 1.0, False)
    assert (read.embed_scale, read.logit_scale, read.attention.scale) == (12, 1 / 16, 128**-0.5)
    assert read.layers[0].residual_scale == 1.4 / math.sqrt(32)


def test_afm_4_5b():
    read = config(
        model_type="arcee", hidden_size=2560, intermediate_size=18432, num_hidden_layers=36, num_attention_heads=20,
        num_key_value_heads=4, head_dim=128, vocab_size=128004, max_position_embeddings=65536, hidden_act="relu2",
        rope_scaling=dict(rope_type="yarn", factor=20.0, original_max_position_embeddings=4096),
    ).decoder  # fmt: skip
    assert read.layers[0].feed == Mlp(18432, activation="relu2", gated=False)
    assert isinstance(read.attention.rope.scaling, Yarn)


def test_ministral_3_scales_the_queries_of_long_texts():
    read = ModelConfig.from_hf({
        "model_type": "mistral3", "vision_config": {}, "torch_dtype": "bfloat16",
        "text_config": dict(
            model_type="ministral3", hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, head_dim=128,
            num_attention_heads=32, num_key_value_heads=8, vocab_size=131072, max_position_embeddings=262144,
            rope_parameters=dict(
                type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=16384, beta_fast=32.0,
                beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
            ),
        ),
    }).decoder  # fmt: skip
    assert read.attention.position_scale == ScaleByPosition(0.1, 16384)
    assert read.attention.rope.scaling == Yarn(16.0, 16384, 1.0)
    assert of_context(read, 16384).attention.position_scale is None and of_context(read, 16385) == read


def test_mistral_4_whose_share_of_columns_is_of_whole_heads():
    rope = dict(rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=32, mscale_all_dim=1.0)
    rope |= dict(mscale=1.0, llama_4_scaling_beta=0.1, partial_rotary_factor=1 / 3)
    read = ModelConfig.from_hf(tiny_config("mistral4", rope_parameters=rope)).decoder
    assert (read.attention.rope.columns, read.attention.position_scale) == (4, ScaleByPosition(0.1, 32))
    assert (read.mixture.scores, read.mixture.renormalised, read.mixture.shared) == ("softmax", True, 24)
    with pytest.raises(ConfigError, match=r"partial_rotary_factor .0.5. must be the share of qk_rope_head_dim .4."):
        ModelConfig.from_hf(tiny_config("mistral4", rope_parameters=rope | dict(partial_rotary_factor=0.5)))


def llama4(layers: int, experts: int, **more):
    """The text model of Scout's or Maverick's config."""
    text = dict(
        model_type="llama4_text", hidden_size=5120, intermediate_size=8192, intermediate_size_mlp=16384,
        num_hidden_layers=layers, num_attention_heads=40, num_key_value_heads=8, head_dim=128, vocab_size=202048,
        num_local_experts=experts, num_experts_per_tok=1, rope_theta=5e5, rms_norm_eps=1e-5, attention_chunk_size=8192,
        attn_temperature_tuning=True, floor_scale=8192, attn_scale=0.1, for_llmcompressor=False, **more,
    )  # fmt: skip
    return ModelConfig.from_hf({"model_type": "llama4", "vision_config": {}, "text_config": text})


def test_llama_4_scout():
    scaling = dict(rope_type="llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0)
    scaling |= dict(original_max_position_embeddings=8192)
    rotates = [1, 1, 1, 0]
    read = llama4(
        4, 16, use_qk_norm=True, interleave_moe_layer_step=1, no_rope_layers=rotates, rope_scaling=scaling,
        max_position_embeddings=10485760,
    )  # fmt: skip
    scores = SigmoidScores(corrected=False)
    experts = Mixture(16, 1, 8192, False, 8192, shared_gated=False, scores=scores, weighs_inputs=True)
    assert {layer.feed for layer in read.decoder.layers} == {experts} and read.max_position == 10485760
    turned, still = (read.decoder.layers[i].mixing for i in (0, 3))
    assert (turned.window, turned.position_scale, turned.qk_norm_unit) == (Chunks(8192), None, True)
    assert turned.rope.interleaved and isinstance(turned.rope.scaling, RopeScaling)
    assert (still.window, still.position_scale, still.qk_norm) == (None, ScaleByPosition(0.1, 8192, 1), None)
    assert [isinstance(layer.mixing.rope.scaling, NoRotation) for layer in read.decoder.layers] == [
        not r for r in rotates
    ]


def test_llama_4_maverick_has_an_mlp_in_every_other_layer():
    read = llama4(4, 128, use_qk_norm=False, interleave_moe_layer_step=2, no_rope_layers=[], rope_scaling=None).decoder
    assert [isinstance(layer.feed, Mixture) for layer in read.layers] == [False, True, False, True]
    assert read.layers[0].feed == Mlp(16384) and read.attention.qk_norm is None
    tensors = {name for each in jax.tree.leaves(MODELS["llama4"].tensors(read)) for name in each.sources}
    assert {f"model.layers.{i}.feed_forward.{name}" for i, name in (
        (0, "gate_proj.weight"), (1, "router.weight"), (1, "experts.gate_up_proj"), (1, "shared_expert.up_proj.weight")
    )} <= tensors  # fmt: skip


def test_a_context_of_one_chunk_needs_no_chunks():
    """Nor scales of queries, which begin a token earlier than Ministral 3's."""
    read = llama4(4, 16, use_qk_norm=True).decoder
    short = [layer.mixing for layer in of_context(read, 8191).layers]
    assert {(each.window, each.position_scale) for each in short} == {(None, None)}
    assert {each.mixing.window for each in of_context(read, 8192).layers} == {None}
    assert of_context(read, 8192).layers[3] == read.layers[3] and of_context(read, 8193) == read


def test_ernie_4_5_21b_a3b():
    read = config(
        model_type="ernie4_5_moe", hidden_size=2560, intermediate_size=12288, num_hidden_layers=3, vocab_size=103424,
        num_attention_heads=20, num_key_value_heads=4, head_dim=128, moe_num_experts=64, moe_k=6,
        moe_num_shared_experts=2, moe_intermediate_size=1536, moe_layer_start_index=1, moe_layer_end_index=27,
        moe_layer_interval=1, moe_use_aux_free=True, use_bias=False, rope_theta=5e5, num_nextn_predict_layers=1,
    )  # fmt: skip
    experts = Mixture(64, 6, 1536, shared=3072, shared_gated=False, scores=SigmoidScores(function="softmax"))
    assert [layer.feed for layer in read.decoder.layers] == [Mlp(12288), experts, experts]
    assert read.decoder.attention.rope.interleaved and read.decoder.tied and read.mtp_layers == 1


def test_k_exaone_236b_a23b():
    """Its keys that transformers passes over say what the others do."""
    windows = [128, 128, 128, 0]
    read = config(
        model_type="exaone_moe", hidden_size=6144, intermediate_size=18432, num_hidden_layers=4, vocab_size=153600,
        num_attention_heads=64, num_key_value_heads=8, head_dim=128, num_experts=128, num_experts_per_tok=8,
        num_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=1, is_moe_layer=[0, 1, 1, 1],
        n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5, scoring_func="sigmoid",
        topk_method="noaux_tc", sliding_window=128, sliding_window_pattern="LLLG", sliding_windows=windows,
        num_nextn_predict_layers=1, mtp_layer_types=["full_attention"], mtp_sliding_windows=[0], mtp_share_layers=False,
    )  # fmt: skip
    assert [layer.mixing.window or 0 for layer in read.decoder.layers] == windows
    tensors = {name for each in jax.tree.leaves(MODELS["exaone_moe"].tensors(read.decoder)) for name in each.sources}
    assert "model.layers.1.mlp.e_score_correction_bias" in tensors


def test_dots1_whose_groups_are_null():
    """All experts are one group then, as in the published config."""
    read = ModelConfig.from_hf(tiny_config("dots1", n_group=None, topk_group=None, scoring_func="noaux_tc")).decoder
    assert read.mixture.scores == SigmoidScores(scale=1.5)


@pytest.mark.parametrize("family,change,words", [
    ("olmoe", dict(clip_qkv=8.0), ["clip_qkv 8.0", "leave it out"]),
    ("mixtral", dict(hidden_act="gelu_pytorch_tanh"), ["hidden_act", "silu"]),
    ("mixtral", dict(num_experts_per_tok=9), ["num_experts_per_tok (9)", "num_local_experts (8)"]),
    ("hunyuan_v1_moe", dict(moe_topk=[1, 2]), ["moe_topk must be the same in all layers", "[1, 2]"]),
    ("hunyuan_v1_moe", dict(use_cla=True), ["use_cla True"]),
    ("bailing_moe", dict(score_function=None), ["score_function", "BailingMoeForCausalLM"]),
    ("bailing_moe", dict(use_qk_norm=False), ["use_qk_norm False"]),
    ("granitemoehybrid", dict(mamba_n_groups=2), ["mamba_n_groups 2", "supported: 1"]),
    ("granitemoehybrid", dict(mamba_d_head=16), ["mamba_n_heads (8)", "mamba_d_head (16)", "(64)"]),
    ("granitemoehybrid", dict(layer_types=["linear_attention"] * 2), ["no attention layer"]),
    ("granitemoehybrid", dict(position_embedding_type="alibi"), ["position_embedding_type", "'alibi'"]),
    ("minicpm", dict(num_experts=8), ["num_experts 8"]),
    ("minicpm", dict(mup_denominator=8), ["mup_denominator 8", "supported: 2"]),
    ("arcee", dict(hidden_act="silu"), ["hidden_act 'silu'", "'relu2'"]),
    ("exaone_moe", dict(sliding_windows=[20, 40]), ["sliding_windows [20, 40]", "supported: [20, 0]"]),
    ("exaone_moe", dict(swiglu_limits=[0.0, 7.0]), ["swiglu_limits [0.0, 7.0]", "supported: [0, 0]"]),
    ("llama4", dict(num_experts_per_tok=2), ["num_experts_per_tok 2", "supported: 1"]),
    ("llama4", dict(attention_chunk_size=24), ["attention_chunk_size", "power of two", "24"]),
    ("llama4", dict(layer_types=["chunked_attention", "sliding_attention"]), ["layer_types", "chunked_attention"]),
    ("llama4", dict(moe_layers=[2]), ["moe_layers", "0 to 1", "[2]"]),
    ("solar_open", dict(n_group=3), ["n_group (3)", "n_routed_experts (8)"]),
])  # fmt: skip
def test_variants_that_are_refused(family, change, words):
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_hf(tiny_config(family, **change))
    for word in words:
        assert word in str(error.value)
