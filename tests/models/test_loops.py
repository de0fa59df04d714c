"""Starts of loops depend on a layer's rows. On a GPU, XLA would make constant ones of all layers at once."""

import jax
import jax.numpy as jnp
import pytest

from jaxspec.models.loops import zeros_after
from jaxspec.models.weights import Fp8, Weight, matmul
from jaxspec.pallas.attention.paged_attention import reference
from jaxspec.pallas.experts.experts_mlp import experts_mlp

TOKENS, WIDTH = 64, 128
S = jax.ShapeDtypeStruct


def experts(x, stack):
    return experts_mlp(x, [stack], jnp.zeros((TOKENS, 1), jnp.int32), jnp.ones((TOKENS, 1)))


def attention(x, kv):
    return reference(x.reshape(1, TOKENS, 1, WIDTH), kv, 0, jnp.zeros((1, 4), jnp.int32), jnp.zeros(1, jnp.int32))


def constant_starts(jaxpr, computed):
    """Shapes of the numbers that loops begin with, where none of `computed` is used to make them."""
    computed, found = set(computed), []
    for eqn in jaxpr.eqns:
        known = [not hasattr(v, "val") and v in computed for v in eqn.invars]
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if eqn.primitive.name in ("scan", "while"):
            begin = len(eqn.invars) - len(eqn.outvars) if eqn.primitive.name == "while" else 0
            found += [v.aval.shape for v, k in zip(eqn.invars[begin:], known[begin:], strict=True) if not k]
        elif inner is not None:
            inner = getattr(inner, "jaxpr", inner)
            found += constant_starts(inner, [v for v, k in zip(inner.invars, known, strict=True) if k])
        computed.update(eqn.outvars if any(known) else ())
    return found


@pytest.mark.parametrize("layer,weights", [
    (matmul, Weight(S((96, WIDTH), "float8_e4m3fn"), Fp8(128, True), scales=S((1, 1), "float32"))),
    (experts, (Weight(S((2, 2 * 8, WIDTH), "float32")), Weight(S((2, WIDTH, 8), "float32")))),
    (attention, S((1, 4, 2, 1, 16, WIDTH), "float32")),
])  # fmt: skip
def test_a_layers_loops_begin_once_its_rows_are_there(layer, weights):
    jaxpr = jax.make_jaxpr(layer)(S((TOKENS, WIDTH), "float32"), weights).jaxpr
    large = [shape for shape in constant_starts(jaxpr, jaxpr.invars) if len(shape) > 1]
    assert not large


def test_the_start_is_zero_whatever_the_rows_are():
    for number in (0.0, -1.0, jnp.inf, -jnp.inf, jnp.nan):
        assert not zeros_after(jnp.full((2, 3), number), (4,), jnp.float32).any()
