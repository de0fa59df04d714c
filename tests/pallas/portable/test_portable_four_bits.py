"""The portable kernels of weights in four bits against numpy, in Pallas's interpreter; and that they lower for several
generations of GPUs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoder.matmul import gating, project
from jaxspec.models.weights import Int4, Nvfp4, Weight
from jaxspec.pallas import hopper, portable
from jaxspec.pallas.experts import experts_mlp
from jaxspec.pallas.portable import experts as portable_experts
from jaxspec.pallas.portable import four_bits as op
from tests.pallas.dense.test_few_rows_four_bits import drawn, drawn_shape, rows_of
from tests.pallas.experts.test_expert_four import GPT_OSS, MODELS, MXFP4, check_mixture, four_case, naive, shapes
from tests.support.kernels import assert_close
from tests.support.portable import KINDS, lowered
from tests.support.sample import rare


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(portable, "kernels_here", lambda: None)
    for name in ("items", "product"):
        monkeypatch.setattr(op, name, partial(getattr(op, name), interpret=True))
    monkeypatch.setattr(portable_experts, "few", partial(portable_experts.few, interpret=True))


@pytest.mark.parametrize("t,e,k,more,activation", [
    (1, 3, 1, {"d": 192, "f": 64}, GPT_OSS),  # words that don't fill a step
    rare(9, 2, 1, {"biased": False, "d": 64, "f": 128}, None),
    rare(70, 2, 1, {"skew": 5, "d": 64, "f": 64}, GPT_OSS),  # all tokens at one expert, in several items
    (3, 2, 2, {"kind": Int4(32, zeros=True), "d": 192, "f": 64, "biased": False, "shared": 64}, None),
    rare(3, 2, 1, {"kind": Nvfp4(), "d": 256, "f": 64}, None),
])  # fmt: skip
def test_a_mixture_matches_numpy(interpreted, t, e, k, more, activation):
    check_mixture("portable_four_bits", t, e, k, more, activation)


def test_experts_without_a_gate(interpreted):
    """Nemotron has such experts in NVFP4."""
    (x, [(up, _)], ids, weights), _ = four_case(3, 2, 1, kind=Nvfp4(), d=64, f=64, biased=False)
    (_, [(_, down)], *_), _ = four_case(3, 2, 1, kind=Nvfp4(), d=64, f=128, biased=False)
    run = jax.jit(partial(experts_mlp.experts_mlp, gating=jax.nn.relu))
    with hopper.counting() as chosen:
        got = run(x, [(up, down)], ids, weights)
    assert chosen == {"portable_four_bits": 1}
    with hopper.use_kernels("plain"):
        rows, items, place = experts_mlp.plan(x, ids, 2)
        expected = experts_mlp.reference(rows, [(up, down)], items, jax.nn.relu)
        assert_close(got, experts_mlp.combine(expected, place, weights))


def test_experts_in_several_formats(interpreted):
    """A checkpoint in four bits may leave its shared expert unquantised: each has its kernel."""
    (x, stacks, ids, weights), whole = four_case(3, 2, 2, kind=Int4(64), d=64, f=64, biased=False, shared=64)
    stacks[1] = tuple(Weight(weight.dequantised(jnp.bfloat16)) for weight in stacks[1])
    residual = jnp.ones_like(x)
    with hopper.counting() as chosen:
        got = jax.jit(lambda *of: experts_mlp.experts_mlp(*of, residual=residual))(x, stacks, ids, weights)
    assert chosen == {"portable_four_bits": 1, "portable_experts_few": 1}
    assert_close(got, 1 + naive(x, ids, weights, whole, None))


@pytest.mark.parametrize("kind,rows", [(Int4(64, zeros=True), 3), (Nvfp4(), 40), rare(Int4(None), 128)])
def test_products_are_those_of_the_dequantised_weight(interpreted, kind, rows):
    """From inputs in parts, of which the last words don't fill a step."""
    weight, whole = drawn(kind, 448, 128)
    x = rows_of(rows, 448)
    with hopper.use_kernels("portable"), hopper.counting() as chosen:
        got = project(x, weight, jnp.array([rows]))
    assert chosen == {"portable_four_bits": 1}
    assert_close(got, np.asarray(x, np.float64) @ whole, 4e-3)


@pytest.mark.parametrize("capability", KINDS)
def test_lowers_for_each_generation(capability, monkeypatch):
    monkeypatch.setattr(portable, "kernels_here", lambda: None)
    d, f, e, k = MODELS["gpt-oss-20b"]
    shape = jax.ShapeDtypeStruct
    routing = shape((8, k), jnp.int32), shape((8, k), jnp.float32)
    run = partial(experts_mlp.experts_mlp, gating=gating(GPT_OSS))
    text = lowered(run, shape((8, d), jnp.bfloat16), [shapes(e, d, f)], *routing, capability=capability)
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 2
    weight = jax.eval_shape(partial(drawn_shape, Int4(128) if capability == "9.0" else Nvfp4(), 1024, 512))
    text = lowered(op.product, shape((8, 1024), jnp.float16), weight, capability=capability)
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 1


def test_supported_says_why_not():
    one, other = shapes(2, 64, 64), shapes(2, 64, 64, Nvfp4())
    assert op.supported(jnp.bfloat16, [one]) is op.supported("float16", [other]) is None
    assert op.supported("float16", [one]) == "rows in float16; bfloat16 are supported"
    assert "several formats or sizes" in op.supported(jnp.bfloat16, [one, other])
    assert "a width of 96; multiples of 64" in op.supported(jnp.bfloat16, [shapes(2, 96, 64, MXFP4)])
