"""The kernels of experts in four bits: in interpret mode against numpy, lowered for CUDA, and where they are chosen."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.decoder.matmul import gating
from jaxspec.models import mxfp4
from jaxspec.models.description import ClampedSwiglu
from jaxspec.models.weights import Format, Int4, Mxfp4, Nvfp4, Weight
from jaxspec.pallas import hopper
from jaxspec.pallas.experts import expert_four, experts_mlp
from jaxspec.pallas.experts.expert_four import MAX_ROWS, TILE, FourStage, mix, supported
from jaxspec.pallas.experts.expert_rows import FEWEST
from jaxspec.pallas.experts.expert_stream import ALIGN, SOURCE, Items
from jaxspec.pallas.experts.four_loaders import Mxfp4Loader
from jaxspec.pallas.hopper import counting
from tests.decoder.test_moe import random_case
from tests.pallas.dense.test_few_rows_four_bits import drawn, drawn_shape
from tests.pallas.experts.test_expert_fp8 import check_refused, interpret
from tests.pallas.experts.test_expert_stream import backwards
from tests.support.kernels import assert_close, kernels
from tests.support.sample import rare

INTERPRET = plgpu.InterpretGPUParams()
MXFP4 = Mxfp4()
GPT_OSS = ClampedSwiglu(1.702, 7.0)
MODELS = {
    "gpt-oss-20b": (2880, 2880, 32, 4),
    "gpt-oss-120b": (2880, 2880, 128, 4),
    "qwen3.5-35b-a3b": (2048, 512, 256, 9),  # with the shared one
    "qwen3-30b-a3b": (2048, 768, 128, 9),  # with another
}  # widths, experts, experts of a token
_quantise, _dequantise = jax.jit(mxfp4.quantise), jax.jit(mxfp4.dequantise)


def packed(stack: Weight, rng: np.random.Generator, kind: Format) -> tuple[Weight, np.ndarray]:
    """A stack in four bits, whose scales are far apart, and the weights that it stands for."""
    e, n, k = stack.values.shape
    if kind != MXFP4:
        size = k**-0.5 / 4
        each, whole = zip(*[drawn(kind, k, n, seed=int(rng.integers(999)), size=size) for _ in range(e)], strict=True)
        return jax.tree.map(lambda *arrays: jnp.stack(arrays), *each), np.stack(whole).swapaxes(1, 2)
    sizes = 2.0 ** rng.integers(-3, 3, (e, n, k // 32)).repeat(32, axis=2)
    values, scales = _quantise(jnp.asarray(np.asarray(stack.values) * sizes, jnp.float32))
    whole = np.asarray(_dequantise(values, scales), np.float64)
    return Weight(values, MXFP4, scales=scales), whole


def four_case(t, e, k, *, kind=MXFP4, skew=0.0, d=576, f=576, biased=True, shared=0):
    """Arguments of `experts_mlp` without its activation, and the experts' arrays in numpy, those of all stacks."""
    x, stacks, ids, weights = random_case(t, e, k, skew, d=d, f=f, seed=t, shared=shared)
    rng, given, numbers = np.random.default_rng(t), [], []
    for stack in stacks:
        (gate_up, whole_up), (down, whole_down) = (packed(weight, rng, kind) for weight in stack)
        experts = len(whole_up)
        biases = [jnp.asarray(rng.standard_normal((experts, len(w[0]))), jnp.bfloat16) for w in (whole_up, whole_down)]
        given.append((gate_up, down, *biases[: 2 * biased]))
        numbers.append((whole_up, whole_down, *(np.asarray(bias, np.float64) * biased for bias in biases)))
    whole = tuple(np.concatenate(arrays) for arrays in zip(*numbers, strict=True))
    return (x.astype(jnp.bfloat16), given, ids, weights), whole


def naive(x, ids, weights, whole, activation):
    """One pair at a time, float64."""
    x, out = np.asarray(x, np.float64), np.zeros(x.shape)
    gate_up, down, up_bias, down_bias = whole
    for t, chosen in enumerate(np.asarray(ids)):
        for j, e in enumerate(chosen):
            if e == experts_mlp.NOBODY:
                continue
            gate, up = np.split(gate_up[e] @ x[t] + up_bias[e], 2)
            hidden = gate / (1 + np.exp(-gate)) * up
            if activation is not None:
                gate, up = np.minimum(gate, activation.limit), np.clip(up, -activation.limit, activation.limit)
                hidden = (up + 1) * gate / (1 + np.exp(-activation.alpha * gate))
            out[t] += float(weights[t, j]) * (down[e] @ hidden + down_bias[e])
    return out


@pytest.fixture
def interpreted(monkeypatch):
    interpret(monkeypatch, expert_four)


@pytest.mark.parametrize("t,e,k,more,activation", [
    (1, 3, 1, {"d": 1728}, GPT_OSS),  # one token; a ring that goes round
    rare(9, 2, 1, {"biased": False}, None),  # items of up to 16 rows, and experts as other models would have them
    rare(70, 2, 1, {"skew": 5}, GPT_OSS),  # all tokens at one expert, whose last item has few rows
    (2, 2, 2, {"kind": Int4(32, zeros=True), "d": 768, "f": 256, "biased": False, "shared": 256}, None),
    rare(9, 2, 1, {"kind": Nvfp4(), "d": 256, "f": 256}, None),  # an odd number of turns
    rare(70, 2, 1, {"kind": Nvfp4(), "skew": 5, "d": 768, "f": 256}, None),
    rare(12, 2, 1, {"kind": Int4(128), "d": 256, "f": 512, "biased": False}, None),
    rare(9, 2, 1, {"kind": Int4(None, zeros=True), "d": 512, "f": 256, "biased": False}, GPT_OSS),
    rare(1, 2, 1, {"kind": Nvfp4(), "d": 1280, "f": 256, "biased": False}, None),
])  # fmt: skip
def test_a_mixture_matches_numpy(interpreted, t, e, k, more, activation):
    check_mixture("expert_four", t, e, k, more, activation)


def check_mixture(kernel, t, e, k, more, activation):
    """Planning and adding up around the kernels. The last of several tokens is padding."""
    (x, stacks, ids, weights), whole = four_case(t, e, k, **more)
    if t > 1:
        ids = ids.at[-1].set(experts_mlp.NOBODY)
    function = None if activation is None else gating(activation)
    with counting() as chosen:
        got = jax.jit(partial(experts_mlp.experts_mlp, gating=function))(x, stacks, ids, weights)
    assert chosen == {kernel: 1}
    assert_close(got, naive(x, ids, weights, whole, activation))


@pytest.mark.exhaustive  # one token is in the mixtures above, its experts without a plan in test_expert_fp8
def test_one_token_alone_needs_no_plan(interpreted):
    """Its row comes with others that are padding."""
    (x, stacks, ids, _), _ = four_case(1, 3, 2)
    items = Items(jnp.pad(ids, ((0, 0), (0, 6))), ALIGN, 2 * ALIGN, 2)
    got = expert_four.mix(jnp.pad(x, ((0, 7), (0, 0)), constant_values=1), stacks, items, gating(GPT_OSS))[::ALIGN]
    planned, items, place = experts_mlp.plan(x, ids, 3, 2)
    assert_close(got, experts_mlp.reference(planned, stacks, items, gating(GPT_OSS))[place[0]])


@pytest.mark.exhaustive  # as those in FP8 do (test_expert_fp8.py), of the same plan
def test_items_write_their_own_rows_alone(interpreted):
    """Back to front, one by one, so that an item that writes too far spoils another's rows."""
    (x, stacks, ids, _), _ = four_case(30, 3, 1, skew=0.7)
    rows, items, place = jax.jit(experts_mlp.plan, static_argnums=(2, 3, 4))(x, ids, 3, 1, MAX_ROWS)
    items = backwards(items)
    got = expert_four.mix(rows, stacks, items, gating(GPT_OSS))
    expected = experts_mlp.reference(rows, stacks, items, gating(GPT_OSS))
    assert_close(got[place], expected[place])


def shapes(e, d, f, kind=MXFP4):
    """A stack of experts; MXFP4's have biases."""
    shape = jax.ShapeDtypeStruct

    def weight(n, k):
        if kind == MXFP4:
            return Weight(shape((e, n, k // 2), jnp.uint8), kind, scales=shape((e, k // 32, n), jnp.uint8))
        return jax.tree.map(lambda x: shape((e, *x.shape), x.dtype), jax.eval_shape(partial(drawn_shape, kind, k, n)))

    biases = shape((e, 2 * f), jnp.bfloat16), shape((e, d), jnp.bfloat16)
    return weight(2 * f, d), weight(d, f), *biases[: 2 * (kind == MXFP4)]


@pytest.mark.parametrize("model,tokens,kind", [
    ("gpt-oss-120b", 1, MXFP4), rare("gpt-oss-20b", 600, MXFP4), rare("qwen3.5-35b-a3b", 9, Nvfp4()),
    rare("qwen3.5-35b-a3b", 32, Int4(32, zeros=True)), rare("qwen3.5-35b-a3b", 600, Int4(128)),
])  # fmt: skip
def test_lowers_for_cuda_with_what_plans_for_it_and_what_moves_many_rows(model, tokens, kind, monkeypatch):
    """Qwen's with a shared expert, in a stack of its own."""
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    d, f, e, k = MODELS[model]
    stacks = [shapes(e, d, f, kind), *[shapes(1, d, f, kind)] * (kind != MXFP4)]
    x, ids, weights = (
        jax.ShapeDtypeStruct((tokens, n), dtype) for n, dtype in ((d, jnp.bfloat16), (k, jnp.int32), (k, jnp.float32))
    )
    run = partial(experts_mlp.experts_mlp, gating=gating(GPT_OSS))
    expected = 2 + 2 * (tokens >= FEWEST)  # a plan and both products in one launch, or these in two
    if tokens >= FEWEST and kind != MXFP4:
        expected = 3  # both products in one launch, and what moves rows
    assert kernels(run, x, stacks, ids, weights) == expected


@pytest.mark.parametrize("rows", [8, 16, 32, 64])
@pytest.mark.parametrize("name", ["up", "down"])
def test_two_or_three_blocks_have_room(name, rows):
    stage = FourStage(name, SOURCE, 2880, 2880, (32,), rows, Mxfp4Loader())
    ring = stage.slots * (stage.groups * TILE * (stage.piece // 2 + stage.scales[0]) + 2 * stage.piece * rows)
    results = 2 * rows * TILE + 4 * (stage.warpgroups - 1) * stage.groups * TILE * rows
    assert stage.blocks_per_multiprocessor * (ring + results + 2048) <= 228 * 1024
    assert stage.slots >= 2 * stage.warpgroups and stage.slots % stage.warpgroups == 0
    assert stage.tiles * TILE == stage.width and stage.heights[-1] == rows and stage.steps * stage.piece == 2880


def test_what_cannot_run_is_named():
    (x, stacks, ids, _), _ = four_case(9, 3, 2)
    assert supported(jnp.bfloat16, stacks) is None
    assert "float32" in supported(jnp.float32, stacks)
    assert "with biases and without" in supported(jnp.bfloat16, [*stacks, stacks[0][:2]])
    assert "widths 576 and 1152" in supported(jnp.bfloat16, [*stacks, shapes(3, 576, 1152)])
    for d, f in ((2880, 1440), (128, 576)):
        assert "supported: multiples of 576" in supported(jnp.bfloat16, [shapes(3, d, f)])
    check_refused(mix, x, stacks, ids)
    four = [shapes(3, 512, 256, kind) for kind in (Int4(128), Nvfp4(), Int4(64))]
    assert supported(jnp.bfloat16, four[:1]) is supported(jnp.bfloat16, four[1:2]) is None
    assert "several formats of four bits" in supported(jnp.bfloat16, four)
    assert "128 x 512; supported: multiples of 256" in supported(jnp.bfloat16, [shapes(3, 512, 128, Int4(128))])
