"""Tensors of GGUF that stay in four bits on the device: Q4_0, Q4_1 and Q4_K as `int4` has them, 32 inputs a scale.

A weight is number x scale + least there, so its zero point is -least / scale, which is no whole number. Q4_0's are
`int4.MIDDLE`, and its float16 scales stay. Others have float32 scales and zero points: float16 ones, of 11 bits, moved
logits of a tiny model by 2e-3. So they take 4.5 and 6 bits a weight on the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import Q4_K

from jaxspec.checkpoint.check import TensorInfo
from jaxspec.checkpoint.gguf.header import GgufTensor
from jaxspec.checkpoint.quantization import U8, beside
from jaxspec.models import int4
from jaxspec.models.weights import LEAST

GROUP = int4.BLOCK  # inputs that share a scale
BESIDE = {  # numbers beside a group's: scales, and zero points
    GGMLQuantizationType.Q4_0: 1,
    GGMLQuantizationType.Q4_1: 2,
    GGMLQuantizationType.Q4_K: 2,
}
_HALF = np.dtype("<f2")
MOST = 2.0**16  # zero points: with larger ones a group's numbers differ by less than 2^-12 of its weights


def fitting(tensors: Mapping[str, GgufTensor]) -> tuple[frozenset[str], str]:
    """Names of a dense model's weights that stay in four bits, and why none does, if a width of one isn't the kernels':
    such layers are faster unquantised, since all of their products are kernels then."""
    four = {name: each for name, each in tensors.items() if each.name.startswith("blk.") and each.type in BESIDE}
    if any("_exps." in each.name for each in tensors.values()):
        return frozenset(), ""
    for name, each in four.items():
        *_, outputs, inputs = each.shape
        if len(each.shape) > 2 or inputs % int4.UNIT or outputs % LEAST:
            said = f"{name} has {inputs} inputs and {outputs} outputs, not multiples of {int4.UNIT} and {LEAST}"
            return frozenset(), f"weights of 4 bits are dequantised as they are read: {said}"
    return frozenset(four), ""


def kernels_here() -> bool:
    """Whether there are kernels for weights of four bits. On a CPU each product would dequantise its weight."""
    return jax.default_backend() != "cpu"


def listed(name: str, tensor: GgufTensor) -> dict[str, TensorInfo]:
    """The two tensors that a weight leaves as."""
    (outputs, inputs), numbers = tensor.shape, math.prod(tensor.shape) // 2
    shape = outputs, inputs // GROUP, BESIDE[tensor.type]
    scales = TensorInfo(shape, tensor.nbytes - numbers, "F16" if shape[2] == 1 else "F32")
    return {name: TensorInfo((outputs, inputs // 2), numbers, U8), beside(name, "weight_scale"): scales}


def unpacked(raw: np.ndarray, kind: GGMLQuantizationType) -> dict[str, np.ndarray]:
    """A tensor's bytes u8[out, n] as `weight`, u8[out, in / 2] of two numbers each, the first one in the low half, and
    `weight_scale`, [out, groups, n] of scales and zero points."""
    outputs = len(raw)
    if kind == GGMLQuantizationType.Q4_K:
        blocks = raw.reshape(-1, 144)
        d, least = (blocks[:, i : i + 2].copy().view(_HALF).astype(np.float32) for i in (0, 2))
        scales, mins = (each.astype(np.float32) for each in Q4_K.get_scale_min(blocks[:, 4:16]))
        return _with_points(blocks[:, 16:].reshape(outputs, -1, 32), d * scales, -least * mins)
    blocks = raw.reshape(-1, 16 + 2 * BESIDE[kind])
    halves, numbers = blocks[:, :-16].copy().view(_HALF), blocks[:, -16:].reshape(outputs, -1, 16)
    if kind == GGMLQuantizationType.Q4_0:
        return {"weight": _pairs(numbers).reshape(outputs, -1), "weight_scale": halves.reshape(outputs, -1, 1)}
    return _with_points(numbers, *halves.astype(np.float32).T)


def _pairs(halves: np.ndarray) -> np.ndarray:
    """Bytes [out, groups, 16] of two neighbours each, of bytes whose low halves are blocks' first numbers."""
    numbers = np.concatenate([halves & 15, halves >> 4], axis=-1)
    numbers = numbers.reshape(len(numbers), -1, GROUP)
    return numbers[..., ::2] | numbers[..., 1::2] << 4


def _with_points(halves: np.ndarray, scales: np.ndarray, least: np.ndarray) -> dict[str, np.ndarray]:
    """A weight whose number 0 stands for each group's `least`. One that is next to constant has no such zero point, so
    all of its numbers become 0."""
    values, least = _pairs(halves), least.reshape(len(halves), -1)
    scales = scales.reshape(least.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        zeros = -least / scales
    flat = ~(np.abs(zeros) <= MOST)
    values[flat] = 0
    scales, zeros = np.where(flat, np.abs(least), scales), np.where(flat, -np.sign(least), zeros)
    return {"weight": values.reshape(len(values), -1), "weight_scale": np.stack([scales, zeros], axis=-1)}
