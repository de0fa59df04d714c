"""The experts' kernel on the device: up and down hand over through counters, which interpret mode can't run."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoder import matmul
from jaxspec.models.weights import Weight
from jaxspec.pallas.experts import experts_mlp
from jaxspec.pallas.experts.expert_stream import COLUMNS, Tiling, stream
from jaxspec.pallas.hopper import KERNELS
from tests.decoder.test_moe import arrays, random_case
from tests.pallas.experts.test_expert_stream import MODELS, bfloat16
from tests.support.kernels import assert_close

pytestmark = pytest.mark.gpu

SKEWS = [0.0, 0.5]  # uniform and lopsided routing
reference = jax.jit(experts_mlp.reference)


def draw(model: str, tokens: int, skew: float, seed: int):
    d, f, e, k, shared = MODELS[model]
    x, _, ids, weights = bfloat16(random_case(tokens, e, k + shared, skew, d=d, f=1, seed=seed, shared=shared))
    keys = jax.random.split(jax.random.key(seed))
    stacks = [
        (
            Weight(jax.random.normal(keys[0], (count, 2 * f, d), jnp.bfloat16) * d**-0.5),
            Weight(jax.random.normal(keys[1], (count, d, f), jnp.bfloat16) * f**-0.5),
        )
        for count in (e, *[1] * shared)
    ]
    return x, stacks, ids, weights


def check(case, kernels, gating=None, reference=reference, tolerance=8e-3):
    """Check one of the kernels against the reference, twice on the same data: a missing wait would differ at times."""
    x, stacks, ids, weights = case
    before = sum(KERNELS[name] for name in kernels)
    run = jax.jit(lambda *a: experts_mlp.experts_mlp(*a, gating=gating))
    got = run(*case)
    assert sum(KERNELS[name] for name in kernels) == before + 1
    np.testing.assert_array_equal(got, run(*case))
    count = sum(len(stack[1].values) for stack in stacks)
    rows, items, place = jax.jit(experts_mlp.plan, static_argnums=2)(x, ids, count)
    assert_close(got, experts_mlp.combine(reference(rows, stacks, items), place, weights), tolerance)


def check_one_launch(monkeypatch, module, run, x, stacks, ids):
    """Where one expert has all tokens, and where all tokens have the same experts: then blocks wait for others most."""
    column = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    monkeypatch.setattr(module, "_mix", module._mix.__wrapped__)  # it would keep its first trace
    for ids in (jnp.where(column == 0, 5, experts_mlp.NOBODY), column):
        rows, items, place = jax.jit(experts_mlp.plan, static_argnums=2)(x, ids, 128)
        made = []
        for one in (True, False):
            monkeypatch.setattr(module, "one_launch", lambda *_, one=one: one)
            made.append(jax.jit(lambda *a: run(*a))(rows, stacks, items)[place[place >= 0]])
        np.testing.assert_array_equal(*made)
        assert np.isfinite(made[0].astype(jnp.float32)).all()


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("tokens", [1, 3, 8, 11, 16, 17, 32, 100, 128, 512, 2048])
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3.5-35b-a3b"])
def test_kernel_matches_the_reference(model, tokens, skew):
    check(draw(model, tokens, skew, SKEWS.index(skew)), ["expert_few", "expert_stream"])


@pytest.mark.parametrize("tokens", [1, 8, 32, 100, 512])
@pytest.mark.parametrize("d,f,gated", [(2816, 704, True), (2688, 1856, False)], ids=["gemma-4-26b", "nemotron-3-nano"])
def test_other_activations_and_experts_without_a_gate(d, f, gated, tokens):
    x, _, ids, weights = bfloat16(random_case(tokens, 128, 6, d=d, f=1, seed=tokens))
    keys, gating = jax.random.split(jax.random.key(0)), matmul.gating("gelu_tanh")
    if not gated:
        gating = matmul.ACTIVATIONS["relu2"]
    up = Weight(jax.random.normal(keys[0], (128, (1 + gated) * f, d), jnp.bfloat16) * d**-0.5)
    down = Weight(jax.random.normal(keys[1], (128, d, f), jnp.bfloat16) * f**-0.5)
    plain = jax.jit(partial(experts_mlp.reference, gating=gating))
    check((x, [(up, down)], ids, weights), ["expert_stream"], gating, plain)


@pytest.mark.parametrize("tokens", [1, 8, 32, 128])
def test_an_expert_twice_as_wide_is_two(tokens):
    """Nemotron 3 Nano's shared one, beside its 128 others."""
    d, f = 2688, 1856
    x, _, ids, weights = bfloat16(random_case(tokens, 128, 6, d=d, f=1, seed=tokens))
    own = jnp.tile(jnp.array([[128, 129]]), (tokens, 1)), jnp.ones((tokens, 2), weights.dtype)
    ids, weights = (jnp.concatenate(each, axis=1) for each in zip((ids, weights), own, strict=True))
    keys, gating = jax.random.split(jax.random.key(0)), matmul.ACTIVATIONS["relu2"]
    wide = [
        (
            Weight(jax.random.normal(keys[0], (e, n * f, d), jnp.bfloat16) * d**-0.5),
            Weight(jax.random.normal(keys[1], (e, d, n * f), jnp.bfloat16) * f**-0.5),
        )
        for e, n in ((128, 1), (1, 2))
    ]
    up, down = (weight.values for weight in wide[1])
    halves = up.reshape(2, f, d), down.reshape(d, 2, f).swapaxes(0, 1)
    run = jax.jit(lambda x, stacks, *rest: experts_mlp.experts_mlp(x, stacks, *rest, gating=gating))
    got = run(x, wide, ids, weights)
    np.testing.assert_array_equal(got, run(x, wide, ids, weights))
    assert_close(got, run(x, [wide[0], tuple(map(Weight, halves))], ids, weights))


@pytest.mark.parametrize("some,more", [(1, (2, 4, 8)), (9, (16, 32, 128, 500))])
def test_a_token_gets_the_same_in_any_company(some, more):
    """Bit for bit within a kernel: sums run over the inputs in one order, and the first token's experts come first. Up
    to eight tokens have a kernel of their own, and more than 512 are added up by one."""
    x, stacks, ids, weights = draw("qwen3.5-35b-a3b", 500, 0.0, 0)
    run = jax.jit(experts_mlp.experts_mlp)
    alone = run(x[:some], stacks, ids[:some], weights[:some])
    for tokens in more:
        np.testing.assert_array_equal(run(x[:tokens], stacks, ids[:tokens], weights[:tokens])[:1], alone[:1])


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("tokens", [4, 40, 300])
def test_every_tiling_hands_over(tokens, columns):
    """A narrow model: blocks without work, and hand-overs right away, over and over."""
    for seed in range(5):
        x, stacks, ids, _ = bfloat16(random_case(tokens, 16, 2, d=256, f=128, seed=seed))
        rows, items, place = jax.jit(experts_mlp.plan, static_argnums=2)(x, ids, 16)
        sizes = Tiling(items.rows, columns, 64)
        got = jax.jit(lambda *a, sizes=sizes: stream(*a, sizes=sizes))(rows, arrays(stacks), items)
        assert_close(got[place], reference(rows, stacks, items)[place])
