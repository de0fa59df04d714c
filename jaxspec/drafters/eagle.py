"""EAGLE: one decoder layer that guesses the target's features, and from them its tokens (`chain`).

EAGLE-1 and 2 read the target's final hidden state. EAGLE-3 reads three layers and may draft from a smaller vocabulary
(https://arxiv.org/abs/2503.01840). EAGLE-2 is EAGLE-1's weights under trees (`eagle_tree`), which EAGLE-3 can grow as
well; as chains, the two are one.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from jaxspec.config.options import ConfigError
from jaxspec.decoder.forward import overridden, run_layer, top_tokens
from jaxspec.decoder.functions import normed
from jaxspec.decoder.matmul import product
from jaxspec.drafters import eagle_checkpoint, eagle_tree
from jaxspec.drafters.chain import Chain
from jaxspec.drafters.own_weights import borrowed, own_dtype
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import matmul
from jaxspec.parallel.sharding import embed


@dataclass(frozen=True)
class EagleDrafter(Chain):
    """Shared part of the EAGLEs: their checkpoints, and trees in place of chains.

    With `topk` above 1 drafts are a tree, `num_steps` deep; None is a chain's, as many as there are drafts.
    """

    topk: int = 1
    num_steps: int | None = None

    def __post_init__(self):
        if self.topk > 1 or self.num_steps is not None:
            eagle_tree.check(self.num_steps, self.topk, self.num_draft_tokens)

    @property
    def longest(self):
        return self.num_draft_tokens if self.num_steps is None else self.num_steps

    @property
    def lookahead(self):
        drafting = 0 if self.num_steps is None else eagle_tree.slots(self.num_steps, self.topk)
        return max(super().lookahead, drafting)

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

    def with_token_map(self, params, ids):
        if len(ids) < self.topk:
            raise ConfigError(f"--topk {self.topk}: --draft-token-map has {len(ids)} tokens; give {len(ids)} or less")
        return super().with_token_map(params, ids)

    def propose(self, params, state, batch):
        if self.num_steps is None:
            return super().propose(params, state, batch)
        hidden = state["hidden"][batch.slots]
        proposal, kv = eagle_tree.propose(self, self.num_steps, params, state["kv"], hidden, batch)
        return proposal, {"kv": kv, "hidden": state["hidden"]}


@dataclass(frozen=True)
class Eagle(EagleDrafter):
    """EAGLE-1 and 2. The feature is the final hidden state, after the target's norm; embedding and head are the
    target's."""

    find = staticmethod(eagle_checkpoint.find_eagle)

    def _fuse(self, params, features):
        return features[0]

    def _layer(self, params, kv, tokens, hidden, rows, requested=None, overrides=None):
        embedded = overridden(embed(params["embed"], tokens), overrides)
        x = matmul(jnp.concatenate([embedded, hidden], axis=-1), params["fc"])
        if "fc_bias" in params:
            x = x + params["fc_bias"]
        positions = rows.marked_positions(x.shape[1])
        return run_layer(self.config.decoder, params["layer"], x, positions, rows, kv, [(x, None)], requested)


@dataclass(frozen=True)
class Eagle3(EagleDrafter):
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

    def _layer(self, params, kv, tokens, hidden, rows, requested=None, overrides=None):
        layer, decoder = params["layer"], self.config.decoder
        embedded = overridden(embed(params["embed"], tokens), overrides)
        inputs = [(embedded, layer["attn_norm"]), (hidden, layer["hidden_norm"])]
        residual = normed(hidden, layer["hidden_norm"], decoder.norm) if self.norm_before_residual else hidden
        return run_layer(decoder, layer, residual, rows.marked_positions(tokens.shape[1]), rows, kv, inputs, requested)

    def _feedback(self, params, out):
        return normed(out, params["norm"], self.config.decoder.norm) if self.norm_output else out

    def _logits(self, params, out):
        return super()._logits(params, normed(out, params["norm"], self.config.decoder.norm))

    def _top(self, params, out):
        top = top_tokens(params["head"], self.config.decoder.norm, params["norm"], out)
        return None if top is None else top[0][:, 0]
