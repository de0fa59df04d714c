"""Where a prompt's program goes over from one CUDA graph to the next, so that the device starts on it early.

XLA makes one CUDA graph of a program's kernels, and the host prepares all of it before the first of them starts: 2 to 4
ms for the five hundred kernels of a prompt, in which the device may have nothing to do. A loop ends a graph. So the
first layer's kernels are one graph, which is ready at once, and while they run the host prepares the next.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas.target import kernels_here

ENDS = (1, 6)  # layers before which a graph ends; the host prepares some seven layers while the device computes one
PROMPT = 32  # rows of a request from which on they are a prompt's; rounds are dispatched while others run


def new_graph(layer: int, positions: Int[Array, "b t"], x: Float[Array, "b t d"]) -> Int[Array, "b t"]:
    """`positions`, known only after a loop that begins once `x` is there, if a graph is to end before this layer."""
    if layer not in ENDS or positions.shape[1] < PROMPT or kernels_here() is not None:
        return positions
    # None of this is ever other than zero, which XLA doesn't see; nor that the loop's two turns change nothing.
    bits = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(x).reshape(-1)[:1], jnp.dtype(f"u{x.dtype.itemsize}"))
    zero = (jax.lax.population_count(bits) >> 6).astype(jnp.int32)
    return positions + jax.lax.fori_loop(0, 2, lambda i, zero: jnp.maximum(zero, i - 2), zero)
