"""Drafters as folders in the public layouts: a training's start and its result.

EAGLE-3, DSpark and Domino as SpecForge writes them (`midlayer.*`, `d2t`, `t2d`), DFlash and DFlash 2 as z-lab does,
LiLiCorr as ModelOpt does. To make a new drafter, its config is written and the drafter's own loader makes up weights
for it. So names, shapes and checks are those of serving.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int
from safetensors.numpy import save

from jaxspec.checkpoint import Model
from jaxspec.config.engine_config import EngineConfig
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.dflash_checkpoint import feature_layers
from jaxspec.drafters.eagle_checkpoint import find_eagle3
from jaxspec.drafters.registry import DRAFTERS
from jaxspec.drafters.vocabulary import id_maps
from jaxspec.models.description import Mlp
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.rope_scaling import LinearScaling, RopeScaling, Yarn
from jaxspec.models.weights import Layout, Param, Weight, is_param
from jaxspec.train.data import TrainError

ARCHITECTURES = {
    "dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel", "domino": "DominoDraftModel",
    "lilicorr": "LiLiCorrDraftModel", "dflash2": "DFlash2DraftModel",
}  # fmt: skip
ROPE_TYPES = {RopeScaling: "llama3", LinearScaling: "linear", Yarn: "yarn"}
_TRAINED_DTYPE, _STORED_DTYPE = "float32", jnp.bfloat16


@dataclass(frozen=True)
class Shape:
    """How large a drafter is to be; None: as the target's layers are."""

    num_layers: int = 1
    mlp_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    target_layers: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Block:
    """How a block drafter is to be. `settings`: a method's part of `dflash_config`, beside DFlash's."""

    size: int
    mask_token: int
    method: str = "dflash"
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Fresh:
    """A drafter to train: its folder with the config, what is declared in its checkpoint, and its params, apart.

    `trained` are the declared ones, float32; `frozen` the target's and ids, in the target's dtype.
    """

    folder: Path
    drafter: Drafter
    declared: dict[str, Any]
    trained: dict[str, Any]
    frozen: dict[str, Any]
    prefixes: tuple[str, str] = ("", "")  # of the declared names, and what they become in the file

    def save(self, trained: Any) -> Path:
        """Write `trained` as the folder's weights, in bfloat16."""
        tensors = {
            name.replace(*self.prefixes, 1): tensor
            for name, tensor in checkpoint_tensors(self.declared, trained).items()
        }
        if "target_ids" in self.frozen:
            ids, reverse = (np.asarray(self.frozen[name], np.int64) for name in ("target_ids", "draft_ids"))
            tensors |= {"d2t": ids - np.arange(len(ids)), "t2d": reverse < len(ids)}
        return write_tensors(self.folder, tensors)


def write_tensors(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    """Write a folder's weights, whole or not at all."""
    path = folder / "model.safetensors"
    part = path.with_suffix(".part")
    part.write_bytes(save(dict(sorted(tensors.items())), metadata={"format": "pt"}))
    part.replace(path)
    return path


def fresh_eagle3(
    folder: Path, target: Model, shape: Shape, vocabulary: Int[np.ndarray, " w"] | None, seed: int
) -> Fresh:
    """An EAGLE-3 drafter for `target`, with a head of its own over the `vocabulary`'s tokens (sorted target ids), which
    starts as the target's; or, without one, with the target's head.

    **Raises:** `TrainError`, `ConfigError` for a shape that can't be.
    """
    c = target.config
    config = _eagle3_config(c, shape, None if vocabulary is None else len(vocabulary))
    drafter, params = _load("eagle3", folder, config, target, seed)
    declared = find_eagle3(str(folder), c, "dummy").declared
    if vocabulary is not None:
        offsets = vocabulary - np.arange(len(vocabulary))
        params |= id_maps(offsets, len(vocabulary), c.vocab_size, str(folder))
        embed = target.params["embed"]
        head = target.params["head"].dequantised(embed.dtype) if "head" in target.params else embed.T
        params["head"] = {"head": Weight(head[:, vocabulary], layout=Layout((len(vocabulary),)))}
    fresh = _fresh(folder, drafter, declared, params, target)
    return dataclasses.replace(fresh, prefixes=("layers.0.", "midlayer."))


def check_eagle3(c: ModelConfig, shape: Shape, vocabulary: int | None) -> None:
    """Refuse what `fresh_eagle3` refuses, as far as it needs no weights."""
    with tempfile.TemporaryDirectory() as folder:
        _write_config(Path(folder), _eagle3_config(c, shape, vocabulary))
        find_eagle3(folder, c, "dummy")


def _eagle3_config(c: ModelConfig, shape: Shape, vocabulary: int | None) -> dict[str, Any]:
    if shape.num_layers != 1:
        raise TrainError(
            f"--num-layers {shape.num_layers}: an EAGLE-3 drafter has one layer; make it wider by --mlp-size"
        )
    layers = shape.target_layers or eagle3_layers(c)
    return {
        **_layer_config(c, shape),
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "target_hidden_size": c.hidden_size,
        "draft_vocab_size": vocabulary,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True},
    }


def eagle3_layers(c: ModelConfig) -> tuple[int, ...]:
    """Layers that an EAGLE-3 drafter reads by default: near the target's beginning, middle and end."""
    last = c.num_layers - 1
    return tuple(min(max(layer, 0), last) for layer in (1, c.num_layers // 2 - 1, last - 3))


def fresh_block(folder: Path, target: Model, shape: Shape, block: Block, seed: int) -> Fresh:
    """A DFlash drafter for `target`, or one of its descendants.

    **Raises:** `TrainError`, `ConfigError` for a shape that can't be.
    """
    drafter, params = _load(block.method, folder, _block_config(target.config, shape, block), target, seed)
    for layer in params["layers"] if getattr(drafter, "taps", 0) else ():
        for name in ("attention_conv", "mlp_conv"):  # that change nothing at first
            layer[name] = jax.tree.map(lambda x: jnp.zeros_like(x).at[:, 0].set(1), layer[name])
            layer[name + "_made"] = jax.tree.map(jnp.zeros_like, layer[name + "_made"])
    return _fresh(folder, drafter, drafter.parameters(), params, target)


def check_block(c: ModelConfig, shape: Shape, block: Block) -> int:
    """Refuse what `fresh_block` refuses, as far as it needs no weights. Returns how many drafts a block has."""
    drafter = DRAFTERS[block.method].from_hf(_block_config(c, shape, block), c)
    return drafter.block_size - drafter.first


def _block_config(c: ModelConfig, shape: Shape, block: Block) -> dict[str, Any]:
    layers = feature_layers(list(shape.target_layers) if shape.target_layers else None, shape.num_layers, c.num_layers)
    return {
        **_layer_config(c, shape),
        "architectures": [ARCHITECTURES[block.method]],
        "model_type": "qwen3",
        "layer_types": ["full_attention"] * shape.num_layers,
        "num_target_layers": c.num_layers,
        "block_size": block.size,
        "dflash_config": {"mask_token_id": block.mask_token, **block.settings, "target_layer_ids": list(layers)},
    }


def dspark_settings(heads: int, kv_heads: int, rank: int, kind: str) -> dict[str, Any]:
    """Settings of a DSpark drafter with a Markov head and a confidence head."""
    return {
        "projector_type": "dspark",
        "attention_mode": "mha" if heads == kv_heads else "gqa",  # which SpecForge asks for
        "markov_rank": rank,
        "markov_head_type": kind,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def domino_settings(width: int, rank: int, spared: int) -> dict[str, Any]:
    """Settings of a Domino drafter whose known token's row drafts too."""
    sizes = {"emb_dim": rank, "gru_hidden_dim": width, "pure_draft_prefix_len": spared}
    return {"projector_type": "domino", "shift_label": True, **sizes}


def lilicorr_settings(top: int, width: int, layers: int, heads: int, factors: int) -> dict[str, Any]:
    """Settings of a LiLiCorr drafter without convolutions. A width of 0 is the block's."""
    sizes = dict(candidate_topk=top, hidden_size=width, num_layers=layers, num_heads=heads, factor_dim=factors)
    sizes |= dict(mlp_ratio=2.0, vector_eps=1e-6, logit_scale=10.0)
    return {"projector_type": "lilicorr"} | {"lilicorr_" + name: value for name, value in sizes.items()}


def dflash2_settings(rank: int, top: int, taps: int, group: int) -> dict[str, Any]:
    """Settings of a DFlash 2 drafter."""
    return {"selector_rank": rank, "selector_top_k": top, "conv_kernel_size": taps, "conv_group_size": group}


def checkpoint_tensors(declared: Any, params: Any) -> dict[str, np.ndarray]:
    """A pytree of params as checkpoint tensors: `checkpoint.params.assemble` undone.

    They are bfloat16, but for what is declared with a dtype of its own.
    """
    tensors: dict[str, np.ndarray] = {}
    leaves = jax.tree.leaves(declared, is_leaf=is_param)
    for param, array in zip(leaves, jax.tree.leaves(params), strict=True):
        parts = _sources(param, np.asarray(array.astype(param.dtype or _STORED_DTYPE)))
        for name, part in zip(param.sources, parts, strict=True):
            part = part.T if param.transpose and not param.stacked else part
            tensors[name] = np.ascontiguousarray(part).reshape(param.stored_values()[name])
    return tensors


def _sources(param: Param, array: np.ndarray) -> list[np.ndarray]:
    """Take an array apart into its sources. A tensor of all experts comes as the checkpoint has it."""
    if param.sources == (param.whole,):
        if not param.transpose:
            return [array]
        return [np.concatenate(param.layout.unpack(array.swapaxes(1, 2)), axis=-1)]
    if param.stacked:
        return [part for expert in array for part in np.split(expert, np.cumsum(param.layout.splits)[:-1])]
    return [np.asarray(part) for part in param.layout.unpack(array)]


def _layer_config(c: ModelConfig, shape: Shape) -> dict[str, Any]:
    """The part of a `config.json` that says how the drafter's layers look."""
    rope: dict[str, Any] = {"rope_theta": c.decoder.attention.rope.theta}
    if type(scaling := c.decoder.attention.rope.scaling) in ROPE_TYPES:  # of others, the drafter has no scaling
        rope["rope_scaling"] = {"rope_type": ROPE_TYPES[type(scaling)], **dataclasses.asdict(scaling)}
        if original := rope["rope_scaling"].pop("original_max_position", None):
            rope["rope_scaling"]["original_max_position_embeddings"] = original
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": shape.mlp_size or _mlp_size(c),
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads or c.num_heads,
        "num_key_value_heads": shape.num_kv_heads or c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.decoder.norm.eps,
        **rope,
        "max_position_embeddings": c.max_position,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": c.bos_token_id,
        "eos_token_id": list(c.eos_token_ids) or None,
        "torch_dtype": "bfloat16",
    }


def _mlp_size(c: ModelConfig) -> int:
    """Width of the target's dense layers, or in a mixture, of all experts that a token passes through."""
    dense = [layer.feed.width for layer in c.decoder.layers if isinstance(layer.feed, Mlp)]
    return dense[0] if dense else c.decoder.mixture.per_token * c.decoder.mixture.width


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _load(method: str, folder: Path, config: dict[str, Any], target: Model, seed: int) -> tuple[Drafter, dict]:
    _write_config(folder, config)
    options = EngineConfig(draft=method, load_format="dummy", seed=seed)
    return DRAFTERS[method].load(target, str(folder), options)


def _fresh(folder: Path, drafter: Drafter, declared: dict, params: dict, target: Model) -> Fresh:
    """Split the params. The last norm starts as the target's: what it feeds is the target's head, or starts as that."""
    norm = target.params["norm"] + (1 if target.config.decoder.norm.centred else 0)  # a drafter's isn't centred
    trained = {name: params[name] for name in declared} | {"norm": norm}
    trained = jax.tree.map(lambda x: jnp.array(x, _TRAINED_DTYPE), trained)  # a copy: steps overwrite it
    frozen = {name: value for name, value in params.items() if name not in declared}
    for name in ("context", "context_norm", "context_bias"):
        frozen.pop(name, None)  # made of trained params, anew in each step
    return Fresh(folder, drafter, declared, trained, frozen)
