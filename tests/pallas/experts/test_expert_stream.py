"""The experts' kernel against its reference: each matmul in interpret mode, the whole by lowering it for CUDA."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.decoder import feed, matmul
from jaxspec.models.description import Mixture
from jaxspec.models.fp8 import E4M3
from jaxspec.models.weights import Weight
from jaxspec.pallas import hopper
from jaxspec.pallas.experts import expert_few, expert_plan, expert_stream, experts_mlp
from jaxspec.pallas.experts.expert_rows import FEWEST
from jaxspec.pallas.experts.expert_stream import COUNT, Tiling, stream, supported, tiling
from jaxspec.pallas.hopper import KERNELS
from tests.decoder.test_moe import arrays, naive, random_case
from tests.support.kernels import assert_close, kernels
from tests.support.sample import rare

MODELS = {  # model width, expert width, experts, experts of a token, shared experts
    "qwen3-30b-a3b": (2048, 768, 128, 8, 0),
    "qwen3.5-35b-a3b": (2048, 512, 256, 8, 1),
    "qwen3-next-80b-a3b": (2048, 512, 512, 10, 1),
}
SIZES = MODELS | {"glm-4.5-air": (4096, 1408, 128, 8, 1)}  # wider than `expert_few` takes


@pytest.fixture
def few_blocks(monkeypatch):
    """Fewer blocks than units, so that each takes several; interpreting a block takes a while, idle or not."""
    monkeypatch.setattr(expert_stream, "BLOCKS", 2)


def bfloat16(case):
    (x, stacks), rest = case[:2], case[2:]
    return *jax.tree.map(lambda a: a.astype(jnp.bfloat16), (x, stacks)), *rest


def backwards(items):
    """One by one, so that an item that writes too far spoils another's rows."""
    return items.replace(table=items.table[: items.table[0, COUNT]][::-1])


def shapes(model, tokens, fp8=None):
    """Shapes of a mixture's rows, stacks, ids and weights, which may be in a format of FP8."""
    d, f, e, k, shared = SIZES[model]
    of = jax.ShapeDtypeStruct

    def weight(e, n, k):
        if not fp8:
            return Weight(of((e, n, k), jnp.bfloat16))
        scales = (n // 128, k // 128) if fp8.block else (n, 1)
        return Weight(of((e, n, k), E4M3), fp8, scales=of((e, *scales), jnp.float32))

    stacks = [(weight(count, 2 * f, d), weight(count, d, f)) for count in (e, *[shared] * (shared > 0))]
    routing = of((tokens, k + shared), jnp.int32), of((tokens, k + shared), jnp.float32)
    return of((tokens, d), jnp.bfloat16), stacks, *routing


@pytest.mark.parametrize("t,e,k,skew,columns", [
    rare(1, 4, 2, 0, 16),  # one token, which the next test has
    rare(11, 8, 2, 0.3, 32),  # items of eight rows
    rare(40, 12, 2, 0, 64),  # items of 16 rows, most of them not full
    (45, 6, 2, 5, 128),  # items of 64 rows that don't hold all rows of an expert
    rare(150, 3, 1, 0.5, 64),  # two warpgroups, items that end in either
])  # fmt: skip
def test_each_matmul_matches_the_reference(monkeypatch, t, e, k, skew, columns):
    width = max(64, columns)
    x, stacks, ids, _ = bfloat16(random_case(t, e, k, skew, d=2 * width, f=width, seed=t))
    rows, items, place = jax.jit(experts_mlp.plan, static_argnums=2)(x, ids, e)
    sizes = Tiling(items.rows, columns, 64)
    monkeypatch.setattr(expert_stream, "BLOCKS", 1)
    items = backwards(items)
    got = stream(rows, arrays(stacks), items, sizes=sizes, interpret=plgpu.InterpretGPUParams())
    expected = jax.jit(experts_mlp.reference)(rows, stacks, items)
    assert_close(got[place], expected[place])


@pytest.mark.parametrize("activation,t,columns", [("gelu_tanh", 1, 16), ("relu2", 11, 32)])
def test_other_activations_and_experts_without_a_gate_match_the_reference(monkeypatch, activation, t, columns):
    x, stacks, ids, _ = bfloat16(random_case(t, 4, 2, d=64, f=64, seed=t))
    gating = matmul.gating(activation)
    if activation == "relu2":  # as Nemotron's
        stacks, gating = [(Weight(up.values[:, :64]), down) for up, down in stacks], matmul.ACTIVATIONS[activation]
    rows, items, place = jax.jit(experts_mlp.plan, static_argnums=2)(x, ids, 4)
    monkeypatch.setattr(expert_stream, "BLOCKS", 1)
    sizes = Tiling(items.rows, columns, 64, activation != "relu2")
    got = stream(rows, arrays(stacks), items, gating, sizes=sizes, interpret=plgpu.InterpretGPUParams())
    assert_close(got[place], experts_mlp.reference(rows, stacks, items, gating)[place])


@pytest.mark.parametrize("d,f,k,gated", [rare(2816, 704, 8, True), (2688, 1856, 8, False)])
def test_experts_of_gemma_4_and_nemotron_lower_for_cuda(d, f, k, gated, monkeypatch):
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    of = jax.ShapeDtypeStruct
    stacks = [(Weight(of((128, (1 + gated) * f, d), jnp.bfloat16)), Weight(of((128, d, f), jnp.bfloat16)))]
    if not gated:  # Nemotron's shared expert is two
        stacks.append((Weight(of((1, 2 * f, d), jnp.bfloat16)), Weight(of((1, d, 2 * f), jnp.bfloat16))))
    gating = matmul.gating("gelu_tanh") if gated else matmul.ACTIVATIONS["relu2"]
    given = of((1, d), jnp.bfloat16), stacks, of((1, k), jnp.int32), of((1, k), jnp.float32)
    assert kernels(partial(experts_mlp.experts_mlp, gating=gating), *given) == 2  # the plan and the products


def test_the_mixture_takes_the_kernel_where_there_is_one(few_blocks, monkeypatch):
    """Planning and adding up around the kernel, as a Hopper GPU has it, with a shared expert."""
    case = bfloat16(random_case(17, 4, 2, d=128, f=64, shared=64))
    interpret = plgpu.InterpretGPUParams()
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    monkeypatch.setattr(expert_stream, "stream", partial(stream, interpret=interpret))
    monkeypatch.setattr(expert_plan, "plan", partial(expert_plan.plan, interpret=interpret))
    before = KERNELS["expert_stream"]
    assert_close(jax.jit(experts_mlp.experts_mlp)(*case), naive(*case))
    assert KERNELS["expert_stream"] == before + 2  # interpreted, each stage is a kernel of its own
    for other in (random_case(3, 4, 2, f=64), bfloat16(random_case(3, 4, 2, f=64, shared=128))):
        jax.eval_shape(experts_mlp.experts_mlp, *other)
    assert KERNELS["expert_stream"] == before + 2


@pytest.mark.parametrize("model,tokens", [
    ("qwen3.5-35b-a3b", 4096), rare("qwen3.5-35b-a3b", 8),  # fewer tokens of Nemotron, above
    *(rare("qwen3-30b-a3b", tokens) for tokens in (1, 32, 512)),
    rare("qwen3-next-80b-a3b", 128),
    *(rare("qwen3.5-35b-a3b", tokens) for tokens in (1, 16, 32)),
    rare("qwen3.5-35b-a3b", 128),
    rare("qwen3-next-80b-a3b", 4),
])  # fmt: skip
def test_lowers_for_cuda_with_what_plans_for_it_and_what_moves_many_rows(model, tokens, monkeypatch):
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    expected = 1 + (expert_few.ROWS < tokens <= expert_plan.MOST) + 2 * (tokens >= FEWEST)
    assert kernels(experts_mlp.experts_mlp, *shapes(model, tokens)) == expected


@pytest.mark.parametrize("gated", [True, rare(False)])
def test_an_expert_twice_as_wide_is_two(monkeypatch, gated):
    """A shared one, whose hidden columns are cut in two, between others and in one kernel with them."""
    d = f = 64
    x, stacks, ids, _ = bfloat16(random_case(5, 4, 2, d=d, f=f, shared=2 * f, seed=1))
    activation = "silu" if gated else "relu2"
    gating = None if gated else matmul.ACTIVATIONS[activation]
    if not gated:
        stacks = [(Weight(up.values[:, : up.values.shape[1] // 2]), down) for up, down in stacks]
    ids = jnp.concatenate([ids[:, :2], jnp.tile(jnp.array([[4, 5]]), (5, 1))], axis=1)
    rows, items, place = jax.jit(experts_mlp.plan, static_argnums=2)(x, ids, 6)
    monkeypatch.setattr(expert_stream, "BLOCKS", 1)
    sizes = Tiling(items.rows, 32, 64, gated)
    got = stream(rows, arrays(stacks), items, gating, sizes=sizes, interpret=plgpu.InterpretGPUParams())[place]
    up, down = (weight.values for weight in stacks[1])
    halves = up.reshape(1 + gated, 2, f, d).swapaxes(0, 1).reshape(2, -1, d), down.reshape(d, 2, f).swapaxes(0, 1)
    divided = [stacks[0], tuple(map(Weight, halves))]
    assert_close(got, experts_mlp.reference(rows, divided, items, gating)[place])


@pytest.mark.parametrize("width,shared,calls", [(64, 128, 1), (128, 192, 2)])
def test_a_shared_expert_of_another_width_is_several_or_has_a_call_of_its_own(monkeypatch, width, shared, calls):
    """A width that isn't a multiple has no kernel in one mixture with the others."""
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    of = jax.ShapeDtypeStruct
    weight = lambda *shape: Weight(of(shape, jnp.bfloat16))  # noqa: E731
    named = dict(experts=8, per_token=3, width=width, shared_gated=False, activation="relu2", gated=False)
    weights = {"experts_up": weight(8, width, 128), "experts_down": weight(8, 128, width)}
    weights |= {"shared_up": weight(1, shared, 128), "shared_down": weight(1, 128, shared)}
    given = of((9, 128), jnp.bfloat16), of((9, 4), jnp.int32), of((9, 4), jnp.float32)
    with hopper.counting() as taken:
        run = partial(feed.mix_chosen, Mixture(shared=shared, **named), residual=None)
        assert jax.eval_shape(run, weights, *given).shape == (9, 128)
    assert taken["expert_stream"] == calls


@pytest.mark.parametrize("tokens,gated,several", [(8, True, False), (9, True, True), (8, False, True)])
def test_a_few_tokens_of_silu_gated_experts_have_one_width(monkeypatch, tokens, gated, several):
    """Their own kernels take no other; up to there a wider shared expert has a call of its own."""
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    stacks = [(Weight(of(n, (1 + gated) * f, 128)), Weight(of(n, 128, f))) for n, f in ((8, 64), (1, 128))]
    gating = None if gated else matmul.ACTIVATIONS["relu2"]
    assert experts_mlp.several_widths(of(tokens, 128), stacks, gating) == several


def test_a_few_items_have_narrow_tiles():
    """Most blocks would have no work of a shared expert otherwise."""
    assert tiling(8, 2688, 3712, gated=False, items=1).columns == 16
    assert tiling(8, 2816, 704, items=8).columns == tiling(8, 2816, 704).columns == 64


@pytest.mark.parametrize("rows", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("model", MODELS)
def test_rings_are_deep_enough(model, rows):
    """A multiprocessor must have some 50 KiB on their way to read at its share of the memory's speed."""
    d, f, *_ = MODELS[model]
    sizes = tiling(rows, d, f)
    assert sizes.weight_slots >= 4 and 4 * sizes.weight_slots * sizes.columns * sizes.step >= 128 * 1024
    assert d % sizes.step == f % sizes.step == d % (2 * sizes.columns) == f % sizes.columns == 0


def test_what_cannot_run_is_named():
    of = lambda f: arrays(random_case(2, 4, 2, d=64, f=f, shared=64)[1])  # noqa: E731
    assert supported(jnp.bfloat16, of(64)) is None
    assert "float32" in supported(jnp.float32, of(64))
    assert "width 96" in supported(jnp.bfloat16, of(96)[:1])
    assert "widths 128 and 64" in supported(jnp.bfloat16, of(128))
    assert supported(jnp.bfloat16, arrays(random_case(2, 4, 2, d=64, f=64, shared=128)[1])) is None
    x, stacks, ids, _ = random_case(2, 4, 2)
    rows, items, _ = experts_mlp.plan(x, ids, 4)
    with pytest.raises(ValueError, match="float32, not bfloat16"):
        stream(rows, arrays(stacks), items)
