"""The portable kernels of experts against each pair by itself in float64, in Pallas's interpreter; and that they lower
for several generations of GPUs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoder.matmul import ACTIVATIONS
from jaxspec.models.weights import Fp8, Weight
from jaxspec.pallas import hopper, portable
from jaxspec.pallas.experts import experts_mlp, top_experts
from jaxspec.pallas.experts.expert_stream import COUNT
from jaxspec.pallas.hopper import counting
from jaxspec.pallas.portable import experts as op
from jaxspec.pallas.portable import router
from tests.decoder.test_moe import naive, random_case
from tests.pallas.experts.test_expert_fp8 import fp8_case
from tests.pallas.experts.test_expert_stream import bfloat16, shapes
from tests.pallas.experts.test_top_experts import CASES, inputs
from tests.support.kernels import assert_close
from tests.support.portable import KINDS, lowered
from tests.support.sample import one_in, rare


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels are chosen, and run in the interpreter."""
    monkeypatch.setattr(portable, "kernels_here", lambda: None)
    for name in ("few", "items"):
        monkeypatch.setattr(op, name, partial(getattr(op, name), interpret=True))


@pytest.mark.parametrize("t,e,k,shared,skew", [
    (1, 6, 3, 64, 0),
    rare(3, 7, 2, 0, 0.3),
    rare(8, 4, 2, 64, 0),  # experts of several tokens, and one of all
    rare(9, 12, 2, 64, 0),  # items of eight rows, which the activation below has, too
    (45, 6, 2, 0, 5),  # items that don't hold all rows of an expert
    rare(150, 3, 1, 0, 0.5),
])  # fmt: skip
def test_a_mixture_is_the_sum_of_its_pairs(interpreted, t, e, k, shared, skew):
    case = bfloat16(random_case(t, e, k, skew, d=128, f=64, seed=t, shared=shared))
    with counting() as kernels:
        got = jax.jit(experts_mlp.experts_mlp)(*case)
    assert_close(got, naive(*case))
    assert kernels == {"portable_experts_few" if t <= op.FEW else "portable_experts": 1}


@pytest.mark.parametrize("t,more", [
    rare(1, {"unit": None, "f": 64, "shared": 64}),  # a scale for each output, one of another stack
    rare(70, {"unit": None, "skew": 5, "f": 64}),  # items that don't hold all rows of an expert
    (9, {"unit": 64, "d": 256}),  # a scale for each block
    rare(150, {"unit": 128, "d": 256}),  # items of 128 rows
])  # fmt: skip
def test_fp8_experts_match_numpy(interpreted, t, more):
    case, whole = fp8_case(t, 3, 2 if "shared" in more else 1, **{"d": 128} | more)
    with counting() as kernels:
        got = jax.jit(experts_mlp.experts_mlp)(*case)
    assert kernels == {"portable_experts": 1}
    assert_close(got, naive(*whole))


@pytest.mark.parametrize("gated", [rare(True), False])
def test_fp8_experts_that_hopper_refuses_take_the_portable_kernel_there(gated, monkeypatch):
    """Gemma's activation and width, and experts without a gate."""
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    (x, [(up, down)], *routing), _ = fp8_case(3, 2, 1, d=128, f=192, unit=None)
    if not gated:
        up = up.replace(values=up.values[:, :192], scales=up.scales[:, :192])
    run = partial(experts_mlp.experts_mlp, gating=ACTIVATIONS["gelu_tanh"] if not gated else lambda gate, up: gate * up)
    with counting() as kernels:
        text = lowered(run, x, [(up, down)], *routing, capability="9.0")
    assert kernels["portable_experts"] and text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 2


def test_tokens_without_experts_leave_the_residual_stream_as_it_is(interpreted):
    x, stacks, ids, weights = bfloat16(random_case(3, 4, 2, d=128, f=64))
    ids = ids.at[1].set(experts_mlp.NOBODY)
    residual = jnp.ones((8, 128), jnp.bfloat16)
    run = jax.jit(experts_mlp.experts_mlp)
    got = run(x, stacks, ids, weights, residual=residual)
    np.testing.assert_array_equal(got[jnp.array([1, 3, 4, 5, 6, 7])], 1)
    alone = run(x, stacks, ids, weights)
    np.testing.assert_array_equal(got[:3], 1 + alone)


def test_items_beyond_the_count_write_nothing():
    x, stacks, ids, _ = bfloat16(random_case(40, 12, 2, d=64, f=64))
    rows, items, place = jax.jit(experts_mlp.plan, static_argnums=2)(x, ids, 12)
    table = items.table.at[items.table[0, COUNT] :].set(0)
    got = op.items(rows, stacks, items.replace(table=table.at[:, COUNT].set(items.table[0, COUNT])), None, True)
    assert_close(got[place], experts_mlp.reference(rows, stacks, items)[place])


@pytest.mark.parametrize("tokens,gated", [rare(5, True), (9, True), (5, False), rare(9, False)])
def test_another_activation(interpreted, tokens, gated):
    gating = (lambda gate, up: (up + 1) * jnp.minimum(gate, 1.0)) if gated else ACTIVATIONS["relu2"]
    x, stacks, *routing = bfloat16(random_case(tokens, 4, 2, d=64, f=64))
    if not gated:
        stacks = [(Weight(first.values[:, :64]), down) for first, down in stacks]
    case = x, stacks, *routing
    got = jax.jit(partial(experts_mlp.experts_mlp, gating=gating))(*case)
    rows, items, place = jax.jit(experts_mlp.plan, static_argnums=2)(case[0], case[2], 4)
    out = experts_mlp.reference(rows, case[1], items, gating)
    assert_close(got, jax.jit(experts_mlp.combine)(out, place, case[3]))


@pytest.mark.parametrize("capability,model,tokens", one_in(
    len(KINDS), KINDS, [*(("qwen3.5-35b-a3b", t) for t in (1, 8, 32, 2048)), *(("qwen3-30b-a3b", t) for t in (4, 128))]
))  # fmt: skip
def test_lowers_for_each_generation(capability, model, tokens, monkeypatch):
    monkeypatch.setattr(portable, "kernels_here", lambda: None)
    text = lowered(experts_mlp.experts_mlp, *shapes(model, tokens), capability=capability)
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 2


@pytest.mark.parametrize("capability,scales,tokens", one_in(len(KINDS), KINDS, [Fp8(128), Fp8(None)], [8, 2048]))
def test_fp8_experts_lower_for_each_generation(capability, scales, tokens, monkeypatch):
    monkeypatch.setattr(portable, "kernels_here", lambda: None)
    text = lowered(experts_mlp.experts_mlp, *shapes("qwen3.5-35b-a3b", tokens, scales), capability=capability)
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 2


@pytest.mark.parametrize("t,e,k,renormalised,width", one_in(6, CASES, [(True, 0), (False, 0), (True, 384)]))
def test_a_router_chooses_as_the_plain_one(t, e, k, renormalised, width):
    given = inputs(t, e, width)
    ids, weights = router.select(*given, k=k, renormalised=renormalised, interpret=True)
    expected_ids, expected = top_experts.reference(*given, k, renormalised)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-30)


def test_what_is_not_a_number_chooses_different_experts_all_the_same():
    logits = jnp.full((1, 8), jnp.nan).at[0, 5].set(1.0)
    ids, _ = router.select(logits, jnp.zeros(1, int), None, k=3, renormalised=True, interpret=True)
    assert ids.tolist() == [[5, 0, 1]]


@pytest.mark.parametrize("capability", KINDS)
def test_the_router_takes_the_kernel_where_it_lowers(capability, monkeypatch):
    monkeypatch.setattr(portable, "kernels_here", lambda: None)
    run = partial(top_experts.top_experts, k=8, renormalised=True)
    text = lowered(run, *inputs(2, 256, 384), capability=capability)
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 1


def test_supported_says_why_not():
    assert router.supported(256, 8, None) is None
    assert router.supported(2048, 8, None) == "8 of 2048 experts; up to 1024 experts are supported"
    case = random_case(1, 4, 2, d=64, f=64)
    assert op.supported("float32", case[1]) == "rows in float32; bfloat16 and float16 are supported"
    assert "weights in float32 and rows in bfloat16" in op.supported("bfloat16", case[1])
    narrow = bfloat16(random_case(1, 4, 2, d=32, f=16))
    assert op.supported("bfloat16", narrow[1]) == "widths 32 and 16; multiples of 64 are supported"
    mixed = bfloat16(random_case(1, 4, 2, d=64, f=64, shared=128))
    assert op.supported("bfloat16", mixed[1]) == "experts of different widths, 64, 128"
    (_, stacks, *_), _ = fp8_case(2, 2, 1, d=128)
    assert op.supported("float16", stacks) is None
    quantised = [tuple(weight.replace(format=Fp8(128, activations=True)) for weight in stacks[0])]
    assert op.supported("bfloat16", quantised) == "weights in Fp8(block=128, activations=True)"
    (gate_up, down), *_ = bfloat16(case)[1]
    assert op.supported("bfloat16", [(gate_up, down, 0, 0)]) == "experts with biases"
