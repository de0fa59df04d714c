"""Scales of keys and values that a quantised checkpoint has for a KV cache in FP8: `read_kv_scales`.

A cache holds x / scale, and attention multiplies by the scale again. A layer's keys have one, and its values have one,
for all heads or for each. Names depend on the tool that made the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxspec.checkpoint.check import CheckpointError
from jaxspec.checkpoint.shards import ModelFolder
from jaxspec.models.description import Decoder
from jaxspec.models.memory import PagedRows
from jaxspec.parallel import sharding

# Behind `model.layers.N.self_attn.`, the first that is there: by compressed-tensors and vLLM, by ModelOpt, and as the
# former two were before. The last is of keys and values alike.
NAMES = tuple(
    (f"{x}_scale", f"attn.{x}_scale", f"{x}_proj.{x}_scale", f"{x}_proj.output_scale", "kv_scale") for x in "kv"
)
_NAMED = re.compile(r".*\.([kv]_scale|kv_scale|[kv]_proj\.output_scale)")


def named(name: str) -> bool:
    """Whether a tensor is a scale of keys or values."""
    return _NAMED.fullmatch(name) is not None


def read_kv_scales(files: ModelFolder, decoder: Decoder, rename: Callable[[str], str | None]) -> np.ndarray | None:
    """f32[l, 2, m]: of each layer with keys and values of its own, by KV head; 1 where there is none, and 0 beyond the
    heads that a layer has. None: there are none.

    Tensors of `files` are called `rename(their name)`.

    **Raises:** `CheckpointError` for a scale of another shape, or one that isn't a positive number.
    """
    found = {rename(name): name for name in files.tensors() if named(name)}
    places, heads = _own(decoder), [memory.heads for memory in _own(decoder).values()]
    sources: dict[str, list[tuple[int, int]]] = {}
    for at, i in enumerate(places):
        for kind, names in enumerate(NAMES):
            each = (f"model.layers.{i}.self_attn.{name}" for name in names)
            if (name := next((found[name] for name in each if name in found), None)) is not None:
                sources.setdefault(name, []).append((at, kind))
    if not sources or next(iter(places.values())).streams == 1:
        return None  # latents are kept as they are
    scales = np.zeros((len(places), 2, max(heads)), np.float32)
    for own, count in zip(scales, heads, strict=True):
        own[:, :count] = 1
    for name, value in files.some(sources):
        value, count = np.asarray(value, np.float32), heads[sources[name][0][0]]
        if value.size not in (1, count):
            raise CheckpointError(
                f"{files.path}: {name} has shape {list(value.shape)}; a scale of keys or values is one number, or one "
                f"for each of {count} KV heads"
            )
        if not (np.isfinite(value).all() and (value > 0).all()):
            raise CheckpointError(f"{files.path}: {name} must be positive; it has {value.min()}")
        for place in sources[name]:
            scales[place][:count] = value.reshape(-1)
    return scales


def _own(decoder: Decoder) -> dict[int, PagedRows]:
    """The memory of each layer with keys and values of its own, by the layer's number."""
    kept = {i: layer.mixing.memory for i, layer in enumerate(decoder.layers) if i not in decoder.sharing}
    return {i: memory for i, memory in kept.items() if isinstance(memory, PagedRows)}


def by_group(scales: Float[np.ndarray, "l 2 m"], decoder: Decoder) -> tuple[Array, ...]:
    """The scales of each group of layers, of the heads that this device has."""
    paged, out, size = _own(decoder).values(), [], sharding.devices()
    for group in decoder.groups(PagedRows):
        own = scales[[memory == group for memory in paged]]
        own = own[:, :, own[0, 0] > 0]
        first = jax.lax.axis_index(sharding.AXIS) * own.shape[2] // size if size > 1 else 0
        out.append(jax.lax.dynamic_slice_in_dim(jnp.asarray(own), first, group.heads, axis=2))
    return tuple(out)
