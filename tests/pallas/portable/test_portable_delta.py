"""The portable kernels of linear attention against the plain ones, in Pallas's interpreter; and that they lower for
several generations of GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas import portable
from jaxspec.pallas.hopper import counting
from jaxspec.pallas.portable import delta as op
from jaxspec.pallas.recurrence import delta_pool, gated_delta
from tests.pallas.recurrence.test_delta_step import CASES as HOPPERS
from tests.pallas.recurrence.test_delta_step import LAYER, Case, check_after, near
from tests.support.portable import KINDS, lowered

CASES = [*HOPPERS, Case("decays by channel", t=3, rows=4, replay=(2, 0), channel_decay=True)]


def check(case: Case, interpret: bool = False) -> None:
    """Outputs, states and records are the plain step's to float32's rounding, and nothing else has changed."""
    pool, slots, rest = case.inputs()
    expected, wanted = jax.jit(gated_delta.reference_step)(pool, LAYER, slots, *rest)
    step = jax.jit(op.step, static_argnames="interpret")
    out, after = step(pool, jnp.int32(LAYER), slots, *rest, interpret=interpret)
    decay = check_after(case, pool, slots, (expected, wanted), out, after)
    np.testing.assert_array_equal(*(each[LAYER] for each in decay))


# Those that differ in how Hopper's kernel divides its work.
SAME = {"two heads in a block", "tiles in a ring", "whole tiles at a time", "room for rows that fill up"}
SAME |= {"rows in order, two heads in a block", "a key head in one block, three values heads"}
SAME |= {"one row", "more than eight rows"}


@pytest.mark.parametrize("case", [
    pytest.param(case, id=case.name, marks=pytest.mark.exhaustive if case.name in SAME else ()) for case in CASES
])  # fmt: skip
def test_equals_the_plain_step(case):
    check(case, interpret=True)


@pytest.mark.parametrize("capability", KINDS)
def test_the_operation_takes_it_where_it_lowers(capability, monkeypatch):
    monkeypatch.setattr(portable, "kernels_here", lambda: None)
    channels = capability in ("8.0", "9.0")
    pool, slots, rest = Case("", t=3, rows=4, padded_rows=4, channel_decay=channels).inputs()
    run = lambda pool, slots, *rest: gated_delta.step(pool, jnp.int32(0), slots, *rest, padded_rows=4)  # noqa: E731
    with counting() as kernels:
        text = lowered(run, pool, slots, *rest, capability=capability)
        out, _ = jax.eval_shape(run, pool, slots, *rest)
    assert kernels == {"portable_delta_step": 2} and out.shape[1] == 4
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 1


def scanned(dtype: str):
    """Blocks of two requests, one of which begins at a snapshot that the other keeps, and continues its own."""
    rng = np.random.default_rng(3)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))  # noqa: E731
    slots, source, keep = (jnp.array(each, jnp.int32) for each in ([1, 1, 2, 2], [-1, 1, 4, 2], [4, -1, 9, 3]))
    carry, write = 0.1 * normal(4, 2, 32, 32), normal(4, 2, 64, 32)
    return normal(2, 6, 2, 64, 32).astype(dtype), jnp.int32(1), slots, source, keep, carry, write


def check_scan(dtype: str, interpret: bool = False) -> None:
    given = scanned(dtype)
    expected = jax.jit(delta_pool.scan_blocks)(*given)
    got = jax.jit(op.scan, static_argnames="interpret")(*given, interpret=interpret)
    for each, wanted in zip(got, expected, strict=True):
        assert each.dtype == wanted.dtype
        near(each, wanted, 2e-6 if dtype == "float32" else 0.008)
    np.testing.assert_array_equal(got[0][0], given[0][0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_prompts_follow_one_another(dtype):
    check_scan(dtype, interpret=True)


@pytest.mark.parametrize("capability", KINDS)
def test_a_prompt_takes_it_where_it_lowers(capability, monkeypatch):
    monkeypatch.setattr(portable, "kernels_here", lambda: None)
    pool, slots, (_, *new) = Case("", t=8, rows=8).inputs()
    run = lambda pool, slots, *new: gated_delta.chunk(pool, jnp.int32(0), slots, slots, -slots, slots * 0 + 8, *new)  # noqa: E731
    with counting() as kernels:
        text = lowered(run, pool, slots, *new, capability=capability)
    assert kernels == {"portable_delta_scan": 1}
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 1


def test_supported_says_why_not():
    states = jnp.zeros((1, 2, 2, 128, 128))
    assert op.scan_supported(states, "bfloat16") is None
    assert op.scan_supported(states, "float32") == "states in float32 and keys in float32"
    assert op.scan_supported(states[..., :96], "bfloat16") == "keys of width 96 and values of width 128"
    sizes = (1, 4, 16, 128), (1, 4, 32, 128)
    assert op.supported(*sizes, jnp.float32, jnp.bfloat16, jnp.bfloat16) is None
    assert "states in float16" in op.supported(*sizes, jnp.float16)
    assert "keys of width 96" in op.supported((1, 4, 16, 96), sizes[1], jnp.float32)
    assert "33 value heads over 16" in op.supported(sizes[0], (1, 4, 33, 128), jnp.float32)
