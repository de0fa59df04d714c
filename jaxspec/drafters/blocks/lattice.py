"""LiLiCorr's network: how well each candidate of a row of drafts follows each of the row before.

A block's candidates, some tokens for each row, are vectors that attend to one another, both ways. Two vectors of unit
length are made of each: the product of one that leaves a candidate with one that enters a candidate of the next row is
the score of that step. An anchor, the context's newest row, leaves for the first row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxspec.config.options import ConfigError
from jaxspec.decoder.functions import rms_norm
from jaxspec.drafters.dflash_checkpoint import integer, number
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import WHOLE, Layout, Param, bias, linear, matmul, norm_scale

FEATURES = 5  # of a candidate: log-probability, probability, distance to the likeliest, rank, whether it is likeliest
LAYER_NORM_EPS = 1e-5


@dataclass(frozen=True)
class Lattice:
    """`rows` of drafts with `top` candidates each; `layers` of this `width`, whose MLPs are `mlp` wide. Vectors have
    `factors` numbers, and scores are `scale` times a cosine. `wide`: width of the drafter's own rows."""

    rows: int
    top: int
    wide: int
    width: int
    layers: int
    heads: int
    mlp: int
    factors: int
    vector_eps: float
    scale: float
    norm_eps: float

    @classmethod
    def from_hf(cls, own: Mapping[str, Any], config: ModelConfig, rows: int) -> Lattice:
        """**Raises:** `ConfigError` for a setting that is missing or can't be: none has a default."""
        name = "lilicorr_{}".format
        size = lambda key, low=1, end=None: integer(name(key), own.get(name(key)), low, end)  # noqa: E731
        if missing := [each for each in map(name, ("mlp_ratio", "vector_eps", "logit_scale")) if own.get(each) is None]:
            raise ConfigError(f"{missing[0]} is missing, and has no default")
        width, heads = size("hidden_size", 0) or config.hidden_size, size("num_heads")
        if width % heads:
            raise ConfigError(f"lilicorr_num_heads is {heads}; it must divide lilicorr_hidden_size, {width}")
        return cls(
            rows=rows,
            top=size("candidate_topk", 1, config.vocab_size + 1),
            wide=config.hidden_size,
            width=width,
            layers=size("num_layers"),
            heads=heads,
            mlp=int(width * number(own, name("mlp_ratio"))),
            factors=size("factor_dim"),
            vector_eps=number(own, name("vector_eps")),
            scale=number(own, name("logit_scale")),
            norm_eps=config.decoder.norm.eps,
        )

    def parameters(self) -> dict[str, Any]:
        """Declarations of a checkpoint's params: whole on each device, and never quantised on load."""
        h, d = self.width, self.wide

        def affine(name: str, inputs: int, outputs: int, weight: str = ".weight", offset: str = ".bias"):
            parts = {name + weight: outputs}, {name + offset: outputs}
            return {"weight": linear(inputs, parts[0], exact=True, split=WHOLE), "bias": bias(parts[1], split=WHOLE)}

        def whole(name: str, *shape: int) -> Param:
            return Param(shape, ("lilicorr." + name,), Layout(shape[-1:]), split=WHOLE)

        def layer(i: int) -> dict[str, Any]:
            name = f"lilicorr.layers.{i}."
            return {
                "attn_norm": norm_scale(h, name + "attn_norm.weight"),
                "qkv": affine(name + "attn.in_proj", h, 3 * h, "_weight", "_bias"),
                "out": affine(name + "attn.out_proj", h, h),
                "mlp_norm": norm_scale(h, name + "mlp_norm.weight"),
                "up": affine(name + "mlp.0", h, self.mlp),
                "down": affine(name + "mlp.2", self.mlp, h),
            }

        sizes = {
            "pass_hidden_proj": (d, h), "context_proj": (d, h), "factor_input_proj": (3 * h, h),
            "out_head": (h, self.factors), "in_head": (h, self.factors), "anchor_out_head": (h, self.factors),
            **({} if h == d else {"token_proj": (d, h)}),
        }  # fmt: skip
        features = "lilicorr.feature_mlp."
        return {
            **{name: affine("lilicorr." + name, *each) for name, each in sizes.items()},
            "feature_norm": norm_scale(FEATURES, features + "0.weight"),
            "feature_norm_bias": bias({features + "0.bias": FEATURES}, split=WHOLE),
            "feature_up": affine(features + "1", FEATURES, h),
            "feature_down": affine(features + "3", h, h),
            "slot_embedding": whole("slot_embedding", 1, 1, self.rows, 1, h),
            "rank_embedding": whole("rank_embedding", 1, 1, 1, self.top, h),
            "relative_slot_bias": whole("relative_slot_bias", self.heads, 2 * self.rows + 1),
            "same_slot_bias": whole("same_slot_bias", self.heads),
            "layers": [layer(i) for i in range(self.layers)],
            "output_norm": norm_scale(h, "lilicorr.output_norm.weight"),
            "anchor_norm": norm_scale(h, "lilicorr.anchor_norm.weight"),
        }

    def scores(
        self,
        params: Any,
        embedded: Float[Array, "b n k d"],
        logprobs: Float[Array, "b n k"],
        rows: Float[Array, "b n d"],
        anchor: Float[Array, "b d"],
        known: Bool[Array, " b"],
    ) -> tuple[Float[Array, "b k"], Float[Array, "b m k k"]]:
        """Scores of the first row's candidates, and of each later row's behind each of the row before, m = n - 1.

        Candidates come in order of their log-probabilities over the whole vocabulary, with the target's embeddings.
        `rows`: the drafter's final hidden states. `anchor`: the context's newest row, where it is `known`.
        """
        b, n, k = logprobs.shape
        eps = self.norm_eps
        x = embedded if "token_proj" not in params else _affine(params["token_proj"], embedded)
        x = x + _affine(params["pass_hidden_proj"], rows)[:, :, None] + self._features(params, logprobs, x.dtype)
        x = x + params["slot_embedding"][0, :, :n] + params["rank_embedding"][0, :, :, :k]
        x, distance = x.reshape(b, n * k, -1), jnp.repeat(jnp.arange(n), k)
        distance = distance[:, None] - distance
        seen = params["relative_slot_bias"][:, distance + self.rows]
        seen = seen + (distance == 0) * params["same_slot_bias"][:, None, None]
        for layer in params["layers"]:
            x = x + self._attend(layer, rms_norm(x, layer["attn_norm"], eps), seen)
            up = jax.nn.silu(_affine(layer["up"], rms_norm(x, layer["mlp_norm"], eps)))
            x = x + _affine(layer["down"], up)
        x = rms_norm(x, params["output_norm"], eps).reshape(b, n, k, -1)
        a = _affine(params["context_proj"], anchor) * known[:, None].astype(anchor.dtype)
        a = rms_norm(a, params["anchor_norm"], eps)
        beside = jnp.broadcast_to(a[:, None, None], x.shape)
        joint = jax.nn.silu(_affine(params["factor_input_proj"], jnp.concatenate([x, beside, x * beside], axis=-1)))
        leaves, enters = (self._unit(_affine(params[name], joint)) for name in ("out_head", "in_head"))
        start = jnp.einsum("bf,bkf->bk", self._unit(_affine(params["anchor_out_head"], a)), enters[:, 0])
        pair = jnp.einsum("bncf,bndf->bncd", leaves[:, :-1], enters[:, 1:])
        return self.scale * start, self.scale * pair

    def _features(self, params: Any, logprobs: Float[Array, "b n k"], dtype: Any) -> Float[Array, "b n k h"]:
        rank = jnp.arange(logprobs.shape[-1])
        fixed = (jnp.broadcast_to(x, logprobs.shape) for x in (rank / max(rank.size - 1, 1), rank == 0))
        x = jnp.stack([logprobs, jnp.exp(logprobs), logprobs - logprobs[..., :1], *fixed], axis=-1).astype(dtype)
        x = jax.nn.standardize(x.astype(jnp.float32), epsilon=LAYER_NORM_EPS).astype(dtype)
        x = x * params["feature_norm"] + params["feature_norm_bias"]
        return _affine(params["feature_down"], jax.nn.silu(_affine(params["feature_up"], x)))

    def _attend(self, layer: Any, x: Float[Array, "b s h"], seen: Float[Array, "n s s"]) -> Float[Array, "b s h"]:
        """Attention of all candidates to all. `seen` is added to the scores."""
        split = lambda part: part.reshape(*part.shape[:-1], self.heads, -1)  # noqa: E731
        q, k, v = (split(part) for part in jnp.split(_affine(layer["qkv"], x), 3, axis=-1))
        scores = jnp.einsum("bqnh,bknh->bnqk", q, k, preferred_element_type=jnp.float32) / math.sqrt(q.shape[-1])
        weights = jax.nn.softmax(scores + seen.astype(jnp.float32), axis=-1).astype(x.dtype)
        return _affine(layer["out"], jnp.einsum("bnqk,bknh->bqnh", weights, v).reshape(x.shape))

    def _unit(self, x: Float[Array, "*b f"]) -> Float[Array, "*b f"]:
        """In float32, of length 1. Shorter than `vector_eps` stays shorter."""
        x = x.astype(jnp.float32)
        square = jnp.sum(x * x, axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.maximum(square, self.vector_eps**2))


def _affine(params: Any, x: Float[Array, "*b k"]) -> Float[Array, "*b n"]:
    return matmul(x, params["weight"]) + params["bias"]
