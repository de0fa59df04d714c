"""Params pytrees: assembled from a checkpoint's tensors as they stream past, or made up from a seed.

Whatever the source, the result has exactly the structure, shapes and names that the family's `tensors` declares.
While streaming, the host holds one tensor, and the sources of a fused parameter that is still incomplete.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.check import CheckpointError
from jaxspec.weights import Layout, Param

_EMBEDDING_STD = 0.02


def assemble(declared: Any, tensors: Iterable[tuple[str, np.ndarray]], dtype: str) -> Any:
    """Fill a pytree of `Param` with arrays and weights of `dtype`, taking (checkpoint name, host array) in any order.

    Arrays have Hugging Face's shapes, already checked; names that no parameter is made of are passed over.

    **Raises:** `CheckpointError` if the tensors end before every parameter is complete.
    """
    leaves, structure = jax.tree.flatten(declared)
    owner = {source: i for i, param in enumerate(leaves) for source in param.sources}
    parts: dict[int, dict[str, np.ndarray]] = {}
    filled: list[Any] = [None] * len(leaves)
    for name, tensor in tensors:
        if name not in owner:
            continue
        i = owner[name]
        parts.setdefault(i, {})[name] = tensor
        del tensor  # or it would stay while the next one is read
        if len(parts[i]) < len(leaves[i].sources):
            continue
        host = [parts[i].pop(source) for source in leaves[i].sources]
        if leaves[i].stacked:  # hundreds of matrices are put together here, since a program of so many operands is slow
            host = [np.concatenate(host).reshape(leaves[i].shape)]
        # A copy, because on a CPU an array may share the host's memory. Waiting for it bounds what the host holds.
        sources = [jnp.array(host.pop(0)) for _ in range(len(host))]
        filled[i] = leaves[i].made(jax.block_until_ready(_fuse(sources, leaves[i], leaves[i].dtype or dtype)))
        del parts[i]
    if lacking := [leaf.sources for leaf, array in zip(leaves, filled, strict=True) if array is None]:
        raise CheckpointError(f"the weights ended before {len(lacking)} parameters were complete: {lacking[0]}, ...")
    return jax.tree.unflatten(structure, filled)


def _fuse(sources: list[jax.Array], param: Param, dtype: str) -> jax.Array:
    if param.depthwise:
        sources = [source[:, 0] for source in sources]
    return _fused(sources, param.transpose, param.layout, dtype)  # layers alike share what compiles


@partial(jax.jit, static_argnames=("transpose", "layout", "dtype"))
def _fused(sources: list[jax.Array], transpose: bool, layout: Layout, dtype: str) -> jax.Array:
    return layout.pack([(source.T if transpose else source).astype(dtype) for source in sources])


def dummy(declared: Any, dtype: str, seed: int) -> Any:
    """Random params on the device, each a function of `seed` and its own name alone.

    Matmul weights have standard deviation `inputs ** -0.5`, so every layer adds about unit variance to the residual
    stream and activations stay finite at any depth; embeddings have 0.02.
    """
    root = jax.random.key(seed)

    def values(path, param: Param) -> jax.Array:
        if param.init != "normal":
            return jnp.full(param.shape, {"ones": 1, "zeros": 0}[param.init], param.dtype or dtype)
        key = jax.random.fold_in(root, zlib.crc32(jax.tree_util.keystr(path).encode()))
        if param.stacked:
            return _normal_stack(key, param.shape, param.shape[-1] ** -0.5, dtype)
        std = param.shape[0] ** -0.5 if param.transpose else _EMBEDDING_STD
        return _normal(key, param.shape, std, param.dtype or dtype)

    return jax.tree_util.tree_map_with_path(lambda path, param: param.made(values(path, param)), declared)


@partial(jax.jit, static_argnames=("shape", "std", "dtype"))
def _normal(key: jax.Array, shape: tuple[int, ...], std: float, dtype: str) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.float32) * std).astype(dtype)


@partial(jax.jit, static_argnames=("shape", "std", "dtype"))
def _normal_stack(key: jax.Array, shape: tuple[int, ...], std: float, dtype: str) -> jax.Array:
    """Matrix by matrix: random bits and float32 numbers of a whole stack would take four times its memory."""
    return jax.lax.map(lambda k: _normal(k, shape[1:], std, dtype), jax.random.split(key, shape[0]))
