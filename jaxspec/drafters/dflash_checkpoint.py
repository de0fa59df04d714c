"""Checkpoints of DFlash and its descendants: what the configs and tensors of each public layout mean.

| layout | sizes of the layers | the drafter's own keys | target layers |
|---|---|---|---|
| z-lab, SpecForge, ModelOpt | top level | `dflash_config` | a layer's output; -1: the embedding's |
| DeepSpec | top level | top level | the same |
| speculators | `transformer_layer_config` | top level | a layer's *input* |

`flat` makes one mapping of them all, in z-lab's words. Whatever family the target is of, the layers are Qwen3's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoint import CheckpointError, ModelFolder, locate
from jaxspec.config.options import ConfigError
from jaxspec.models.families import qwen3
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import WHOLE, Weight, embedding, head, is_param, linear, norm_scale

MAPS = ("d2t", "t2d")  # from draft ids to target ids, as offsets; and which target ids those are, which nobody needs
METHODS = {
    "DFlashDraftModel": "dflash",
    "DFlashSpeculator": "dflash",
    "DFlash2DraftModel": "dflash2",
    "DSparkDraftModel": "dspark",
    "DSparkSpeculator": "dspark",
    "Qwen3DSparkModel": "dspark",
    "LiLiCorrDraftModel": "lilicorr",
    "DominoDraftModel": "domino",
    "DominoSpeculator": "domino",
}

FEATURE_MLP = {  # of LiLiCorr, as TensorRT-LLM names its parts
    "lilicorr.feature_norm.": "lilicorr.feature_mlp.0.",
    "lilicorr.feature_mlp.up_proj.": "lilicorr.feature_mlp.1.",
    "lilicorr.feature_mlp.down_proj.": "lilicorr.feature_mlp.3.",
}

# Keys that only some methods compute, and the values with which there is nothing to compute.
VARIANTS: dict[str, tuple[Any, ...]] = {
    "selector_rank": (None, 0),
    "conv_kernel_size": (None,),
    "markov_rank": (None, 0),
    "lilicorr_candidate_topk": (None,),
    "gru_hidden_dim": (None,),
    "projector_type": (None, *dict.fromkeys(METHODS.values())),
    "use_swa": (None, False),
}


def flat(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` of any layout as one mapping. **Raises:** `ConfigError` for settings that aren't a mapping."""
    settings = hf.get("dflash_config") or {}
    if not isinstance(settings, Mapping):
        raise ConfigError(f"dflash_config must be a mapping, got {settings!r}")
    own = {**hf, **settings}
    if "causal" in own:
        own.setdefault("is_causal", own["causal"])
    if "shift_label" in own:  # Domino's word
        own.setdefault("sample_from_anchor", own["shift_label"])
    layers = own.pop("transformer_layer_config", None)
    if layers is None:
        return own
    if not isinstance(layers, Mapping):
        raise ConfigError(f"transformer_layer_config must be a mapping, got {layers!r}")
    from transformers import AutoConfig  # what was saved are differences from the defaults that it knows

    kind, ids = own.get("speculators_model_type"), own.pop("aux_hidden_state_layer_ids", None)
    anchored, sees = kind in ("dspark", "domino"), kind == "dflash2"
    defaults = {"sample_from_anchor": anchored, "sliding_window_non_causal": sees}
    if kind == "domino":
        own["emb_dim"] = own.get("logits_correction_emb_dim", 256)
        defaults |= {"gru_hidden_dim": 1024, "pure_draft_prefix_len": 1}
    own = {**AutoConfig.for_model(**{"model_type": "qwen3", **layers}).to_dict(), **defaults, **own}
    if isinstance(ids, list | tuple) and all(type(i) is int for i in ids):
        own["target_layer_ids"] = [i - 1 for i in ids]
    if own["sliding_window_non_causal"]:
        own["is_causal"] = False
    return own


def recognise(hf: Mapping[str, Any]) -> str:
    """The method of a config of one of these kinds, one of `METHODS`."""
    own, names = flat(hf), hf.get("architectures")
    named = [METHODS.get(name) for name in names if isinstance(name, str)] if isinstance(names, list) else []
    named.append(own.get("projector_type"))
    keys = {
        "lilicorr": "lilicorr_candidate_topk", "domino": "gru_hidden_dim", "dflash2": "selector_rank",
        "dspark": "markov_rank",
    }  # fmt: skip
    return next((method for method, key in keys.items() if method in named or own.get(key)), "dflash")


def open_folder(source: str, load_format: str) -> ModelFolder:
    """**Raises:** `ConfigError`, `CheckpointError`."""
    files = locate(source, load_format=load_format)
    if not isinstance(files, ModelFolder):
        raise ConfigError(f"--draft {source}: a DFlash drafter is a folder with config.json and weights")
    if (pickled := files.path / "mask_embedding.pt").exists():
        raise CheckpointError(
            f"{pickled} is never opened, since it could run code. Without it the mask token has another embedding; "
            "remove the file to use the target's own"
        )
    return files


def canonical(name: str) -> str:
    """A tensor's name in any of the layouts -> in the one declared here."""
    name = name.removeprefix("model.").removeprefix("logit_head.").removeprefix("logits_correction.")
    for theirs, ours in FEATURE_MLP.items():
        name = name.replace(theirs, ours)
    if name in ("encoder.fc.weight", "encoder.output_norm_enc.weight"):
        return "fc.weight" if "fc" in name else "hidden_norm.weight"
    return name.removesuffix(".weight") if name.endswith("_codebook.weight") else name


def read_config(own: Mapping[str, Any], target: ModelConfig) -> tuple[ModelConfig, tuple[bool, ...]]:
    """The config of a drafter's layers, and which of them are causal within a block.

    **Raises:** `ConfigError` for a config that can't be read, or of a drafter for another model.
    """
    # Its layers are Qwen3's, whatever the target is. What they attend to is ours to read.
    config = ModelConfig.from_hf({**own, "model_type": "qwen3", "layer_types": None, "use_sliding_window": False})
    for key, ours, theirs in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", own.get("num_target_layers", target.num_layers), target.num_layers),
    ):
        if ours != theirs:
            raise ConfigError(f"it was made for a model with {key} {ours}, and this one has {theirs}")
    causal, windows = sight(own, own.get("is_causal"), config.num_layers)
    replace, decoder = dataclasses.replace, config.decoder
    sees = zip(decoder.layers, windows, strict=True)
    layers = tuple(replace(layer, mixing=replace(layer.mixing, window=window)) for layer, window in sees)
    scale = number(own, "input_embedding_scale")
    return replace(config, decoder=replace(decoder, layers=layers, embed_scale=scale)), causal


def parameters(config: ModelConfig, features: int, heads: int | None, found: Container[str]) -> dict[str, Any]:
    """Declarations of a DFlash checkpoint's params. `heads`: tokens of its own head, None: the target's serves.

    Embeddings and head are declared if they are among the tensors `found`.
    """
    d = config.hidden_size
    body = {key: tree for key, tree in qwen3.tensors(config.decoder).items() if key in ("layers", "norm")}
    bare = lambda param: dataclasses.replace(  # noqa: E731
        param, sources=tuple(source.removeprefix("model.") for source in param.sources)
    )
    declared = {
        **jax.tree.map(bare, body, is_leaf=is_param),
        "fc": linear(features * d, {"fc.weight": d}, split=WHOLE),
        "hidden_norm": norm_scale(d, "hidden_norm.weight"),
    }
    if "embed_tokens.weight" in found:
        declared["embed"] = embedding(config.vocab_size, d, "embed_tokens.weight")
    if heads is not None or "lm_head.weight" in found:
        declared["head"] = head(d, heads or config.vocab_size, "lm_head.weight")
    return declared


def borrow(params: dict[str, Any], target: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The params with the target's embedding and head where the file brings none, or a copy of them. `target` has
    these two alone, or the embedding if they are tied.

    **Raises:** `CheckpointError` for another embedding than the target's without a head of its own, if theirs are tied.
    """
    params, embed = dict(params), target["embed"]
    if "embed" in params and _same(params["embed"], embed):
        del params["embed"]
    if "head" in params and _same(params["head"].values, _head(target, params["head"].dtype)):
        del params["head"]
    if "embed" in params and "head" not in params and "head" not in target:
        raise CheckpointError(
            f"{source}: embed_tokens.weight isn't the target's, whose head is tied to its embedding; lm_head.weight "
            "must come with it"
        )
    return {**target, **params}


def offsets(files: ModelFolder, found: Mapping[str, str], size: int) -> np.ndarray:
    """The tensor d2t, i64[size]. `found`: names of tensors in the file by their names here.

    **Raises:** `CheckpointError`.
    """
    if "d2t" not in found:
        raise CheckpointError(
            f"{files.path}: missing d2t: the drafter knows {size} tokens (draft_vocab_size), and d2t says which"
        )
    values = files.tensor(found["d2t"])
    if values.shape != (size,):
        raise CheckpointError(f"{files.path}: d2t has shape {list(values.shape)}, draft_vocab_size is {size}")
    return values


def _head(target: Mapping[str, Any], dtype: Any) -> jax.Array:
    head: Weight | None = target.get("head")
    return target["embed"].T if head is None else head.dequantised(dtype)


def _same(ours: jax.Array, theirs: jax.Array) -> bool:
    return ours.shape == theirs.shape and bool((ours == theirs).all())


def refuse_variants(own: Mapping[str, Any], computed: Container[str]) -> None:
    """**Raises:** `ConfigError` for a key that asks for more than DFlash and what is `computed` beside."""
    for key, neutral in VARIANTS.items():
        if key not in computed and own.get(key) not in neutral:
            raise ConfigError(f"{key} is {own[key]!r}; variants of DFlash that have it are not supported")


def integer(key: str, value: Any, low: int, end: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (end is not None and value >= end):
        allowed = f"of at least {low}" if end is None else f"from {low} to {end - 1}"
        raise ConfigError(f"{key} must be an integer {allowed}, got {value!r}")
    return value


def number(own: Mapping[str, Any], key: str) -> float:
    """A positive number of a drafter's config, 1 where it is silent. **Raises:** `ConfigError` for anything else."""
    value = 1.0 if own.get(key) is None else own[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise ConfigError(f"{key} must be a positive number, got {value!r}")
    return float(value)


def feature_layers(ids: Any, num_layers: int, target_layers: int) -> tuple[int, ...]:
    """The target layers whose outputs are read: those named, else as many as there are layers here, evenly spread."""
    if ids is None and num_layers == 1:
        ids = [target_layers // 2]
    elif ids is None:
        ids = [round(1 + i * (target_layers - 4) / (num_layers - 1)) for i in range(num_layers)]
    if not isinstance(ids, list | tuple) or not ids:
        raise ConfigError(f"target_layer_ids must be a list of layers, got {ids!r}")
    return tuple(integer("each of target_layer_ids", i, -1, target_layers) for i in ids)


def sight(hf: Mapping[str, Any], is_causal: Any, num_layers: int) -> tuple[tuple[bool, ...], tuple[int | None, ...]]:
    """By layer, whether rows of a block see only what is before them, and how far. Qwen3's keys, read as Qwen3 does."""
    window = integer("sliding_window", hf.get("sliding_window"), 1) if hf.get("use_sliding_window") else None
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
