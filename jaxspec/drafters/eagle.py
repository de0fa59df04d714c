"""EAGLE: one decoder layer that guesses the target's features, and from them its tokens.

Row t pairs the target's features at position t with the token at t + 1, and its output predicts the token at t + 2
(https://arxiv.org/abs/2401.15077). Drafting continues from there: each draft is paired with the output that it was
drawn from, in place of features that the target hasn't computed yet. EAGLE-1 and 2 read the target's final hidden
state. EAGLE-3 reads three layers and may draft from a smaller vocabulary (https://arxiv.org/abs/2503.01840). EAGLE-2 is
EAGLE-1's weights under trees (`eagle_tree`), which EAGLE-3 can grow as well; as chains, the two are one.

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

from jaxspec.cache.paged import KV, Rows, kv_bytes_per_token
from jaxspec.config.options import ConfigError
from jaxspec.decoder.forward import run_layer, top_tokens, unembed
from jaxspec.decoder.functions import normed, row_of
from jaxspec.decoder.matmul import product
from jaxspec.drafters import eagle_checkpoint, eagle_tree
from jaxspec.drafters.base import Drafter, Proposal
from jaxspec.drafters.own_weights import borrowed, own_dtype
from jaxspec.drafters.vocabulary import as_targets, known_tokens, maps_of, rows_of
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import matmul
from jaxspec.parallel.sharding import embed


@dataclass(frozen=True)
class Chain(Drafter):
    """Shared part of the EAGLEs: everything but what features, layer and head compute.

    `config` is that of the drafter's one layer.

    Sampled drafts of a chain are drawn as each request samples, for rejection with the drafter's probabilities: that
    accepts a draft as often as drafter and target overlap, where a point mass on the drafter's favourite would be
    accepted as often as the target draws just that. The price is one array [b, drafts, v] in rounds that sample.

    With `topk` above 1 drafts are a tree, `num_steps` deep; None is a chain's, as many as there are drafts.
    """

    config: ModelConfig
    dtype: str
    feature_layers: tuple[int, ...] = ()
    num_draft_tokens: int = 3
    topk: int = 1
    num_steps: int | None = None

    reach = 1  # a row depends on the token after it

    def __post_init__(self):
        if self.topk > 1 or self.num_steps is not None:
            eagle_tree.check(self.num_steps, self.topk, self.num_draft_tokens)

    steps: ClassVar[bool] = True
    rests: ClassVar[bool] = True

    @property
    def longest(self):
        return self.num_draft_tokens if self.num_steps is None else self.num_steps

    @property
    def lookahead(self):
        drafting = 0 if self.num_steps is None else eagle_tree.places(self.num_steps, self.topk)
        return max(self.num_draft_tokens + 1, drafting)

    @staticmethod
    def find(source: str, target: ModelConfig, load_format: str) -> eagle_checkpoint.Found:
        """The checkpoint, its fit to the target checked."""
        raise NotImplementedError

    @classmethod
    def load(cls, target, source, options):
        """**Raises:** `ConfigError` for a drafter of another kind or for another model, `CheckpointError` for tensors
        that are missing or don't fit. Both name what is wrong."""
        found = cls.find(source, target.config, options.load_format)
        steps, drafts = None, options.num_draft_tokens or 3
        if options.topk > 1:
            steps, drafts = eagle_tree.shape(options)
            known = found.config.vocab_size if found.draft_ids is None else found.draft_ids
            if options.topk > known:
                raise ConfigError(f"--topk {options.topk}: --draft {source} knows {known} tokens; give that or less")
        dtype = own_dtype(target, options)
        params, theirs = found.read(dtype, options), borrowed(target, dtype)
        own, embed = params.get("embed"), theirs["embed"]
        if own is None or (own.shape == embed.shape and bool((own == embed).all())):
            params["embed"] = embed  # drafters that bring one mostly bring a copy of this
        params.setdefault("head", theirs)
        return cls(found.config, dtype, found.layers, drafts, options.topk, steps, **found.settings), params

    def with_token_map(self, params: Any, ids: np.ndarray) -> dict[str, Any]:
        """The params to draft these of the target's tokens alone. **Raises:** `ConfigError` if it can't be."""
        if len(ids) < self.topk:
            raise ConfigError(f"--topk {self.topk}: --draft-token-map has {len(ids)} tokens; give {len(ids)} or less")
        maps = maps_of(params, ids, self.config.vocab_size)
        return {**params, "head": rows_of(params["head"], ids), **maps}

    def on_one_of(self, size):
        return replace(self, config=self.config.on_one_of(size))

    def kv_bytes_per_token(self, dtype):
        return kv_bytes_per_token(self.config, dtype)

    def init_state(self, layout, num_slots):
        hidden = jnp.zeros((num_slots, self.config.hidden_size), self.dtype)
        return {"kv": layout.kv(self.config), "hidden": hidden}

    def propose(self, params, state, batch):
        hidden, kv = state["hidden"][batch.slots][:, None], state["kv"]
        if self.num_steps is not None:
            proposal, kv = eagle_tree.propose(self, params, kv, hidden[:, 0], batch)
            return proposal, {"kv": kv, "hidden": state["hidden"]}
        tokens, probs, logits = [], [], []
        for step in range(self.num_draft_tokens):
            if step:
                rows = batch.rows(step - 2, 1)
                hidden, kv = self._layer(params, kv, tokens[-1][:, None], self._feedback(params, hidden), rows)
            logits.append(self._logits(params, hidden[:, 0]))
            top = self._top(params, hidden) if batch.greedy else None
            token, p = batch.choose(logits[-1], step, top, known_tokens(params, self.config.vocab_size))
            token, p = as_targets(params, token, p)
            tokens.append(token)
            probs.append(p)
        count = jnp.where(batch.live, self.num_draft_tokens, 0)
        stacked = None if batch.greedy else jnp.stack(probs, axis=1)
        proposal = Proposal(jnp.stack(tokens, axis=1), count, stacked, jnp.stack(logits, axis=1))
        return proposal, {"kv": kv, "hidden": state["hidden"]}

    def narrowed(self, drafts):
        return replace(self, num_draft_tokens=drafts) if drafts else super().narrowed(0)

    def idle(self, params, state, batch):
        return state  # `commit` computes the rows that stand whatever `propose` left there

    def commit(self, params, state, batch, verified):
        rows, keep = Rows(batch.length - 1, verified.accepted, batch.table), verified.accepted > 0
        requested = jnp.maximum(rows.count - 1, 0)
        return self._take(params, state, batch.slots, verified.outputs, verified.features, rows, keep, requested)

    def prefill(self, params, state, batch, features):
        """Keep the output of the last block if a request has several."""
        slots, rows = batch.slots, batch.rows
        real = rows.count > 0
        later = (slots[:, None] == slots) & (rows.start[:, None] < rows.start) & real
        keep = real & ~later.any(axis=1)
        requested = jnp.where(keep, rows.count - 1, -1)
        return self._take(params, state, slots, batch.next_tokens, features, rows, keep, requested)

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
    ) -> dict[str, Array]:
        """Compute rows from the target's features and the tokens after them, and where `keep`, note the output of the
        row `requested`. Of others keys and values are all that later ones read."""
        features = tuple(x.astype(self.dtype) for x in features)
        out, kv = self._layer(params, state["kv"], tokens, self._fuse(params, features), rows, requested)
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
    ) -> tuple[Float[Array, "b _ d"], KV]:
        """The decoder layer over pairs of token and hidden state: its output, before any norm; of each request's row
        `requested` alone, if that is given and others' would cost something.

        Hidden states can be followed by others, r - t of them, that fill up what kernels take together. They stay there
        from step to step, where cutting them off and putting others in their place would be kernels of its own.
        """
        raise NotImplementedError

    def _feedback(self, params: Any, out: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        """Hidden state that the next draft is paired with, from the output that it was drawn from."""
        return out

    def _logits(self, params: Any, out: Float[Array, "*b d"]) -> Float[Array, "*b w"]:
        """Over the drafter's vocabulary."""
        return unembed(params["head"], out)

    def _top(self, params: Any, out: Float[Array, "b r d"]) -> Int[Array, " b"] | None:
        """Where the logits of each first row are highest, if that can be had without them."""
        return None

    def _target_ids(self, params: Any, tokens: Int[Array, "*b"]) -> Int[Array, "*b"]:
        return params["target_ids"][tokens] if "target_ids" in params else tokens


@dataclass(frozen=True)
class Eagle(Chain):
    """EAGLE-1 and 2. The feature is the final hidden state, after the target's norm; embedding and head are the
    target's."""

    find = staticmethod(eagle_checkpoint.find_eagle)

    def _fuse(self, params, features):
        return features[0]

    def _layer(self, params, kv, tokens, hidden, rows, requested=None):
        x = matmul(jnp.concatenate([embed(params["embed"], tokens), hidden], axis=-1), params["fc"])
        if "fc_bias" in params:
            x = x + params["fc_bias"]
        positions = rows.marked_positions(x.shape[1])
        return run_layer(self.config.decoder, params["layer"], x, positions, rows, kv, [(x, None)], requested)


@dataclass(frozen=True)
class Eagle3(Chain):
    """EAGLE-3. Its layer attends to token and features side by side, each with a norm of its own.

    **Arguments:**

    - `norm_output`: feed the normed output back, not the residual stream (EAGLE 3.1).
    - `norm_before_residual`: the residual stream starts from the normed features.
    """

    norm_output: bool = False
    norm_before_residual: bool = False

    find = staticmethod(eagle_checkpoint.find_eagle3)

    def _fuse(self, params, features):
        norm = self.config.decoder.norm
        if "feature_norms" in params:
            features = [normed(x, scale, norm) for x, scale in zip(features, params["feature_norms"], strict=True)]
        if "input_norm" in params:
            features = [normed(jnp.concatenate(features, axis=-1), params["input_norm"], norm)]
        x = product(features, params["fc"])
        return x + params["fc_bias"] if "fc_bias" in params else x

    def _layer(self, params, kv, tokens, hidden, rows, requested=None):
        layer, decoder, embedded = params["layer"], self.config.decoder, embed(params["embed"], tokens)
        inputs = [(embedded, layer["attn_norm"]), (hidden, layer["hidden_norm"])]
        residual = normed(hidden, layer["hidden_norm"], decoder.norm) if self.norm_before_residual else hidden
        return run_layer(decoder, layer, residual, rows.marked_positions(tokens.shape[1]), rows, kv, inputs, requested)

    def _feedback(self, params, out):
        return normed(out, params["norm"], self.config.decoder.norm) if self.norm_output else out

    def _logits(self, params, out):
        return super()._logits(params, normed(out, params["norm"], self.config.decoder.norm))

    def _top(self, params, out):
        top = top_tokens(params["head"], self.config.decoder.norm, params["norm"], out)
        return None if top is None else top[:, 0]
