"""A drafter's weights: read or made up in its own dtype and format, beside what it borrows from its target.

Embedding and head of the target are shared, not copied, as long as the two have one dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from jaxspec import sharding
from jaxspec.checkpoint import ModelFolder, dummy, in_format, read_params
from jaxspec.checkpoint.quantization import Quantization
from jaxspec.config import EngineConfig
from jaxspec.weights import Unquantised, Weight

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model


def own_dtype(target: Model, options: EngineConfig) -> str:
    """Of activations, and of weights that aren't quantised."""
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

    Weights that the files have in FP8 stay so; others are made FP8 if --draft-quantization asks for it. `reading`: more
    arguments of `read_params`. **Raises:** as it does.
    """
    if options.load_format == "dummy":
        return made_up(declared, files.quantization, dtype, options)
    return read_params(
        _in_format(declared, files.quantization, options),
        files,
        name,
        dtype,
        fp8_activations=options.fp8_activations == "on",
        mesh=sharding.mesh_of(options.tp_size),
        **reading,
    )


def made_up(declared: Any, how: Quantization | None, dtype: str, options: EngineConfig) -> Any:
    """Dummies of these declarations, in the format of a checkpoint that is quantised as `how` says."""
    mesh = sharding.mesh_of(options.tp_size)
    return dummy(_in_format(declared, how, options), dtype, options.seed or 0, mesh)


def _in_format(declared: Any, how: Quantization | None, options: EngineConfig) -> Any:
    return in_format(declared, how, options.draft_quantization, options.load_format, options.fp8_activations == "on")


def borrowed(target: Model, dtype: str) -> dict[str, Any]:
    """The target's embedding and, unless it is tied to it, its head, in the drafter's dtype."""
    params: Mapping[str, Any] = target.params
    return {name: _in_dtype(params[name], dtype) for name in ("head", "embed") if name in params}


def _in_dtype(weight: jax.Array | Weight, dtype: str) -> jax.Array | Weight:
    """The same array if it has the dtype already. A quantised weight takes any activations as it is."""
    if weight.dtype == dtype or (isinstance(weight, Weight) and not isinstance(weight.format, Unquantised)):
        return weight
    return jax.tree.map(lambda array: array.astype(dtype), weight)
