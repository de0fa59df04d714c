"""The portable kernels of experts in MXFP4 against numpy, in Pallas's interpreter; and that they lower for several
generations of GPUs."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxspec.decoder.matmul import gating
from jaxspec.pallas import portable
from jaxspec.pallas.experts import experts_mlp
from jaxspec.pallas.portable import mxfp4 as op
from tests.pallas.experts.test_expert_four import GPT_OSS, MODELS, check_mixture, four_case, shapes
from tests.support.portable import KINDS, lowered
from tests.support.sample import rare


@pytest.mark.parametrize("t,e,k,more,activation", [
    (1, 3, 1, {"d": 192, "f": 64}, GPT_OSS),  # words that don't fill a step
    rare(9, 2, 1, {"biased": False, "d": 64, "f": 128}, None),
    (70, 2, 1, {"skew": 5, "d": 64, "f": 64}, GPT_OSS),  # all tokens at one expert, in several items
])  # fmt: skip
def test_a_mixture_matches_numpy(t, e, k, more, activation, monkeypatch):
    monkeypatch.setattr(portable, "kernels_here", lambda: None)
    monkeypatch.setattr(op, "items", partial(op.items, interpret=True))
    check_mixture("portable_mxfp4", t, e, k, more, activation)


@pytest.mark.parametrize("capability", KINDS)
def test_lowers_for_each_generation(capability, monkeypatch):
    monkeypatch.setattr(portable, "kernels_here", lambda: None)
    d, f, e, k = MODELS["gpt-oss-20b"]
    shape = jax.ShapeDtypeStruct
    routing = shape((8, k), jnp.int32), shape((8, k), jnp.float32)
    run = partial(experts_mlp.experts_mlp, gating=gating(GPT_OSS))
    text = lowered(run, shape((8, d), jnp.bfloat16), [shapes(e, d, f)], *routing, capability=capability)
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 2


def test_supported_says_why_not():
    (_, stacks, *_), _ = four_case(1, 2, 1, d=64, f=64)
    assert op.supported(jnp.bfloat16, stacks) is None
    assert op.supported("float32", stacks) == "rows in float32; bfloat16 is supported"
    assert op.supported(jnp.bfloat16, stacks * 2) == "several stacks of experts in MXFP4"
    (_, stacks, *_), _ = four_case(1, 2, 1, d=96, f=64)
    assert op.supported(jnp.bfloat16, stacks) == "widths 96 and 64; multiples of 64 are supported"
