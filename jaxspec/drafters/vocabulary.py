"""A drafter's vocabulary of its own, smaller than the target's: which of the target's tokens it knows.

Drafters that have one keep `target_ids` and `draft_ids` among their params; those that know every token keep neither.

A drafter is trained with one, or is given one: a token map lists the target's tokens worth drafting, and the drafter's
head becomes a copy of their weights. It reads less of memory for each draft, and can't draft the rest (FR-Spec,
https://arxiv.org/abs/2502.14856).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.checkpoint import CheckpointError
from jaxspec.checkpoint.bin_file import read_ids
from jaxspec.config.options import ConfigError
from jaxspec.drafters.base import DraftBatch, Proposal
from jaxspec.models.weights import Weight
from jaxspec.parallel.sharding import take


def id_maps(offsets: np.ndarray | None, size: int, vocab_size: int, source: str) -> dict[str, Array]:
    """`target_ids` i32[size], the target's id of each of the drafter's; `draft_ids` i32[v], the reverse.

    Where a token of the target has none, `draft_ids` is `size`. Without offsets (dummy weights), ids are spread evenly.

    **Raises:** `CheckpointError` for an id that the target lacks, or that two draft tokens share, and for offsets that
    aren't whole numbers.
    """
    own = np.arange(size, dtype=np.int64)
    if offsets is not None and offsets.dtype.kind not in "iu":
        raise CheckpointError(f"{source}: d2t is stored as {offsets.dtype}; it must be whole numbers")
    ids = own * vocab_size // size if offsets is None else own + offsets.astype(np.int64)
    if (ids < 0).any() or (ids >= vocab_size).any():
        i = int(np.argmax((ids < 0) | (ids >= vocab_size)))
        raise CheckpointError(f"{source}: d2t maps draft token {i} to {ids[i]}; the target has {vocab_size} tokens")
    reverse = np.full(vocab_size, size, np.int32)
    reverse[ids] = own
    if (twice := reverse[ids] != own).any():
        i = int(np.argmax(twice))
        raise CheckpointError(f"{source}: d2t maps draft tokens {i} and {reverse[ids[i]]} to the same token, {ids[i]}")
    return {"target_ids": jnp.asarray(ids, jnp.int32), "draft_ids": jnp.asarray(reverse)}


def known_tokens(params: Any, vocab_size: int) -> int:
    """How many tokens the drafter knows, of so many of the target's."""
    return len(params["target_ids"]) if "target_ids" in params else vocab_size


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


class Chained:
    """Drafts of a chain, which are drawn one after another. `tokens` are the target's, i32[b] each."""

    def __init__(self, params: Any, batch: DraftBatch, vocab_size: int):
        """`vocab_size` is the target's; `params` say which of its tokens the drafter knows."""
        self._params, self._batch, self._known = params, batch, known_tokens(params, vocab_size)
        self.tokens, self._probs, self._logits = [], [], []

    def draw(self, logits: Float[Array, "b w"], top: Int[Array, " b"] | None = None) -> Int[Array, " b"]:
        """The next token. `top`: as of `DraftBatch.choose`."""
        token, probs = as_targets(self._params, *self._batch.choose(logits, len(self.tokens), top, self._known))
        for kept, one in ((self.tokens, token), (self._probs, probs), (self._logits, logits)):
            kept.append(one)
        return token

    def proposal(self, count: int | Int[Array, " b"], confidence: Float[Array, "b n"] | None = None) -> Proposal:
        """All that were drawn, of which so many are verified."""
        tokens, logits = jnp.stack(self.tokens, axis=1), jnp.stack(self._logits, axis=1)
        probs = None if self._batch.greedy else jnp.stack(self._probs, axis=1)
        return Proposal(tokens, jnp.where(self._batch.live, count, 0), probs, logits, confidence=confidence)


def read_token_map(path: str, vocab_size: int) -> Int[np.ndarray, " n"]:
    """The ids of a token map, ascending. A JSON file has a list of them, a NumPy file (`.npy`) an array, and a file of
    `torch.save` (`.pt`), as FR-Spec publishes, a list or a tensor.

    **Raises:** `ConfigError` for a file that can't be read or holds anything else, for ids that the target lacks, and
    for one that comes twice.
    """
    name = f"--draft-token-map {path}"
    try:
        ids = _read(path)
    except CheckpointError as error:
        raise ConfigError(f"--draft-token-map: {error}") from error
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{name}: {reason}. It must be a JSON file with a list of token ids, or a .npy or .pt file"
        ) from error
    if not isinstance(ids, np.ndarray) and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
        raise ConfigError(f"{name}: it must hold a list of token ids and nothing else")
    try:
        ids = np.asarray(ids)
    except OverflowError as error:
        raise ConfigError(f"{name}: it has ids of more than 64 bits") from error
    if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise ConfigError(f"{name}: it must hold a list of token ids, got {ids.dtype} of shape {list(ids.shape)}")
    beyond = ids[(ids < 0) | (ids >= vocab_size)]
    if beyond.size:
        raise ConfigError(f"{name}: token {beyond[0]} is none of the target's {vocab_size}. Is it another model's map?")
    once, count = np.unique(ids, return_counts=True)
    if len(once) < len(ids):
        raise ConfigError(f"{name}: token {once[count.argmax()]} is in it {count.max()} times. List each token once")
    return once.astype(np.int64)


def _read(path: str) -> Any:
    match Path(path).suffix:
        case ".npy":
            return np.load(path, allow_pickle=False)
        case ".pt":
            return read_ids(Path(path))
    return json.loads(Path(path).read_text("utf-8"))


def rows_of(head: dict[str, Any], ids: Int[np.ndarray, " n"]) -> dict[str, Any]:
    """Copy what computes logits, a `head` or tied embeddings, for these tokens alone."""
    if "head" not in head:
        return {"embed": take(head["embed"], ids, axis=0)}
    return {"head": columns_of(head["head"], ids, head["embed"].dtype)}


def columns_of(weight: Weight, ids: Int[np.ndarray, " n"], dtype: Any) -> Weight:
    """A copy of these outputs of a weight [k, v]; those of a quantised one in `dtype`."""
    values = weight.dequantised(dtype) if weight.quantised else weight.unquantised
    return Weight(take(values, ids, axis=1))


def maps_of(params: Any, ids: Int[np.ndarray, " n"], vocab_size: int) -> dict[str, Array]:
    """`id_maps` of a token map. **Raises:** `ConfigError` if the drafter's params have a vocabulary of their own."""
    if "target_ids" in params:
        raise ConfigError(
            f"--draft-token-map: this drafter was trained to draft {len(params['target_ids'])} tokens, and its head is "
            "theirs. Drop the flag"
        )
    return id_maps(ids - np.arange(len(ids)), len(ids), vocab_size, "--draft-token-map")
