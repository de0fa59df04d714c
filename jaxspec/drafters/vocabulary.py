"""A drafter's vocabulary of its own, smaller than the target's: which of the target's tokens it knows.

Drafters that have one keep `target_ids` and `draft_ids` among their params; those that know every token keep neither.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.checkpoint import CheckpointError


def id_maps(offsets: np.ndarray | None, size: int, vocab_size: int, source: str) -> dict[str, Array]:
    """`target_ids` i32[size], the target's id of each of the drafter's; `draft_ids` i32[v], the reverse.

    Where a token of the target has none, `draft_ids` is `size`. Without offsets (dummy weights), ids are spread evenly.

    **Raises:** `CheckpointError` for an id that the target lacks, or that two draft tokens share.
    """
    own = np.arange(size, dtype=np.int64)
    ids = own * vocab_size // size if offsets is None else own + offsets
    if (ids < 0).any() or (ids >= vocab_size).any():
        i = int(np.argmax((ids < 0) | (ids >= vocab_size)))
        raise CheckpointError(f"{source}: d2t maps draft token {i} to {ids[i]}; the target has {vocab_size} tokens")
    reverse = np.full(vocab_size, size, np.int32)
    reverse[ids] = own
    if (twice := reverse[ids] != own).any():
        i = int(np.argmax(twice))
        raise CheckpointError(f"{source}: d2t maps draft tokens {i} and {reverse[ids[i]]} to the same token, {ids[i]}")
    return {"target_ids": jnp.asarray(ids, jnp.int32), "draft_ids": jnp.asarray(reverse)}


def as_targets(
    params: Any, tokens: Int[Array, "*b"], probs: Float[Array, "*b w"] | None
) -> tuple[Int[Array, "*b"], Float[Array, "*b v"] | None]:
    """Drafts and their probabilities, from the drafter's vocabulary to the target's."""
    if "target_ids" not in params:
        return tokens, probs
    tokens = params["target_ids"][tokens]
    if probs is None:
        return tokens, None
    padding = [(0, 0)] * (probs.ndim - 1) + [(0, 1)]  # the column added is for all other tokens
    return tokens, jnp.pad(probs, padding)[..., params["draft_ids"]]
