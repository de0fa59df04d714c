"""EAGLE checkpoints: what the configs and tensors of each public layout mean, and how they become params.

| layout | config | decoder layer | target layers |
|---|---|---|---|
| SafeAILab, SpecForge, AngelSlim | flat | `midlayer.*` (EAGLE-1: `layers.0.*`) | `eagle_config`: a layer's output |
| SGLang | flat | `layers.0.*` | the same |
| speculators, vLLM | sizes in `transformer_layer_config`, or flat | `layers.0.*` | top level: a layer's *input* |

All become one set of names here, those of `layers.0.*`. Where config and tensors could disagree (biases, norms of
queries and keys, norms before `fc`), what is in the file decides, so a tensor is never left out in silence. Everything
is checked against the target before a weight is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxspec.checkpoint import CheckpointError, ModelFolder, locate
from jaxspec.checkpoint.check import TensorInfo
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.options import ConfigError
from jaxspec.drafters.own_weights import load_weights
from jaxspec.drafters.vocabulary import id_maps
from jaxspec.models.declaring import layer_tensors
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import WHOLE, bias, embedding, head, linear, norm_scale

_LAYER = "layers.0."
_HIDDEN_NORM = _LAYER + "hidden_norm.weight"  # EAGLE-3's alone
_MAPS = ("d2t", "t2d")  # from draft ids to target ids, as offsets; and which of those have one, which nobody needs
_LEGACY_NORMS = {f"aux_norm_{name}.weight": f"fc_norm.{i}.weight" for i, name in enumerate(("low", "mid", "high"))}


def recognise(files: ModelFolder) -> str | None:
    """The method, if a folder is a drafter as SafeAILab saves them: its config's architecture is the target's own."""
    if "draft_vocab_size" in files.hf:
        return "eagle3"
    return "eagle" if "fc.weight" in map(canonical, files.tensors()) else None


def canonical(name: str) -> str:
    """A tensor's name in any of the layouts -> in the one declared here."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        return _LAYER + name.removeprefix("midlayer.")
    return _LEGACY_NORMS.get(name, name)


@dataclass(frozen=True, eq=False)
class Found:
    """An EAGLE checkpoint that fits its target, its weights not read yet. `layers` are target layers, by output;
    the number after the last is the final norm's."""

    source: str
    files: ModelFolder
    config: ModelConfig
    layers: tuple[int, ...]
    declared: dict[str, Any]
    skip: tuple[str, ...] = _MAPS
    draft_ids: int | None = None  # how many, of a drafter with a vocabulary of its own
    settings: Mapping[str, Any] = field(default_factory=dict)  # more of the drafter's fields

    def read(self, dtype: str, options: EngineConfig) -> dict[str, Any]:
        """The params that the checkpoint itself holds, or random ones if it was found without its weights."""
        named = {"rename": canonical, "skip": self.skip}
        params = load_weights(self.declared, self.files, self.source, dtype, options, **named)
        names = [name for name in self.files.tensors() if canonical(name) == "d2t"]
        offsets = self.files.tensor(names[0]) if names else None
        if self.draft_ids is not None:
            params |= id_maps(offsets, self.draft_ids, self.config.vocab_size, self.source)
        return params


def find_eagle(source: str, target: ModelConfig, load_format: str) -> Found:
    """EAGLE-1 and 2: a decoder layer without its first norm, and no final one. Embedding and head are the target's.

    **Raises:** `CheckpointError`, `ConfigError`.
    """
    files, found, config = _open(source, target, load_format)
    d = config.hidden_size
    if _HIDDEN_NORM in found:
        raise ConfigError(f"--draft eagle:{source} is an EAGLE-3 checkpoint; use --draft eagle3:{source}")
    if d != target.hidden_size:
        raise ConfigError(_other_model(source, "hidden size", d, target.hidden_size))
    layer = layer_tensors(config.decoder.layers[0], d, _LAYER)
    del layer["attn_norm"]
    declared: dict[str, Any] = {"fc": linear(2 * d, {"fc.weight": d}, split=WHOLE), "layer": layer}
    if files.hf.get("bias", True):
        declared["fc_bias"] = bias({"fc.bias": d}, split=WHOLE)
    skip = (*_MAPS, "embed_tokens.weight")
    return Found(source, files, config, (target.num_layers,), declared, skip)


def find_eagle3(source: str, target: ModelConfig, load_format: str) -> Found:
    """EAGLE-3, with whatever of its variants config and tensors call for.

    **Raises:** `CheckpointError`, `ConfigError`.
    """
    files, found, config = _open(source, target, load_format)
    hf, d = files.hf, config.hidden_size
    if "fc.weight" in found and _HIDDEN_NORM not in found and found["fc.weight"].shape == (d, 2 * d):
        raise ConfigError(f"--draft eagle3:{source} is an EAGLE checkpoint, not EAGLE-3; use --draft eagle:{source}")
    made_for = hf.get("target_hidden_size") or d
    if made_for != target.hidden_size:
        raise ConfigError(_other_model(source, "hidden size", made_for, target.hidden_size))
    layers = _target_layers(source, hf, target.num_layers)
    width = len(layers) * target.hidden_size
    layer = layer_tensors(config.decoder.layers[0], d, _LAYER)
    layer["qkv"] = dataclasses.replace(layer["qkv"], shape=(2 * d, layer["qkv"].shape[1]))
    layer["hidden_norm"] = norm_scale(d, _HIDDEN_NORM)
    declared: dict[str, Any] = {
        "fc": linear(width, {"fc.weight": d}, split=WHOLE),
        "layer": layer,
        "norm": norm_scale(d, "norm.weight"),
    }
    settings = {**(hf.get("eagle_config") or {}), **hf}
    if "fc.bias" in found or settings.get("bias"):
        declared["fc_bias"] = bias({"fc.bias": d}, split=WHOLE)
    if "input_norm.weight" in found or settings.get("norm_before_fc"):
        declared["input_norm"] = norm_scale(width, "input_norm.weight")
    if "fc_norm.0.weight" in found or settings.get("fc_norm") or settings.get("use_aux_norm"):
        declared["feature_norms"] = [norm_scale(target.hidden_size, f"fc_norm.{i}.weight") for i in range(len(layers))]
    if "embed_tokens.weight" in found or d != target.hidden_size:
        declared["embed"] = embedding(config.vocab_size, d, "embed_tokens.weight")
    ids = _declare_head(source, declared, files, found, config, d != target.hidden_size)
    more = {key: bool(settings.get(key)) for key in ("norm_output", "norm_before_residual")}
    return Found(source, files, config, layers, declared, draft_ids=ids, settings=more)


def _declare_head(
    source: str,
    declared: dict[str, Any],
    files: ModelFolder,
    found: Mapping[str, TensorInfo],
    config: ModelConfig,
    needed: bool,
) -> int | None:
    """Declare the drafter's own head, if it has one. Returns how many draft ids are to be mapped, None for none."""
    size = files.hf.get("draft_vocab_size") or config.vocab_size
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= config.vocab_size:
        raise ConfigError(f"--draft {source}: draft_vocab_size must be 1 to {config.vocab_size} or null, got {size!r}")
    smaller = size < config.vocab_size
    if "lm_head.weight" in found or needed or smaller or (not found and files.hf.get("draft_vocab_size")):
        declared["head"] = {"head": head(config.hidden_size, size, "lm_head.weight")}
    if found and smaller and "d2t" not in found:
        raise CheckpointError(
            f"{files.path}: missing d2t: the drafter knows {size} of {config.vocab_size} tokens (draft_vocab_size), "
            "and d2t says which"
        )
    if "d2t" in found and found["d2t"].shape != (size,):
        raise CheckpointError(f"{files.path}: d2t has shape {list(found['d2t'].shape)}, draft_vocab_size is {size}")
    return size if smaller or "d2t" in found else None


def _open(source: str, target: ModelConfig, load_format: str) -> tuple[ModelFolder, dict[str, TensorInfo], ModelConfig]:
    """The folder, its tensors by canonical name (none of dummy weights), and the config of the decoder layer."""
    files = locate(source, load_format=load_format)
    if not isinstance(files, ModelFolder):
        raise ConfigError(f"--draft {source}: an EAGLE drafter is a folder with config.json and weights")
    found = {canonical(name): info for name, info in files.tensors().items()}
    hf = dict(files.hf)
    if (nested := hf.get("transformer_layer_config")) is not None:
        from transformers import AutoConfig  # what was saved are differences from the defaults that it knows

        hf = AutoConfig.for_model(**{"model_type": "qwen3", **nested}).to_dict()
    has = lambda name: f"{_LAYER}{name}" in found  # noqa: E731
    hf |= {
        "model_type": "qwen3" if has("self_attn.q_norm.weight") else "llama",
        "attention_bias": has("self_attn.q_proj.bias"),
        "mlp_bias": has("mlp.gate_proj.bias"),
        "eos_token_id": None,
    }
    try:
        config = ModelConfig.from_hf(hf)
    except ConfigError as error:
        raise ConfigError(f"--draft {source}: {error}") from error
    if config.num_layers != 1:
        raise ConfigError(
            f"--draft {source}: num_hidden_layers is {config.num_layers}; EAGLE drafters of one layer are supported"
        )
    if config.vocab_size != target.vocab_size:
        raise ConfigError(_other_model(source, "vocab_size", config.vocab_size, target.vocab_size))
    return files, found, config


def _target_layers(source: str, hf: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Target layers whose outputs are read (0-based): as the config names them, else the second, middle and late one.

    The same key means the layers' outputs in `eagle_config`, and their inputs at the top level.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    settings = hf.get("eagle_config") or {}
    if settings.get("use_aux_hidden_state") is False:
        raise ConfigError(f"--draft {source}: eagle_config.use_aux_hidden_state is false, which is not supported")
    if (ids := settings.get(key)) is not None:
        where, inputs = f"eagle_config.{key}", 0
    elif (ids := hf.get(key)) is not None:
        where, inputs = key, 1
    else:
        where, inputs, ids = "EAGLE-3's default layers", 0, [1, num_layers // 2 - 1, num_layers - 4]
    low, high = inputs, num_layers - 1 + inputs
    if not isinstance(ids, list | tuple) or not ids:
        raise ConfigError(f"--draft {source}: {where} must be a list of layers, got {ids!r}")
    if bad := [i for i in ids if isinstance(i, bool) or not isinstance(i, int) or not low <= i <= high]:
        raise ConfigError(
            f"--draft {source}: {where} are {list(ids)}; for a target with {num_layers} layers they can be {low} to "
            f"{high}, not {bad[0]!r}. This drafter is for another model"
        )
    return tuple(i - inputs for i in ids)


def _other_model(source: str, what: str, ours: int, theirs: int) -> str:
    return f"--draft {source} is a drafter for another model: its {what} is {ours}, the target's {theirs}"
