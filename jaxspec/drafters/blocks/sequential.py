"""A block whose drafts are drawn one after another: the layers run once, and each draft changes the next row's logits.

DSpark and Domino differ in what they make of the drafts before: a latent, whose product with a matrix over the
vocabulary is added to a row's logits. The probabilities of a draft are those after the addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.drafters.base import Proposal
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.vocabulary import Chained, columns_of
from jaxspec.models.weights import matmul


@dataclass(frozen=True)
class SequentialBlock(DFlash):
    """A subclass has `embedded` and `latent`, and the matrix among its params under the name `after`."""

    after: ClassVar[str]

    def with_token_map(self, params, ids):
        params = super().with_token_map(params, ids)
        if self.after not in params:
            return params
        after = columns_of(params[self.after], ids, params["embed"].dtype)  # drafts before are still any token
        return {**params, self.after: after}

    def propose(self, params, state, batch):
        hidden = self._fill(params, state, batch)
        rows = self._drafting(hidden.last)
        base, token = self._logits(params, rows), batch.tokens(-1, 1)[:, 0]
        drafts, memory, befores = Chained(params, batch, self.config.vocab_size), None, []
        found = self.found(params, base, token) if batch.greedy else None
        for step in range(self.num_draft_tokens):
            own = base[:, step]
            if self.after in params:
                befores.append(self.embedded(params, token))
                latent, memory = self.latent(params, befores[-1], rows[:, step], memory, step)
                own = own if latent is None else own + matmul(latent, params[self.after], jnp.float32)
            token = drafts.draw(own, None if found is None else found[:, step])
        return self.concluded(params, rows, befores, drafts), hidden.cache

    def concluded(self, params: Any, rows: Float[Array, "b n d"], befores: list[Array], drafts: Chained) -> Proposal:
        """The proposal of these drafts. `befores`: each one's `embedded` draft before."""
        return drafts.proposal(self.num_draft_tokens)

    def found(self, params: Any, base: Float[Array, "b n v"], newest: Int[Array, " b"]) -> Int[Array, "b n"] | None:
        """All drafts of a greedy chain, if they can be had at once."""
        return None

    def embedded(self, params: Any, token: Int[Array, "*b"]) -> Float[Array, "*b e"]:
        """Embeddings of drafts, as `latent` takes them."""
        raise NotImplementedError

    def latent(
        self,
        params: Any,
        before: Float[Array, "*b e"],
        row: Float[Array, "*b d"],
        memory: Float[Array, "*b m"] | None,
        step: int,
    ) -> tuple[Float[Array, "*b r"] | None, Float[Array, "*b m"] | None]:
        """Latent of draft number `step`, None where nothing is added, from the embedded draft before it. Also the
        memory of all drafts so far; None before the first."""
        raise NotImplementedError

    def latents(
        self, params: Any, before: Float[Array, "*b n e"], rows: Float[Array, "*b n d"]
    ) -> Float[Array, "*b n r"]:
        """Latents of drafts that are all known, as in training: zeros where nothing is added."""
        memory, found = None, []
        for step in range(rows.shape[-2]):
            latent, memory = self.latent(params, before[..., step, :], rows[..., step, :], memory, step)
            found.append(jnp.zeros((*rows.shape[:-2], self.rank), rows.dtype) if latent is None else latent)
        return jnp.stack(found, axis=-2)
