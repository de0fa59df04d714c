"""A vision tower's weights, out of the checkpoint of its model. They aren't quantised, as in published files."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.check import CheckpointError
from jaxspec.checkpoint.gguf_file import GgufFile
from jaxspec.checkpoint.params import THREADS
from jaxspec.checkpoint.shards import ModelFolder
from jaxspec.checkpoint.stored import Readers
from jaxspec.models.vision import PER_LAYER, PREFIX, Tower

NORMS = ("norm.weight", "norm1.weight", "norm2.weight")  # that dummies have at one


def found(files: ModelFolder | GgufFile) -> bool:
    """Whether files have a tower: its first matrix stands for the rest."""
    return PREFIX + "patch_embed.proj.weight" in files.tensors()


def load(tower: Tower, files: ModelFolder | GgufFile, dtype: str, load_format: str, seed: int) -> dict[str, Any]:
    """A tower's parameters on the device, by their names in `Tower.shapes`.

    **Raises:** `CheckpointError` for tensors that are missing or of other sizes.
    """
    if load_format == "dummy":
        return dummy(tower, dtype, seed)
    wanted = {name: (key, layer) for key in tower.shapes for layer, name in _names(tower, key)}
    host = {key: [None] * (tower.layers if key.startswith(PER_LAYER) else 1) for key in tower.shapes}
    if missing := sorted(wanted.keys() - files.tensors().keys()):
        raise CheckpointError(
            f"{files.path}: {len(missing)} tensors of the vision tower are missing, such as {missing[0]}; download the "
            "model again, or remove vision_config from its config.json to serve text alone"
        )
    stored = files.stored()
    with Readers(THREADS) as readers:
        read = readers.read([stored[name] for name in wanted])
    for name, tensor in zip(wanted, read, strict=True):
        key, layer = wanted[name]
        shape = tower.shapes[key]
        if tensor.size != math.prod(shape) or len(tensor) != shape[0]:
            raise CheckpointError(f"{files.path}: {name} has shape {list(tensor.shape)}, {list(shape)} is expected")
        host[key][layer] = np.asarray(tensor).reshape(shape)
    stacked = {key: np.stack(each) if key.startswith(PER_LAYER) else each[0] for key, each in host.items()}
    return {key: jnp.array(values, dtype) for key, values in stacked.items()}


def _names(tower: Tower, key: str) -> list[tuple[int, str]]:
    """The tensors that a parameter is made of, each with its layer."""
    if not key.startswith(PER_LAYER):
        return [(0, PREFIX + key)]
    return [(i, PREFIX + re.sub(f"^{PER_LAYER}", f"{PER_LAYER}{i}.", key)) for i in range(tower.layers)]


def dummy(tower: Tower, dtype: str, seed: int) -> dict[str, Any]:
    """Random parameters, each a function of `seed` and its place."""
    made = {}
    for i, (key, shape) in enumerate(tower.shapes.items()):
        shape = (tower.layers, *shape) if key.startswith(PER_LAYER) else shape
        if key.endswith(NORMS):
            made[key] = jnp.ones(shape, dtype)
        elif key.endswith("bias"):
            made[key] = jnp.zeros(shape, dtype)
        else:
            drawn = jax.random.normal(jax.random.fold_in(jax.random.key(seed), i), shape, jnp.float32)
            made[key] = (drawn * shape[-1] ** -0.5).astype(dtype)
    return made
