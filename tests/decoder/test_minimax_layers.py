"""MiniMax-M2's layers at few rows, by kernels: they are the plain ones. OLMoE's are the same, scored by a softmax."""

from __future__ import annotations

import jax
import pytest

from jaxspec.decoder import forward as forward_module
from jaxspec.pallas.hopper import KERNELS
from tests.decoder.test_few_rows_layers import (
    assert_same_forward,
    forward,
    in_fp8,
    small_model,
    take_few_rows,
    take_mixtures,
    two_requests,
)
from tests.support import drawn
from tests.support.sample import rare

MINIMAX = dict(num_local_experts=8, num_experts_per_tok=8, intermediate_size=64, rotary_dim=32)
OLMOE = dict(num_experts=8, num_experts_per_tok=8, intermediate_size=64)


@pytest.mark.parametrize("family,sizes,quantised", [
    rare("minimax_m2", MINIMAX, True), rare("minimax_m2", MINIMAX, False), ("olmoe", OLMOE, False),
])  # fmt: skip
def test_layers_are_those_of_the_model(monkeypatch, family, sizes, quantised):
    """All heads' queries have one norm, whose weights differ by column. Each token takes all experts: a near-tie would
    have one choose others."""
    sizes = dict(hidden_size=1152, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2) | sizes
    config, params = small_model(family, **sizes)
    for i, layer in enumerate(params["layers"]):
        for name in ("q_norm", "k_norm"):
            layer[name] = 1 + 0.5 * drawn.normal(jax.random.key(i), layer[name].shape, layer[name].dtype)
    if quantised:
        params["layers"] = in_fp8(params["layers"], activations=True)
    rows = two_requests()
    expected = forward(config, params, rows)
    take_few_rows(monkeypatch)
    monkeypatch.setattr(forward_module, "PATHS", forward_module.PATHS[1:])  # `fused_norms`
    calls, before = take_mixtures(monkeypatch), KERNELS["few_rows_normed"]
    got = forward(config, params, rows)
    assert KERNELS["few_rows_normed"] > before and "add" in calls
    assert_same_forward(got, expected, rows, 5e-2 if quantised else 2e-2)
