"""Domino: DFlash's block, whose logits a small recurrent network corrects by the drafts before.

A GRU reads the target's embeddings of the newest token and of the drafts, one after another. From draft number `spared`
on, an MLP of a row and the GRU's state is added to the row's logits (https://arxiv.org/abs/2605.29707).

Formats: SpecForge and ModelOpt, which write the same; speculators; see `dflash_checkpoint`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxspec.drafters import dflash_checkpoint as checkpoint
from jaxspec.drafters.blocks.sequential import SequentialBlock
from jaxspec.models.weights import WHOLE, head, linear, matmul
from jaxspec.parallel.sharding import embed


@dataclass(frozen=True)
class Domino(SequentialBlock):
    """The GRU's state has `width` numbers, and the MLP's latent `rank`. The first `spared` drafts aren't corrected."""

    width: int = 1024
    rank: int = 256
    spared: int = 0

    after: ClassVar[str] = "domino_after"
    computes: ClassVar[frozenset[str]] = frozenset({"gru_hidden_dim"})

    @classmethod
    def more(cls, own, config):
        drafts = own.get("block_size", 16) - int(not own.get("sample_from_anchor"))
        return {
            "width": checkpoint.integer("gru_hidden_dim", own.get("gru_hidden_dim"), 1),
            "rank": checkpoint.integer("emb_dim", own.get("emb_dim"), 1),
            "spared": checkpoint.integer("pure_draft_prefix_len", own.get("pure_draft_prefix_len") or 0, 0, drafts),
        }

    def parameters(self, found=()):
        declared, d, v = super().parameters(found), self.config.hidden_size, self.config.vocab_size
        whole = dict(exact=True, split=WHOLE)
        return {
            **declared,
            "gru_in": linear(d, {"prefix_gru.weight_ih_l0": 3 * self.width}, **whole),
            "gru_state": linear(self.width, {"prefix_gru.weight_hh_l0": 3 * self.width}, **whole),
            "domino_joint": linear(d + self.width, {"embed_proj.0.weight": self.rank}, **whole),
            "domino_after": head(self.rank, self.draft_ids or v, "embed_proj.2.weight"),
        }

    def embedded(self, params, token):
        return embed(params["embed"], token)

    def latent(self, params, before, row, memory, step):
        """Latent of the MLP; the memory is the GRU's state, whose parts are reset, update and new."""
        memory = jnp.zeros((*row.shape[:-1], self.width), row.dtype) if memory is None else memory
        given = jnp.split(matmul(before, params["gru_in"]), 3, axis=-1)
        kept = jnp.split(matmul(memory, params["gru_state"]), 3, axis=-1)
        reset, update = (jax.nn.sigmoid(a + b) for a, b in zip(given[:2], kept[:2], strict=True))
        memory = (1 - update) * jnp.tanh(given[2] + reset * kept[2]) + update * memory
        if step < self.spared:
            return None, memory
        return jax.nn.silu(matmul(jnp.concatenate([row, memory], axis=-1), params["domino_joint"])), memory
