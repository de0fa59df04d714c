"""Operations outside of programs that NumPy does in tests are those that jax does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compiler

from jaxspec.checkpoint.params import _fused
from jaxspec.compiling.xla_options import compile_counter
from jaxspec.models.weights import Layout

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4) / 7
OPERATIONS = {
    "broadcast": lambda x: jnp.broadcast_to(x[:, :1], (5, *x.shape)),
    "column": lambda x: jax.lax.broadcast_in_dim(x[0, 0], (4, 3), (0,)),
    "concatenate": lambda x: jnp.concatenate([x, x[:, ::-1]], axis=1),
    "bfloat16": lambda x: x.astype(jnp.bfloat16),
    "to integers": lambda x: (x - 2).astype(jnp.int8),
    "back": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    "flags": lambda x: x.astype(jnp.int32).astype(bool),
    "iota": lambda x: jax.lax.broadcasted_iota(jnp.int32, (3, 4), 1),
    "reshape": lambda x: x.reshape(4, -1),
    "in another order": lambda x: jax.lax.reshape(x, (4, 6), (2, 0, 1)),
    "squeeze": lambda x: jnp.squeeze(x[:1], 0),
    "transpose": lambda x: x.transpose(2, 0, 1),
    "slice": lambda x: x[1:, ::2, 1:3],
    "dynamic slice": lambda x: jax.lax.dynamic_slice(x, (1, -1, 9), (1, 2, 2)),
    "fused weights": lambda x: _fused([x.reshape(6, 4), x[::-1].reshape(6, 4)], True, Layout((6, 6), 2), "bfloat16"),
    "float8": lambda x: (x - 2).astype(jnp.float8_e4m3fn),
    "from float8": lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.bfloat16),
    "a number's product": lambda x: x.astype(jnp.bfloat16) * 0.1,
    "quotient": lambda x: x / (x - 1),
    "root": lambda x: jnp.sqrt(x) - jnp.abs(x - 2),
    "choice": lambda x: jnp.where(x > 1, x, -x) == jnp.clip(x, 0.5, 2),
    "bits": lambda x: (x > 1) & ~(x < 2) | (x != 3) ^ (x <= 1),
    "rounded": lambda x: jnp.round(x * 7 / 2) + jnp.floor(x) - jnp.ceil(x),
    "reduced": lambda x: x.max((0, 2)) - x.min(),
    "padded": lambda x: jnp.pad(x, ((0, 0), (1, 2), (0, 1)), constant_values=3),
    "cropped": lambda x: jax.lax.pad(x, 0.0, ((0, 0, 0), (0, -1, 0), (0, 0, 1))),
    "apart": lambda x: sum(jnp.split(x, (1, 3), axis=2)[1:2]) + jnp.stack(list(x.transpose(2, 0, 1))[:2], axis=-1),
    "all of them": lambda x: (x > 1).all(0) | (x > 3).any(0) | ((x > 2).sum(0) % 2 == 1),
    "divided integers": lambda x: jnp.arange(-7, 7) // 3 * 10 + jnp.arange(-7, 7) % 3,
    "weak": lambda x: jnp.asarray(1.5) + x[0, 0, :1],
}


JAXS = {"to integers", "flags", "in another order", "cropped", "weak"}  # which NumPy doesn't do


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_jaxs(monkeypatch, name):
    """Its bits, dtype, weak type and placement. In a program XLA does all of it."""
    operation, compiled, compile_one = OPERATIONS[name], [], compiler.backend_compile_and_load
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "backend_compile_and_load", lambda *of: compiled.append(of) or compile_one(*of))
        own = operation(jnp.asarray(X))
    assert bool(compiled) == (name in JAXS)
    jaxs = jax.jit(operation)(X)
    assert (own.dtype, own.shape, own.weak_type) == (jaxs.dtype, jaxs.shape, jaxs.weak_type)
    assert own.sharding == jaxs.sharding and own.committed == jaxs.committed
    np.testing.assert_array_equal(np.asarray(own, np.float32), np.asarray(jaxs, np.float32))


def test_a_program_can_write_to_what_is_made():
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    for size in range(2, 8000, 400):
        x = jnp.zeros((2, size), jnp.float32)
        memory = x.unsafe_buffer_pointer()
        assert step(x).unsafe_buffer_pointer() == memory, size


def test_what_is_made_shares_no_memory():
    x = jnp.asarray(X)
    part = x[0]
    jax.jit(lambda x: x + 1, donate_argnums=0)(x).block_until_ready()
    np.testing.assert_array_equal(part, X[0])


def test_what_would_have_been_compiled_counts():
    """Once for each shape, so that a server that computes outside of its programs is found out."""
    compiled = compile_counter()
    for size, expected in ((3, 1), (3, 0), (5, 1)):
        x, before = jnp.zeros(size), compiled["compiles"]
        x + x
        assert compiled["compiles"] == before + expected
