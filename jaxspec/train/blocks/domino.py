"""Domino's training: DFlash's blocks, whose GRU reads the text's own tokens, so that all drafts are scored at once.

Blocks are scored with the correction and without it: `share` times the loss without, and the rest with. The share falls
to 0 over the run, since a correction of bad logits teaches little (https://arxiv.org/abs/2605.29707).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.drafters.blocks.domino import Domino
from jaxspec.models.weights import matmul
from jaxspec.train.blocks.dflash import DFlashObjective
from jaxspec.train.losses import Scorer, frozen_logits


@dataclass(frozen=True)
class DominoObjective(DFlashObjective):
    """Objective in which the loss without corrections counts `base_weight` at first, and nothing once `base_share` of
    the run is done."""

    drafter: Domino
    base_weight: float = 1.0
    base_share: float = 0.5

    head: ClassVar[tuple[str, ...]] = ("domino_after",)

    def _student(self, params, out, before, *_):
        """Rows and their corrections' latents, side by side; zeros where nothing is corrected."""
        embedded, memory, latents = self.drafter.embedded(params, before), None, []
        for step in range(out.shape[2]):
            latent, memory = self.drafter.latent(params, embedded[:, :, step], out[:, :, step], memory, step)
            latents.append(jnp.zeros((*out.shape[:2], self.drafter.rank), out.dtype) if latent is None else latent)
        return jnp.concatenate([out, jnp.stack(latents, axis=2)], axis=-1)

    def _guesses(self, student, weights, done):
        share = self.base_weight * jnp.maximum(1 - done / self.base_share, 0.0)
        plain = student.at[..., self.drafter.config.hidden_size :].set(0)
        return jnp.stack([student, plain]), jnp.stack([(1 - share) * weights, share * weights])

    def _scorer(self):
        return Scorer(self.kind, self.target, self._logits)

    def _head_flops(self, trained, head):
        return super()._head_flops(trained, head) + 4 * head

    def _logits(self, head: Any, frozen: Any, student: Float[Array, "*b w"]) -> Float[Array, "*b v"]:
        """Logits, whose addition is rounded as `dspark.DSparkObjective` rounds its own."""
        out, latent = jnp.split(student, [self.drafter.config.hidden_size], axis=-1)
        added = matmul(latent, self.cast(head["domino_after"]))
        return frozen_logits(frozen, out) + added.astype(jnp.float32)
