"""Gated delta-rule attention and state spaces on the device: the CPU tests' cases, sizes that are served, and speed."""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.hopper import counting
from jaxspec.pallas.recurrence import gated_delta
from tests.pallas.recurrence import test_accumulate, test_delta_chunk, test_delta_step, test_gated_norm

pytestmark = pytest.mark.gpu

Step, Chunk = test_delta_step.Case, test_delta_chunk.Case
STEPS = [
    *(Step(f"Qwen3-Next, {t} rows", t, t, (t, 0, 1, t // 2), 16, 2, division=None) for t in (1, 2, 3, 4, 8, 16)),
    *(Step(f"Kimi Linear, {t} rows", t, t, (t, 0, 1), 32, division=None, channel_decay=True) for t in (1, 4, 16)),
    Step("Qwen3.5 27B", 4, 4, (4, 2), 16, 3, division=None),
    Step("Qwen3.5 2B", 4, 4, (4, 2), 16, 1, division=None),
    Step("four value heads a key head", 4, 4, (4, 2), 4, 4, division=None),
    Step("many, bfloat16", 4, 4, tuple(i % 5 for i in range(64)), 16, 2, "bfloat16", division=None),
]
CHUNKS = [
    Chunk("Qwen3-Next", (0, 0, 1, 1, 1), (-1, 0, 3, 1, 1), (-1, 4, -1, 5, -1), 16, 2),
    Chunk("long", (0,) * 40, (-1, *(0,) * 39), (-1,) * 40, 16, 3),
]


@pytest.mark.parametrize("case", [*test_delta_step.CASES, *STEPS], ids=lambda case: case.name)
def test_a_round_equals_the_plain_one(case):
    test_delta_step.check(case)


@pytest.mark.parametrize("case", [*test_delta_step.AROUND, *STEPS[:-1]], ids=lambda case: case.name)
def test_gates_and_norm_around_a_round_are_the_plain_ones(case):
    test_delta_step.check_around(case)


@pytest.mark.parametrize("case", [*test_accumulate.SPACES, *test_accumulate.SERVED], ids=lambda case: case.name)
def test_a_round_of_a_state_space_equals_the_plain_one(case):
    test_accumulate.check_space(case)


@pytest.mark.parametrize("b,t", [(1, 1), (8, 4), (128, 1)])
@pytest.mark.parametrize("columns,groups", [(4096, 8), (3072, 1)])
def test_the_norm_behind_a_state_space_is_the_plain_one(b, t, columns, groups):
    test_gated_norm.check_grouped(b, t, columns, groups)


@pytest.mark.parametrize("case", [*test_delta_chunk.CASES, *CHUNKS], ids=lambda case: case.name)
def test_prompts_equal_the_plain_form(case):
    test_delta_chunk.check(case)


def test_the_operations_choose_the_kernels():
    pool, slots, (replay, *new) = Step("", 4, 4, (4, 0), 2, 2).inputs()
    with counting() as chosen:
        jax.eval_shape(partial(gated_delta.step, pool, jnp.int32(0), slots, replay, *new))
        blocks = [jnp.pad(x, [(0, 0), (0, 60), *[(0, 0)] * (x.ndim - 2)]) for x in new]
        jax.eval_shape(partial(gated_delta.chunk, pool, jnp.int32(0), slots, slots, slots, replay, *blocks))
    assert chosen == {"delta_step": 1, "delta_chunk": 1}


@pytest.mark.parametrize("b,t,least", [(32, 4, 2.6), (128, 4, 3.0), (128, 8, 2.8)])
@pytest.mark.speed
def test_memory_bandwidth(b, t, least, figures):
    """TB/s of states read and written in eight layers of Qwen3-Next's shape; `least` leaves room for a busy device."""
    layers, n = 8, 32
    pool, slots, (replay, *new) = Step("", t, t, tuple(i % (t + 1) for i in range(b)), 16, 2).inputs()
    pool = jax.tree.map(lambda x: jnp.concatenate([x] * (layers // 2)), pool)

    @partial(jax.jit, donate_argnums=0)
    def run(pool):
        outs = []
        for layer in range(layers):
            out, pool = gated_delta.step(pool, jnp.int32(layer), slots, replay, *new)
            outs.append(out)
        return pool, outs

    for _ in range(2):  # a pool that a program returned may take a compilation of its own
        pool, outs = jax.block_until_ready(run(pool))
    begin, rounds = time.perf_counter(), 30
    for _ in range(rounds):
        pool, outs = run(pool)
    jax.block_until_ready((pool, outs))
    seconds = (time.perf_counter() - begin) / rounds / layers
    rate = 2 * b * n * np.prod(pool.state.shape[3:]) * pool.state.dtype.itemsize / seconds / 1e12
    figures[f"gated delta step, {b} x {t} rows"] = {"us": seconds * 1e6, "TB/s": float(rate)}
    assert rate >= least
