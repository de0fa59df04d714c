"""Weights of 4 or 8 bits packed into 32-bit words, as AWQ, GPTQ and compressed-tensors publish them.

They are dequantised while they are read: a module's tensors leave as the one `weight` that an unquantised checkpoint
has, so nothing behind this module knows of them. A weight is (number - zero point) x scale, with a scale and a zero
point for each group of inputs of an output.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.check import CheckpointError, TensorInfo
from jaxspec.checkpoint.quantization import config_of, refusal
from jaxspec.config.json_values import shown

AWQ, GPTQ, COMPRESSED = "awq", "gptq", "compressed-tensors"
BITS = (4, 8)
# What a module's weight is stored as: what it must have, and what it may have.
_PARTS = {
    AWQ: (("qweight", "qzeros", "scales"), ()),
    GPTQ: (("qweight", "qzeros", "scales"), ("g_idx",)),
    COMPRESSED: (("weight_packed", "weight_scale"), ("weight_shape", "weight_zero_point", "weight_g_idx")),
}
_WORDS = ("qweight", "qzeros", "weight_packed", "weight_zero_point")
# AWQ's column of each four bits of a word, from the lowest on: https://arxiv.org/abs/2306.00978, AutoAWQ's GEMM kernel.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Packed:
    """How a checkpoint packs its weights.

    `kind`: AWQ, GPTQ or COMPRESSED. `group`: inputs that share a scale; None: all of them. `less`: what was taken from
    zero points before they were stored.
    """

    kind: str
    bits: int
    group: int | None
    less: int = 0

    def tensors(self, found: Mapping[str, TensorInfo], where: Path) -> dict[str, TensorInfo]:
        """The tensors of an unquantised checkpoint in place of those `found`; bytes are those stored.

        **Raises:** `CheckpointError` for a weight of which a part is missing, or is no matrix of words.
        """
        parts = self._parts(found)
        kept = {name: info for name, info in found.items() if self._module(name, parts) is None}
        (first, *others), _ = _PARTS[self.kind]
        for module, names in parts.items():
            if lacking := [part for part in others if part not in names]:
                raise CheckpointError(
                    f"{where}: {module} has {first} and no {' and no '.join(lacking)}; download its files again"
                )
            for name in (f"{module}.{part}" for part in names if part in _WORDS):
                if found[name].dtype != "I32" or len(found[name].shape) != 2:
                    said = f"{name} is {found[name].dtype} {list(found[name].shape)}"
                    raise CheckpointError(f"{where}: {said}; packed numbers are a matrix of I32")
            size = sum(found[f"{module}.{part}"].nbytes for part in names)
            kept[f"{module}.weight"] = TensorInfo(self._shape(found[f"{module}.{first}"].shape), size, "F32")
        return kept

    def read(
        self, tensors: Iterable[tuple[str, np.ndarray]], found: Collection[str]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The stored tensors, called as in `found`, with each packed weight in place of its parts: f32[out, in].

        The host holds one dequantised weight, and the parts of those that aren't complete.

        **Raises:** `CheckpointError` for parts that don't fit one another, and scales that aren't finite numbers.
        """
        parts, left = self._parts(found), {}
        for name, array in tensors:
            module = self._module(name, parts)
            if module is None:
                yield name, array
                continue
            have = left.setdefault(module, {})
            have[name.removeprefix(f"{module}.")] = array
            del array  # or it would stay while the next one is read
            if len(have) == len(parts[module]):
                yield f"{module}.weight", self._dequantised(module, left.pop(module))

    def _parts(self, found: Collection[str]) -> dict[str, list[str]]:
        """Stored parts of each packed weight, by its module."""
        needed, more = _PARTS[self.kind]
        modules = [name.removesuffix(f".{needed[0]}") for name in found if name.endswith(f".{needed[0]}")]
        return {module: [part for part in (*needed, *more) if f"{module}.{part}" in found] for module in modules}

    def _module(self, name: str, parts: Mapping[str, list[str]]) -> str | None:
        """The module whose packed weight this tensor is a part of."""
        module, _, part = name.rpartition(".")
        return module if part in parts.get(module, ()) else None

    def _shape(self, words: tuple[int, ...]) -> tuple[int, int]:
        """[out, in] of a weight by the shape of its words."""
        (rows, columns), each = words, 32 // self.bits
        shapes = {AWQ: (columns * each, rows), GPTQ: (columns, rows * each), COMPRESSED: (rows, columns * each)}
        return shapes[self.kind]

    def _dequantised(self, module: str, parts: dict[str, np.ndarray]) -> np.ndarray:
        numbers, zeros, scales, groups = self._stored(parts)
        outputs, inputs = numbers.shape
        width = self.group or inputs
        if scales.shape != (outputs, -(-inputs // width)) or np.shape(zeros) not in ((), scales.shape):
            raise CheckpointError(
                f"{module}: scales {list(scales.shape)} and zero points {list(np.shape(zeros))} don't fit a weight "
                f"{[outputs, inputs]} of which {width} inputs share a scale (quantization_config); download it again"
            )
        scales = np.asarray(scales, np.float32)
        if not np.isfinite(scales).all():
            raise CheckpointError(f"{module} has scales that aren't finite numbers; download the file again")
        zeros = np.broadcast_to(np.asarray(zeros, np.float32), scales.shape)
        in_order = np.arange(inputs) // width
        if groups is not None and (groups.shape != (inputs,) or (np.sort(groups) != in_order).any()):
            raise CheckpointError(f"{module}: its inputs' groups (g_idx) don't fit its scales; download the file again")
        if groups is None or (groups == in_order).all():
            return _times_scales(numbers, zeros, scales, width)
        order = np.argsort(groups, kind="stable")
        return np.take(_times_scales(numbers[:, order], zeros, scales, width), np.argsort(order), axis=1)

    def _stored(
        self, parts: dict[str, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray | int, np.ndarray, np.ndarray | None]:
        """Numbers uint8[out, in], zero points [out, groups] or one for all, scales [out, groups], and each input's
        group where the file says it."""
        return {AWQ: self._awq, GPTQ: self._gptq, COMPRESSED: self._compressed}[self.kind](parts)

    def _awq(self, parts: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """Words stand [in, out / 8] and [groups, out / 8]."""

        def outputs(words: np.ndarray) -> np.ndarray:
            words = np.ascontiguousarray(words.T)
            made = np.empty((len(words), 8, words.shape[1]), np.uint8)
            for i, column in enumerate(_AWQ_ORDER):
                made[:, column] = words >> (4 * i) & 15
            return made.reshape(-1, words.shape[1])

        return outputs(parts["qweight"]), outputs(parts["qzeros"]), parts["scales"].T, None

    def _gptq(self, parts: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """Words stand [in / 8, out] and [groups, out / 8]."""
        zeros = _unpacked(parts["qzeros"], self.bits).T.astype(np.float32) + self.less
        return _unpacked(parts["qweight"].T, self.bits), zeros, parts["scales"].T, parts.get("g_idx")

    def _compressed(self, parts: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """Words stand [out, in / 8] and [out / 8, groups]. All numbers, zero points too, had half of their range added
        to them."""
        numbers, scales = _unpacked(parts["weight_packed"], self.bits), parts["weight_scale"]
        if (shape := parts.get("weight_shape")) is not None:
            numbers = numbers[: int(shape[0]), : int(shape[1])]
        zeros = 1 << (self.bits - 1)
        if (words := parts.get("weight_zero_point")) is not None:
            zeros = _unpacked(words.T, self.bits).T[: len(scales)]
        return np.ascontiguousarray(numbers), zeros, scales, parts.get("weight_g_idx")


def _times_scales(numbers: np.ndarray, zeros: np.ndarray, scales: np.ndarray, width: int) -> np.ndarray:
    """f32[out, in] of numbers of which so many inputs share a scale and a zero point; the last group may be smaller."""
    made = numbers.astype(np.float32)
    for group in range(scales.shape[1]):
        part = made[:, group * width : (group + 1) * width]
        part -= zeros[:, group, None]
        part *= scales[:, group, None]
    return made


def _unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """The numbers in 32-bit words [r, n], the lowest bits first: uint8 [r, 32 n / bits]."""
    each = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return each
    return np.stack([each & 15, each >> 4], axis=-1).reshape(len(words), -1)


def read(hf: Mapping[str, Any], file: Path) -> Packed | None:
    """Read config.json's description of packed weights; None if they aren't packed.

    **Raises:** `CheckpointError` for AWQ or GPTQ in a layout that isn't read.
    """
    config = config_of(hf, file)
    if config is None:
        return None
    match config.get("quant_method"):
        case "awq":
            return _read_awq(config, file)
        case "gptq":
            return _read_gptq(config, file)
        case "compressed-tensors":
            return _read_compressed(config)
    return None


def _read_awq(config: Mapping[str, Any], file: Path) -> Packed:
    bits, version = config.get("bits", config.get("w_bit", 4)), str(config.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm" or not config.get("zero_point", True):
        said = (
            f"awq in {shown(bits)} bits, version {shown(version)}, zero_point {shown(config.get('zero_point', True))}"
        )
        raise CheckpointError(refusal(file, f"{said}, not in 4 bits of version gemm with zero points"))
    return Packed(AWQ, 4, _group(config.get("group_size", config.get("q_group_size", 128)), AWQ, file))


def _read_gptq(config: Mapping[str, Any], file: Path) -> Packed:
    bits, layout = config.get("bits", 4), config.get("checkpoint_format") or "gptq"
    if bits not in BITS or layout not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        said = f"gptq in {shown(bits)} bits, checkpoint_format {shown(layout)}"
        raise CheckpointError(refusal(file, f"{said}, not in 4 or 8 bits of gptq or gptq_v2"))
    if several := [name for name in config.get("dynamic") or () if not str(name).startswith("-:")]:
        raise CheckpointError(refusal(file, f"gptq with settings of its own for {shown(several[0])} (dynamic)"))
    return Packed(GPTQ, bits, _group(config.get("group_size", 128), GPTQ, file), less=int(layout == "gptq"))


def _read_compressed(config: Mapping[str, Any]) -> Packed | None:
    """None for what `quantization.read` reads, or refuses by name."""
    groups = config.get("config_groups")
    found = set()
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping) or "pack-quantized" not in (config.get("format"), group.get("format")):
            return None
        bits, strategy, size = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size")
        if weights.get("type") != "int" or bits not in BITS or group.get("input_activations") is not None:
            return None
        if strategy != "channel" and not (strategy == "group" and type(size) is int and size > 0):
            return None
        found.add((bits, size if strategy == "group" else None))
    return Packed(COMPRESSED, *found.pop()) if len(found) == 1 else None


def _group(size: Any, method: str, file: Path) -> int | None:
    """Inputs that share a scale; -1 means all."""
    if type(size) is not int or (size < 1 and size != -1):
        raise CheckpointError(refusal(file, f"{method} with group_size {shown(size)}, not a number of inputs or -1"))
    return None if size == -1 else size


def told(packed: Packed, dtype: str, quantization: str | None) -> str:
    """Describe for the log how the weights are used."""
    if quantization is not None:
        return f"weights of {packed.bits} bits ({packed.kind}) are dequantised and made {quantization} as they are read"
    return (
        f"weights of {packed.bits} bits ({packed.kind}) are dequantised to {dtype} as they are read, and take as much "
        "memory as unquantised ones; --quantization fp8 makes them FP8"
    )
