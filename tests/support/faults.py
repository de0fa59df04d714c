"""Faults of a device, for tests of what the engine makes of them."""

import contextlib
import math

import jax
import jax.numpy as jnp


@jax.jit
def _vast(results):
    rows = jnp.arange(2**20) + results[0].sum(dtype=jnp.float32)
    vast = (jnp.ones((2**20, 2**27)) * rows[:, None]) @ jnp.ones(2**27)
    return [result + vast.sum().astype(result.dtype) for result in results]


def out_of_memory(results):
    """A pytree of arrays behind an allocation that no machine has. This returns; each is an error once it is read."""
    leaves, kind = jax.tree.flatten(results)
    return jax.tree.unflatten(kind, _vast(leaves))


@contextlib.contextmanager
def damaged(llm, token, value=math.nan):
    """The target's embedding of one token is no number within."""
    runner = llm.engine.runner
    weights, draft = runner.model.params, runner.draft.params
    runner.programs.fill({**weights, "embed": weights["embed"].at[token].set(value)}, draft)
    try:
        yield
    finally:
        runner.programs.fill(weights, draft)
