"""DFlash 2's training: DFlash's blocks, with the text's own token before each draft given to the selector.

A selector's scores are the rows' logits and what it adds to them, so both are trained over the whole vocabulary: half
of the loss is of the sums, and half of the logits alone, which choose the candidates. No recipe of the authors' is
public.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from jaxspec.drafters.blocks.dflash2 import DFlash2
from jaxspec.models.weights import matmul
from jaxspec.train.blocks.dflash import CorrectedObjective


@dataclass(frozen=True)
class DFlash2Objective(CorrectedObjective):
    """Objective of block, convolutions and selector together."""

    drafter: DFlash2

    head: ClassVar[tuple[str, ...]] = ("after",)

    def _student(self, params, out, before, *_):
        """Rows and the selector's latents, side by side."""
        return jnp.concatenate([out, params["before"][before] * matmul(out, params["selector"])], axis=-1)

    def _plain_share(self, done):
        return 0.5

    def _correction(self, head, latent):
        return latent @ self.cast(head["after"]).T
