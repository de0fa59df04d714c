"""A few tokens' experts on the device: up and down hand over through counters, which interpret mode can't run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.weights import Int4, Nvfp4
from jaxspec.pallas.experts import experts_mlp
from jaxspec.pallas.experts.expert_few import ROWS, mix
from jaxspec.pallas.experts.experts_mlp import NOBODY
from tests.decoder.test_moe import arrays, random_case
from tests.gpu import test_expert_four, test_expert_fp8, test_expert_stream
from tests.gpu.test_expert_stream import draw
from tests.pallas.experts import test_expert_few as cpu
from tests.pallas.experts.test_expert_stream import MODELS, bfloat16
from tests.support.kernels import assert_close

pytestmark = pytest.mark.gpu


@jax.jit
def run(x, stacks, *rest):
    return mix(x, arrays(stacks), *rest)


@jax.jit
def expected(x, stacks, ids, weights):
    rows, items, place = experts_mlp.plan(x, ids, sum(len(down.values) for _, down in stacks))
    return experts_mlp.combine(experts_mlp.reference(rows, stacks, items), place, weights)


@pytest.mark.parametrize("tokens", range(1, ROWS + 1))
@pytest.mark.parametrize("model", MODELS)
def test_kernel_matches_the_reference(model, tokens):
    """Twice on the same data, with uniform and with lopsided routing: a missing wait would differ now and then."""
    for seed, skew in enumerate((0.0, 0.5)):
        case = draw(model, tokens, skew, seed)
        got = run(*case)
        np.testing.assert_array_equal(got, run(*case))
        assert_close(got, expected(*case))


@pytest.mark.parametrize("tokens,rows", [(1, 8), (3, 3), (4, 8), (8, 8)])
def test_is_added_to_the_residual_stream(tokens, rows):
    case = draw("qwen3.5-35b-a3b", tokens, 0.0, 0)
    residual = jax.random.normal(jax.random.key(tokens), (rows, case[0].shape[1]), case[0].dtype)
    alone = run(*case)
    got = run(*case, residual)
    np.testing.assert_array_equal(got, residual + jnp.pad(alone, ((0, rows - tokens), (0, 0))))


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3.5-35b-a3b"])
@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_sums_come_scaled_for_the_norm_after_them(model, tokens):
    case = draw(model, tokens, 0.0, 0)
    residual, scale = cpu.residual_and_scale(case[0].shape[1])
    got, scaled = run(*case, residual, scale)
    np.testing.assert_array_equal(got, run(*case, residual))
    cpu.assert_scaled(scaled, got, scale)


@jax.jit
def run_fp8(x, stacks, *rest):
    return mix(x, cpu.fp8_arrays(stacks), *rest)


@pytest.mark.parametrize("tokens", range(1, ROWS + 1))
@pytest.mark.parametrize("model,block", [("qwen3-30b-a3b", 128), ("qwen3.5-35b-a3b", 128), ("qwen3.5-35b-a3b", None)])
def test_fp8_experts_match_the_reference(model, block, tokens):
    """Twice on the same data, with uniform and with lopsided routing: a missing wait would differ now and then."""
    for seed, skew in enumerate((0.0, 0.5)):
        case = test_expert_fp8.draw(model, tokens, skew, seed, block)
        got = run_fp8(*case)
        for _ in range(3):
            np.testing.assert_array_equal(got, run_fp8(*case))
        assert_close(got, expected(*case), 1e-2)


FOUR_BITS = [Int4(128), Nvfp4(), Int4(32, zeros=True)]


@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "model,kind", [*(("qwen3.5-35b-a3b", kind) for kind in FOUR_BITS), ("qwen3-30b-a3b", Int4(128))]
)
def test_experts_in_four_bits_match_the_reference(model, kind, tokens):
    """The mixture takes this kernel; twice on the same data, with uniform and with lopsided routing."""
    for seed, skew in enumerate((0.0, 0.5)):
        case = test_expert_four.draw(model, tokens, skew, seed, kind)
        test_expert_stream.check(case, ["expert_few"], None, experts_mlp.reference, 1e-2)


@pytest.mark.parametrize("kind", FOUR_BITS)
def test_small_experts_in_four_bits(kind):
    """Hand-overs right away, over and over; a token without experts, too."""
    for seed in range(5):
        x, _, ids, weights = bfloat16(random_case(4, 16, 3, d=2048, f=1, seed=seed))
        stacks, ids = [test_expert_four.four_bits(16, 2048, 256, kind)], ids.at[-1].set(NOBODY)
        got = run_four(x, stacks, ids, weights)
        assert not np.asarray(got[-1], np.float32).any()
        assert_close(got, expected(x, stacks, ids, weights), 1e-2)


@jax.jit
def run_four(x, stacks, *rest):
    return mix(x, stacks, *rest)


@pytest.mark.parametrize("tokens", [1, 4, 8])
@pytest.mark.parametrize("fp8,block", [(False, None), (True, 128), (True, None)])
def test_small_experts(tokens, fp8, block):
    """Blocks without work, and hand-overs right away, over and over. A token without experts, too."""
    of, tolerance = (run_fp8, 1e-2) if fp8 else (run, 8e-3)
    for seed in range(5):
        x, stacks, ids, weights = bfloat16(random_case(tokens, 16, 3, d=2048, f=1 if fp8 else 256, seed=seed))
        stacks = [test_expert_fp8.stack(16, 2048, 256, seed, block)] if fp8 else stacks
        assert_close(of(x, stacks, ids, weights), expected(x, stacks, ids, weights), tolerance)
        ids = ids.at[-1].set(NOBODY)
        got = of(x, stacks, ids, weights)
        assert not np.asarray(got[-1], np.float32).any()
        np.testing.assert_array_equal(got[:-1], of(x, stacks, ids, weights)[:-1])
        if tokens > 1:
            first = ids.at[0].set(NOBODY)
            assert_close(of(x, stacks, first, weights), expected(x, stacks, first, weights), tolerance)
