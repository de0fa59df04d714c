"""A mixture's router as one kernel: interpreted, lowered for CUDA, and what it leaves to others."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.dense import few_rows
from jaxspec.pallas.experts import top_experts
from jaxspec.pallas.experts.router import router, supported
from tests.support import drawn
from tests.support.kernels import kernels
from tests.support.sample import rare

EPS = 1e-6


def operands(width: int, experts: int, bias: bool):
    """Operands of eight rows, of which the last two are padding."""
    keys = jax.random.split(jax.random.key(experts), 6)
    x, scale = (drawn.normal(k, n) for k, n in zip(keys[:2], ((8, width), (width,)), strict=True))
    weight = drawn.normal(keys[3], (width, experts)) * width**-0.5
    x, scale, weight = (a.astype(jnp.bfloat16) for a in (x, 1 + 0.1 * scale, weight))
    bias = drawn.normal(keys[4], (experts,), jnp.bfloat16) if bias else None
    positions = jnp.array([0, 1, 2, 3, 4, 5, -1, -1])
    return few_rows.scale_rows(x, scale), weight, positions, bias


def reference(x, weight, positions, bias, *, k, renormalised, num_experts):
    """From the definition; only the first `num_experts` experts can be chosen."""
    factor = jax.lax.rsqrt(x.squares.sum(0) / weight.shape[0] + EPS)[:, None]
    wide = x.rows.astype(jnp.float32)
    logits = (wide @ weight.astype(jnp.float32)) * factor
    logits = (logits if bias is None else logits + bias)[:, :num_experts]
    rows = (wide * factor).astype(jnp.bfloat16)
    return *top_experts.reference(logits, positions, None, k, renormalised), rows


def check(width, experts, k, bias=False, renormalised=True, num_experts=None, **options):
    given = operands(width, experts, bias)
    named = dict(k=k, renormalised=renormalised, eps=EPS, num_experts=num_experts or experts)
    ids, weights, rows = jax.jit(partial(router, **named, **options))(*given)
    expected, likely, normed = reference(*given, k=k, renormalised=renormalised, num_experts=num_experts or experts)
    chosen = expected.shape[1]
    np.testing.assert_array_equal(ids[:, :chosen], expected)
    assert (ids[:, chosen:] == top_experts.NOBODY).all()
    np.testing.assert_allclose(weights[:6, :chosen], likely[:6], rtol=2e-3, atol=1e-6)
    np.testing.assert_array_equal(rows, normed)


CASES = {
    "qwen3": dict(experts=128, k=8),
    "many": dict(experts=256, k=8),
    "gpt-oss": dict(experts=128, k=4, bias=True),
    "few experts": dict(experts=64, k=4, bias=True, renormalised=False, num_experts=32),
}


@pytest.mark.parametrize("case", CASES)
def test_experts_are_chosen(case):
    check(256, **CASES[case], interpret=plgpu.InterpretGPUParams())


@pytest.mark.parametrize(
    "width,case", [rare(2048, "qwen3"), (2048, "many"), (2880, "gpt-oss"), rare(2880, "few experts")]
)
def test_lowers_for_cuda(width, case):
    sizes = dict(CASES[case])
    experts, k = sizes["experts"], sizes["k"]
    given = jax.eval_shape(lambda: operands(width, experts, "bias" in sizes))
    run = partial(router, k=k, renormalised=True, eps=EPS, num_experts=sizes.get("num_experts", experts))
    assert kernels(run, *given) == 1


def test_what_it_leaves_to_others_is_named():
    assert supported(8, 2048, 256, 8, jnp.bfloat16) is None
    assert supported(8, 2880, 128, 4, jnp.bfloat16) is None
    assert "float32" in supported(8, 2048, 128, 8, jnp.float32)
    assert "16 rows" in supported(16, 2048, 128, 8, jnp.bfloat16)
    assert "2048 by 100" in supported(8, 2048, 100, 8, jnp.bfloat16)
    assert "shared memory" in supported(8, 2048, 512, 10, jnp.bfloat16)
    assert "supported: up to 128" in supported(8, 2048, 256, 129, jnp.bfloat16)
