"""The kernel that plans a mixture's work: interpreted against the plain plan, lowered for CUDA, and where it serves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas import hopper
from jaxspec.pallas.experts import expert_plan, experts_mlp
from jaxspec.pallas.experts.expert_stream import COUNT
from jaxspec.pallas.experts.experts_mlp import NOBODY
from jaxspec.pallas.hopper import KERNELS
from tests.decoder.test_moe import random_case
from tests.pallas.experts.test_expert_stream import MODELS
from tests.support.kernels import lowered
from tests.support.sample import rare

CASES = [  # tokens, experts, of a token, how much the same ones are liked, whether there is one that all share
    (1, 8, 3, 0, False),
    (9, 40, 3, 0, True),  # two words of bits, columns that aren't brought whole
    (12, 300, 2, 0, False),
    (13, 4, 4, 0, False),  # all tokens to all experts
    (21, 5, 2, 5, False),  # items that don't hold all of an expert's rows
    (37, 33, 2, 0.3, True),  # tokens of several words
]


def inputs(t: int, e: int, k: int, skew: float, shared: bool, d: int, nobody: str = "some"):
    """Rows and their experts: none of `some` tokens in between, of those at the `end`, or of `all`."""
    x, _, ids, _ = random_case(t, e, k + shared, skew, d=d, f=1, seed=t, shared=int(shared))
    token = np.arange(t)[:, None]
    absent = {"some": token % 4 == 1, "end": token >= t // 2, "all": token >= 0}[nobody]
    return x.astype(jnp.bfloat16), jnp.where(absent, NOBODY, ids), e + shared


def check(
    t: int, e: int, k: int, skew: float, shared: bool, d: int = 128, nobody: str = "some", wide: int = 0, **options
):
    """Everything that anyone reads is what the plain plan has. `wide`: columns that hold nobody."""
    x, ids, e = inputs(t, e, k, skew, shared, d, nobody)
    each, rows = ids.shape[1], experts_mlp.rows_per_item(ids.size / e)
    items, place = jax.jit(experts_mlp._by_expert, static_argnums=(1, 2))(ids, e, rows)
    given = jnp.pad(ids, ((0, 0), (0, wide)), constant_values=NOBODY)
    sizes = {"rows": rows, "items": len(items.table), "capacity": items.capacity}
    gathered, table, places = expert_plan.plan(x, given, each=each, experts=e, **sizes, **options)
    count = int(items.table[0, COUNT])
    assert int(table[0, COUNT]) == count
    np.testing.assert_array_equal(table[:count, :COUNT], items.table[:count, :COUNT])
    np.testing.assert_array_equal(places, place)
    real = np.asarray(place) >= 0
    np.testing.assert_array_equal(
        np.asarray(gathered[place[real]], np.float32), np.asarray(x, np.float32)[np.nonzero(real)[0]]
    )


@pytest.mark.parametrize("case", [case if case[0] == 37 else rare(case) for case in CASES])
def test_matches_the_plain_plan(case):
    check(*case, interpret=plgpu.InterpretGPUParams())


def test_rows_may_be_of_odd_widths():
    check(5, 8, 2, 0, False, d=1088, interpret=plgpu.InterpretGPUParams())


@pytest.mark.parametrize("nobody", ["end", "all"])
def test_padding_has_no_place(nobody):
    check(10, 40, 3, 0, False, nobody=nobody, wide=5, interpret=plgpu.InterpretGPUParams())


@pytest.mark.parametrize("model,tokens", [
    rare("qwen3-30b-a3b", 9), rare("qwen3-30b-a3b", 32), rare("qwen3.5-35b-a3b", 45), ("qwen3-next-80b-a3b", 128),
])  # fmt: skip
def test_the_mixture_takes_it_where_there_is_one(model, tokens, monkeypatch):
    """From what the router's kernel gives, with nothing else before the experts' kernel."""
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    d, _, e, k, shared = MODELS[model]
    before = KERNELS["expert_plan"]
    x, ids = jax.ShapeDtypeStruct((tokens, d), jnp.bfloat16), jax.ShapeDtypeStruct((tokens, 128), jnp.int32)
    run = jax.jit(lambda x, ids: experts_mlp.plan(x, ids, e + shared, k + shared))
    text = lowered(run, x, ids)
    assert text.count("custom_call @mosaic_gpu") == 1
    assert not [op for op in ("gather", "scatter", "pad", "slice", "reduce") if f"stablehlo.{op}" in text]
    assert KERNELS["expert_plan"] == before + 1
    jax.eval_shape(run, jax.ShapeDtypeStruct((129, d), jnp.bfloat16), jax.ShapeDtypeStruct((129, 128), jnp.int32))
    assert KERNELS["expert_plan"] == before + 1


def test_what_it_leaves_to_others_is_named():
    assert expert_plan.supported(128, 16, 1024, 2048, jnp.bfloat16) is None
    assert expert_plan.supported(129, 8, 128, 2048, jnp.bfloat16) == "129 tokens, more than 128"
    assert "17 of 128 experts a token" in expert_plan.supported(8, 17, 128, 2048, jnp.bfloat16)
    assert "8 of 1025 experts a token" in expert_plan.supported(8, 8, 1025, 2048, jnp.bfloat16)
    assert "float32" in expert_plan.supported(8, 8, 128, 2048, jnp.float32)
    assert "width of 100" in expert_plan.supported(8, 8, 128, 100, jnp.bfloat16)
