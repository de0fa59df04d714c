"""A drafter's weights: read or made up in its own dtype and format, beside what it borrows from its target.

Embedding and head of the target are shared, not copied, as long as the two have one dtype. A drafter whose weights are
to be FP8 drafts with a copy of the head in FP8, which is read once for each draft. The target's own stays as it is, for
verification.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxspec.cache.paged import kv_bytes_per_token
from jaxspec.checkpoint import Model, ModelFolder, dummy, in_format, kept_format, read_params
from jaxspec.checkpoint.quantization import Quantization
from jaxspec.config.engine_config import EngineConfig
from jaxspec.drafters.base import Drafter
from jaxspec.models import fp8
from jaxspec.models.fp8 import BLOCK
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import Fp8, Layout, Weight
from jaxspec.parallel import sharding

log = logging.getLogger("jaxspec")


@dataclass(frozen=True)
class OwnLayers(Drafter):
    """A drafter with decoder layers of its own, of this `config`. Their keys and values are over the target's pages."""

    config: ModelConfig

    def on_one_of(self, size):
        return replace(self, config=self.config.on_one_of(size))

    def kv_bytes_per_token(self, dtype):
        return kv_bytes_per_token(self.config, dtype)

    def init_state(self, layout, num_slots):
        return layout.kv(self.config)


def own_dtype(target: Model, options: EngineConfig) -> str:
    """Dtype of a drafter's activations, and of its weights that aren't quantised."""
    return options.draft_dtype or target.dtype


def load_weights(
    declared: Any,
    files: ModelFolder,
    name: str,
    dtype: str,
    options: EngineConfig,
    **reading: Any,
) -> Any:
    """Params for these declarations, from the files or, with dummy weights, from the seed.

    Weights that the files have quantised stay so; others are quantised as --draft-quantization asks. `reading`: more
    arguments of `read_params`. **Raises:** as it does.
    """
    how = kept_format(files, options.draft_quantization)
    if options.load_format == "dummy":
        return made_up(declared, how, dtype, options)
    return read_params(
        _in_format(declared, how, options),
        files,
        name,
        dtype,
        fp8_activations=options.quantises_activations,
        mesh=sharding.mesh_of(options.tp_size),
        threads=options.load_threads,
        **reading,
    )


def made_up(declared: Any, how: Quantization | None, dtype: str, options: EngineConfig) -> Any:
    """Dummies of these declarations, in the format of a checkpoint that is quantised as `how` says."""
    mesh = sharding.mesh_of(options.tp_size)
    return dummy(_in_format(declared, how, options), dtype, options.seed or 0, mesh)


def _in_format(declared: Any, how: Quantization | None, options: EngineConfig) -> Any:
    return in_format(declared, how, options.draft_quantization, options.load_format, options.quantises_activations)


def borrowed(target: Model, dtype: str, names: tuple[str, ...] = ("head", "embed")) -> dict[str, Any]:
    """The target's embedding and, unless it is tied to it, its head, or others of its params, in the drafter's
    dtype."""
    params: Mapping[str, Any] = target.params
    return {name: _in_dtype(params[name], dtype) for name in names if name in params}


def _in_dtype(weight: jax.Array | Weight, dtype: str) -> jax.Array | Weight:
    """Cast a weight to `dtype`, if it has another. A quantised weight takes any activations as it is."""
    if weight.dtype == dtype or (isinstance(weight, Weight) and weight.quantised):
        return weight
    return jax.tree.map(lambda array: array.astype(dtype), weight)


COPIED_OUTPUTS = 4096  # that are in float32 at once


def with_head_copy(params: dict[str, Any]) -> dict[str, Any]:
    """The params with an FP8 copy of the head that makes their logits, as `head_copy` beside it. A head that is FP8
    already needs none. With many rows the head itself is used, see `decoder.forward`.

    A GPU's kernels take a multiple of 128 inputs. There another head gets no copy, which XLA would dequantise for each
    draft, and the log says so.
    """
    if isinstance(params.get("head"), dict):
        return {**params, "head": with_head_copy(params["head"])}
    head, axis = (params["embed"], 0) if "head" not in params else (params["head"], 1)
    if isinstance(head, Weight):
        if head.quantised:
            return params
        head = head.unquantised
    inputs = head.shape[1 - axis]
    if inputs % BLOCK and jax.default_backend() != "cpu":
        log.warning("drafts are made with the unquantised head: its %d inputs are no multiple of %d", inputs, BLOCK)
        return params
    return {**params, "head_copy": _fp8_copy(head, axis)}


def _fp8_copy(head: jax.Array, axis: int) -> Weight:
    """A head with the vocabulary along this axis, in FP8, on each device that has a part of it."""
    make = partial(_quantised, axis=axis)
    if isinstance(head, jax.core.Tracer) or isinstance(head.sharding, jax.sharding.SingleDeviceSharding):
        return make(head)
    mesh, spec = head.sharding.mesh, head.sharding.spec
    part = PartitionSpec(spec[axis] if axis < len(spec) else None)
    parts = jax.tree.map(lambda _: part, jax.eval_shape(make, sharding.on_one(head)))
    return jax.jit(sharding.spread(make, mesh, (spec,), parts))(head)


@partial(jax.jit, static_argnames="axis")
def _quantised(head: Float[Array, "a b"], axis: int) -> Weight:
    """In blocks of the whole vocabulary, some outputs at a time: a quarter of a million in float32 would take as much
    as a small model."""
    outputs = head.shape[axis]
    at_once = math.gcd(outputs, COPIED_OUTPUTS)
    if at_once % BLOCK:
        at_once = outputs
    size = math.gcd(outputs, BLOCK)  # outputs that share a scale

    def some(first):
        part = jax.lax.dynamic_slice_in_dim(head, first, at_once, axis)
        return part.T if axis else part

    starts = jnp.arange(0, outputs, at_once)
    largest = jax.lax.map(lambda first: fp8.magnitudes(some(first), size), starts)
    of_blocks = sharding.largest_of_blocks(largest.reshape(outputs // size, -1), BLOCK // size).reshape(largest.shape)
    values, scales = jax.lax.map(lambda of: fp8.quantise_blocks(some(of[0]), of[1]), (starts, of_blocks))
    values, scales = (each.reshape(-1, each.shape[-1]) for each in (values, scales))
    return Weight(values, Fp8(BLOCK), Layout((outputs,)), scales)
