"""`--deterministic`: a model whose rows have the same bits whatever is computed beside them, and what it can't be had
with. How each part is held is in docs/determinism.md."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache.paged import page_dtype
from jaxspec.checkpoint import Model
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.options import ConfigError
from jaxspec.decoder.forward import choose
from jaxspec.decoder.mixings import mixing_of
from jaxspec.decoder.path import Call
from jaxspec.drafters.loading import LoadedDrafter
from jaxspec.models.description import Decoder
from jaxspec.models.local import local
from jaxspec.models.weights import Weight
from jaxspec.pallas import hopper
from jaxspec.pallas.dense import weight_stream
from jaxspec.pallas.hopper import SWIZZLED as UNIT
from jaxspec.parallel import sharding

PROMPT_BLOCK = 64  # rows of a prompt's block on a GPU
SEGMENT, SEGMENTS = 256, 32  # tokens that attention sums by themselves, and how many times it does at most


def prepared(model: Model, draft: LoadedDrafter, options: EngineConfig) -> Model:
    """The model with a deterministic decoder and a head of its own, if the options ask for that.

    **Raises:** `ConfigError` which names what there is no fixed order of sums for.
    """
    if not options.deterministic:
        return model
    if draft.drafter.topk > 1:
        raise ConfigError(
            f"--deterministic verifies chains; --topk {draft.drafter.topk} drafts trees, whose rows' sums have another "
            "order. Drop one of the two"
        )
    return fixed_order(model, options, draft.drafter.num_draft_tokens + 1)


def reporting(model: Model, options: EngineConfig, several_hosts: bool) -> Model:
    """The model with a decoder that reports the experts of its mixtures, if the options ask for that.

    **Raises:** `ConfigError` for a model without any, and on several hosts.
    """
    if several_hosts and (options.enable_return_hidden_states or options.enable_return_routed_experts):
        raise ConfigError("--enable-return-hidden-states and --enable-return-routed-experts need a model on one host")
    if not options.enable_return_routed_experts:
        return model
    if model.config.decoder.mixture is None:
        raise ConfigError(f"--enable-return-routed-experts: {model.name} has no mixture of experts. Drop the flag")
    decoder = dataclasses.replace(model.config.decoder, reports_experts=True)
    return dataclasses.replace(model, config=dataclasses.replace(model.config, decoder=decoder))


def fixed_order(model: Model, options: EngineConfig, width: int) -> Model:
    """The model with a deterministic decoder and a head of its own, for rounds of up to `width` rows a request.

    **Raises:** as `prepared`.
    """
    segment = SEGMENT
    while segment * SEGMENTS < (options.context_length or model.config.max_position):
        segment *= 2
    decoder = dataclasses.replace(model.config.decoder, deterministic=segment)
    size, layers = model.tp_size, model.params["layers"]
    layers = layers if size == 1 else sharding.on_one(layers)
    pages = page_dtype(options.kv_cache_dtype, model.dtype)
    try:
        for rows in (1, width, PROMPT_BLOCK):
            choose(local(decoder, size), layers, Call(1, rows, pages, hopper.multiprocessors(), devices=size))
    except NotImplementedError as error:
        raise ConfigError(f"{model.name}: {error}") from error
    params = dict(model.params)
    if "head" not in params:  # tied: transposed once, as the kernel takes it
        params["head"] = Weight(jax.jit(lambda embed: embed.T)(params["embed"]))
    params = widened(params, decoder)
    if hopper.multiprocessors():
        head = sharding.on_one(params["head"])
        reason = weight_stream.fixed_supported(head.dtype, head.inputs, head.outputs)
        if reason is not None:
            raise ConfigError(f"{model.name}: --deterministic has no kernel for {reason}. Drop the flag")
    return dataclasses.replace(model, params=params, config=dataclasses.replace(model.config, decoder=decoder))


def widened(params: dict[str, Any], decoder: Decoder) -> dict[str, Any]:
    """Pad narrow projections with columns of zeros, up to what the kernel takes."""
    if not hopper.multiprocessors():
        return params

    def wide(weight: Weight) -> Weight:
        pad = lambda values: jnp.pad(values, ((0, 0), (0, -values.shape[1] % UNIT)))  # noqa: E731
        return dataclasses.replace(weight, values=sharding.on_each(pad, weight.values))

    each = zip(decoder.layers, params["layers"], strict=True)
    layers = [own | {name: wide(own[name]) for name in mixing_of(layer).exact} for layer, own in each]
    return params | {"layers": layers}
