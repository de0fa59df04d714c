"""The experts' kernel on the device: up and down hand over through counters, which interpret mode can't run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.weights import Weight
from jaxspec.pallas.experts import experts_mlp
from jaxspec.pallas.experts.expert_stream import COLUMNS, Tiling, stream
from jaxspec.pallas.hopper import KERNELS
from tests.decoder.test_moe import arrays, random_case
from tests.pallas.experts.test_expert_stream import MODELS, assert_close, bfloat16

pytestmark = pytest.mark.gpu


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


@pytest.mark.parametrize("tokens", [1, 3, 8, 11, 16, 17, 32, 100, 128, 512, 2048])
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3.5-35b-a3b"])
def test_kernel_matches_the_reference(model, tokens):
    """Twice on the same data, with uniform and with lopsided routing: a missing wait would differ now and then."""
    for seed, skew in enumerate((0.0, 0.5)):
        x, stacks, ids, weights = case = draw(model, tokens, skew, seed)
        before = KERNELS["expert_few"] + KERNELS["expert_stream"]
        run = jax.jit(lambda *a: experts_mlp.experts_mlp(*a))
        got = run(*case)
        assert KERNELS["expert_few"] + KERNELS["expert_stream"] == before + 1
        np.testing.assert_array_equal(got, run(*case))
        rows, items, place = jax.jit(experts_mlp.plan, static_argnums=2)(
            x, ids, sum(len(down.values) for _, down in stacks)
        )
        assert_close(got, experts_mlp.combine(jax.jit(experts_mlp.reference)(rows, stacks, items), place, weights))


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
        assert_close(got[place], jax.jit(experts_mlp.reference)(rows, stacks, items)[place])
