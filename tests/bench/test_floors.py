"""Floors against arithmetic done by hand, and against what was measured for Qwen3-8B on an H200."""

import jax
import jax.numpy as jnp
import pytest

from jaxspec.bench.floors import Ceilings, ModelCost
from jaxspec.checkpoint import Model
from jaxspec.models.families import MODELS
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import is_param
from tests.support import kernels
from tests.support.tiny import tiny_config

H200 = Ceilings(4.3e12, 780e12)
QWEN3_8B = kernels.QWEN3_8B | {"vocab_size": 151936, "num_hidden_layers": 36}

QWEN3_30B_A3B = QWEN3_8B | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}

QWEN35_35B_A3B = QWEN3_8B | {
    "vocab_size": 248320,
    "hidden_size": 2048,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_hidden_layers": 40,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def cost(**overrides):
    """The cost of a model that has shapes and no numbers, in bfloat16."""
    config = ModelConfig.from_hf(tiny_config(**overrides))
    params = jax.tree.map(
        lambda param: param.made(jax.ShapeDtypeStruct(param.shape, jnp.bfloat16)),
        MODELS[config.model_type].tensors(config.decoder),
        is_leaf=is_param,
    )
    return ModelCost.of(Model(config, params, "bfloat16", "shapes", None, None), "bfloat16")


@pytest.fixture(scope="module")
def qwen():
    return cost(**QWEN3_8B)


@pytest.mark.parametrize("requests, floor_ms", [(1, 3.6), (8, 3.8), (32, 4.8), (128, 8.6)])
def test_decoding_is_bound_by_bytes(qwen, requests, floor_ms):
    size, flops = qwen.round(requests, 1, 1024 + 128)
    assert H200.seconds(size, flops) * 1e3 == pytest.approx(floor_ms, abs=0.1)
    assert H200.seconds(size, flops) == size / 4.3e12


@pytest.mark.parametrize("requests, floor_ms", [(1, 1.4), (8, 6.0), (32, 13.1), (128, 17.4)])
def test_of_experts_those_are_read_that_are_chosen(requests, floor_ms):
    """Qwen3-30B-A3B at 1024 to 1280 tokens: the floors that were worked out for it elsewhere."""
    moe = cost(family="qwen3_moe", **QWEN3_30B_A3B)
    size, flops = moe.round(requests, 1, 1024 + 128)
    assert H200.seconds(size, flops) * 1e3 == pytest.approx(floor_ms, rel=0.06)
    assert moe.weight_bytes - moe.expert_bytes < moe.round(1, 1, 0)[0] < 0.12 * moe.weight_bytes
    assert moe.layer_flops + moe.head_flops == pytest.approx(2 * 3.04e9, rel=0.02)  # what is active, embedding aside


@pytest.mark.parametrize("requests, floor_ms", [(1, 1.4), (8, 4.5), (32, 11.6), (128, 20.1)])
def test_of_hybrids_states_are_read_and_written_and_few_layers_attend(requests, floor_ms):
    """Qwen3.5-35B-A3B likewise. A shared expert is read whoever is chosen."""
    hybrid = cost(family="qwen3_5_moe", **QWEN35_35B_A3B)
    size, flops = hybrid.round(requests, 1, 1024 + 128)
    assert H200.seconds(size, flops) * 1e3 == pytest.approx(floor_ms, rel=0.06)
    assert hybrid.state_bytes == 30 * 32 * 128 * 128 * 4 and hybrid.kv_bytes == 10 * 2 * 2 * 256 * 2
    assert sum(each.pair_flops for each in hybrid.attends) == 10 * 4 * 16 * 256
    assert hybrid.expert_bytes == 2 * 40 * 256 * 3 * 512 * 2048
    assert hybrid.layer_flops + hybrid.head_flops == pytest.approx(2 * 3.05e9, rel=0.03)


def test_experts_without_a_gate_are_read_as_they_are_chosen():
    """Nemotron's, in one layer, over rows 16 wide."""
    moe = cost(family="nemotron_h", n_routed_experts=16, num_experts_per_tok=2, moe_intermediate_size=32)
    assert moe.expert_bytes == 2 * 16 * 2 * 32 * 16


def test_windowed_layers_read_what_they_see():
    sizes = dict(QWEN3_8B, num_hidden_layers=2, use_sliding_window=True, sliding_window=1024)
    full, half = (cost(family="qwen2", **sizes, max_window_layers=layers) for layers in (2, 1))
    assert half.round(8, 1, 1000) == full.round(8, 1, 1000) and half.prefill(1024) == full.prefill(1024)
    saved = [x - y for x, y in zip(full.round(8, 1, 32768), half.round(8, 1, 32768), strict=True)]
    flops = full.attends[1].pair_flops
    assert saved == [8 * (32768 - 1024) * full.kv_bytes / 2, 8 * (32768 - 1024) * flops]
    hidden = sum(max(seen - 1024, 0) for seen in range(1, 5001))
    assert full.prefill(5000)[1] - half.prefill(5000)[1] == hidden * flops


def test_layers_with_chunks_read_half_a_chunk_on_average():
    sizes = dict(num_hidden_layers=2, num_experts_per_tok=1, no_rope_layer_interval=2)
    chunked = cost(family="llama4", **sizes, attention_chunk_size=1024).attends
    near, far = chunked
    assert (near.seen(1000), near.seen(32768), far.seen(32768)) == (1000, 512.5, 32768)
    assert near.pairs(4096) == 4 * sum(range(1025)) and near.pairs(1000) == far.pairs(1000) == sum(range(1001))


def test_verifying_many_rows_is_bound_by_arithmetic(qwen):
    size, flops = qwen.round(128, 16, 1152)
    assert H200.seconds(size, flops) == flops / 780e12 > size / 4.3e12


def test_prompts_are_bound_by_arithmetic(qwen):
    size, flops = qwen.prefill(1024)
    assert H200.seconds(size, flops) * 1e3 == pytest.approx(18.5, abs=0.5)
    # 8192 tokens: eight times the matrices' work, and attention that grows with the square
    attention = 4 * 32 * 128 * 36 * 8192 * 8193 / 2
    assert qwen.prefill(8192)[1] == pytest.approx(8 * (flops - attention / 64) + attention, rel=1e-3)


def test_the_embedding_is_read_only_if_it_is_the_head():
    apart, tied = cost(vocab=64), cost(vocab=64, tie_word_embeddings=True)
    assert apart.weight_bytes == tied.weight_bytes  # one of the two tables, 64 x 32, either way
    assert apart.head_flops == tied.head_flops == 2 * 64 * 32
    # tiny: 2 layers; qkv 32 x 128, out 64 x 32, gate and up 32 x 128, down 64 x 32
    assert apart.layer_flops == 2 * 2 * (32 * 128 + 64 * 32 + 32 * 128 + 64 * 32)
    assert apart.kv_bytes == 2 * 2 * 2 * 16 * 2
