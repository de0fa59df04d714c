"""The kernels of experts in four bits on the device: from one token to a prompt, against plain jnp, and their speed."""

from __future__ import annotations

import functools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.bench import profile
from jaxspec.decoder.matmul import gating
from jaxspec.models import mxfp4
from jaxspec.models.weights import Format, Int4, Nvfp4, Weight
from jaxspec.pallas.experts import expert_four, experts_mlp
from jaxspec.pallas.experts.expert_four import MAX_ROWS, mix
from jaxspec.pallas.experts.four_loaders import Mxfp4Loader
from tests.decoder.test_moe import random_case
from tests.gpu.test_expert_stream import SKEWS, check, check_one_launch
from tests.pallas.experts.test_expert_four import GPT_OSS, MODELS, MXFP4
from tests.pallas.experts.test_expert_stream import bfloat16
from tests.support.kernels import assert_close

pytestmark = pytest.mark.gpu
ACT, GPT_OSSES = gating(GPT_OSS), [name for name in MODELS if name.startswith("gpt-oss")]


def draw(model: str, tokens: int, skew: float, seed: int, kind: Format = MXFP4):
    """A shared expert, in a stack of its own, is among Qwen's."""
    d, f, e, k = MODELS[model]
    shared = int(kind != MXFP4)
    x, _, ids, weights = bfloat16(random_case(tokens, e, k, skew, d=d, f=1, seed=seed, shared=shared))
    return x, [stack(e, d, f, kind), *[stack(1, d, f, kind)] * shared], ids, weights


@functools.cache
def stack(count: int, d: int, f: int, kind: Format = MXFP4):
    if kind != MXFP4:
        return four_bits(count, d, f, kind)

    def own(key, n, k):  # blocks of different sizes: a scale that is taken from another block is far off
        key, more = jax.random.split(key)
        sizes = jnp.exp(jax.random.normal(more, (n, k // 32, 1)))
        return mxfp4.quantise((jax.random.normal(key, (n, k // 32, 32)) * sizes * k**-0.5).reshape(n, k))

    def weight(key, n, k):
        values, scales = jax.lax.map(lambda key: own(key, n, k), jax.random.split(key, count))
        return Weight(values, MXFP4, scales=scales)

    keys = jax.random.split(jax.random.key(count), 4)
    biases = [jax.random.normal(key, (count, n), jnp.bfloat16) for key, n in zip(keys[2:], (2 * f, d), strict=True)]
    return jax.jit(lambda: (weight(keys[0], 2 * f, d), weight(keys[1], d, f), *biases))()


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def four_bits(count: int, d: int, f: int, kind: Format):
    """Symmetric integers, or NVFP4, whose groups have different sizes; zero points are added to integers' scales."""

    def weight(key, n, k):
        def own(key):
            sizes = jnp.exp(jax.random.normal(key, (n, k // 16))).repeat(16, axis=1)
            values, scales, *factors = kind.quantise(jax.random.normal(key, (n, k)) * sizes * k**-0.5)
            if getattr(kind, "zeros", False):
                points = jax.random.randint(key, scales.shape, 0, 16).astype(scales.dtype)
                scales = jnp.stack([scales, points], axis=1).reshape(-1, n)
            return values, scales, *factors

        values, scales, *factors = jax.lax.map(own, jax.random.split(key, count))
        return Weight(values, kind, scales=scales, factors=factors[0] if factors else None)

    keys = jax.random.split(jax.random.key(count), 2)
    return weight(keys[0], 2 * f, d), weight(keys[1], d, f)


def test_numbers_are_exact():
    """One row with a single input: each output is one number of the weight times one hidden one."""
    gate_up, down, *_ = stack(2, 576, 576)
    one = jnp.eye(576, dtype=jnp.bfloat16)
    ids, weights = jnp.zeros((576, 1), jnp.int32), jnp.ones((576, 1))
    got = jax.jit(partial(experts_mlp.experts_mlp, gating=lambda gate, up: up + 0 * gate))(
        one, [(gate_up, down)], ids, weights
    )
    hidden = gate_up.dequantised("float32")[0, 576:].T.astype(jnp.bfloat16)  # exact: two bits of mantissa
    np.testing.assert_array_equal(hidden.astype(jnp.float32), gate_up.dequantised("float32")[0, 576:].T)
    expected = hidden.astype(jnp.float32) @ down.dequantised("float32")[0].T
    assert_close(got, expected, 4e-3)


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("tokens", [1, 3, 8, 17, 32, 100, 128, 512, 2048])
@pytest.mark.parametrize("model", GPT_OSSES)
def test_kernel_matches_the_reference(model, tokens, skew):
    case = draw(model, tokens, skew, SKEWS.index(skew))
    check(case, ["expert_four"], ACT, partial(experts_mlp.reference, gating=ACT), 1e-2)


SIZES = [
    *(("qwen3.5-35b-a3b", Int4(128), tokens) for tokens in (9, 32, 128, 2048)),
    *(("qwen3.5-35b-a3b", Int4(32, zeros=True), tokens) for tokens in (17, 600)),
    *(("qwen3.5-35b-a3b", Nvfp4(), tokens) for tokens in (9, 17, 128, 600)),
    *(("qwen3-30b-a3b", Int4(128), tokens) for tokens in (9, 128)),  # an odd number of turns
    ("qwen3-30b-a3b", Nvfp4(), 32),
]


@pytest.mark.parametrize("model,kind,tokens", SIZES)
def test_integers_and_nvfp4_match_the_reference(model, kind, tokens):
    case = draw(model, tokens, SKEWS[-1] if tokens == 17 else 0.0, tokens, kind)
    check(case, ["expert_four"], None, experts_mlp.reference, 1e-2)


@pytest.mark.parametrize("tokens", [9, 128])
def test_one_launch_makes_the_bits_of_two(tokens, monkeypatch):
    x, stacks, ids, _ = draw("gpt-oss-120b", tokens, 0.0, 0)
    monkeypatch.setattr(Mxfp4Loader, "one_launch", len(ids) * ids.shape[1])
    check_one_launch(monkeypatch, expert_four, partial(mix, gating=ACT), x, stacks, ids)


@pytest.mark.parametrize("highest", [8, 16, 32, 64])
def test_items_of_every_height_keep_to_their_rows(highest):
    """A narrow model, where blocks of one expert's rows end next to another's, over and over."""
    for seed in range(3):
        x, _, ids, _ = bfloat16(random_case(200, 16, 4, 0.5, d=576, f=1, seed=seed))
        stacks = [stack(16, 576, 576)]
        rows, items, place = jax.jit(experts_mlp.plan, static_argnums=(2, 3, 4))(x, ids, 16, 4, highest)
        assert items.rows == min(highest, MAX_ROWS)
        got = jax.jit(lambda *a: mix(*a, gating=ACT))(rows, stacks, items)
        assert_close(got[place], experts_mlp.reference(rows, stacks, items, ACT)[place], 1e-2)


def test_one_token_alone_needs_no_plan():
    """Padding rows come with it. Its sums come scaled, too."""
    x, stacks, ids, weights = draw("gpt-oss-120b", 1, 0.0, 0)
    rows, wide_ids, wide = (jnp.pad(a, ((0, 7), (0, more))) for a, more in ((x, 0), (ids, 124), (weights, 124)))
    named = dict(each=4, residual=jnp.zeros_like(rows), scale=jnp.ones(x.shape[1], jnp.bfloat16), tokens=1)
    got, scaled = jax.jit(lambda *a: experts_mlp.experts_mlp(*a, gating=ACT, **named))(rows, stacks, wide_ids, wide)
    assert_close(got[:1], jax.jit(lambda *a: experts_mlp.experts_mlp(*a, gating=ACT))(x, stacks, ids, weights), 1e-2)
    np.testing.assert_array_equal(scaled.rows, got)


@pytest.mark.parametrize("model,kind", [("gpt-oss-20b", MXFP4), ("qwen3-30b-a3b", Int4(128))])
def test_a_token_gets_the_same_in_any_company(model, kind):
    """Bit for bit, whether one warpgroup or two have summed up. More than 512 tokens are added up by another kernel."""
    x, stacks, ids, weights = draw(model, 500, 0.0, 0, kind)
    run = jax.jit(lambda *a: experts_mlp.experts_mlp(*a, gating=ACT))
    alone = run(x[:1], stacks, ids[:1], weights[:1])
    for tokens in (2, 8, 16, 32, 128, 500):
        np.testing.assert_array_equal(run(x[:tokens], stacks, ids[:tokens], weights[:tokens])[:1], alone)


@pytest.mark.parametrize("model", GPT_OSSES)
@pytest.mark.speed
def test_speed(model, figures):
    """Microseconds of each kernel, and the speed at which chosen experts' bytes are read."""
    d, f, _, k = MODELS[model]
    for tokens in (1, 8, 32, 128, 512, 2048, 8192):
        x, stacks, ids, weights = draw(model, tokens, 0.0, tokens)
        run = jax.jit(lambda *a: experts_mlp.experts_mlp(*a, gating=ACT))
        jax.block_until_ready(run(x, stacks, ids, weights))
        rows = profile.kernels(
            lambda run=run, a=(x, stacks, ids, weights): jax.block_until_ready([run(*a) for _ in range(10)]), 10
        )
        chosen = len(np.unique(np.asarray(ids)))
        size, flops = chosen * 3 * d * f * 17 / 32, 2 * tokens * k * 3 * d * f
        us = {row["kernel"]: round(row["us"], 1) for row in rows}
        own = sum(time for name, time in us.items() if re.search("expert_four", name))
        figures[f"{model} {tokens}"] = {
            "us": us, "TB/s": round(size / own / 1e6, 2), "TFLOP/s": round(flops / own / 1e6, 1)
        }  # fmt: skip
        print(f"{model}, {tokens} tokens, {chosen} experts: {figures[f'{model} {tokens}']}", flush=True)
        assert own > 0
