"""Mixtures of experts: the block against transformers', the router, and work items that cover each pair once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoint.check import TensorInfo
from jaxspec.checkpoint.load import read_params
from jaxspec.config import ModelConfig
from jaxspec.models import moe
from jaxspec.models.layers import Param
from jaxspec.pallas import experts
from tests.tiny import tiny_config

GOLDEN = Path(__file__).parent / "golden"


class Tensors:
    """Tensors in memory where a checkpoint's files are expected."""

    path = "memory"

    def __init__(self, tensors):
        self.held = tensors

    def tensors(self):
        return {name: TensorInfo(array.shape, array.nbytes) for name, array in self.held.items()}

    def read(self):
        return iter(self.held.items())


def config_of(**overrides) -> ModelConfig:
    return ModelConfig.from_hf(tiny_config("qwen3_moe", **overrides))


def naive(x, gate_up, down, ids, weights):
    """One pair at a time, float64."""
    x, gate_up, down = (np.asarray(a, np.float64) for a in (x, gate_up, down))
    out = np.zeros(x.shape)
    for t, chosen in enumerate(np.asarray(ids)):
        for j, e in enumerate(chosen):
            gate, up = np.split(gate_up[e] @ x[t], 2)
            out[t] += float(weights[t, j]) * (down[e] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def random_case(t: int, e: int, k: int, skew: float = 0.0, d: int = 32, f: int = 16, seed: int = 0):
    """Arguments of `experts_mlp`; with `skew`, most tokens like the same experts."""
    rng = np.random.default_rng(seed)
    liking = rng.random((t, e)) + skew * (np.arange(e) < k)
    ids = np.argsort(-liking, axis=1)[:, :k].astype(np.int32)
    weights = rng.random((t, k)).astype(np.float32)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5)  # noqa: E731
    return d**0.5 * draw(t, d), draw(e, 2 * f, d), draw(e, d, f), jnp.asarray(ids), jnp.asarray(weights)


def test_a_block_with_a_shared_expert_matches_transformers():
    golden = load_file(GOLDEN / "moe" / "shared.safetensors")
    x, out = golden.pop("x"), golden.pop("out")
    config = config_of(
        hidden_size=48, num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=40
    )
    layer = read_params(moe.parameters(config, ""), Tensors(golden), "shared", "float32", progress=False)
    np.testing.assert_allclose(moe.moe(layer, config, x), out, rtol=0, atol=2e-5)
    assert abs(out - moe.moe({k: v for k, v in layer.items() if k != "shared_gate"}, config, x)).max() > 0.1


@pytest.mark.parametrize("norm", [True, False])
def test_router_probabilities_are_float32_whatever_the_dtype(norm):
    config = dataclasses.replace(config_of(), norm_topk_prob=norm)
    rows = jax.random.normal(jax.random.key(0), (5, 32), jnp.bfloat16)
    router = jax.random.normal(jax.random.key(1), (32, 8), jnp.bfloat16)
    ids, weights = moe.route(router, config, rows)
    logits = np.asarray(rows, np.float64) @ np.asarray(router, np.float64)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    best = np.argsort(-probs, axis=-1)[:, :2]
    expected = np.take_along_axis(probs, best, axis=-1)
    assert weights.dtype == jnp.float32
    np.testing.assert_array_equal(ids, best)
    np.testing.assert_allclose(weights, expected / expected.sum(-1, keepdims=True) if norm else expected, rtol=1e-5)


@pytest.mark.parametrize("t,e,k,skew", [
    (1, 8, 2, 0), (8, 8, 3, 0), (8, 16, 2, 5), (9, 8, 2, 0), (40, 16, 4, 0), (60, 8, 2, 5), (300, 8, 4, 0),
])  # fmt: skip
def test_experts_match_one_pair_at_a_time(t, e, k, skew):
    case = random_case(t, e, k, skew)
    np.testing.assert_allclose(jax.jit(experts.experts_mlp)(*case), naive(*case), rtol=0, atol=2e-5)


@pytest.mark.parametrize("skew", [0, 0.3, 5])
@pytest.mark.parametrize("t,e,k", [(1, 8, 3), (5, 4, 2), (8, 20, 6), (9, 20, 6), (30, 40, 1), (64, 8, 2), (70, 5, 5)])
def test_items_hold_each_pair_once(t, e, k, skew):
    """Whatever the routing: a pair's row of the result is its expert's work on its token, and items don't overlap."""
    ids = random_case(t, e, k, skew)[3]
    x = jnp.arange(1.0, t + 1)[:, None]
    rows, items, place = jax.tree.map(np.asarray, jax.jit(experts.plan, static_argnums=2)(x, ids, e))
    count, written = int(items.count[0]), {}
    assert count <= len(items.expert)
    for i in range(count):
        source, target, blocks = (int(a[i]) * experts.ALIGN for a in (items.source, items.target, items.blocks))
        assert 0 <= source <= len(rows) - items.rows and 0 <= target <= items.capacity - items.rows
        assert blocks <= items.rows
        for r in range(blocks):
            assert target + r not in written
            written[target + r] = int(items.expert[i]), float(rows[source + r, 0])
    for (token, j), row in np.ndenumerate(place):
        assert written[int(row)] == (int(ids[token, j]), token + 1)
    done = {int(e) for e, blocks in zip(items.expert[:count], items.blocks, strict=False) if blocks}
    assert done == set(np.unique(ids).tolist())


def test_many_pairs_are_ranked_chunk_by_chunk():
    flat = np.random.default_rng(0).integers(0, 5, 4 * experts.CHUNK + 77)
    counts, rank = jax.jit(experts._ranks, static_argnums=1)(flat, 7)
    assert counts.tolist() == np.bincount(flat, minlength=7).tolist()
    assert rank.tolist() == [int((flat[:i] == e).sum()) for i, e in enumerate(flat)]


def test_item_rows_follow_the_mean():
    assert [experts.rows_per_item(mean) for mean in (0.1, 3, 4, 12, 16, 32, 500)] == [8, 8, 16, 32, 64, 128, 128]


@pytest.mark.parametrize("stacked", [False, True])
def test_both_layouts_give_the_same_stack(stacked):
    config, rng = config_of(), np.random.default_rng(0)
    params = moe.parameters(config, "mlp.")
    whole = {name: rng.standard_normal(p.shape, np.float32) for name, p in params.items() if p.stacked}
    tensors = {"mlp.gate.weight": np.zeros((8, 32), np.float32)}
    if stacked:
        tensors |= {f"mlp.experts.{n}": whole[f"experts_{n[:-5]}"] for n in ("gate_up_proj", "down_proj")}
    else:
        for e in range(8):
            gate, up = np.split(whole["experts_gate_up"][e], 2)
            each = {"gate_proj": gate, "up_proj": up, "down_proj": whole["experts_down"][e]}
            tensors |= {f"mlp.experts.{e}.{name}.weight": matrix for name, matrix in each.items()}
    layer = read_params(params, Tensors(tensors), "x", "float32", progress=False)
    for name, expected in whole.items():
        np.testing.assert_array_equal(layer[name], expected)


def test_a_stack_says_what_it_is_made_of():
    stack = moe.parameters(config_of(), "mlp.")["experts_gate_up"]
    assert stack.shape == (8, 48, 32) and len(stack.sources) == 16
    assert stack.stored()["mlp.experts.7.up_proj.weight"] == (24, 32)
    whole = stack.as_found({"mlp.experts.gate_up_proj"})
    assert whole.stored() == {"mlp.experts.gate_up_proj": (8, 48, 32)}
    assert stack.as_found({"mlp.experts.0.gate_proj.weight"}) is stack
    assert isinstance(whole, Param) and whole.shape == stack.shape
