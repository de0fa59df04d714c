"""DSpark's training: DFlash's blocks, with the text's own token before each draft given to the Markov head.

What the head adds to a row's logits then depends on the row and that token alone, so all drafts are scored at once, as
DFlash's are. The confidence head learns beside it how often rejection sampling would accept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.drafters.blocks.dspark import DSpark
from jaxspec.models.weights import matmul
from jaxspec.train.blocks.dflash import DFlashObjective
from jaxspec.train.losses import Scorer, frozen_logits


@dataclass(frozen=True)
class DSparkObjective(DFlashObjective):
    """Objective of a drafter whose confidence head reads the draft before.

    `by_rounds`: blocks count as often as serving's rounds would begin there. Where a round yields k tokens, one begins
    at every k-th; the confidence head estimates k.
    """

    drafter: DSpark
    by_rounds: bool = False

    head: ClassVar[tuple[str, ...]] = ("markov_after", "confidence", "confidence_bias")
    heads: ClassVar[frozenset[str]] = frozenset({*head, "markov_before", "markov_joint", "markov_joint_bias"})

    def _student(self, params, out, before, *_):
        """Rows, the embeddings of the tokens before, and the Markov head's latents, side by side."""
        embedded = self.drafter.embedded(params, before)
        return jnp.concatenate([out, embedded, self.drafter.latents(params, embedded, out)], axis=-1)

    def _often(self, trained, student):
        if not self.by_rounds:
            return 1.0
        stands = jnp.cumprod(jax.nn.sigmoid(self._odds(trained, student)), axis=-1).sum(axis=-1)
        often = 1 / (1 + stands)
        return jax.lax.stop_gradient(often / often.mean())

    def _scorer(self):
        return Scorer(self.kind, self.target, self._logits, self._odds)

    def _logits(self, head: Any, frozen: Any, student: Float[Array, "*b w"]) -> Float[Array, "*b v"]:
        """The addition is rounded to the activations' dtype, and so is its gradient: see `frozen_logits`."""
        out, _, latent = self._parts(student)
        added = matmul(latent, self.cast(head["markov_after"]))
        return frozen_logits(frozen, out) + added.astype(jnp.float32)

    def _odds(self, head: Any, student: Float[Array, "*b w"]) -> Float[Array, "*b"]:
        out, embedded, _ = self._parts(student)
        return self.drafter.odds(head, out, embedded)

    def _parts(self, student: Array) -> list[Array]:
        d, r = self.drafter.config.hidden_size, self.drafter.rank
        return jnp.split(student, [d, d + r], axis=-1)
