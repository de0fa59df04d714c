"""Latent attention: configs as published, refusals by name, FP8 weights, texts that drafts leave as they are."""

import math

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec import LLM
from jaxspec.config.options import ConfigError
from jaxspec.models.description import Norm, SigmoidScores
from jaxspec.models.memory import PagedRows
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.rope_scaling import Rope, Yarn
from tests.models.test_families import GREEDY, OPTIONS, PROMPTS, VOCAB, YARN
from tests.support import heads, quantised
from tests.support.engines import check_greedy
from tests.support.sample import rare
from tests.support.tiny import tiny_checkpoint, tiny_config

SCALING = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "moe_layer_freq": 1, "num_nextn_predict_layers": 1, "rope_theta": 10000,
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "attention_bias": False,
    "rope_scaling": SCALING | {"original_max_position_embeddings": 4096},
}  # fmt: skip
K2 = V3 | {
    "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "first_k_dense_replace": 1,
    "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "rope_theta": 50000.0,
    "num_nextn_predict_layers": 0,
    "rope_scaling": SCALING | {"factor": 32, "beta_fast": 1, "original_max_position_embeddings": 4096},
}  # fmt: skip


def test_deepseek_v3_as_published():
    config = ModelConfig.from_hf(V3)
    attention, mixture = config.decoder.attention, config.decoder.mixture
    mscale = 0.1 * math.log(40) + 1
    assert attention.rope == Rope(10000.0, Yarn(40.0, 4096, 1.0, 32.0, 1.0), columns=64, interleaved=True)
    assert attention.scale == pytest.approx(mscale**2 / math.sqrt(192)) and attention.norm == Norm(1e-6)
    assert (attention.query_latent, attention.heads, attention.memory) == (1536, 128, PagedRows(1, 576, streams=1))
    assert mixture.scores == SigmoidScores(8, 4, 2.5) and (mixture.shared, mixture.shared_gated) == (2048, False)
    assert [layer.feed == mixture for layer in config.decoder.layers] == [False] * 3 + [True] * 58
    assert (config.mtp_layers, config.max_position) == (1, 163840)


def test_kimi_k2_as_published():
    config = ModelConfig.from_hf(K2)
    mixture, scaling = config.decoder.mixture, config.decoder.attention.rope.scaling
    assert (mixture.experts, mixture.per_token, mixture.scores) == (384, 8, SigmoidScores(1, 1, 2.827))
    assert (config.decoder.attention.heads, config.mtp_layers, config.max_position) == (64, 0, 163840)
    assert (scaling.beta_fast, scaling.beta_slow, scaling.attention_factor) == (1.0, 1.0, 1.0)


def test_layers_of_glm4_moe_lite_have_the_mlps_that_its_config_names():
    kinds = ["dense", "sparse", "dense"]
    config = ModelConfig.from_hf(tiny_config("glm4_moe_lite", num_hidden_layers=3, mlp_layer_types=kinds))
    assert [layer.feed == config.decoder.mixture for layer in config.decoder.layers] == [False, True, False]


@pytest.mark.parametrize("family,change,words", [
    ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "topk_method 'group_limited_greedy'.*supported: 'greedy'"),
    ("deepseek_v2", {"routed_scaling_factor": 16.0}, r"routed_scaling_factor 16\.0.*supported: 1\.0"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True"),
    ("deepseek_v2", {"mlp_bias": True}, "mlp_bias True"),
    *((family, {"tie_word_embeddings": True}, "tie_word_embeddings True") for family in ("kimi_linear", "nemotron_h")),
    ("deepseek_v3", {"attention_bias": True}, "attention_bias True is not supported for model_type 'deepseek_v3'"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'.*supported: 'sigmoid'"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
    ("deepseek_v3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
    ("deepseek_v3", {"qk_rope_head_dim": 5}, "5, not an even number"),
    ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank must be a positive integer"),
    ("glm4_moe_lite", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act 'gelu_pytorch_tanh'.*for experts"),
    ("minimax_m2", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act 'gelu_pytorch_tanh'.*for experts"),
    ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list 0 is not supported"),
    ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type 'per_head'.*supported: 'per_layer'"),
    ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size 8"),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must name 2 layers"),
    ("kimi_k2", {"sliding_window": 8, "use_sliding_window": True}, "sliding-window attention is not supported"),
])  # fmt: skip
def test_what_is_not_served_is_refused_by_name(family, change, words):
    with pytest.raises(ConfigError, match=words):
        ModelConfig.from_hf(tiny_config(family, **change))


def test_heads_of_gemma4_may_all_be_alike():
    """transformers then saves that no layer has keys of its own."""
    config = tiny_config("gemma4", per_layer_config={})
    full = ModelConfig.from_hf(config).decoder.layers[-1].mixing
    assert (full.head_dim, full.kv_heads) == (config["head_dim"], config["num_key_value_heads"])


def test_infinity_as_transformers_saves_it():
    saved = tiny_config("nemotron_h", time_step_limit=[0.0, {"__float__": "Infinity"}])
    assert ModelConfig.from_hf(saved) == ModelConfig.from_hf(saved | {"time_step_limit": [0.0, math.inf]})


def eagle3(target) -> str:
    return f"eagle3:{heads.random_eagle3(target, tuple(range(0, VOCAB, 2)), (0, 0, 0))}"


@pytest.mark.parametrize("family,draft,options", [
    ("deepseek_v3", lambda _: "ngram", {}),
    pytest.param("kimi_k2", eagle3, {}, marks=pytest.mark.exhaustive),
    pytest.param("glm4_moe_lite", lambda _: "ngram", {"kv_cache_dtype": "bfloat16"}, marks=pytest.mark.exhaustive),
    pytest.param("deepseek_v2", eagle3, {"topk": 2}, marks=pytest.mark.exhaustive),  # trees
])  # fmt: skip
def test_greedy_texts_are_the_models_own_cached_or_cold(family, draft, options):
    target = tiny_checkpoint(family, VOCAB, 2, rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0})
    llm = LLM(str(target), draft(target), **OPTIONS | options)
    cached = check_greedy(llm, PROMPTS, GREEDY)
    assert cached[-1].metrics.cached_tokens >= len(PROMPTS[-1]) - 1 - OPTIONS["page_size"]
    stats = llm.engine.stats()
    assert 0 < sum(stats["accepted_per_position"]) < sum(stats["drafted_per_position"])


@pytest.mark.exhaustive
def test_drafts_and_cached_prefixes_leave_texts_over_fp8_latents_as_they_are():
    target = str(tiny_checkpoint("kimi_k2", VOCAB, 2))
    options = OPTIONS | {"kv_cache_dtype": "fp8"}
    undrafted = LLM(target, "none", **options | {"num_draft_tokens": None}).generate(PROMPTS, GREEDY)
    llm = LLM(target, "ngram", **options)
    for _ in ("cold", "cached"):
        outs = llm.generate(PROMPTS, GREEDY)
        assert [out.token_ids for out in outs] == [out.token_ids for out in undrafted]
    assert outs[-1].metrics.cached_tokens and sum(llm.engine.stats()["accepted_per_position"])
    assert "float8_e4m3fn" in {each.dtype.name for each in jax.tree.leaves(llm.engine.runner.state)}


@pytest.mark.parametrize("kind,config,suffix", [
    ("block", quantised.BLOCKS, "_scale_inv"), rare("channel", quantised.compressed("channel"), "_scale"),
])  # fmt: skip
def test_fp8_weights_are_the_numbers_that_they_stand_for(kind, config, suffix, tmp_path):
    """In blocks, whose scales of the 200 rows of latents are of 128 and of 72, and by channel."""
    sizes = dict(q_lora_rank=96, kv_lora_rank=160, qk_nope_head_dim=64, qk_rope_head_dim=40, v_head_dim=64)
    source = tiny_checkpoint("deepseek_v3", VOCAB, **sizes)
    fp8, whole = quantised.write(source, tmp_path, kind, config, suffix)
    how = {"progress": False, "fp8_activations": False}
    model, expected = (jaxspec.load_model(str(folder), **how) for folder in (fp8, whole))
    assert model.params["layers"][0]["keys_values"].quantised and model.params["layers"][0]["latents"].quantised
    text = np.arange(20)[None] % VOCAB
    np.testing.assert_allclose(jaxspec.logits(model, text), jaxspec.logits(expected, text), atol=2e-3)
