"""DFlash: a whole block of drafts in one pass (https://arxiv.org/abs/2602.06036).

A few Qwen3 layers read the newest token followed by mask tokens, and fill in the masks. They know the text through the
target: the outputs of some of its layers, projected once for each position to the keys and values of every layer here.
Only those are cached, over the target's pages. A block's own keys and values are written behind them, and the next
block overwrites them. So between rounds this holds, as for the target: the keys and values of every known token but the
newest are the context's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache import KV, Rows, kv_bytes_per_token
from jaxspec.checkpoint import CheckpointError, ModelFolder, dummy, locate, read_params
from jaxspec.config import ConfigError, ModelConfig
from jaxspec.decoder.forward import forward, top_tokens, unembed, write_keys_values
from jaxspec.decoder.matmul import product
from jaxspec.decoder.spec import Decoder
from jaxspec.draft import Drafter, Proposal
from jaxspec.models import qwen3
from jaxspec.weights import Layout, Weight, is_param, linear, norm_scale

# Keys of variants (DFlash 2, Domino, drafters for other families) that compute more than this; and what none of it is.
VARIANTS = {
    "selector_rank": None,
    "conv_kernel_size": None,
    "projector_type": None,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}


@dataclass(frozen=True)
class DFlash(Drafter):
    """`config` is that of the drafter's own layers; embeddings and head are the target's.

    A block is the newest token and `num_draft_tokens` masks, `block_size` tokens at most. Within it, the rows of layer
    i see each other, or only what is before them if `causal[i]`; and nothing its window or more positions away.
    """

    config: ModelConfig
    mask_token: int
    block_size: int
    causal: tuple[bool, ...]
    num_draft_tokens: int
    feature_layers: tuple[int, ...] = ()

    def __post_init__(self):
        if not 1 <= self.num_draft_tokens < self.block_size:
            raise ConfigError(
                f"--num-draft-tokens {self.num_draft_tokens}: this DFlash drafter fills blocks of {self.block_size} "
                f"tokens, of which the first is known, so it drafts 1 to {self.block_size - 1}"
            )

    @classmethod
    def load(cls, target, source, options):
        """**Raises:** `ConfigError` for a config of another kind or for another model, `CheckpointError` for tensors
        that are missing or don't fit it. Both name what is wrong."""
        files = locate(source, load_format=options.load_format)
        if not isinstance(files, ModelFolder):
            raise ConfigError(f"--draft {source}: a DFlash drafter is a folder with config.json and safetensors")
        if (pickled := files.path / "mask_embedding.pt").exists():
            raise CheckpointError(
                f"{pickled} is never opened, since it could run code. Without it the mask token has another embedding; "
                "remove the file to use the target's own"
            )
        try:
            drafter = cls.from_hf(files.hf, target.config, options.num_draft_tokens)
        except ConfigError as error:
            raise ConfigError(f"--draft {source} can't draft for {target.name}: {error}") from error
        declared, dtype = drafter.parameters(), target.dtype
        if options.load_format == "dummy":
            params = dummy(declared, dtype, options.seed or 0)
        else:
            unprefixed = lambda name: name.removeprefix("model.")  # noqa: E731
            params = read_params(declared, files, source, dtype, rename=unprefixed)
        borrowed = {name: target.params[name] for name in ("embed", "head") if name in target.params}
        return drafter, {**params, **_context_projection(drafter.config, params["layers"]), **borrowed}

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], target: ModelConfig, num_draft_tokens: int | None = None) -> DFlash:
        """Read a drafter's `config.json` (as a mapping), for a target of this config.

        **Raises:** `ConfigError` naming the key, its value and what would fit.
        """
        settings = hf.get("dflash_config") or {}
        if not isinstance(settings, Mapping):
            raise ConfigError(f"dflash_config must be a mapping, got {settings!r}")
        value = lambda key, default=None: settings.get(key, hf.get(key, default))  # noqa: E731
        if value("mask_token_id") is None:
            raise ConfigError("it is no DFlash drafter: neither config.json nor its dflash_config has a mask_token_id")
        for key, neutral in VARIANTS.items():
            if value(key, neutral) not in (neutral, None):
                raise ConfigError(f"{key} is {value(key)!r}; variants of DFlash that have it are not supported")
        # Its layers are Qwen3's, whatever the target is. What they attend to is ours to read.
        own = {**hf, "model_type": "qwen3", "layer_types": None, "use_sliding_window": False}
        config = ModelConfig.from_hf(own)
        for key, ours, theirs in (
            ("hidden_size", config.hidden_size, target.hidden_size),
            ("vocab_size", config.vocab_size, target.vocab_size),
            ("num_target_layers", value("num_target_layers", target.num_layers), target.num_layers),
        ):
            if ours != theirs:
                raise ConfigError(f"it was made for a model with {key} {ours}, and this one has {theirs}")
        block_size = _integer("block_size", value("block_size", 16), 2)
        causal, windows = _sight(hf, value("is_causal"), config.num_layers)
        return cls(
            config=dataclasses.replace(config, decoder=_windowed(config.decoder, windows)),
            feature_layers=_feature_layers(value("target_layer_ids"), config.num_layers, target.num_layers),
            mask_token=_integer("mask_token_id", value("mask_token_id"), 0, config.vocab_size),
            block_size=block_size,
            causal=causal,
            num_draft_tokens=num_draft_tokens or block_size - 1,
        )

    def parameters(self) -> dict[str, Any]:
        """What a checkpoint holds, as declarations: no embeddings, no head, and no `model.` before the names."""
        d = self.config.hidden_size
        body = {key: tree for key, tree in qwen3.tensors(self.config.decoder).items() if key in ("layers", "norm")}
        bare = lambda param: dataclasses.replace(  # noqa: E731
            param, sources=tuple(source.removeprefix("model.") for source in param.sources)
        )
        return {
            **jax.tree.map(bare, body, is_leaf=is_param),
            "fc": linear(len(self.feature_layers) * d, {"fc.weight": d}),
            "hidden_norm": norm_scale(d, "hidden_norm.weight"),
        }

    def kv_bytes_per_token(self, dtype):
        return kv_bytes_per_token(self.config, dtype)

    def init_state(self, layout, num_slots):
        return layout.kv(self.config)

    def propose(self, params, state, batch):
        n = self.num_draft_tokens
        newest = batch.tokens(-1, 1)
        block = jnp.concatenate([newest, jnp.full((len(newest), n), self.mask_token, newest.dtype)], axis=1)
        rows = batch.rows(-1, n + 1)
        decoder, found = self.config.decoder, None
        hidden = forward(decoder, params, block, rows.marked_positions(n + 1), _Block(self, rows), state)
        logits = unembed(params, hidden.last[:, 1:])  # a mask's row is about its own position, not the next
        if batch.greedy:
            found = top_tokens(params, decoder.norm, params["norm"], hidden.unnormed)
        top = None if found is None else found[:, 1:]
        tokens, probs = jax.vmap(batch.choose, in_axes=(1, 0, 1), out_axes=1)(logits, jnp.arange(n), top)
        return Proposal(tokens, jnp.where(batch.live, n, 0), probs, logits), hidden.cache

    def commit(self, params, state, batch, verified):
        """Of all rows: what those that weren't accepted leave is behind the text, where the next block is written."""
        return self._inject(params, state, batch.rows(-1, verified.tokens.shape[1]), verified.features)

    def prefill(self, params, state, batch, features):
        return self._inject(params, state, batch.rows, features)

    def _inject(self, params: Any, state: KV, rows: Rows, features: tuple[Float[Array, "b t d"], ...]) -> KV:
        """Write the keys and values that all layers here have of the target's features at these rows."""
        context = product(features, params["fc"])
        return write_keys_values(self.config.decoder, params, context, rows, state)


@dataclass(frozen=True)
class _Block:
    """A `PagedMixer` of blocks at `rows`, as far as each layer's rows see."""

    drafter: DFlash
    rows: Rows

    def only(self, asked):
        return self

    def attend(self, cache, layer, q, k, v, window):
        return self._look(self.rows.write(cache, layer, k, v), layer, q, window)

    def pages(self, cache):
        return cache

    def attend_written(self, cache, layer, t, write, window):
        q, kv = write(cache, self.rows.written(cache, t))
        return self._look(kv, layer, q, window)

    def _look(self, kv: KV, layer: Int[Array, ""], q: Array, window: int | None) -> tuple[Array, KV]:
        """The context and the block, as far as a row's window reaches either way. Nothing is seen of padding rows."""
        drafter, rows, (b, t) = self.drafter, self.rows, q.shape[:2]
        causal, width = jnp.array(drafter.causal)[layer], drafter.num_draft_tokens + 1
        mask = jnp.tril(jnp.ones((t, width), bool)) | ~causal
        if window is not None:
            mask &= abs(jnp.arange(t)[:, None] - jnp.arange(width)) < window
        return rows.look(kv, layer, q, jnp.broadcast_to(mask, (b, t, width)), window), kv


def _windowed(decoder: Decoder, windows: tuple[int | None, ...]) -> Decoder:
    """The decoder with each layer's window."""
    mixing = [dataclasses.replace(layer.mixing, window=w) for layer, w in zip(decoder.layers, windows, strict=True)]
    layers = [dataclasses.replace(layer, mixing=each) for layer, each in zip(decoder.layers, mixing, strict=True)]
    return dataclasses.replace(decoder, layers=tuple(layers))


def _context_projection(config: ModelConfig, layers: list[dict[str, Any]]) -> dict[str, Any]:
    """What projects context to keys and values, of all layers side by side: a second copy, so that it is one matmul."""
    a = config.decoder.attention
    queries = a.heads * a.head_dim
    parts = [part for layer in layers for part in layer["qkv"].parts(layer["k_norm"].dtype)[1:]]
    layout = Layout(tuple(part.shape[1] for part in parts))
    projection = {
        "context": Weight(jnp.concatenate(parts, axis=1), layout=layout),
        "context_norm": jnp.stack([layer["k_norm"] for layer in layers]),
    }
    if a.bias:
        projection["context_bias"] = jnp.concatenate([layer["qkv_bias"][queries:] for layer in layers])
    return projection


def _integer(key: str, value: Any, low: int, end: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (end is not None and value >= end):
        allowed = f"of at least {low}" if end is None else f"from {low} to {end - 1}"
        raise ConfigError(f"{key} must be an integer {allowed}, got {value!r}")
    return value


def _feature_layers(ids: Any, num_layers: int, target_layers: int) -> tuple[int, ...]:
    """The target layers whose outputs are read: those named, else as many as there are layers here, evenly spread."""
    if ids is None and num_layers == 1:
        ids = [target_layers // 2]
    elif ids is None:
        ids = [round(1 + i * (target_layers - 4) / (num_layers - 1)) for i in range(num_layers)]
    if not isinstance(ids, list | tuple) or not ids:
        raise ConfigError(f"target_layer_ids must be a list of layers, got {ids!r}")
    return tuple(_integer("each of target_layer_ids", i, 0, target_layers) for i in ids)


def _sight(hf: Mapping[str, Any], is_causal: Any, num_layers: int) -> tuple[tuple[bool, ...], tuple[int | None, ...]]:
    """By layer, whether rows of a block see only what is before them, and how far. Qwen3's keys, read as Qwen3 does."""
    window = _integer("sliding_window", hf.get("sliding_window"), 1) if hf.get("use_sliding_window") else None
    kinds = hf.get("layer_types")
    if kinds is None:
        full = hf.get("max_window_layers", 28) if hf.get("use_sliding_window") else num_layers
        kinds = ["full_attention" if i < full else "sliding_attention" for i in range(num_layers)]
    if len(kinds) != num_layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"layer_types must name full_attention or sliding_attention for each of {num_layers} layers, got {kinds!r}"
        )
    sliding = [kind == "sliding_attention" for kind in kinds]
    causal = tuple(s if is_causal is None else bool(is_causal) for s in sliding)
    return causal, tuple(window if s else None for s in sliding)
