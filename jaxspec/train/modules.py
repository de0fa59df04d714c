"""The training of several MTP modules: step i of the unrolled chain is module i's, over rows of its own.

Where all modules read the text's own tokens, module i's rows see those before them, as in serving. From the last module
on, the chain goes on as EAGLE-3's does (`eagle3`).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from jaxspec.drafters.mtp import Mtp
from jaxspec.drafters.mtp_modules import MtpModules
from jaxspec.train.eagle3 import Eagle3Objective, Step


@dataclass(frozen=True)
class MtpObjective(Eagle3Objective):
    """`trained` are the module's params, or those of several."""

    drafter: Mtp

    def _unroll(self, params, features, batch):
        if not isinstance(self.drafter, MtpModules):
            return super()._unroll(params, features, batch)
        hidden, outputs, last = self.drafter._fuse(params, features), [], self.drafter.modules - 1
        for i in range(self.steps):
            module, further = min(i, last), max(i - last, 0)
            cache = cache if further else []
            tokens, rows = jnp.roll(batch.tokens, -(i + 1), axis=1), Step(batch, further)
            out, cache = self.drafter._module(params, module, cache, tokens, hidden, rows)
            outputs.append(out)
            hidden = self.drafter._feedback(params, out)
        return outputs
