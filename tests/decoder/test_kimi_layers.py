"""Kimi Linear's layers at few rows, and others with latent attention, by kernels: they are the plain ones."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxspec.cache.mixers import RoundRows, empty_cache
from jaxspec.cache.paged import PageLayout, Rows
from jaxspec.decoder.fused_norms import FUSED_NORMS
from jaxspec.decoder.mixings import kimi_delta
from jaxspec.decoder.path import Call
from jaxspec.models.weights import Fp8
from jaxspec.pallas.hopper import KERNELS
from jaxspec.pallas.recurrence import gated_delta
from tests.decoder import test_few_rows_layers as few
from tests.decoder.test_few_rows_layers import hybrid_round, small_hybrid, take_few_rows, take_mixtures
from tests.pallas.dense.test_few_rows import INTERPRET, PAGE
from tests.support import drawn
from tests.support.kernels import assert_close
from tests.support.operations import only
from tests.support.sample import rare

KIMI = dict(
    linear_num_heads=32, linear_head_dim=32, num_hidden_layers=3, first_k_dense_replace=1, num_experts=8,
    num_experts_per_token=8, layer_types=["linear_attention", "linear_attention", "full_attention"],
    qk_nope_head_dim=64, qk_rope_head_dim=32, kv_lora_rank=32, v_head_dim=32, num_key_value_heads=2,
)  # fmt: skip


@pytest.mark.exhaustive  # Nemotron's layers by kernels are in test_few_rows_layers.py, the rule's kernel below
@pytest.mark.parametrize("t,requests", [(1, 1), (3, 1), (1, 8)])
def test_layers_are_those_of_the_model(monkeypatch, t, requests):
    """Norms that aren't centred, of 96 columns beside many; latent attention, and a mixture scored by a sigmoid."""
    config, params = small_hybrid("kimi_linear", 17 * 64, **KIMI)
    expected = hybrid_round(config, params, t, requests)
    take_few_rows(monkeypatch)
    calls, before = take_mixtures(monkeypatch), KERNELS["few_rows_normed"]
    got = hybrid_round(config, params, t, requests)
    assert KERNELS["few_rows_normed"] > before and set(calls) == {"add"}
    for one, other in zip(got, expected, strict=True):
        assert_close(one, other, 3e-2)  # of either and float32's: 1.5e-2 and 1.9e-2


LATENT = dict(
    hidden_size=1152, intermediate_size=128, num_key_value_heads=2, num_hidden_layers=2, first_k_dense_replace=1,
    n_routed_experts=8, num_experts_per_tok=8, moe_intermediate_size=64, n_group=1, topk_group=1,
    q_lora_rank=128, kv_lora_rank=96, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64,
)  # fmt: skip


def latent_model(activations: bool):
    """Mistral Small 4's layers in FP8, whose neighbours rotate and whose queries are scaled by position."""
    config, params = few.small_model("mistral4", **LATENT)
    return config, params | {"layers": few.in_fp8(params["layers"], activations=activations)}


@pytest.mark.parametrize("activations", [rare(False), rare(True)])
def test_latent_attention_in_fp8_is_the_models(monkeypatch, activations):
    (config, params), rows = latent_model(activations), few.two_requests()
    expected = few.forward(config, params, rows)
    take_few_rows(monkeypatch)
    calls, before = take_mixtures(monkeypatch), KERNELS["few_rows_normed"]
    got = few.forward(config, params, rows)
    assert KERNELS["few_rows_normed"] > before and calls == ["add"]
    few.assert_same_forward(got, expected, rows, 5e-2 if activations else 2e-2)


def test_scales_of_latents_that_the_kernels_cannot_read_are_named():
    (config, params), call = latent_model(False), Call(2, 4, "bfloat16", processors=132)
    first, *others = params["layers"]
    assert FUSED_NORMS.refuses(config.decoder, [first, *others], call) is None
    by_tensor = first | {"latents": first["latents"].replace(format=Fp8(None))}
    assert "128 outputs and all inputs" in FUSED_NORMS.refuses(config.decoder, [by_tensor, *others], call)


def rounds(sizes: dict, t: int, replay: int, requests: int = 1):
    """Two rounds of a layer's Kimi Delta Attention by itself, whose rows are filled up to eight: what the second one's
    valid rows give, and the layer's states after it."""
    config, params = small_hybrid("kimi_linear", **sizes)
    layer, weights = config.decoder.layers[0], params["layers"][0]
    cache = empty_cache(config, PageLayout(3, PAGE, "bfloat16"), requests + 1, t, "bfloat16")
    rows = Rows(jnp.zeros(requests, int), jnp.full(requests, t), jnp.zeros((requests, 2), int))
    filled, made = max(t, 8 // requests), []
    for i, name in enumerate(("qkv", "gates")):
        shape = 2, requests, filled, weights[name].outputs
        made.append(drawn.normal(jax.random.key(i), shape, jnp.bfloat16))
    for i in range(2):
        mixer = RoundRows(rows, jnp.arange(requests), jnp.full(requests, i * replay))
        of = layer, weights, jnp.int32(0), [each[i] for each in made], rows.marked_positions(t), mixer, cache
        out, cache = jax.jit(lambda mixer, cache, of=of: kimi_delta.mix(*of[:5], mixer, cache))(mixer, cache)
    assert out.shape == (requests, filled, layer.mixing.inner)
    return out[:, :t], *(leaf[:, :requests] for leaf in jax.tree.leaves(cache.states))


@pytest.mark.parametrize("t,replay", [rare(1, 1), (3, 2)])
def test_the_rule_with_gates_and_norm_is_the_plain_one(monkeypatch, t, replay):
    sizes = dict(linear_num_heads=2, linear_head_dim=128)
    expected = rounds(sizes, t, replay)
    monkeypatch.setattr(kimi_delta, "RULE", only(kimi_delta.RULE, "delta_step"))
    monkeypatch.setattr(gated_delta, "delta_step", partial(gated_delta.delta_step, **INTERPRET))
    before = KERNELS["delta_step"]
    got = rounds(sizes, t, replay)
    assert KERNELS["delta_step"] > before
    for one, other in zip(got, expected, strict=True):
        assert_close(one, other, 1e-2)
