"""The FP8 experts' kernels: in interpret mode against numpy, by lowering them for CUDA, and where they are chosen."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.models.weights import Fp8, Weight
from jaxspec.pallas import hopper
from jaxspec.pallas.experts import expert_fp8, expert_plan, expert_tile, experts_mlp
from jaxspec.pallas.experts.expert_fp8 import MAX_ROWS, Fp8Stage, mix, supported
from jaxspec.pallas.experts.expert_rows import FEWEST
from jaxspec.pallas.experts.expert_stream import ALIGN, COUNT, SOURCE, Items
from jaxspec.pallas.hopper import counting
from tests.decoder.test_moe import naive, random_case
from tests.pallas.experts.test_expert_stream import SIZES, backwards, bfloat16, shapes
from tests.support.kernels import assert_close, kernels
from tests.support.quantised import quantised
from tests.support.sample import rare

INTERPRET = plgpu.InterpretGPUParams()


def fp8_weight(stack: Weight, unit: int | None) -> tuple[Weight, Weight]:
    """A stack in FP8, with a scale for each `unit` outputs and 128 inputs, or for each output, and the weights that it
    stands for."""
    # Rows of different sizes: a scale that is taken from another block, or another output, is far off.
    kind, same = ("block", 128) if unit else ("channel", 1)
    sizes = np.repeat(np.exp(np.arange(-(-stack.outputs // same)) % 3), same)[: stack.outputs, None]
    values, scales, whole = (np.stack(a) for a in zip(*(quantised(m * sizes, kind) for m in stack.values)))  # noqa: B905
    scales = jnp.asarray(np.repeat(scales, 128 // unit, axis=1) if unit else scales)
    return Weight(jnp.asarray(values), Fp8(128 if unit else None), scales=scales), Weight(jnp.asarray(whole))


def fp8_case(t, e, k, *, skew=0.0, d=256, f=128, shared=0, unit=128):
    """Arguments of `experts_mlp`, and the same with the weights that the FP8 ones stand for."""
    x, stacks, *rest = random_case(t, e, k, skew, d=d, f=f, seed=t, shared=shared)
    pairs = [[fp8_weight(np_stack, unit) for np_stack in stack] for stack in stacks]
    given, whole = ([tuple(weight[i] for weight in stack) for stack in pairs] for i in range(2))
    x = bfloat16((x, [], *rest))[0]
    return (x, given, *rest), (x, whole, *rest)


@pytest.fixture
def interpreted(monkeypatch):
    interpret(monkeypatch, expert_fp8)


def interpret(monkeypatch, module):
    """The kernels of `mix` are chosen, and interpreted."""
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    monkeypatch.setattr(module, "mix", partial(module.mix, interpret=INTERPRET))
    monkeypatch.setattr(expert_plan, "supported", lambda *_: "its interpreter takes seconds")
    monkeypatch.setattr(expert_tile, "SHARED_BYTES", 0)  # the fewest slots, so that each is used again


@pytest.mark.parametrize("t,e,k,more", [
    rare(1, 4, 1, {"d": 640}),  # one token; a ring that goes round, and one warpgroup has a piece more than the other
    rare(5, 9, 4, {"d": 128, "unit": 64}),  # experts that nobody chose; a scale for each group of outputs
    (12, 4, 2, {"d": 128, "shared": 128}),  # an expert of another stack, in items of up to 16 rows
    rare(70, 3, 1, {"skew": 5}),  # all tokens at one expert, whose last item has few rows
    rare(3, 3, 2, {"d": 384, "shared": 128, "unit": None}),  # a scale for each output, an odd number of pieces
    rare(1, 4, 1, {"d": 640, "unit": None}),
    rare(70, 3, 1, {"skew": 5, "unit": None}),
])  # fmt: skip
def test_a_mixture_matches_numpy(interpreted, t, e, k, more):
    """Planning and adding up around the kernels. The last of several tokens is padding."""
    case, whole = fp8_case(t, e, k, **more)
    if t > 1:
        case, whole = ((*c[:2], c[2].at[-1].set(experts_mlp.NOBODY), c[3]) for c in (case, whole))
    with counting() as chosen:
        got = jax.jit(experts_mlp.experts_mlp)(*case)
    assert chosen == {"expert_fp8": 1}
    assert_close(got, naive(*whole))


def test_one_token_alone_needs_no_plan(interpreted):
    """Its row comes with others that are padding, and one of its experts is nobody."""
    (x, stacks, ids, _), _ = fp8_case(1, 4, 3, d=128)
    ids, rows = ids.at[0, 1].set(experts_mlp.NOBODY), jnp.pad(x, ((0, 7), (0, 0)), constant_values=1)
    items = Items(jnp.pad(ids, ((0, 0), (0, 5))), ALIGN, 3 * ALIGN, 3)
    got = expert_fp8.mix(rows, stacks, items)[::ALIGN]
    planned, items, place = experts_mlp.plan(x, ids, 4, 3)
    expected = jax.jit(experts_mlp.reference)(planned, stacks, items)[place[0]]
    assert_close(got[jnp.array([0, 2])], expected[jnp.array([0, 2])])


def test_items_write_their_own_rows_alone(interpreted):
    """Back to front, one by one, so that an item that writes too far spoils another's rows."""
    (x, stacks, ids, _), _ = fp8_case(50, 4, 2, skew=0.7, d=128)
    rows, items, place = jax.jit(experts_mlp.plan, static_argnums=(2, 3, 4))(x, ids, 4, 2, MAX_ROWS)
    blocks = np.asarray(items.table[: items.table[0, COUNT], 3])
    assert items.rows == 64 and set(blocks.tolist()) - {2, 4, 8}  # some fill no height
    items = backwards(items)
    got = expert_fp8.mix(rows, stacks, items)
    assert_close(got[place], jax.jit(experts_mlp.reference)(rows, stacks, items)[place])


@pytest.mark.parametrize("model,tokens,scales", [
    rare("qwen3.5-35b-a3b", 32, Fp8(128)),
    rare("qwen3-30b-a3b", 600, Fp8(128)),  # what moves rows of bfloat16 is in test_expert_stream.py
    ("glm-4.5-air", 8, Fp8(None)),
    rare("qwen3.5-35b-a3b", 600, Fp8(None)),
])  # fmt: skip
def test_lowers_for_cuda_with_what_plans_for_it_and_what_moves_many_rows(model, tokens, scales, monkeypatch):
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    expected = 1 + (tokens <= expert_plan.MOST) + 2 * (tokens >= FEWEST)
    with counting() as chosen:
        assert kernels(experts_mlp.experts_mlp, *shapes(model, tokens, scales)) == expected
    assert chosen["expert_fp8"]


@pytest.mark.parametrize("rows", [8, 16, 32, 64])
@pytest.mark.parametrize("model", SIZES)
def test_two_or_three_blocks_have_room(model, rows):
    d, f, *_ = SIZES[model]
    for stage in (Fp8Stage("up", SOURCE, d, f, (8,), rows, 128), Fp8Stage("down", SOURCE, f, d, (8,), rows, 128)):
        ring = stage.slots * 128 * (128 + 2 * rows)
        results = (2 * stage.parts + 8 * (stage.warpgroups - 1)) * rows * 64
        assert stage.blocks_per_multiprocessor * (ring + results + 2048) <= 228 * 1024
        assert stage.slots >= 2 * stage.warpgroups and stage.slots % stage.warpgroups == 0
        assert stage.tiles * stage.parts * 64 == stage.width and stage.heights[-1] == rows


def test_what_cannot_run_is_named():
    (x, stacks, ids, _), _ = fp8_case(9, 3, 2, d=128)
    of = lambda **changes: [tuple(weight.replace(**changes) for weight in stack) for stack in stacks]  # noqa: E731
    assert supported(jnp.bfloat16, stacks) is None
    assert "float32" in supported(jnp.float32, stacks)
    assert "quantised, too" in supported(jnp.bfloat16, of(format=Fp8(128, activations=True)))
    assert "64 inputs each" in supported(jnp.bfloat16, of(format=Fp8(64)))
    assert "scales for 128 outputs and all inputs" in supported(jnp.bfloat16, of(format=Fp8(None)))
    narrow = [tuple(weight.replace(scales=jnp.repeat(weight.scales, 4, axis=1)) for weight in stacks[0])]
    assert "32 outputs" in supported(jnp.bfloat16, narrow)
    finer = [(gate_up.replace(scales=jnp.repeat(gate_up.scales, 2, axis=1)), down) for gate_up, down in stacks]
    assert supported(jnp.bfloat16, finer) is None
    assert supported(jnp.bfloat16, stacks + finer) == "scales for 64 outputs and for 128 in one mixture"
    wider = fp8_case(2, 2, 2, d=128, f=256)[0][1]
    assert "widths 128 and 256" in supported(jnp.bfloat16, stacks + wider)
    odd = [tuple(weight.replace(values=weight.values[..., :64]) for weight in stacks[0])]
    assert "width 64" in supported(jnp.bfloat16, odd)
    check_refused(mix, x, stacks, ids)


def check_refused(mix, x, stacks, ids):
    rows, items, _ = experts_mlp.plan(x, ids, 3)
    with pytest.raises(ValueError, match="rows in float32"):
        mix(rows.astype(jnp.float32), stacks, items)
    with pytest.raises(ValueError, match="items of 128 rows"):
        mix(rows, stacks, items.replace(rows=128))
