"""The FP8 experts' kernels on the device: from one token to a prompt, against plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import fp8
from jaxspec.models.weights import Fp8, Weight
from jaxspec.pallas.experts import expert_fp8, experts_mlp
from jaxspec.pallas.experts.expert_fp8 import MAX_ROWS, mix
from tests.decoder.test_moe import random_case
from tests.gpu.test_expert_stream import SKEWS, check, check_one_launch
from tests.pallas.experts.test_expert_stream import SIZES, bfloat16
from tests.support.kernels import assert_close

pytestmark = pytest.mark.gpu


def draw(model: str, tokens: int, skew: float, seed: int, block: int | None = 128):
    d, f, e, k, shared = SIZES[model]
    x, _, ids, weights = bfloat16(random_case(tokens, e, k + shared, skew, d=d, f=1, seed=seed, shared=shared))
    return x, [stack(count, d, f, seed + i, block) for i, count in enumerate((e, *[1] * shared))], ids, weights


def stack(count: int, d: int, f: int, seed: int, block: int | None = 128):
    def own(key, n, k):  # blocks, or outputs, of different sizes: a scale that is taken from another one is far off
        key, more = jax.random.split(key)
        if block is None:
            sizes = jnp.exp(jax.random.normal(more, (n, 1)))
            return fp8.quantise_outputs(jax.random.normal(key, (n, k)) * sizes * k**-0.5)
        sizes = jnp.exp(jax.random.normal(more, (n // 128, 1, k // 128, 1)))
        numbers = jax.random.normal(key, (n // 128, 128, k // 128, 128)) * sizes * k**-0.5
        return fp8.quantise_blocks(numbers.reshape(n, k))

    def weight(key, n, k):
        values, scales = jax.lax.map(lambda key: own(key, n, k), jax.random.split(key, count))
        return Weight(values, Fp8(block), scales=scales)

    keys = jax.random.split(jax.random.key(seed))
    return jax.jit(lambda: (weight(keys[0], 2 * f, d), weight(keys[1], d, f)))()


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("tokens", [9, 17, 32, 100, 128, 512, 1000])
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3.5-35b-a3b"])
def test_kernel_matches_the_reference(model, tokens, skew):
    check(draw(model, tokens, skew, SKEWS.index(skew)), ["expert_fp8"], tolerance=1e-2)


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 32, 100, 128, 512])
@pytest.mark.parametrize("model", ["glm-4.5-air", "qwen3.5-35b-a3b"])
def test_scales_of_outputs(model, tokens, skew):
    check(draw(model, tokens, skew, SKEWS.index(skew), None), ["expert_few", "expert_fp8"], tolerance=1e-2)


@pytest.mark.parametrize("block", [128, None])
@pytest.mark.parametrize("tokens", [9, 128])
def test_one_launch_makes_the_bits_of_two(tokens, block, monkeypatch):
    check_one_launch(monkeypatch, expert_fp8, mix, *draw("qwen3-30b-a3b", tokens, 0.0, 0, block)[:3])


@pytest.mark.parametrize("block", [128, None])
@pytest.mark.parametrize("highest", [8, 16, 32, 64])
def test_items_of_every_height_keep_to_their_rows(highest, block):
    """A narrow model, where blocks of one expert's rows end next to another's, over and over."""
    for seed in range(5):
        x, _, ids, _ = bfloat16(random_case(200, 16, 4, 0.5, d=256, f=1, seed=seed))
        stacks = [stack(16, 256, 128, seed, block)]
        rows, items, place = jax.jit(experts_mlp.plan, static_argnums=(2, 3, 4))(x, ids, 16, 4, highest)
        assert items.rows == min(highest, MAX_ROWS)
        assert_close(jax.jit(mix)(rows, stacks, items)[place], experts_mlp.reference(rows, stacks, items)[place], 1e-2)


@pytest.mark.parametrize("model,block,companies", [
    ("qwen3.5-35b-a3b", 128, (1, 16, 32, 128, 500)),
    ("qwen3.5-35b-a3b", 128, (2, 3, 8)),
    ("glm-4.5-air", None, (1, 3, 16, 32, 128, 500)),
])  # fmt: skip
def test_a_token_gets_the_same_in_any_company(model, block, companies):
    """Bit for bit: sums run over the inputs in one order, and a token's experts are added in its own. From two to eight
    tokens rows are pairs of e4m3 rows, so these agree among themselves."""
    x, stacks, ids, weights = draw(model, 500, 0.0, 0, block)
    run = jax.jit(experts_mlp.experts_mlp)
    first, *others = [run(x[:n], stacks, ids[:n], weights[:n])[:1] for n in companies]
    for other in others:
        np.testing.assert_array_equal(other, first)
