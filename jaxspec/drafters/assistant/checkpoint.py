"""Read an assistant's checkpoint: its config, its fit to the target, its tensors and their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec.checkpoint import CheckpointError, ModelFolder
from jaxspec.config.json_values import positive, shown
from jaxspec.config.options import ConfigError
from jaxspec.models.description import Attention, Decoder
from jaxspec.models.families import gemma4
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import WHOLE, linear

KINDS = ("gemma4_assistant", "gemma4_unified_assistant")
TARGETS = ("gemma4", "gemma4_unified")
ORDERING = "masked_embedding.token_ordering"


def read(hf: Mapping[str, Any], source: str) -> ModelConfig:
    """The assistant's own config: a Gemma 4 text model whose layers all share keys and values."""
    text = hf.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"--draft {source}: its config.json has no text_config")
    kind = str(text.get("model_type", "gemma4")).removesuffix("_text")
    if kind not in TARGETS:
        raise ConfigError(f"--draft {source}: text_config has model_type {shown(kind)}, not {' or '.join(TARGETS)}")
    defaults = {"model_type": kind, "hidden_size_per_layer_input": 0}
    config = ModelConfig.from_hf({**defaults, **text, "num_kv_shared_layers": 0, "eos_token_id": None})
    if config.decoder.layer_inputs or config.decoder.mixture or not config.decoder.tied:
        raise ConfigError(
            f"--draft {source}: assistants with per-layer embeddings, experts or a head of their own aren't supported"
        )
    layers = [replace(layer, mixing=replace(layer.mixing, shared=True)) for layer in config.decoder.layers]
    return replace(config, decoder=replace(config.decoder, layers=tuple(layers)))


def chosen_centroids(hf: Mapping[str, Any], source: str) -> int:
    """How many centroids have their tokens scored; 0 without ordered embeddings."""
    if not hf.get("use_ordered_embeddings"):
        return 0
    chosen, count = positive(hf, "centroid_intermediate_top_k", 32), positive(hf, "num_centroids", 2048)
    vocab = positive(hf["text_config"], "vocab_size", gemma4.DEFAULTS["vocab_size"])
    if chosen > count or vocab % count:
        raise ConfigError(
            f"--draft {source}: num_centroids ({count}) must divide the vocabulary of {vocab}, and be at least "
            f"centroid_intermediate_top_k ({chosen})"
        )
    return chosen


def sources_of(
    config: ModelConfig, target: ModelConfig, hf: Mapping[str, Any], source: str
) -> tuple[tuple[int, int], ...]:
    """Where each layer's keys and values are in the target's pages. **Raises:** `ConfigError` for another target."""
    if target.model_type not in TARGETS:
        raise ConfigError(f"--draft {source}: an assistant of Gemma 4; the target is a {target.model_type}")
    for what, ours, theirs in (
        ("backbone_hidden_size", positive(hf, "backbone_hidden_size", 1536), target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise ConfigError(f"--draft {source}: {what} is {ours}, the target's {theirs}. It is for another model")
    return tuple(_source(layer.mixing, target.decoder, source) for layer in config.decoder.layers)


def _source(mixing: Attention, target: Decoder, source: str) -> tuple[int, int]:
    own = [
        (where, layer.mixing)
        for where, layer in zip(target.memory_index, target.layers, strict=True)
        if not layer.mixing.shared and (layer.mixing.window is None) == (mixing.window is None)
    ]
    if not own or own[-1][1].memory != mixing.memory:
        found = own[-1][1].memory if own else "none"
        raise ConfigError(
            f"--draft {source}: its layers read {mixing.memory.heads} KV heads of width {mixing.memory.width}; the "
            f"target's layers of their kind have {found}. It is for another model"
        )
    return own[-1][0]


def own_name(name: str) -> str | None:
    """A tensor's name as `parameters` has it; None for the ordering and for copies of the head."""
    name = name.removeprefix("language_model.")
    name = f"model.{name.removeprefix('mtp.')}" if name.startswith("mtp.") else name
    return None if name in (ORDERING, "lm_head.weight") else name


def parameters(config: ModelConfig, backbone: int) -> dict[str, Any]:
    """Declarations of an assistant's params, for a target so wide."""
    d = config.hidden_size
    return gemma4.tensors(config.decoder) | {
        "pre": linear(2 * backbone, {"pre_projection.weight": d}, split=WHOLE),
        "post": linear(d, {"post_projection.weight": backbone}, split=WHOLE),
    }


def ordering(files: ModelFolder, vocab: int, centroids: int, load_format: str) -> Int[Array, "c k"]:
    """The tokens of each centroid; of dummy weights, neighbours. **Raises:** `CheckpointError` unless each token is
    there once."""
    ids = np.arange(vocab)
    if load_format != "dummy":
        found = [name for name in files.tensors() if name.endswith(ORDERING)]
        if not found:
            raise CheckpointError(f"{files.path}: missing {ORDERING}: it says which tokens a centroid has")
        ids = np.asarray(next(values for _, values in files.some(found)))
        if ids.shape != (vocab,) or (np.sort(ids) != np.arange(vocab)).any():
            raise CheckpointError(f"{files.path}: {ORDERING} must have each of {vocab} tokens once")
    return jnp.asarray(ids.reshape(centroids, -1), jnp.int32)
