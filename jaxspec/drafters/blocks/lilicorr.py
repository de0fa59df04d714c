"""LiLiCorr: DFlash's block, of whose likeliest tokens a small network picks those that follow one another.

Each row keeps its `top` likeliest tokens. The network scores every step from one row's candidates to the next row's
(`lattice`), and drafts are drawn along these scores alone, in order: a token's own probability counts only as an input
of the network (https://arxiv.org/abs/2608.20530). Candidates are looked up in the target's embedding, whatever the
drafter's own is. Some checkpoints have DFlash 2's convolutions in their layers.

Beside its keys and values a request keeps, by slot, the projected context's newest row: the network's anchor. Where the
row isn't the one before the newest token, the network is told that none is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache.paged import Rows
from jaxspec.config.options import ConfigError
from jaxspec.decoder.functions import normed, row_of
from jaxspec.drafters.blocks.candidates import largest, walk
from jaxspec.drafters.blocks.convolutions import ConvolvedBlock
from jaxspec.drafters.blocks.lattice import Lattice
from jaxspec.parallel.sharding import embed, top_logprobs

CONVOLUTIONS = ("conv_kernel_size", "conv_group_size")


@dataclass(frozen=True)
class LiLiCorr(ConvolvedBlock):
    """A block whose drafts a `lattice` scores."""

    lattice: Lattice | None = None

    computes: ClassVar[frozenset[str]] = frozenset({"lilicorr_candidate_topk", "conv_kernel_size"})

    @classmethod
    def more(cls, own, config):
        if own.get("lilicorr_enabled") is False:
            raise ConfigError("lilicorr_enabled is false: its network isn't trained, so it is no LiLiCorr drafter")
        for key in ("sample_from_anchor", "is_causal"):
            if own.get(key):
                raise ConfigError(f"{key} is true; LiLiCorr drafts from masks alone, which see each other")
        if (own.get("draft_vocab_size") or config.vocab_size) != config.vocab_size:
            raise ConfigError(
                f"draft_vocab_size is {own['draft_vocab_size']}; LiLiCorr's probabilities are over all of the target's "
                f"{config.vocab_size} tokens"
            )
        given = [key for key in CONVOLUTIONS if own.get(key) is not None]
        if len(given) == 1:
            raise ConfigError(f"{given[0]} is set alone; convolutions need {' and '.join(CONVOLUTIONS)}")
        rows = own.get("block_size", 16) - cls.first_by_default
        lattice = {"lattice": Lattice.from_hf(own, config, rows)}
        return (super().more(own, config) if given else {}) | lattice

    def parameters(self, found=()):
        return {**super().parameters(found), "lattice": self.lattice.parameters()}

    @classmethod
    def _borrow(cls, params, target, source):
        params = super()._borrow(params, target, source)
        return params if params["embed"] is target["embed"] else {**params, "candidates": target["embed"]}

    def init_state(self, layout, num_slots):
        anchor = jnp.zeros((num_slots, self.config.hidden_size), jnp.float32)
        return {"kv": super().init_state(layout, num_slots), "anchor": anchor, "at": jnp.full(num_slots, -1, jnp.int32)}

    def propose(self, params, state, batch):
        hidden = self._fill(params, state["kv"], batch)
        rows = hidden.last[:, self.first : self.rows]  # all of them, since candidates see one another
        best, ids, total = top_logprobs(self._logits(params, rows), self.lattice.top, self.config.vocab_size, largest)
        known = state["at"][batch.slots] == batch.length - 2
        anchor = state["anchor"][batch.slots].astype(rows.dtype)
        embedded = embed(params.get("candidates", params["embed"]), ids)
        start, pair = self.lattice.scores(params["lattice"], embedded, best - total, rows, anchor, known)
        each = jnp.arange(len(ids))

        def score(step, token, place):
            return pair[each, step - 1, place] if step else start

        proposal = walk(batch, ids[:, : self.num_draft_tokens], score, self.config.vocab_size)
        return proposal, {**state, "kv": hidden.cache}

    def commit(self, params, state, batch, verified):
        rows = batch.rows(-1, verified.tokens.shape[1])
        keep = verified.accepted > 0
        return self._take(params, state, batch.slots, rows, verified.features, keep, verified.accepted - 1)

    def prefill(self, params, state, batch, features):
        return self._take(params, state, batch.slots, batch.rows, features, batch.last, batch.rows.count - 1)

    def _take(
        self,
        params: Any,
        state: dict[str, Any],
        slots: Int[Array, " b"],
        rows: Rows,
        features: tuple[Float[Array, "b t d"], ...],
        keep: Bool[Array, " b"],
        newest: Int[Array, " b"],
    ) -> dict[str, Any]:
        """Write the context of these rows, and where `keep`, note the row `newest` as the anchor."""
        context = self._context(params, features)
        anchor = row_of(context, jnp.maximum(newest, 0))[:, 0]
        anchor = normed(anchor, params["hidden_norm"], self.config.decoder.norm).astype(jnp.float32)
        into = jnp.where(keep, slots, len(state["at"]))  # out of range for all others, which are dropped
        return {
            "kv": self._write(params, state["kv"], slots, rows, context),
            "anchor": state["anchor"].at[into].set(anchor, mode="drop"),
            "at": state["at"].at[into].set(rows.start + newest, mode="drop"),
        }
