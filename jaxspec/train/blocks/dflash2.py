"""DFlash 2's training: DFlash's blocks, with the text's own token before each draft given to the selector.

A selector's scores are the rows' logits and what it adds to them, so both are trained over the whole vocabulary: half
of the loss is of the sums, and half of the logits alone, which choose the candidates. No recipe of the authors' is
public.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.drafters.blocks.dflash2 import DFlash2
from jaxspec.models.weights import matmul
from jaxspec.train.blocks.dflash import DFlashObjective
from jaxspec.train.losses import Scorer, frozen_logits


@dataclass(frozen=True)
class DFlash2Objective(DFlashObjective):
    """Objective of block, convolutions and selector together."""

    drafter: DFlash2

    head: ClassVar[tuple[str, ...]] = ("after",)

    def _student(self, params, out, before, *_):
        """Rows and the selector's latents, side by side."""
        return jnp.concatenate([out, params["before"][before] * matmul(out, params["selector"])], axis=-1)

    def _guesses(self, student, weights, done):
        plain = student.at[..., self.drafter.config.hidden_size :].set(0)
        return jnp.stack([student, plain]), jnp.stack([weights / 2] * 2)

    def _scorer(self):
        return Scorer(self.kind, self.target, self._logits)

    def _head_flops(self, trained, head):
        return super()._head_flops(trained, head) + 4 * head

    def _logits(self, head: Any, frozen: Any, student: Float[Array, "*b w"]) -> Float[Array, "*b v"]:
        """Logits, whose addition is rounded as `dspark.DSparkObjective` rounds its own."""
        out, latent = jnp.split(student, [self.drafter.config.hidden_size], axis=-1)
        added = latent @ self.cast(head["after"]).T
        return frozen_logits(frozen, out) + added.astype(jnp.float32)
