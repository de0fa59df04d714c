"""The experts' kernel against its reference: each matmul in interpret mode, the whole by lowering it for CUDA."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas import expert_stream, experts, target
from jaxspec.pallas.expert_stream import BLOCKS, Tiling, stream, supported, tiling
from jaxspec.pallas.target import KERNELS
from tests.test_moe import naive, random_case

MODELS = {  # model width, expert width, experts, experts of a token
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "qwen3.5-35b-a3b": (2048, 512, 256, 8),
    "qwen3-next-80b-a3b": (2048, 512, 512, 10),
}


@pytest.fixture
def few_blocks(monkeypatch):
    """Fewer blocks than units, so that each takes several; interpreting a block takes a while, idle or not."""
    monkeypatch.setattr(expert_stream, "BLOCKS", 2)


def bfloat16(case):
    x, gate_up, down, ids, weights = case
    return *(a.astype(jnp.bfloat16) for a in (x, gate_up, down)), ids, weights


def assert_close(got, expected, tolerance: float = 8e-3):
    got, expected = (np.asarray(a, np.float64) for a in (got, expected))
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("t,e,k,skew,columns", [
    (1, 4, 2, 0, 16),  # one token
    (11, 8, 2, 0.3, 32),  # pairs that another does the work of, two blocks of rows
    (40, 12, 2, 0, 64),  # items of 16 rows, most of them not full
    (45, 6, 2, 5, 128),  # items of 64 rows that don't hold all rows of an expert
    (150, 3, 1, 0.5, 64),  # two warpgroups, items that end in either
])  # fmt: skip
def test_each_matmul_matches_the_reference(few_blocks, t, e, k, skew, columns):
    width = max(64, columns)
    x, gate_up, down, ids, _ = bfloat16(random_case(t, e, k, skew, d=2 * width, f=width, seed=t))
    rows, items, place = jax.jit(experts.plan, static_argnums=2)(x, ids, e)
    sizes = Tiling(items.rows, columns, 64)
    got = stream(rows, gate_up, down, items, sizes=sizes, fused=False, interpret=plgpu.InterpretGPUParams())
    expected = jax.jit(experts.reference)(rows, gate_up, down, items)
    assert_close(got[place], expected[place])


def test_the_mixture_takes_the_kernel_where_there_is_one(few_blocks, monkeypatch):
    """Routing, gathering and adding up around the kernel, as a Hopper GPU has it."""
    case = bfloat16(random_case(20, 8, 2, d=128, f=64))
    interpreted = partial(stream, fused=False, interpret=plgpu.InterpretGPUParams())
    monkeypatch.setattr(target, "kernels_here", lambda: None)
    monkeypatch.setattr(expert_stream, "stream", interpreted)
    before = KERNELS["experts"]
    assert_close(experts.experts_mlp(*case), naive(*case))
    assert KERNELS["experts"] == before + 1
    experts.experts_mlp(*random_case(3, 4, 2))  # float32
    assert KERNELS["experts"] == before + 1


@pytest.mark.parametrize("tokens", [1, 4, 8, 16, 32, 128, 512, 4096])
@pytest.mark.parametrize("model", MODELS)
def test_lowers_for_cuda_as_one_kernel(model, tokens, monkeypatch):
    monkeypatch.setattr(target, "kernels_here", lambda: None)
    d, f, e, k = MODELS[model]
    shape = jax.ShapeDtypeStruct
    weights = shape((e, 2 * f, d), jnp.bfloat16), shape((e, d, f), jnp.bfloat16)
    routing = shape((tokens, k), jnp.int32), shape((tokens, k), jnp.float32)
    lowered = jax.jit(experts.experts_mlp).trace(shape((tokens, d), jnp.bfloat16), *weights, *routing)
    assert lowered.lower(lowering_platforms=("cuda",)).as_text().count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("tokens", [1, 4, 8, 32, 128])
@pytest.mark.parametrize("model", MODELS)
def test_tiles_keep_every_block_busy(model, tokens):
    """Of what the busiest block reads, the average block reads most."""
    d, f, e, k = MODELS[model]
    items = round(experts.expected_experts(tokens, k, e))
    columns = tiling(8, items, d, f).columns
    share = items * 3 * d * f / 2 / BLOCKS / expert_stream._busiest(items, columns, d, f)
    assert share > (0.85 if tokens < 32 else 0.93)


@pytest.mark.parametrize("rows", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("model", MODELS)
def test_rings_are_deep_enough(model, rows):
    """A multiprocessor must have some 50 KiB on their way to read at its share of the memory's speed."""
    d, f, *_ = MODELS[model]
    sizes = tiling(rows, 100, d, f)
    assert sizes.weight_slots >= 4 and 4 * sizes.weight_slots * sizes.columns * sizes.step >= 128 * 1024
    assert d % sizes.step == f % sizes.step == d % (2 * sizes.columns) == f % sizes.columns == 0


def test_what_cannot_run_is_named():
    assert supported(jnp.bfloat16, 2048, 768) is None
    assert "float32" in supported(jnp.float32, 2048, 768)
    assert "96" in supported(jnp.bfloat16, 2048, 96)
    x, gate_up, down, ids, _ = random_case(2, 4, 2)
    rows, items, _ = experts.plan(x, ids, 4)
    with pytest.raises(ValueError, match="float32, not bfloat16"):
        stream(rows, gate_up, down, items)
