"""The portable kernels on the device, at the sizes of models, against what they must equal."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoder.matmul import gating, project
from jaxspec.models.weights import Int4, Nvfp4
from jaxspec.pallas import hopper
from jaxspec.pallas.experts import experts_mlp, top_experts
from jaxspec.pallas.portable import fp8, router
from tests.decoder.test_moe import random_case
from tests.gpu.test_expert_fp8 import stack
from tests.gpu.test_lossless import NEAR_TIE, logit_gap
from tests.pallas.attention.test_decode_attention import CASES, Case
from tests.pallas.dense.test_few_rows_four_bits import drawn
from tests.pallas.dense.test_fp8_rows import operands
from tests.pallas.experts.test_expert_four import GPT_OSS, four_case, naive
from tests.pallas.experts.test_expert_stream import bfloat16
from tests.pallas.experts.test_top_experts import inputs
from tests.pallas.portable.test_portable_attention import PROMPTS, check
from tests.pallas.portable.test_portable_delta import CASES as DELTA
from tests.pallas.portable.test_portable_delta import check as delta_check
from tests.pallas.portable.test_portable_delta import check_scan
from tests.pallas.recurrence import test_accumulate as accumulate
from tests.support.kernels import assert_close
from tests.support.portable import outputs

pytestmark = pytest.mark.gpu

LARGE = [
    Case("32 heads, 16 parts", lengths=(1000,), group=4, kv_heads=8, entries=16, division=(16, 1)),
    Case("many requests", lengths=tuple(range(1, 257, 2)), kv_heads=8),
    Case("verify, 8 x 4", t=4, lengths=(4, 3, 200, 100, 250, 64, 65, 7), kv_heads=8, division=(4, 1)),
    Case("blocks of a prompt", t=64, lengths=(64, 128, 192, 256, 30), kv_heads=8),
    Case("blocks, width 256", t=64, lengths=(64, 128, 192, 256, 30), h=256, group=8),
    Case("blocks, width 512", t=64, lengths=(64, 128, 192, 30), h=512, group=8),
    Case("requests, width 512", lengths=(1000, 7, 300, 64), h=512, group=8, kv_heads=4, division=(4, 1), entries=16),
    Case("verify, width 512", t=4, lengths=(4, 200, 65), h=512, group=8, kv_heads=4),
    Case("blocks, width 64, window, sinks", t=64, lengths=(64, 256), h=64, group=8, window=128, sinks=True),
]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in [*CASES, *PROMPTS, *LARGE]])
def test_attention_equals_dense_softmax(case):
    parts = case.division[0] * case.division[1]
    check(dataclasses.replace(case, division=(1 << (parts - 1).bit_length(), 1)))  # on a GPU a power of two


@pytest.mark.parametrize("case", DELTA, ids=lambda case: case.name)
def test_a_delta_step_equals_the_plain_one(case):
    delta_check(case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_prompts_follow_one_another(dtype):
    check_scan(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_of_given_updates_equals_the_plain_one(dtype):
    accumulate.check_step(dtype)


def test_states_that_only_decay_follow_one_another():
    accumulate.check_scan()


@pytest.mark.parametrize("t,shared", [(1, 512), (8, 512), (8, 0), (32, 512), (300, 0)])
def test_a_mixture_equals_the_plain_one(t, shared):
    case = bfloat16(random_case(t, 64, 4, 0.3, d=2048, f=512, seed=t, shared=shared))
    outs = {}
    for kernels in ("portable", "plain"):
        with hopper.use_kernels(kernels), hopper.counting() as chosen:
            outs[kernels] = jax.jit(experts_mlp.experts_mlp)(*case)
            jax.clear_caches()
        assert bool(chosen) == (kernels == "portable")
    assert_close(outs["portable"], outs["plain"])


@pytest.mark.parametrize("t", [1, 32, 300])
def test_experts_gated_by_gelu_equal_the_plain_ones(t):
    case, given = bfloat16(random_case(t, 64, 4, 0.3, d=2816, f=704, seed=t, shared=0)), {"gating": gating("gelu_tanh")}
    outs = {}
    for kernels in ("portable", "plain"):
        with hopper.use_kernels(kernels), hopper.counting() as chosen:
            outs[kernels] = jax.jit(partial(experts_mlp.experts_mlp, **given))(*case)
            jax.clear_caches()
        assert bool(chosen) == (kernels == "portable")
    assert_close(outs["portable"], outs["plain"])


@pytest.mark.parametrize("t,e,k,width", [(1, 256, 8, 2048), (33, 512, 10, 2048), (5, 60, 4, 0)])
def test_a_router_chooses_as_the_plain_one(t, e, k, width):
    given = inputs(t, e, width)
    ids, weights = router.select(*given, k=k, renormalised=True)
    expected_ids, expected = top_experts.reference(*given, k, True)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gemma4", "gpt_oss", "qwen3_5"])
def test_greedy_text_is_the_same_with_drafts_and_without(family):
    """In float32, but for near-ties: other numbers of rows add up in another order."""
    expected = None
    for draft in ("none", "ngram"):
        llm, got = outputs(family, draft, kernels="portable", num_draft_tokens=None if draft == "none" else 3)
        assert llm.engine.stats()["kernels"]["portable_attention"]
        expected = expected or got
        for out, want in zip(got, expected, strict=True):
            if out.token_ids != want.token_ids:
                assert logit_gap(llm.engine.runner.model, out, want) < NEAR_TIE


@pytest.mark.parametrize("t,e,k,more", [
    (1, 8, 4, {}), (9, 8, 4, {}), (300, 4, 2, {}), (9, 8, 4, {"kind": Int4(32, zeros=True), "shared": 704}),
    (300, 4, 2, {"kind": Int4(64), "biased": False}), (1, 8, 4, {"kind": Nvfp4()}), (300, 4, 2, {"kind": Nvfp4()}),
])  # fmt: skip
def test_a_mixture_in_four_bits_matches_numpy(t, e, k, more):
    (x, stacks, ids, weights), whole = four_case(t, e, k, d=576, f=704, **more)
    with hopper.use_kernels("portable"), hopper.counting() as chosen:
        got = jax.jit(partial(experts_mlp.experts_mlp, gating=gating(GPT_OSS)))(x, stacks, ids, weights)
    assert chosen["portable_four_bits"]
    assert_close(got, naive(x, ids, weights, whole, GPT_OSS))


@pytest.mark.parametrize("t", [1, 9, 300])
@pytest.mark.parametrize("d,f,block", [(2048, 512, 128), (4096, 1408, None), (2816, 704, None)])
def test_fp8_experts_equal_the_plain_ones(d, f, block, t):
    x, _, ids, weights = bfloat16(random_case(t, 16, 4, 0.3, d=d, f=1, seed=t))
    given, outs = (x, [stack(16, d, f, t, block)], ids, weights), {}
    for kernels in ("portable", "plain"):
        with hopper.use_kernels(kernels), hopper.counting() as chosen:
            outs[kernels] = jax.jit(experts_mlp.experts_mlp)(*given)
            jax.clear_caches()
        assert bool(chosen["portable_experts"]) == (kernels == "portable")
    assert_close(outs["portable"], outs["plain"], 1e-2)


@pytest.mark.parametrize("rows", [1, 8, 40, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", [Int4(128), Int4(32, zeros=True), Nvfp4()], ids=str)
def test_weights_in_four_bits_match_numpy(kind, dtype, rows):
    weight, whole = drawn(kind, 4096, 512)
    x = jax.random.normal(jax.random.key(rows), (rows, 4096), dtype)
    with hopper.use_kernels("portable"), hopper.counting() as chosen:
        got = project(x, weight, jnp.array([rows]))
    assert chosen["portable_four_bits"]
    assert_close(got, np.asarray(x, np.float64) @ whole, 4e-3)


@pytest.mark.parametrize("rows,outputs,inputs", [(1, 6144, 4096), (32, 4096, 12288), (128, 4096, 4096)])
def test_fp8_weights_match_numpy(rows, outputs, inputs):
    x, values, scales, whole = operands(rows, outputs, inputs)
    expected = np.asarray(x, np.float64) @ whole.T.astype(np.float64)
    for each in (values, values.view(jnp.int8)):  # as GPUs from Ada on have it, and as those before
        got = fp8._product(x, each, scales, parts=1, interpret=False).sum(0)
        np.testing.assert_allclose(np.asarray(got), expected, atol=1e-3 * np.abs(expected).max())
