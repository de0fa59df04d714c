"""The portable kernels of linear attention against the plain ones, in Pallas's interpreter; and that they lower for
several generations of GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas import gated_delta, portable
from jaxspec.pallas.hopper import counting
from jaxspec.pallas.portable import delta as op
from tests.portable import KINDS, lowered
from tests.test_delta_step import CASES, LAYER, Case, near


def check(case: Case, interpret: bool = False) -> None:
    """Outputs, states and records are the plain step's to float32's rounding, and nothing else has changed."""
    pool, slots, rest = case.inputs()
    expected, wanted = jax.jit(gated_delta.reference_step)(pool, LAYER, slots, *rest)
    arrays = pool.state, pool.keys, pool.updates, pool.decay
    out, arrays = jax.jit(op.step, static_argnames="interpret")(
        *arrays, jnp.int32(LAYER), slots, *rest, interpret=interpret
    )
    pool, wanted, after = (jax.tree.map(np.asarray, each) for each in (pool, wanted, gated_delta.DeltaPool(*arrays)))
    near(out, expected, 0.008)
    near(after.state[LAYER], wanted.state[LAYER], 1e-6 if case.dtype == "float32" else 0.008)
    near(after.updates[LAYER], wanted.updates[LAYER], 1e-5)
    np.testing.assert_array_equal(after.keys[LAYER], wanted.keys[LAYER])
    np.testing.assert_array_equal(after.decay[LAYER], wanted.decay[LAYER])
    others = [slot for slot in range(pool.state.shape[1]) if slot not in np.asarray(slots)]
    for was, now in zip(jax.tree.leaves(pool), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(was[0], now[0])
        np.testing.assert_array_equal(was[LAYER, others], now[LAYER, others])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_plain_step(case):
    check(case, interpret=True)


@pytest.mark.parametrize("capability", KINDS)
def test_the_operation_takes_it_where_it_lowers(capability, monkeypatch):
    monkeypatch.setattr(portable, "kernels_here", lambda: None)
    pool, slots, rest = Case("", t=3, rows=4, filled=4).inputs()
    run = lambda pool, slots, *rest: gated_delta.step(pool, jnp.int32(0), slots, *rest, filled=4)  # noqa: E731
    with counting() as kernels:
        text = lowered(run, pool, slots, *rest, capability=capability)
        out, _ = jax.eval_shape(run, pool, slots, *rest)
    assert kernels == {"portable_delta_step": 2} and out.shape[1] == 4
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 1


def test_supported_says_why_not():
    sizes = (1, 4, 16, 128), (1, 4, 32, 128)
    assert op.supported(*sizes, jnp.float32, jnp.bfloat16, jnp.bfloat16) is None
    assert "states in float16" in op.supported(*sizes, jnp.float16)
    assert "keys of width 96" in op.supported((1, 4, 16, 96), sizes[1], jnp.float32)
    assert "33 value heads over 16" in op.supported(sizes[0], (1, 4, 33, 128), jnp.float32)
