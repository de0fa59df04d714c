"""Gemma 4's assistants: a few layers that have queries alone, over the target's own keys and values.

A draft is made of the newest token's embedding and a hidden state, side by side: at first the target's, after its final
norm, of the row that predicted the newest token; later the assistant's own, projected back to the target's width. All
drafts of a round stand at the newest token's position, and see the tokens before it. Each layer reads the pages of the
target's last layer of its kind that has keys and values of its own. So an assistant has no cache and no prefill.

Small assistants choose among the tokens of their likeliest centroids alone ("ordered embeddings").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.mixers import AttentionRows
from jaxspec.checkpoint import ModelFolder, locate
from jaxspec.config.options import ConfigError
from jaxspec.decoder.forward import head_logits, run_layer
from jaxspec.decoder.functions import capped, normed, row_of
from jaxspec.decoder.matmul import product
from jaxspec.drafters.assistant.checkpoint import (
    KINDS,
    chosen_centroids,
    ordering,
    own_name,
    parameters,
    read,
    sources_of,
)
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.own_weights import borrowed, load_weights, own_dtype
from jaxspec.drafters.vocabulary import Chained
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import WHOLE, linear
from jaxspec.parallel.sharding import devices, embed, own_rows

DRAFTS = 3  # where neither the user nor the checkpoint says how many


@flax.struct.dataclass
class TargetRows(AttentionRows):
    """Rows that read the keys and values of one of the target's layers, the `layer`-th of its group."""

    layer: int = flax.struct.field(pytree_node=False, default=0, kw_only=True)

    def attend_shared(self, cache, layer, q, window):
        return super().attend_shared(cache, jnp.int32(self.layer), q, window)


@dataclass(frozen=True)
class Assistant(Drafter):
    """`config` is the assistant's, `sources` the group of pages and the layer in it that each of its layers reads.

    `scale`: of the target's embedding. `width`: of its hidden states. `centroids`: how many of them have their tokens
    scored; 0: all tokens are.
    """

    config: ModelConfig
    sources: tuple[tuple[int, int], ...]
    scale: float
    dtype: str
    width: int
    feature_layers: tuple[int, ...] = ()
    num_draft_tokens: int = DRAFTS
    centroids: int = 0

    steps: ClassVar[bool] = True

    @classmethod
    def load(cls, target, source, options):
        """**Raises:** `ConfigError` for an assistant of another model, `CheckpointError` for tensors that are missing
        or don't fit. Both name what is wrong."""
        files = locate(source, load_format=options.load_format)
        if not isinstance(files, ModelFolder) or files.hf.get("model_type") not in KINDS:
            raise ConfigError(f"--draft {source}: an assistant is a folder whose model_type is {' or '.join(KINDS)}")
        config, chosen = read(files.hf, source), chosen_centroids(files.hf, source)
        sources = sources_of(config, target.config, files.hf, source)
        dtype, declared = own_dtype(target, options), parameters(config, target.config.hidden_size)
        if chosen:
            named = {"masked_embedding.centroids.weight": files.hf["num_centroids"]}
            declared["centroids"] = linear(config.hidden_size, named, exact=True, split=WHOLE)
        params = load_weights(declared, files, f"{source}, assistant", dtype, options, rename=own_name)
        params["target"] = borrowed(target, dtype)["embed"]
        if chosen:
            params["ordering"] = ordering(files, config.vocab_size, files.hf["num_centroids"], options.load_format)
        drafts = options.num_draft_tokens or files.generation.get("num_assistant_tokens") or DRAFTS
        of = target.config.decoder.embed_scale, dtype, target.config.hidden_size, (target.config.num_layers,)
        return cls(config, sources, *of, drafts, chosen), params

    def on_one_of(self, size):
        return replace(self, config=self.config.on_one_of(size))

    def init_state(self, layout, num_slots):
        return {"hidden": jnp.zeros((num_slots, self.width), self.dtype)}

    def propose(self, params, state, batch):
        hidden, token = state["hidden"][batch.slots][:, None], batch.tokens(-1, 1)
        drafts = Chained(params, batch, self.config.vocab_size)
        for _ in range(self.num_draft_tokens):
            hidden, out = self._step(params, token, hidden, batch)
            token = drafts.draw(*self._logits(params, out[:, 0]))[:, None]
        return drafts.proposal(self.num_draft_tokens), state

    def narrowed(self, drafts):
        return replace(self, num_draft_tokens=drafts) if drafts else super().narrowed(0)

    def idle(self, params, state, batch):
        return state

    def commit(self, params, state, batch, verified):
        (features,), last = verified.features, jnp.maximum(verified.accepted - 1, 0)
        hidden = row_of(features, last)[:, 0].astype(self.dtype)
        into = jnp.where(verified.accepted > 0, batch.slots, len(state["hidden"]))  # out of range: dropped
        return {"hidden": state["hidden"].at[into].set(hidden, mode="drop")}

    def _step(
        self, params: Any, token: Int[Array, "b 1"], hidden: Float[Array, "b 1 w"], batch: Any
    ) -> tuple[Float[Array, "b 1 w"], Float[Array, "b 1 d"]]:
        """The next hidden state, and the normed output that logits are made of."""
        embedded = embed(params["target"], token) * jnp.asarray(self.scale, self.dtype)
        x, decoder = product([embedded, hidden], params["pre"]), self.config.decoder
        before = batch.rows(-2, 1)  # a row in the slot before sees the tokens there are
        positions = batch.rows(-1, 1, shifted=True).marked_positions(1)
        for layer, weights, (group, i) in zip(decoder.layers, params["layers"], self.sources, strict=True):
            one, mixer = replace(decoder, layers=(layer,)), TargetRows(before, number=group, layer=i)
            x, _ = run_layer(one, weights, x, positions, mixer, batch.cache)
        out = normed(x, params["norm"], decoder.norm)
        return product([out], params["post"]), out

    def _logits(self, params: Any, out: Float[Array, "b d"]) -> tuple[Float[Array, "b v"], Int[Array, " b"] | None]:
        """This device's part of the logits, and the likeliest token if it is known without all of them."""
        cap = self.config.decoder.logit_cap
        bounded = (lambda logits: logits) if cap is None else partial(capped, cap=cap)
        if not self.centroids:
            return bounded(head_logits({"embed": params["embed"]}, out)), None
        scores = jnp.matmul(out, params["centroids"].dequantised(out.dtype), preferred_element_type=jnp.float32)
        _, nearest = jax.lax.top_k(scores, self.centroids)
        ids = params["ordering"][nearest].reshape(len(out), -1)
        table, (rows, here) = params["embed"], own_rows(params["embed"], ids)
        logits = bounded(jnp.einsum("bd,bkd->bk", out, table[rows], preferred_element_type=jnp.float32))
        others, own = jnp.full((len(out), len(table)), -jnp.inf), jnp.where(here, rows, len(table))
        part = others.at[jnp.arange(len(out))[:, None], own].set(logits, mode="drop")
        if devices() > 1:
            return part, None
        return part, jnp.take_along_axis(ids, jnp.argmax(logits, axis=1)[:, None], axis=1)[:, 0]
