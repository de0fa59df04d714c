"""MTP: the multi-token prediction module that Qwen3-Next and Qwen3.5 were trained with, out of their own checkpoint.

One decoder layer of the target's kind, with full attention, over pairs of the target's final hidden state at a position
(after the last norm) and the token that follows. It was trained for one token ahead and goes on with its own normed
output in place of what the target doesn't know yet, as EAGLE does, whose chains and caches these are (`eagle.Chain`).
Embedding and head are the target's.

Names are `mtp.*` beside the model's own, in all public layouts. Experts can be one by one there and stacked in the
body, or the other way round.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxspec.checkpoint import MTP, ModelFolder, dummy, locate, read_params
from jaxspec.config import ConfigError, ModelConfig
from jaxspec.drafters.eagle import Chain
from jaxspec.models import few_rows, qwen3_next
from jaxspec.models.layers import centred_rms_norm, centred_scale, linear
from jaxspec.pallas.hopper import chosen

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model


@dataclass(frozen=True)
class Mtp(Chain):
    """`config` is the target's, of one layer, with full attention. The feature is the target's final hidden state."""

    @classmethod
    def load(cls, target, source, options):
        """**Raises:** `ConfigError` for a target without such a module, or several of them, `CheckpointError` for
        tensors that are missing or don't fit."""
        if not found(target, options.load_format):
            raise ConfigError(
                f"--draft mtp: {target.name} (model_type {target.config.model_type}) brings no MTP module; Qwen3-Next "
                "and Qwen3.5 checkpoints do, as tensors mtp.*. Use --draft ngram, which needs nothing"
            )
        if target.config.mtp_layers > 1:
            raise ConfigError(
                f"--draft mtp: {target.name} has {target.config.mtp_layers} MTP modules; one, drafting any number of "
                "tokens, is supported"
            )
        config = dataclasses.replace(target.config, num_layers=1, linear=None, dense_layers=())
        embed = target.params["embed"]
        declared, dtype = parameters(config), str(embed.dtype)
        if options.load_format == "dummy":
            params = dummy(declared, dtype, options.seed or 0)
        else:
            own = lambda name: name if name.startswith(MTP) else None  # noqa: E731
            params = read_params(declared, locate(target.path), f"{target.name}, MTP", dtype, rename=own)
        params |= {"embed": embed, "head": {k: target.params[k] for k in ("head", "embed") if k in target.params}}
        drafts = options.num_draft_tokens or 3
        return cls(config, target.config.model_type, dtype, (target.config.num_layers,), drafts), params

    def _fuse(self, params, features):
        return features[0]

    def _layer(self, params, kv, tokens, hidden, rows):
        eps, positions = self.config.rms_norm_eps, rows.marked_positions(tokens.shape[1])
        few = chosen(qwen3_next.few_supported([params["layer"]], tokens.shape))
        embedded = centred_rms_norm(params["embed"][tokens], params["embed_norm"], eps)
        hidden = centred_rms_norm(hidden, params["hidden_norm"], eps)
        x = few_rows.product([*map(few_rows.fill, (embedded, hidden))] if few else [embedded, hidden], params["fc"])
        return qwen3_next.attention_layer(params["layer"], self.config, jnp.int32(0), x, positions, rows, kv, few)

    def _feedback(self, params, out):
        return centred_rms_norm(out, params["norm"], self.config.rms_norm_eps)

    def _logits(self, params, out):
        return super()._logits(params, self._feedback(params, out))


def parameters(config: ModelConfig) -> dict[str, Any]:
    """What the module has of its own, as declarations, of a config of one layer."""
    d = config.hidden_size
    return {
        "embed_norm": centred_scale(d, MTP + "pre_fc_norm_embedding.weight"),
        "hidden_norm": centred_scale(d, MTP + "pre_fc_norm_hidden.weight"),
        "fc": linear(2 * d, {MTP + "fc.weight": d}),
        "layer": qwen3_next.attention_layer_parameters(config, MTP + "layers.0."),
        "norm": centred_scale(d, MTP + "norm.weight"),
    }


def found(target: Model, load_format: str) -> bool:
    """Whether the target brings a module to draft with: tensors in its checkpoint, or, without weights, any hybrid."""
    if target.config.linear is None or load_format == "dummy":
        return target.config.linear is not None
    files = locate(target.path) if target.path is not None else None
    return isinstance(files, ModelFolder) and any(name.startswith(MTP) for name in files.tensors())


def preferred(target: Model, load_format: str) -> bool:
    """Whether to draft with it where the user names no drafter; without weights, if the config counts one module."""
    counted = target.config.mtp_layers
    return counted <= 1 and bool(counted or load_format != "dummy") and found(target, load_format)
