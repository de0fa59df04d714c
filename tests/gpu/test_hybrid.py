"""A hybrid mixture on the device: prompts and a round through all of its kernels, against plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.mixers import PromptBlocks, RoundRows, empty_cache
from jaxspec.cache.paged import PageLayout, Rows
from jaxspec.cache.recurrent import NOTHING
from jaxspec.checkpoint.params import dummy
from jaxspec.decoder.forward import forward
from jaxspec.models.families import MODELS
from jaxspec.models.model_config import ModelConfig
from jaxspec.pallas.hopper import counting
from tests.support.kernels import switch_off
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.gpu

WIDTHS = {
    "hidden_size": 512,
    "head_dim": 128,
    "num_hidden_layers": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
PROMPTS = {
    *("top_experts", "expert_stream", "take_rows", "weighted_rows", "kv_write", "tile_matmul"),
    *("conv_chunk", "delta_chunk", "prompt_attention"),
}
ROUNDS = {"top_experts", "expert_plan", "expert_stream", "conv_step", "delta_step", "decode_attention"}
WHOLE_TILES = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}  # of columns, as few rows want them
FEW_ROWS = {"few_rows_normed", "few_rows_add", "conv_step", "delta_step", "decode_attention"}
SPACES = {
    **{"hybrid_override_pattern": "MEM*E", "n_groups": 8, "ssm_state_size": 128, "mamba_num_heads": 64},
    **{"mamba_head_dim": 64, "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 128},
    **{"moe_shared_expert_intermediate_size": 256, "moe_latent_size": None},
}
ROWS, BLOCKS = 4, 4  # of a request


def serve(config: ModelConfig, params, requests: int):
    """A prompt of 200 to 256 tokens and a round of four rows for each request: hidden states, and kernels chosen."""
    length = jnp.array([256, 200, 237])[:requests]
    keys = jax.random.split(jax.random.key(0))
    table = jnp.arange(1, 1 + 5 * requests, dtype=jnp.int32).reshape(requests, 5)
    cache = empty_cache(config, PageLayout(1 + table.size, 64, "bfloat16"), requests + 1, ROWS, "bfloat16")
    request, place = jnp.divmod(jnp.arange(BLOCKS * requests, dtype=jnp.int32), BLOCKS)
    blocks = Rows(64 * place, jnp.clip(length[request] - 64 * place, 0, 64), table[request])
    nothing = jnp.full((BLOCKS * requests,), NOTHING, jnp.int32)
    prompt = PromptBlocks(blocks, request, jnp.where(place == 0, NOTHING, request), nothing)
    rows = Rows(length, jnp.full((requests,), ROWS), table)
    step = RoundRows(rows, jnp.arange(requests, dtype=jnp.int32), jnp.zeros((requests,), jnp.int32))
    run = jax.jit(
        lambda params, tokens, positions, mixer, cache: forward(config.decoder, params, tokens, positions, mixer, cache)
    )
    outs = []
    for mixer, at, key in ((prompt, blocks, keys[0]), (step, rows, keys[1])):
        tokens = jax.random.randint(key, (len(at.start), 64 if at is blocks else ROWS), 0, config.vocab_size)
        with counting() as chosen:
            hidden = run(params, tokens, at.marked_positions(tokens.shape[1]), mixer, cache)
        real = np.arange(tokens.shape[1]) < np.asarray(at.count)[:, None]
        outs.append((np.asarray(hidden.last, np.float64)[real], set(chosen)))
        cache = hidden.cache
    return outs


@pytest.mark.parametrize("family,widths,requests,prompts,rounds", [
    ("qwen3_5_moe", EXPERTS, 3, PROMPTS, ROUNDS),
    ("qwen3_5", WHOLE_TILES, 1, {"tile_matmul", "delta_chunk", "prompt_attention"}, FEW_ROWS),
])  # fmt: skip
def test_prompts_and_rounds_are_as_exact_as_the_plain_path(monkeypatch, family, widths, requests, prompts, rounds):
    assert served_exactly(monkeypatch, family, widths, requests) == [prompts, rounds]


@pytest.mark.parametrize("requests", [1, 2, 3])
def test_rounds_of_state_spaces_are_as_exact_as_the_plain_path(monkeypatch, requests):
    """Nemotron's layers, of which up to eight rows have each norm with the product after it."""
    _, rounds = served_exactly(monkeypatch, "nemotron_h", SPACES, requests)
    few = {"few_rows_normed", "few_rows_add"} if requests < 3 else set()
    assert {"conv_step", "delta_step", "grouped_norm", "expert_stream"} | few <= rounds


def served_exactly(monkeypatch, family: str, widths: dict, requests: int) -> list[set[str]]:
    """Check prompts and a round against float32, and name their kernels.

    Two paths in bfloat16 are apart by what each is from that. A rounded sum sends one token in ten to another expert,
    and what it writes is seen by those after it.
    """
    config = ModelConfig.from_hf(tiny_config(family, **WIDTHS | widths))
    params = dummy(MODELS[config.model_type].tensors(config.decoder), "bfloat16", seed=0)
    ours = serve(config, params, requests)
    switch_off(monkeypatch)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    plain, exact = serve(config, params, requests), serve(config, wide, requests)
    for (got, _), (rounded, chosen), (expected, _) in zip(ours, plain, exact, strict=True):
        assert not chosen and np.isfinite(got).all()
        apart = [
            np.median(np.linalg.norm(x - expected, axis=1) / np.linalg.norm(expected, axis=1)) for x in (got, rounded)
        ]
        assert apart[0] <= 1.5 * apart[1], apart
    return [chosen for _, chosen in ours]
