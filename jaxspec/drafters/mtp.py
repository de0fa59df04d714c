"""MTP: the multi-token prediction module that a model was trained with, out of its own checkpoint.

It is one decoder layer of the target's kind, with full attention. It reads pairs: the target's final hidden state at a
position (after the last norm), and the token that follows. It was trained for one token ahead. Further drafts continue
from its own normed output, as EAGLE's do, whose chains and caches these are (`chain`). Embedding and head are the
target's. Where a checkpoint counts several modules, each drafts one token: `mtp_modules`.

Names are `mtp.*` beside the model's own (Qwen3-Next, Qwen3.5, Nemotron 3, K-EXAONE), `model.mtp.*` (MiMo-V2),
`model.mtp_block.*` and others (ERNIE 4.5), or those of a layer behind the model's last (DeepSeek's layout: GLM-4.5,
DeepSeek-V3, Hy3, Ling 2). Experts can be one by one there and stacked in the body, or the other way round.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

from jaxspec.checkpoint import MTP, Model, ModelFolder, Source, locate, mtp_name
from jaxspec.config.options import ConfigError
from jaxspec.decoder.forward import overridden, run_layer
from jaxspec.decoder.functions import normed
from jaxspec.decoder.matmul import product
from jaxspec.drafters.chain import Chain
from jaxspec.drafters.own_weights import borrowed, load_weights, made_up, own_dtype
from jaxspec.models.declaring import layer_tensors
from jaxspec.models.description import Mixture
from jaxspec.models.families import MODELS
from jaxspec.models.memory import PagedRows
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import WHOLE, linear, norm_scale
from jaxspec.parallel.sharding import embed


class Modules(NamedTuple):
    """How many modules there are. `separate`: each has a projection and norms of its own. `chained`: each takes what
    the one before it made, and not the target's hidden state."""

    count: int = 1
    separate: bool = False
    chained: bool = True

    @classmethod
    def among(cls, names: Iterable[str | None]) -> Modules:
        """The modules that have tensors of these names."""
        names = {name for name in names if name}
        numbers = [int(found[1]) for name in names if (found := re.match(rf"{MTP}layers\.(\d+)\.", name))]
        return cls(1 + max(numbers, default=0), f"{MTP}layers.1.fc.weight" in names)


ONE = Modules()
BRING = "Qwen3-Next", "Qwen3.5", "GLM-4.5", "DeepSeek-V3", "MiMo-V2", "Nemotron 3 Super"
BRING += "ERNIE 4.5", "Hy3", "Ling 2", "K-EXAONE", "Qwen3.8-Flash-Next"


@dataclass(frozen=True)
class Mtp(Chain):
    """`config` is the target's, of one layer, with full attention. The feature is the target's final hidden state."""

    @classmethod
    def load(cls, target, source, options):
        """**Raises:** `ConfigError` for a target without such a module, `CheckpointError` for tensors that are missing
        or don't fit."""
        check(target, options.load_format)
        config, family = module_config(target.config), MODELS[target.config.model_type]
        dtype, own = own_dtype(target, options), partial(mtp_name, layers=target.config.num_layers)
        if options.load_format == "dummy":
            how = Modules(max(target.config.mtp_layers, 1), hasattr(family, "mtp_layer"))
            params = made_up(parameters(config, how), target.quantization, dtype, options)
        else:
            files = locate(target.path)
            declared = parameters(config, how := Modules.among(map(own, files.tensors())))
            params = load_weights(declared, files, f"{target.name}, MTP", dtype, options, rename=own)
        theirs = borrowed(target, dtype)
        params |= {"embed": theirs["embed"], "head": theirs}
        params |= {} if _normed(family) else borrowed(target, dtype, ("norm",))
        decoder = target.config.decoder
        read = decoder.last_streams if decoder.streams else target.config.num_layers
        made = config, dtype, (read,), options.num_draft_tokens or 3
        how = how._replace(chained=getattr(family, "MTP_CHAINED", True))
        return cls.made_of(how, *made), params

    @classmethod
    def made_of(cls, modules: Modules, *fields: Any) -> Mtp:
        """The drafter with these fields, of so many modules: one. `mtp_modules.MtpModules` makes any."""
        if modules.count > 1:
            raise ConfigError(f"{cls.__name__} drafts with one module, got {modules.count}; load MtpModules")
        return cls(*fields)

    def _fuse(self, params, features):
        return features[0]

    def _layer(self, params, kv, tokens, hidden, rows, requested=None, overrides=None):
        norm = self.config.decoder.norm
        embedded = overridden(embed(params["embed"], tokens), overrides)
        embedded = normed(embedded, params["embed_norm"], norm)
        hidden = normed(hidden, params["hidden_norm"], norm)
        x = product([embedded, hidden], params["fc"], keep_padding=True)
        positions = rows.marked_positions(tokens.shape[1])
        return run_layer(self.config.decoder, params["layer"], x, positions, rows, kv, requested=requested)

    def _feedback(self, params, out):
        return normed(out, params["norm"], self.config.decoder.norm)

    def _logits(self, params, out):
        return super()._logits(params, self._feedback(params, out))


def module_config(target: ModelConfig) -> ModelConfig:
    """The target's config with one layer: the family's own for it, or full attention, and experts if any layer has
    them."""
    layers, own = target.decoder.layers, getattr(MODELS[target.model_type], "mtp_layer", None)
    attends = next(layer for layer in layers if isinstance(layer.mixing.memory, PagedRows))
    feed = next((layer.feed for layer in layers if isinstance(layer.feed, Mixture)), attends.feed)
    layer = own(target.decoder) if own else dataclasses.replace(attends, feed=feed)
    return dataclasses.replace(target, decoder=dataclasses.replace(target.decoder, layers=(layer,)))


def parameters(config: ModelConfig, modules: Modules = ONE) -> dict[str, Any]:
    """Declarations of the module's own params, for a config of one layer. Several modules have a list, `layers`, of
    their layers, or, where they are `separate`, of all that they have."""
    d, centred, family = config.hidden_size, config.decoder.norm.centred, MODELS[config.model_type]
    if config.decoder.streams:
        return family.mtp_parameters(config.decoder)
    declare = getattr(family, "mtp_tensors", layer_tensors)
    layers = [declare(config.decoder.layers[0], d, f"{MTP}layers.{i}.") for i in range(modules.count)]

    def beside(prefix: str) -> dict[str, Any]:
        return {
            "embed_norm": norm_scale(d, prefix + "pre_fc_norm_embedding.weight", centred),
            "hidden_norm": norm_scale(d, prefix + "pre_fc_norm_hidden.weight", centred),
            "fc": linear(2 * d, {prefix + "fc.weight": d}, exact=True, split=WHOLE),
            **({"norm": norm_scale(d, prefix + "norm.weight", centred)} if _normed(family) else {}),
        }

    if modules.count == 1:
        return {**beside(MTP), "layer": layers[0]}
    if not modules.separate:
        return {**beside(MTP), "layers": layers}
    prefixes = [MTP, *(f"{MTP}layers.{i}." for i in range(1, modules.count))]
    return {"layers": [{**beside(prefix), "layer": layer} for prefix, layer in zip(prefixes, layers, strict=True)]}


def _normed(family: ModuleType) -> bool:
    """Whether a module has a norm of its own behind its layer; others take the model's."""
    return getattr(family, "MTP_NORMED", True)


def check(target: Model | Source, load_format: str) -> None:
    """**Raises:** `ConfigError` for a target without a module to draft with."""
    if target.config.decoder.streams and target.config.mtp_layers > 1:
        raise ConfigError(
            f"--draft mtp: {target.name} counts {target.config.mtp_layers} MTP modules that read several residual "
            "streams; one is supported. Use --draft ngram, which needs nothing"
        )
    if found(target, load_format):
        return
    name, stored = f"{target.name} (model_type {target.config.model_type})", _stored(target, load_format)
    if known := [each for each in stored if mtp_name(each, target.config.num_layers)]:
        raise ConfigError(
            f"--draft mtp: {name} has tensors of an MTP module, such as {known[0]}, and its config.json counts none; "
            "give num_nextn_predict_layers there, or use --draft ngram"
        )
    if unknown := [each for each in stored if "mtp" in each]:
        raise ConfigError(
            f"--draft mtp: the MTP module of {name} has tensors of no layout that is read, such as {unknown[0]}. Use "
            "--draft ngram, which needs nothing"
        )
    raise ConfigError(
        f"--draft mtp: {name} brings no MTP module; {', '.join(BRING)} checkpoints do, as tensors mtp.* or as a layer "
        "behind the last. Use --draft ngram, which needs nothing"
    )


def found(target: Model | Source, load_format: str) -> bool:
    """Whether the target brings a module to draft with: tensors in its checkpoint, or, without weights, any hybrid and
    any model whose config counts one."""
    config = target.config
    may = config.recurrent or config.mtp_layers > 0
    if not may or load_format == "dummy":
        return may
    return any(mtp_name(name, config.num_layers) for name in _stored(target, load_format))


def _stored(target: Model | Source, load_format: str) -> Iterable[str]:
    """The names of the tensors in a target's folder, if it has one."""
    files = locate(target.path) if target.path is not None and load_format != "dummy" else None
    return files.tensors() if isinstance(files, ModelFolder) else ()


def preferred(target: Model, load_format: str) -> bool:
    """Whether to draft with it where the user names no drafter; without weights, if the config counts a module."""
    return bool(target.config.mtp_layers or load_format != "dummy") and found(target, load_format)
