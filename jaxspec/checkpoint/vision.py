"""A vision tower's weights, out of the checkpoint of its model. Quantised ones are dequantised."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.check import CheckpointError
from jaxspec.checkpoint.gguf.file import GgufFile
from jaxspec.checkpoint.params import THREADS
from jaxspec.checkpoint.quantization import U8
from jaxspec.checkpoint.shards import ModelFolder
from jaxspec.checkpoint.stored import Readers
from jaxspec.models.fp8 import BLOCK, E4M3
from jaxspec.models.vision import Tower

BOUND = 1e4
NORMS = re.compile(r"norm\d?\.weight$")  # that dummies have at one


def found(tower: Tower, files: ModelFolder | GgufFile) -> bool:
    """Whether files have a tower: its first matrix stands for the rest."""
    first = next(iter(tower.shapes)), 0
    return any(tower.parameter(name) == first for name in files.tensors())


def load(tower: Tower, files: ModelFolder | GgufFile, dtype: str, load_format: str, seed: int) -> dict[str, Any]:
    """A tower's parameters on the device, by their names in `Tower.shapes`.

    **Raises:** `CheckpointError` for tensors that are missing or of other sizes.
    """
    if load_format == "dummy":
        return dummy(tower, dtype, seed)
    host = {key: [None] * _count(tower, key) for key in tower.shapes}
    wanted = {name: own for name in files.tensors() if (own := tower.parameter(name)) is not None}
    if missing := sorted({(key, i) for key, each in host.items() for i in range(len(each))} - {*wanted.values()}):
        (key, layer), inner = missing[0], tower.per_layer
        raise CheckpointError(
            f"{files.path}: {len(missing)} tensors of the vision tower are missing, such as "
            f"{key.replace(inner, f'{inner}{layer}.')}; download the model again, or remove vision_config from its "
            "config.json to serve text alone"
        )
    stored = files.stored({name for name, info in files.tensors().items() if name in wanted and info.dtype == U8})
    scales = {name: next((s for s in (f"{name}_scale_inv", f"{name}_scale") if s in stored), None) for name in wanted}
    with Readers(THREADS) as readers:
        read = readers.read([stored[name] for name in wanted])
    for name, tensor in zip(wanted, read, strict=True):
        key, layer = wanted[name]
        if tensor.dtype == E4M3:
            if scales[name] is None:
                raise CheckpointError(f"{files.path}: {name} is stored as FP8 and has no scales; download it again")
            tensor = _dequantised(tensor, files.tensor(scales[name]))
        shape = tower.shapes[key]
        if tensor.size != math.prod(shape) or tensor.shape[:1] != shape[:1]:
            raise CheckpointError(f"{files.path}: {name} has shape {list(tensor.shape)}, {list(shape)} is expected")
        host[key][layer] = np.asarray(tensor).reshape(shape)
    stacked = {key: np.stack(each) if key.startswith(tower.per_layer) else each[0] for key, each in host.items()}
    return {key: jnp.array(values, dtype) for key, values in stacked.items()}


def _dequantised(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """FP8 values times their scales, of the matrix, of each output or of each block."""
    rows, columns = values.shape
    scales = np.float32(scales)
    if scales.size in (1, rows):
        scales = scales.reshape(-1, 1)
    else:
        scales = np.repeat(np.repeat(scales, BLOCK, axis=0), BLOCK, axis=1)[:rows, :columns]
    return np.float32(values) * scales


def _count(tower: Tower, key: str) -> int:
    """How many tensors a parameter is made of."""
    return tower.layers if key.startswith(tower.per_layer) else 1


def dummy(tower: Tower, dtype: str, seed: int) -> dict[str, Any]:
    """Random parameters, each a function of `seed` and its place."""
    made = {}
    for i, (key, shape) in enumerate(tower.shapes.items()):
        shape = (tower.layers, *shape) if key.startswith(tower.per_layer) else shape
        if NORMS.search(key):
            made[key] = jnp.ones(shape, dtype)
        elif tower.shapes[key] == ():  # a bound, beyond which nothing comes
            made[key] = jnp.full(shape, -BOUND if key.endswith("min") else BOUND, dtype)
        elif key.endswith("bias"):
            made[key] = jnp.zeros(shape, dtype)
        else:
            drawn = jax.random.normal(jax.random.fold_in(jax.random.key(seed), i), shape, jnp.float32)
            made[key] = (drawn * shape[-1] ** -0.5).astype(dtype)
    return made
