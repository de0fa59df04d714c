"""Mixtures of experts: the block against transformers', the router, and work items that cover each pair once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxspec
from jaxspec.cache.paged import Rows
from jaxspec.checkpoint import params
from jaxspec.checkpoint.check import TensorInfo
from jaxspec.checkpoint.load import read_params
from jaxspec.checkpoint.params import dummy
from jaxspec.decoder import feed
from jaxspec.decoder.forward import forward
from jaxspec.decoder.mixer import OnlyAttention
from jaxspec.models.declaring import mixture_tensors
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import Param, Weight
from jaxspec.pallas.experts import experts_mlp
from jaxspec.pallas.experts.expert_stream import COUNT
from jaxspec.pallas.experts.top_experts import top_experts
from jaxspec.train.objective import matmul_weights
from tests.support import drawn
from tests.support.sample import one_in, rare
from tests.support.tiny import tiny_checkpoint, tiny_config

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


class Tensors:
    """Tensors in memory where a checkpoint's files are expected."""

    path = "memory"
    quantization = packed = None

    def __init__(self, tensors):
        self.held = tensors

    def tensors(self):
        return {name: TensorInfo(array.shape, array.nbytes) for name, array in self.held.items()}

    def stored(self):
        return self.held


def config_of(**overrides) -> ModelConfig:
    return ModelConfig.from_hf(tiny_config("qwen3_moe", **overrides))


def arrays(stacks):
    """The weights of `random_case` as the kernels take them."""
    return [tuple(weight.unquantised for weight in stack) for stack in stacks]


def naive(x, stacks, ids, weights):
    """One pair at a time, float64."""
    x, out = np.asarray(x, np.float64), np.zeros(x.shape)
    pairs = [pair for stack in arrays(stacks) for pair in zip(*stack, strict=True)]
    each = [tuple(np.asarray(m, np.float64) for m in pair) for pair in pairs]
    for t, chosen in enumerate(np.asarray(ids)):
        for j, e in enumerate(chosen):
            if e == experts_mlp.NOBODY:
                continue
            gate_up, down = each[e]
            gate, up = np.split(gate_up @ x[t], 2)
            out[t] += float(weights[t, j]) * (down @ (gate / (1 + np.exp(-gate)) * up))
    return out


def random_case(t: int, e: int, k: int, skew: float = 0.0, d: int = 32, f: int = 16, seed: int = 0, shared: int = 0):
    """Arguments of `experts_mlp`; with `skew`, most tokens like the same experts.

    `shared` is the width of one expert more, in a stack of its own, that all tokens choose.
    """
    rng = np.random.default_rng(seed)
    liking = rng.random((t, e)) + skew * (np.arange(e) < k)
    ids = np.argsort(-liking, axis=1)[:, :k].astype(np.int32)
    weights = rng.random((t, k)).astype(np.float32)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5)  # noqa: E731
    x, stacks = d**0.5 * draw(t, d), [(Weight(draw(e, 2 * f, d)), Weight(draw(e, d, f)))]
    if shared:
        stacks.append((Weight(draw(1, 2 * shared, d)), Weight(draw(1, d, shared))))
        ids[:, -1] = e
    return x, stacks, jnp.asarray(ids), jnp.asarray(weights)


def test_a_block_with_a_shared_expert_matches_transformers():
    golden = load_file(GOLDEN / "moe" / "shared.safetensors")
    x, out = golden.pop("x"), golden.pop("out")
    config = config_of(
        hidden_size=48, num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=40
    )
    layer = read_params(
        mixture_tensors(config.decoder.mixture, config.hidden_size, ""),
        Tensors(golden),
        "shared",
        "float32",
        progress=False,
    )
    run, positions = jax.jit(feed.mixture, static_argnums=0), jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    mixture = config.decoder.mixture
    np.testing.assert_allclose(run(mixture, layer, x, x, positions), x + out, rtol=0, atol=2e-5)
    assert abs(x + out - run(dataclasses.replace(mixture, shared=0), layer, x, x, positions)).max() > 0.1


@pytest.mark.parametrize("norm", [True, False])
def test_router_probabilities_are_float32_whatever_the_dtype(norm):
    per_token = config_of().decoder.mixture.per_token
    rows = drawn.normal(jax.random.key(0), (5, 32), jnp.bfloat16)
    router = drawn.normal(jax.random.key(1), (32, 8), jnp.bfloat16)
    logits = jnp.matmul(rows, router, preferred_element_type=jnp.float32)
    ids, weights = top_experts(logits, jnp.arange(5), None, per_token, norm)
    logits = np.asarray(rows, np.float64) @ np.asarray(router, np.float64)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    best = np.argsort(-probs, axis=-1)[:, :2]
    expected = np.take_along_axis(probs, best, axis=-1)
    assert weights.dtype == jnp.float32
    np.testing.assert_array_equal(ids, best)
    np.testing.assert_allclose(weights, expected / expected.sum(-1, keepdims=True) if norm else expected, rtol=1e-5)


def test_padding_reads_no_experts(monkeypatch):
    """The rows of a program that aren't real are marked all the way down to their experts."""
    seen = []
    noted = lambda x, stacks, ids, weights, each, residual, *_, **named: seen.append(ids) or residual  # noqa: E731
    monkeypatch.setattr(feed, "experts_mlp", noted)
    model = jaxspec.load_model(str(tiny_checkpoint("qwen3_moe", num_hidden_layers=1)), dtype="float32", progress=False)
    rows = Rows(jnp.array([4, 0]), jnp.array([2, 0]), jnp.zeros((2, 1), jnp.int32))
    attend = lambda kv, layer, q, k, v, window: (q, kv)  # noqa: E731
    with jax.disable_jit():
        tokens = jnp.zeros((2, 3), jnp.int32)
        forward(model.config.decoder, model.params, tokens, rows.marked_positions(3), OnlyAttention(attend))
    (ids,) = seen
    assert (ids == experts_mlp.NOBODY).all(axis=1).tolist() == [False, False, True, True, True, True]


def test_a_launch_has_ids_of_its_own_experts_alone(monkeypatch):
    """Kernels read all columns. Another launch's expert was an item more than planned, of whatever memory held."""
    seen = []
    noted = lambda x, stacks, ids, weights, each, residual, *_, **named: seen.append((stacks, ids)) or residual  # noqa: E731
    monkeypatch.setattr(feed, "experts_mlp", noted)
    x, stacks, ids, scores = random_case(5, 8, 4, shared=40)
    weights = dict(
        zip(("experts_gate_up", "experts_down", "shared_gate_up", "shared_down"), sum(stacks, ()), strict=True)
    )
    mixture = dataclasses.replace(config_of(num_experts_per_tok=3).decoder.mixture, shared=40)
    feed.mix_chosen(mixture, weights, x, ids, scores, x)
    for held, ids in seen:
        assert ((ids < sum(len(down.values) for _, down in held)) | (ids == experts_mlp.NOBODY)).all()
    assert [len(held) for held, _ in seen] == [1, 1]


def test_equal_probabilities_choose_the_first_experts():
    ids, weights = top_experts(jnp.zeros((2, 8)), jnp.arange(2), None, 3, True)
    assert ids.tolist() == [[0, 1, 2]] * 2
    np.testing.assert_allclose(weights, 1 / 3, rtol=1e-6)


@pytest.mark.parametrize("t", [5, 40])
def test_a_row_that_is_not_a_number_leaves_the_others_alone(t):
    mixture, router = config_of().decoder.mixture, drawn.normal(jax.random.key(0), (32, 8))
    ((gate_up, down),) = random_case(1, 8, 2)[1]
    layer = {"router": Weight(router), "experts_gate_up": gate_up, "experts_down": down}
    rows = drawn.normal(jax.random.key(1), (t, 32))
    run = jax.jit(lambda x: feed.mixture(mixture, layer, x[None], x[None], jnp.arange(t)[None])[0])
    broken = run(rows.at[3].set(jnp.nan))
    assert jnp.isnan(broken[3]).all()
    np.testing.assert_allclose(jnp.delete(broken, 3, axis=0), jnp.delete(run(rows), 3, axis=0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("t,e,k,skew,shared", [
    (1, 8, 2, 0, 0), rare(1, 8, 3, 0, 16), (8, 16, 2, 5, 0), (16, 8, 3, 0, 24), (17, 8, 2, 0, 0), rare(60, 8, 2, 5, 16),
    rare(300, 8, 4, 0, 0),
])  # fmt: skip
def test_experts_match_one_pair_at_a_time(t, e, k, skew, shared):
    case = random_case(t, e, k, skew, shared=shared)
    run = jax.jit(experts_mlp.experts_mlp)
    np.testing.assert_allclose(run(*case), naive(*case), rtol=0, atol=2e-5)
    x, stacks, ids, weights = case
    ids = jnp.where(jnp.arange(t)[:, None] % 3 == 1, experts_mlp.NOBODY, ids)  # padding
    case = x.at[1::3].set(jnp.nan), stacks, ids, weights
    np.testing.assert_allclose(run(*case), naive(*case), rtol=0, atol=2e-5)


@pytest.mark.parametrize("t,shared", [(5, 16), (60, 0)])
def test_experts_have_the_gradients_of_all_experts_at_once(t, shared):
    x, stacks, ids, weights = random_case(t, 8, 2, shared=shared)

    def dense(x, stacks, weights):
        out = 0.0
        all_pairs = [pair for stack in arrays(stacks) for pair in zip(*stack, strict=True)]
        for e, (gate_up, down) in enumerate(all_pairs):
            gate, up = jnp.split(x @ gate_up.T, 2, axis=1)
            out += jnp.sum(weights * (ids == e), axis=1)[:, None] * ((jax.nn.silu(gate) * up) @ down.T)
        return out

    run = lambda x, stacks, weights: experts_mlp.experts_mlp(x, stacks, ids, weights)  # noqa: E731
    got, expected = (
        jax.jit(jax.grad(lambda *of, f=f: jnp.sum(jnp.sin(f(*of))), argnums=(0, 1, 2)))(x, stacks, weights)
        for f in (run, dense)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4), got, expected)


@pytest.mark.parametrize("t,e,k,skew", one_in(
    3, [(1, 8, 3), (5, 4, 2), (8, 20, 6), (9, 20, 6), (30, 40, 1), (64, 8, 2), (70, 5, 5)], [0, 0.3, 5]
))  # fmt: skip
def test_items_hold_each_pair_once(t, e, k, skew):
    """Whatever the routing: a pair's row of the result is its expert's work on its token, and items don't overlap."""
    ids = random_case(t, e, k, skew)[2]
    if skew == 0.3:  # padding, between what is real and at the end
        ids = ids.at[t // 2 :: 4].set(experts_mlp.NOBODY).at[t - 1].set(experts_mlp.NOBODY)
    x = jnp.arange(1.0, t + 1)[:, None]
    rows, items, place = jax.tree.map(np.asarray, jax.jit(experts_mlp.plan, static_argnums=2)(x, ids, e))
    count, written = int(items.table[0, COUNT]), {}
    assert count <= len(items.table)
    for expert, *places, _ in items.table[:count].tolist():
        source, target, blocks = (experts_mlp.ALIGN * place for place in places)
        assert 0 <= source <= len(rows) - items.rows and 0 <= target <= items.capacity - items.rows
        assert blocks <= items.rows
        for r in range(blocks):
            assert target + r not in written
            written[target + r] = expert, float(rows[source + r, 0])
    for (token, j), row in np.ndenumerate(place):
        chosen = int(ids[token, j])
        assert row == -1 if chosen == experts_mlp.NOBODY else written[int(row)] == (chosen, token + 1)
    done = [expert for expert, _, _, blocks, _ in items.table[:count].tolist() if blocks]
    assert set(done) == set(np.unique(ids).tolist()) - {experts_mlp.NOBODY}
    assert len(done) == sum(-(-int((ids == expert).sum()) // items.rows) for expert in set(done))  # nobody's read twice


def test_many_pairs_are_ranked_chunk_by_chunk():
    flat = np.random.default_rng(0).integers(0, 5, 4 * experts_mlp.CHUNK + 77)
    counts, rank = jax.jit(experts_mlp._ranks, static_argnums=1)(flat, 7)
    assert counts.tolist() == np.bincount(flat, minlength=7).tolist()
    assert rank.tolist() == [int((flat[:i] == e).sum()) for i, e in enumerate(flat)]


def test_item_rows_follow_the_mean():
    assert [experts_mlp.rows_per_item(mean) for mean in (0.1, 3, 4, 12, 16, 32, 500)] == [8, 8, 16, 32, 64, 128, 128]
    assert [experts_mlp.rows_per_item(mean, 2) for mean in (4, 5, 16, 32)] == [8, 16, 32, 64]


@pytest.mark.parametrize("stacked", [False, True])
def test_both_layouts_give_the_same_stack(stacked):
    declared, rng = mixture_tensors(config_of().decoder.mixture, 32, "mlp."), np.random.default_rng(0)
    whole = {name: rng.standard_normal(p.shape, np.float32) for name, p in declared.items() if p.stacked}
    tensors = {"mlp.gate.weight": np.zeros((8, 32), np.float32)}
    if stacked:
        tensors |= {f"mlp.experts.{n}": whole[f"experts_{n[:-5]}"] for n in ("gate_up_proj", "down_proj")}
    else:
        for e in range(8):
            gate, up = np.split(whole["experts_gate_up"][e], 2)
            each = {"gate_proj": gate, "up_proj": up, "down_proj": whole["experts_down"][e]}
            tensors |= {f"mlp.experts.{e}.{name}.weight": matrix for name, matrix in each.items()}
    layer = read_params(declared, Tensors(tensors), "x", "float32", progress=False)
    for name, expected in whole.items():
        np.testing.assert_array_equal(layer[name].values, expected)


def test_dummy_stacks_are_made_matrix_by_matrix():
    """Use little memory: 61 GB of weights leave no room for random bits and float32 numbers of a whole stack."""
    declared = mixture_tensors(config_of(moe_intermediate_size=64, num_experts=32).decoder.mixture, 128, "")
    layer = dummy(declared, "bfloat16", seed=0)
    for name, param in declared.items():
        assert layer[name].values.shape == param.shape and layer[name].dtype == jnp.bfloat16
    gate_up = np.asarray(layer["experts_gate_up"].values, np.float32)
    assert gate_up.std() == pytest.approx(128**-0.5, rel=0.05)
    assert abs(np.corrcoef(gate_up[0].ravel(), gate_up[31].ravel())[0, 1]) < 0.05
    stack = params._normal_stack.lower(jax.random.key(0), gate_up.shape, 1.0, "bfloat16").compile()
    assert stack.memory_analysis().temp_size_in_bytes < 0.5 * gate_up.size * 2
    whole = params._whole.lower(layer["experts_gate_up"].values, declared["experts_gate_up"].layout, False).compile()
    assert whole.memory_analysis().temp_size_in_bytes < 0.5 * gate_up.size * 2


@pytest.mark.exhaustive
def test_eagle3_reads_a_targets_layers_with_experts():
    folder = tiny_checkpoint("qwen3_moe", 96, num_hidden_layers=8, mlp_only_layers=(3,))
    target = jaxspec.load_model(str(folder), dtype="float32", progress=False)
    source = str(GOLDEN / "eagle" / "specforge-eagle3")
    drafter = jaxspec.load_drafter(source, target, jaxspec.EngineConfig(draft=source))
    drafts = jaxspec.propose(target, drafter, [5, 6, 7], 3)
    assert drafts.count == 3 and drafts.next_token == int(jnp.argmax(jaxspec.logits(target, [[5, 6, 7]])[0, -1]))


def test_training_counts_the_weights_that_are_chosen():
    config = config_of(num_hidden_layers=3, mlp_only_layers=[0], shared_expert_intermediate_size=8)
    attention = 32 * 8 * 16 + 4 * 16 * 32
    assert matmul_weights(config) == 3 * attention + 3 * 32 * (64 + 2 * (2 * 24 + 8))


def test_a_stack_says_what_it_is_made_of():
    stack = mixture_tensors(config_of().decoder.mixture, 32, "mlp.")["experts_gate_up"]
    assert stack.shape == (8, 48, 32) and len(stack.sources) == 16
    assert stack.stored()["mlp.experts.7.up_proj.weight"] == (24, 32)
    whole = stack.as_found({"mlp.experts.gate_up_proj"})
    assert whole.stored() == {"mlp.experts.gate_up_proj": (8, 48, 32)}
    assert stack.as_found({"mlp.experts.0.gate_proj.weight"}) is stack
    assert isinstance(whole, Param) and whole.shape == stack.shape
