"""A mixture's router on any NVIDIA GPU, as `top_experts` has it. A program has a token."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxspec.pallas import hopper, portable

MOST = 1024  # experts
NOBODY = 2**30  # as `experts_mlp.NOBODY`
LEAST = -3e38  # in place of what isn't a number, and above what has been chosen already


def supported(experts: int, k: int, shared: Any) -> str | None:
    """Why the kernel can't choose k of so many experts, or None if it can; `shared` as in `top_experts`."""
    if experts > MOST or k > experts:
        return f"{k} of {experts} experts; up to {MOST} experts are supported"
    if shared is not None and shared[0].shape[1] % 128:
        return f"a shared expert's gate of {shared[0].shape[1]} inputs; multiples of 128 are supported"
    return None


def select(
    logits: Float[Array, "t e"],
    positions: Int[Array, " t"],
    shared: Any,
    *,
    k: int,
    renormalised: bool,
    interpret: bool = False,
) -> tuple[Int[Array, "t w"], Float[Array, "t w"]]:
    """Run `top_experts.reference`; there are as many columns as a token has experts."""
    hopper.count("portable_top_experts")
    return _select(logits, positions, shared, k=k, renormalised=renormalised, interpret=interpret)


@partial(jax.jit, static_argnames=("k", "renormalised", "interpret"))
def _select(logits, positions, shared, *, k, renormalised, interpret):
    t, width = len(logits), k + (shared is not None)
    given = [] if shared is None else [shared[0], shared[1].reshape(-1)]
    return pl.pallas_call(
        partial(_token, k, renormalised),
        out_shape=[jax.ShapeDtypeStruct((t, width), dtype) for dtype in (jnp.int32, jnp.float32)],
        grid=(t,),
        compiler_params=portable.triton().CompilerParams(num_warps=1 if shared is None else 4, num_stages=1),
        interpret=interpret,
        name="portable_top_experts",
    )(logits.astype(jnp.float32), positions, *given)


def _token(k: int, renormalised: bool, logits_ref: Any, positions_ref: Any, *refs: Any) -> None:
    *shared, ids_ref, weights_ref = refs
    token, experts = pl.program_id(0), logits_ref.shape[1]
    expert = jnp.arange(1 << (experts - 1).bit_length(), dtype=jnp.int32)
    at = logits_ref.at[jnp.full_like(expert, 1) * token, expert]
    logits = portable.triton().load(at, mask=expert < experts, other=0.0)
    logits = jnp.where(expert < experts, jnp.where(logits > LEAST, logits, LEAST), -jnp.inf)
    valid, best, ids, left = positions_ref[token] >= 0, [], [], logits
    for _ in range(k):
        top = jnp.max(left, axis=0)
        mine = jnp.min(jnp.where(left == top, expert, experts), axis=0)
        best, ids = [*best, top], [*ids, mine]
        left = jnp.where(expert == mine, -jnp.inf, left)
    among = jnp.zeros((), jnp.float32)
    if renormalised:
        for each in best:
            among = among + jnp.exp(each - best[0])
    else:
        among = jnp.sum(jnp.exp(logits - best[0]), axis=0)
    for j in range(k):
        ids_ref[token, j] = jnp.where(valid, ids[j], NOBODY)
        weights_ref[token, j] = jnp.exp(best[j] - best[0]) / among
    if shared:
        # jax 0.11.2 would make booleans of two Python numbers.
        ids_ref[token, k] = jnp.where(valid, jnp.int32(experts), jnp.int32(NOBODY))
        weights_ref[token, k] = jax.nn.sigmoid(_product(token, *shared))


def _product(token: Array, rows_ref: Any, gate_ref: Any) -> Array:
    """A token's row times the shared expert's gate, in float32."""
    width = rows_ref.shape[1]
    step = min(width & -width, 1024)

    def body(i, sums):
        at = pl.ds(i * step, step)
        return sums + rows_ref[token, at].astype(jnp.float32) * gate_ref[at].astype(jnp.float32)

    return jnp.sum(lax.fori_loop(0, width // step, body, jnp.zeros((step,), jnp.float32)), axis=0)
