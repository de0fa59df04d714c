"""Domino's training: DFlash's blocks, whose GRU reads the text's own tokens, so that all drafts are scored at once.

Blocks are scored with the correction and without it: `share` times the loss without, and the rest with. The share falls
to 0 over the run, since a correction of bad logits teaches little (https://arxiv.org/abs/2605.29707).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from jaxspec.drafters.blocks.domino import Domino
from jaxspec.models.weights import matmul
from jaxspec.train.blocks.dflash import CorrectedObjective


@dataclass(frozen=True)
class DominoObjective(CorrectedObjective):
    """Objective in which the loss without corrections counts `base_weight` at first, and nothing once `base_share` of
    the run is done."""

    drafter: Domino
    base_weight: float = 1.0
    base_share: float = 0.5

    head: ClassVar[tuple[str, ...]] = ("domino_after",)

    def _student(self, params, out, before, *_):
        """Rows and their corrections' latents, side by side; zeros where nothing is corrected."""
        latents = self.drafter.latents(params, self.drafter.embedded(params, before), out)
        return jnp.concatenate([out, latents], axis=-1)

    def _plain_share(self, done):
        return self.base_weight * jnp.maximum(1 - done / self.base_share, 0.0)

    def _correction(self, head, latent):
        return matmul(latent, self.cast(head["domino_after"]))
