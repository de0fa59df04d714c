"""A drafter of one decoder layer that feeds its own output back: each draft is one more pass through the layer.

Row t pairs the target's features at position t with the token at t + 1, and its output predicts the token at t + 2
(https://arxiv.org/abs/2401.15077). Drafting continues from there: each draft is paired with the output that it was
drawn from, in place of features that the target hasn't computed yet.

Between rounds, of a request with tokens x_0 .. x_(N-1), the rows of positions 0 .. N-2 are in the cache, all computed
from the target's features, and `hidden` is the last one's output. A round writes its drafts' rows behind them, and the
next commit overwrites those. Row t depends on token t + 1, so a prefix's pages are shared only where the token after
them matches too (`reach`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache.paged import KV, Rows
from jaxspec.decoder.forward import Overrides, head_logits
from jaxspec.decoder.functions import row_of
from jaxspec.drafters.own_weights import OwnLayers
from jaxspec.drafters.vocabulary import Chained, maps_of, rows_of


@dataclass(frozen=True)
class Chain(OwnLayers):
    """Shared part of EAGLE and MTP: everything but what features, layer and head compute.

    `config` is that of the drafter's one layer.

    Sampled drafts of a chain are drawn as each request samples, for rejection with the drafter's probabilities: that
    accepts a draft as often as drafter and target overlap, where a point mass on the drafter's favourite would be
    accepted as often as the target draws just that. The price is one array [b, drafts, v] in rounds that sample.
    """

    dtype: str
    feature_layers: tuple[int, ...] = ()
    num_draft_tokens: int = 3

    reach = 1  # a row depends on the token after it

    steps: ClassVar[bool] = True
    rests: ClassVar[bool] = True

    def with_token_map(self, params: Any, ids: np.ndarray) -> dict[str, Any]:
        """The params to draft these of the target's tokens alone. **Raises:** `ConfigError` if it can't be."""
        maps = maps_of(params, ids, self.config.vocab_size)
        return {**params, "head": rows_of(params["head"], ids), **maps}

    def init_state(self, layout, num_slots):
        hidden = jnp.zeros((num_slots, self.config.hidden_size), self.dtype)
        return {"kv": super().init_state(layout, num_slots), "hidden": hidden}

    def propose(self, params, state, batch):
        hidden, kv = state["hidden"][batch.slots][:, None], state["kv"]
        drafts = Chained(params, batch, self.config.vocab_size)
        for step in range(self.num_draft_tokens):
            if step:
                rows = batch.rows(step - 2, 1, shifted=True)
                hidden, kv = self._layer(params, kv, drafts.tokens[-1][:, None], self._feedback(params, hidden), rows)
            drafts.draw(self._logits(params, hidden[:, 0]), self._top(params, hidden) if batch.greedy else None)
        return drafts.proposal(self.num_draft_tokens), {"kv": kv, "hidden": state["hidden"]}

    def narrowed(self, drafts):
        return replace(self, num_draft_tokens=drafts) if drafts else super().narrowed(0)

    def idle(self, params, state, batch):
        return state  # `commit` computes the rows that stand whatever `propose` left there

    def commit(self, params, state, batch, verified):
        rows = Rows(batch.length - 1, verified.accepted, batch.table, shift=batch.shift)
        keep = verified.accepted > 0
        requested = jnp.maximum(rows.count - 1, 0)
        return self._take(params, state, batch.slots, verified.outputs, verified.features, rows, keep, requested)

    def prefill(self, params, state, batch, features):
        """Keep the output of the last block if a request has several."""
        slots, rows, keep = batch.slots, batch.rows.replace(axes=batch.axes), batch.last
        requested = jnp.where(keep, rows.count - 1, -1)
        of = params, state, slots, batch.next_tokens, features, rows, keep, requested
        return self._take(*of, batch.overrides)

    def _take(
        self,
        params: Any,
        state: dict[str, Array],
        slots: Int[Array, " b"],
        tokens: Int[Array, "b t"],
        features: tuple[Float[Array, "b t d"], ...],
        rows: Rows,
        keep: Bool[Array, " b"],
        requested: Int[Array, " b"],
        overrides: Overrides | None = None,
    ) -> dict[str, Array]:
        """Compute rows from the target's features and the tokens after them, and where `keep`, note the output of the
        row `requested`. Of others keys and values are all that later ones read."""
        features = tuple(x.astype(self.dtype) for x in features)
        out, kv = self._layer(params, state["kv"], tokens, self._fuse(params, features), rows, requested, overrides)
        last = (out if out.shape[1] == 1 else row_of(out, jnp.maximum(requested, 0)))[:, 0]
        into = jnp.where(keep, slots, len(state["hidden"]))  # out of range for all others, which are dropped
        return {"kv": kv, "hidden": state["hidden"].at[into].set(last, mode="drop")}

    def _fuse(self, params: Any, features: tuple[Float[Array, "b t d"], ...]) -> Float[Array, "b t d"]:
        """Combine the target's features into the hidden states that the layer takes."""
        raise NotImplementedError

    def _layer(
        self,
        params: Any,
        kv: KV,
        tokens: Int[Array, "b t"],
        hidden: Float[Array, "b r d"],
        rows: Rows,
        requested: Int[Array, " b"] | None = None,
        overrides: Overrides | None = None,
    ) -> tuple[Float[Array, "b _ d"], KV]:
        """The decoder layer over pairs of token and hidden state: its output, before any norm; of each request's row
        `requested` alone, if that is given and others' would cost something. `overrides`: of the tokens' embeddings.

        Hidden states can be followed by others, r - t of them, that fill up what kernels take together. They stay there
        from step to step, where cutting them off and putting others in their place would be kernels of its own.
        """
        raise NotImplementedError

    def _feedback(self, params: Any, out: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        """Hidden state that the next draft is paired with, from the output that it was drawn from."""
        return out

    def _logits(self, params: Any, out: Float[Array, "*b d"]) -> Float[Array, "*b w"]:
        """Over the drafter's vocabulary."""
        return head_logits(params["head"], out)

    def _top(self, params: Any, out: Float[Array, "b r d"]) -> Int[Array, " b"] | None:
        """Where the logits of each first row are highest, if that can be had without them."""
        return None

    def _target_ids(self, params: Any, tokens: Int[Array, "*b"]) -> Int[Array, "*b"]:
        return params["target_ids"][tokens] if "target_ids" in params else tokens
