"""Packed weights, as AWQ, GPTQ, compressed-tensors and ModelOpt publish them: integers of 4 or 8 bits, and NVFP4.
Integers that have a byte each (INT8) are read by the same code.

An integer weight is (number - zero point) x scale, with a scale and a zero point for each group of inputs of an output.
An NVFP4 one is number x scale x factor, with a scale for each 16 inputs and a factor for the matrix.

Weights of four bits stay packed. Whatever the tool, a module's tensors leave as `weight`, u8[out, in / 2], the first
number in the low half, and `weight_scale`, [out, groups, n]: scales alone, or scales and what comes with each, which is
a zero point or NVFP4's factor. `order` has the inputs in the order of these, where they are sorted by group.

All others are dequantised while they are read: they leave as the one `weight` that an unquantised checkpoint has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.check import CheckpointError, TensorInfo
from jaxspec.checkpoint.quantization import (
    F8,
    INT4,
    MODELOPT,
    MODELOPT_FP8,
    NVFP4,
    U8,
    Quantization,
    compressed,
    config_of,
    modelopt_algorithms,
    modelopt_fp8,
    names,
    refusal,
)
from jaxspec.checkpoint.stored import Computed, Shared
from jaxspec.config.engine_config import ANY_ON_LOAD
from jaxspec.config.json_values import shown
from jaxspec.models import int4, mxfp4, nvfp4

AWQ, GPTQ, COMPRESSED, GGUF, INT8 = "awq", "gptq", "compressed-tensors", "gguf", "int-quantized"
BITS = (4, 8)
# What a module's weight is stored as: what it must have, and what it may have.
_PARTS = {
    AWQ: (("qweight", "qzeros", "scales"), ()),
    GPTQ: (("qweight", "qzeros", "scales"), ("g_idx",)),
    COMPRESSED: (("weight_packed", "weight_scale"), ("weight_shape", "weight_zero_point", "weight_g_idx")),
    NVFP4: (("weight_packed", "weight_scale", "weight_global_scale"), ()),
    MODELOPT: (("weight_scale_2", "weight", "weight_scale"), ()),
    INT8: (("weight_scale", "weight"), ("weight_zero_point", "weight_g_idx")),
}
_FORMATS = {"nvfp4-pack-quantized": NVFP4, "pack-quantized": COMPRESSED, "int-quantized": INT8}  # compressed-tensors'
_WORDS = ("qweight", "qzeros", "weight_packed", "weight_zero_point")
_SIZES = ("bits", "group_size")
_ROTATED = ("rotation", "rotation_config", "spinquant_config")  # GPTQModel's and AutoRound's
GROUPS = (".g_idx", ".weight_g_idx")  # what names of tensors end in that say each input's group
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# AWQ's column of each four bits of a word, from the lowest on: https://arxiv.org/abs/2306.00978, AutoAWQ's GEMM kernel.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Packed:
    """How a checkpoint packs its weights.

    `kind`: AWQ, GPTQ, COMPRESSED, INT8, or of NVFP4 that of compressed-tensors or MODELOPT. `group`: inputs that share
    a scale; None: all of them. `less`: what was taken from zero points before they were stored. `kept`: names of
    modules that aren't quantised, and `fp8`, as of `Quantization`. `needed`: parts without which a weight would be
    another by the config. Of kind GGUF are files of `gguf`, which read themselves.
    """

    kind: str
    bits: int
    group: int | None
    less: int = 0
    kept: tuple[str, ...] = field(default=(), compare=False)
    fp8: str | None = None
    needed: tuple[str, ...] = field(default=(), compare=False)

    @property
    def floats(self) -> bool:
        """Whether numbers are E2M1, not integers."""
        return self.kind in (NVFP4, MODELOPT)

    @property
    def quantization(self) -> Quantization | None:
        """The format in which weights stay; None if they are all dequantised."""
        if self.floats:
            return Quantization(NVFP4, self.kept, self.group, fp8=self.fp8)
        stay = self.bits == 4 and (self.group is None or self.group % int4.BLOCK == 0)
        return Quantization(INT4, self.kept, self.group, self.kind in (AWQ, GPTQ), self.fp8) if stay else None

    def stays(self, quantization: str | None) -> bool:
        """Whether weights stay packed with this `--quantization`: not as FP8, and those of GGUF, of which only some are
        packed, with none."""
        return quantization != "fp8" and (self.kind != GGUF or quantization is None)

    def orders(self, groups: Iterable[tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """By module, its inputs in the order of their groups, of the tensors that name each input's; none where that is
        the order in which they stand."""
        found = {}
        for name, each in groups:
            if self.group and (each != np.arange(len(each)) // self.group).any():
                found[name.rpartition(".")[0]] = np.argsort(each, kind="stable").astype(np.int32)
        return found

    def tensors(
        self,
        found: Mapping[str, TensorInfo],
        where: Path,
        ordered: Container[str] = (),
        dequantised: Container[str] = (),
    ) -> dict[str, TensorInfo]:
        """Tensors under their common names in place of those `found`; bytes are those stored. `ordered` are modules
        whose inputs are in another order. All tensors in `dequantised` leave as unquantised.

        **Raises:** `CheckpointError` for a weight of which a part is missing, or has another shape or dtype.
        """
        parts = self._parts(found)
        kept = {name: info for name, info in found.items() if self._module(name, parts) is None}
        (first, *others), _ = _PARTS[self.kind]
        for module, held in parts.items():
            if lacking := [part for part in (*others, *self.needed) if part not in held]:
                raise CheckpointError(
                    f"{where}: {module} has {first} and no {' and no '.join(lacking)}; download its files again"
                )
            for part in held:
                self._check_part(f"{module}.{part}", part, found[f"{module}.{part}"], where)
            words = found[f"{module}.{'weight' if self.kind in (MODELOPT, INT8) else first}"]
            size, (outputs, inputs) = sum(found[f"{module}.{part}"].nbytes for part in held), self._shape(words.shape)
            if f"{module}.weight" in dequantised or not self._stays(inputs):
                kept[f"{module}.weight"] = TensorInfo((outputs, inputs), size, "F32")
                continue
            kept[f"{module}.weight"] = TensorInfo((outputs, inputs // 2), words.nbytes, U8)
            beside = 1 if self.kind == COMPRESSED and "weight_zero_point" not in held else 2
            shape = outputs, inputs // (self.group or inputs), beside
            kept[f"{module}.weight_scale"] = TensorInfo(shape, size - words.nbytes, "F32")
            if module in ordered:
                kept[f"{module}.order"] = TensorInfo((inputs,), 4 * inputs, "I32")
        return kept

    def _check_part(self, name: str, part: str, info: TensorInfo, where: Path) -> None:
        """**Raises:** `CheckpointError` for a part of another shape or dtype."""
        if part in (*_WORDS, "weight"):
            dtype = U8 if self.floats else "I8" if self.kind == INT8 else "I32"
            fits, said = info.dtype == dtype and len(info.shape) == 2, f"packed numbers are a matrix of {dtype}"
        elif part == "weight_shape":
            fits, said = info.shape == (2,), "a weight has two axes"
        else:
            floats = "F32", "F16", "BF16", *([F8] if self.floats else [])
            fits, said = f".{part}" in GROUPS or info.dtype in floats, f"scales are {', '.join(floats)}"
        if not fits or 0 in info.shape:
            raise CheckpointError(f"{where}: {name} is {info.dtype} {list(info.shape)}; {said}")

    def _stays(self, inputs: int) -> bool:
        """Whether a weight of so many inputs stays packed: of four bits, in whole groups of whole blocks."""
        block, group = (mxfp4.BLOCK, nvfp4.GROUP) if self.floats else (int4.BLOCK, self.group or inputs)
        return self.quantization is not None and inputs % block == 0 and inputs % group == 0

    def stored(
        self, tensors: Mapping[str, Any], listed: Mapping[str, TensorInfo], dequantised: Container[str] = ()
    ) -> dict[str, Any]:
        """The tensors that are `listed` by the method `tensors`. A packed weight is made of its parts when it is read.

        **Raises:** then `CheckpointError` for parts that don't fit one another, and scales that aren't finite numbers.
        """
        parts, found, seen = self._parts(tensors), {}, set()
        for name, tensor in tensors.items():
            module = self._module(name, parts)
            if module is None:
                found[name] = tensor
            if module is None or module in seen:
                continue
            seen.add(module)
            own = {part: tensors[f"{module}.{part}"] for part in parts[module]}
            weight = Shared(partial(self.made, module, own, f"{module}.weight" in dequantised))
            for part in ("weight", "weight_scale", "order"):
                if (info := listed.get(f"{module}.{part}")) is not None:
                    size = info.nbytes + (4 if info.dtype == "F32" else 1) * math.prod(info.shape)
                    found[f"{module}.{part}"] = Computed(size, partial(weight.take, part))
        return found

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
        """[out, in] of a weight by the shape of its words, or of NVFP4's bytes."""
        rows, columns = words
        if self.floats:
            return rows, columns * 2
        each = 32 // self.bits
        shapes = {AWQ: (columns * each, rows), GPTQ: (columns, rows * each), COMPRESSED: (rows, columns * each)}
        return (rows, columns) if self.kind == INT8 else shapes[self.kind]

    def made(self, module: str, parts: Mapping[str, Any], whole: bool = False) -> dict[str, np.ndarray]:
        """A module's tensors under common names, of its parts, arrays or yet to be read. `whole`: dequantised, even if
        it could stay packed."""
        parts = {part: each if isinstance(each, np.ndarray) else each.read() for part, each in parts.items()}
        return dict(self._made(module, parts, whole))

    def _made(self, module: str, parts: dict[str, np.ndarray], whole: bool) -> Iterator[tuple[str, np.ndarray]]:
        if self.floats:
            packed, scales = self._nvfp4(module, parts)
            if not whole and self._stays(packed.shape[1] * 2):
                yield from (("weight", packed), ("weight_scale", scales))
                return
            numbers = _E2M1[np.stack([packed & 15, packed >> 4], axis=-1)].reshape(len(packed), -1)
            by_group = np.repeat(scales.prod(-1), self.group, axis=1)
            yield "weight", numbers * by_group[:, : numbers.shape[1]]
            return
        numbers, zeros, scales, groups = self._stored(parts)
        outputs, inputs = numbers.shape
        width = self.group or inputs
        if scales.shape != (outputs, -(-inputs // width)) or np.shape(zeros) not in ((), scales.shape):
            raise CheckpointError(
                f"{module}: scales {list(scales.shape)} and zero points {list(np.shape(zeros))} don't fit a weight "
                f"{[outputs, inputs]} of which {width} inputs share a scale (quantization_config); download it again"
            )
        if not np.isfinite(np.asarray(scales, np.float32)).all():
            raise CheckpointError(f"{module} has scales that aren't finite numbers; download the file again")
        in_order, order = np.arange(inputs) // width, None
        if groups is not None and (groups.shape != (inputs,) or (np.sort(groups) != in_order).any()):
            raise CheckpointError(f"{module}: its inputs' groups (g_idx) don't fit its scales; download the file again")
        if groups is not None and (groups != in_order).any():
            order = np.argsort(groups, kind="stable").astype(np.int32)
            numbers = numbers[:, order]
        if not whole and self._stays(inputs):
            yield "weight", numbers[:, ::2] | numbers[:, 1::2] << 4
            beside = () if np.ndim(zeros) == 0 else (np.asarray(zeros, scales.dtype),)
            yield "weight_scale", np.stack([scales, *beside], axis=-1)
            if order is not None:
                yield "order", order
            return
        scales = np.asarray(scales, np.float32)
        zeros = np.broadcast_to(np.asarray(zeros, np.float32), scales.shape)
        weight = _times_scales(numbers, zeros, scales, width)
        yield "weight", weight if order is None else np.take(weight, np.argsort(order), axis=1)

    def _nvfp4(self, module: str, parts: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of numbers, and f32[out, groups, 2] of scales and the factor, which compressed-tensors stores as a
        divisor."""
        ours = self.kind == MODELOPT
        packed, scales = parts["weight" if ours else "weight_packed"], parts["weight_scale"].astype(np.float32)
        factor = np.asarray(parts["weight_scale_2" if ours else "weight_global_scale"], np.float32)
        if scales.shape != (len(packed), -(-packed.shape[1] * 2 // nvfp4.GROUP)) or factor.size != 1:
            raise CheckpointError(
                f"{module}: scales {list(scales.shape)} and factors {list(factor.shape)} don't fit a weight "
                f"{[len(packed), packed.shape[1] * 2]} of which {nvfp4.GROUP} inputs share a scale; download it again"
            )
        with np.errstate(divide="ignore"):
            factor = factor.reshape(()) if ours else np.float32(1) / factor.reshape(())
        if not (np.isfinite(scales).all() and np.isfinite(factor) and (scales >= 0).all() and factor >= 0):
            raise CheckpointError(f"{module} has scales that aren't finite numbers, or negative; download it again")
        return packed, np.stack([scales, np.broadcast_to(factor, scales.shape)], axis=-1)

    def _stored(
        self, parts: dict[str, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray | int, np.ndarray, np.ndarray | None]:
        """Numbers uint8[out, in], zero points [out, groups] or one for all, scales [out, groups], and each input's
        group where the file says it."""
        return {AWQ: self._awq, GPTQ: self._gptq}.get(self.kind, self._compressed)(parts)

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
        """Words stand [in / 8, out] and [groups, out / 8]. GPTQModel takes `less` from whole words of zero points, so
        that a zero point of 0 borrows from its neighbour, which the sum gives back."""
        ones = np.uint32(sum(self.less << bit for bit in range(0, 32, self.bits)))
        zeros = _unpacked(parts["qzeros"].view(np.uint32) + ones, self.bits).T
        return _unpacked(parts["qweight"].T, self.bits), zeros, parts["scales"].T, parts.get("g_idx")

    def _compressed(self, parts: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """Words stand [out, in / 8] and [out / 8, groups]. All numbers, zero points too, had half of their range added
        to them. Those of INT8 stand as they are, [out, in] and [out, groups]."""
        scales = parts["weight_scale"]
        if self.kind == INT8:
            numbers, zeros = parts["weight"], parts.get("weight_zero_point", np.int8(0))
            if scales.size == 1:  # of the whole matrix
                scales, zeros = np.broadcast_to(scales.reshape(1, 1), (len(numbers), 1)), zeros.reshape(())
            return numbers, zeros, scales, parts.get("weight_g_idx")
        numbers = _unpacked(parts["weight_packed"], self.bits)
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

    **Raises:** `CheckpointError` for AWQ or GPTQ in a layout that isn't read, and for rotations that need rows to be
    rotated, too.
    """
    config = config_of(hf, file)
    if config is None:
        return None
    if rotated := [key for key in _ROTATED if config.get(key)]:
        said = f"{config.get('quant_method')} with {rotated[0]} {shown(config[rotated[0]])}"
        raise CheckpointError(refusal(file, f"{said}, which asks for rotated rows"))
    match config.get("quant_method"):
        case "awq":
            return _read_awq(config, file)
        case "gptq":
            return _read_gptq(config, file)
        case "auto-round" | "intel/auto-round":
            return _read_auto_round(config, file)
        case "compressed-tensors":
            return _read_compressed(config, file)
        case "modelopt":
            return _read_modelopt(config, file)
    return None


def _read_awq(config: Mapping[str, Any], file: Path) -> Packed:
    bits, version = config.get("bits", config.get("w_bit", 4)), config.get("version") or _layout(config) or "gemm"
    version = str(version).lower()
    if bits != 4 or version != "gemm":
        said = f"awq in {shown(bits)} bits, version {shown(version)}, not in 4 bits of version gemm"
        raise CheckpointError(refusal(file, said))
    group = _group(config.get("group_size", config.get("q_group_size", 128)), AWQ, file)
    return Packed(AWQ, 4, group, kept=names(config, "modules_to_not_convert", file))


def _layout(config: Mapping[str, Any]) -> Any:
    """The layout that a config of GPTQ or AWQ names; GPTQModel has two keys for it."""
    return config.get("checkpoint_format") or config.get("format")


def _read_gptq(config: Mapping[str, Any], file: Path) -> Packed:
    bits, layout = config.get("bits", 4), _layout(config) or "gptq"
    if bits not in BITS or layout not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        said = f"gptq in {shown(bits)} bits, checkpoint_format {shown(layout)}"
        raise CheckpointError(refusal(file, f"{said}, not in 4 or 8 bits of gptq or gptq_v2"))
    apart = config.get("dynamic") or {}
    kept = [name for name in map(str, apart) if name.startswith("-:")]
    _check_own(config, "dynamic", kept, file)
    kept = tuple(f"re:{name.removeprefix('-:')}" for name in kept)
    group, needed = _group(config.get("group_size", 128), GPTQ, file), ("g_idx",) if config.get("desc_act") else ()
    return Packed(GPTQ, bits, group, int(layout == "gptq"), kept, needed=needed)


def _check_own(config: Mapping[str, Any], key: str, kept: Container[str], file: Path) -> None:
    """**Raises:** `CheckpointError` for modules with settings of their own, below `key`, that are packed otherwise."""
    if not isinstance(apart := config.get(key) or {}, Mapping):
        raise CheckpointError(f"{file}: quantization_config: {key} must be a mapping, got {shown(apart)}")
    for name, own in apart.items():
        alike = isinstance(own, Mapping) and all(own.get(k, config.get(k)) == config.get(k) for k in _SIZES)
        if name not in kept and not alike:
            said = f"{config['quant_method']} with settings of its own for {shown(name)} ({key})"
            raise CheckpointError(refusal(file, f"{said}, not the same bits and group_size for all"))


def _read_auto_round(config: Mapping[str, Any], file: Path) -> Packed:
    """AutoRound's own config, of weights packed as AutoGPTQ, GPTQModel, AutoAWQ or llm-compressor do it."""
    layout, number = config.get("packing_format") or config.get("backend") or "auto", config.get("data_type") or "int"
    packing = str(layout).removeprefix("auto_round:").partition(":")[0]
    rows = config.get("act_bits") or 16
    integers = number == "int" and rows == 16
    of_nvfp4 = str(number).startswith("nv_fp") and (config.get("bits"), config.get("group_size")) == (4, nvfp4.GROUP)
    if integers and packing in ("auto", "auto_gptq", "gptq"):
        packed = _read_gptq(config, file)
    elif integers and packing in ("auto_round", "gptqmodel"):
        packed = _read_gptq({**config, "checkpoint_format": "gptq_v2"}, file)
    elif integers and packing in ("auto_awq", "awq"):
        packed = _read_awq(config, file)
    elif of_nvfp4 and packing == "llm_compressor":
        packed = Packed(NVFP4, 4, nvfp4.GROUP)
    else:
        said = f"auto-round of {shown(number)} packed as {shown(layout)}, act_bits {shown(rows)}, not of 'int' with "
        said += "act_bits 16 as auto_round:auto_gptq, auto_round:gptqmodel or auto_round:auto_awq, or of 'nv_fp' as "
        raise CheckpointError(refusal(file, f"{said}auto_round:llm_compressor"))
    more = config.get("extra_config")
    more = more if isinstance(more, Mapping) else {}
    kept = tuple(name for name, own in more.items() if isinstance(own, Mapping) and own.get("bits") == 16)
    _check_own(config, "extra_config", kept, file)
    return dataclasses.replace(packed, kept=kept)


def _read_modelopt(config: Mapping[str, Any], file: Path) -> Packed | None:
    """NVFP4, alone or beside weights in FP8. None for what `quantization.read` reads, or refuses by name."""
    algorithms, nvfp4s = modelopt_algorithms(config), {"NVFP4", "W4A16_NVFP4"}
    if not algorithms & nvfp4s or not algorithms <= nvfp4s | MODELOPT_FP8.keys():
        return None
    return Packed(MODELOPT, 4, nvfp4.GROUP, fp8=modelopt_fp8(config), kept=names(config, "ignore", file))


def _read_compressed(config: Mapping[str, Any], file: Path) -> Packed | None:
    """Packed weights, alone or beside FP8. None for what `quantization.read` reads, or refuses by name."""
    groups = config.get("config_groups")
    _check_transforms(config.get("transform_config"), file)
    sparse = config.get("sparsity_config")
    if isinstance(sparse, Mapping) and sparse.get("format", "dense") != "dense":
        raise CheckpointError(refusal(file, f"compressed-tensors with sparsity {shown(sparse.get('format'))}"))
    found, fp8, asymmetric = set(), {}, []
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else {}
        if weights is None:
            continue
        if not isinstance(weights, Mapping):
            return None
        bits, number, strategy, size = (weights.get(key) for key in ("num_bits", "type", "strategy", "group_size"))
        if (bits, number) == (8, "float"):
            fp8[name] = group
            continue
        asymmetric.append(weights.get("symmetric") is False)
        kind = _FORMATS.get(group.get("format") or config.get("format"))
        by_group = strategy == "group" and type(size) is int and size > 0
        integers = number == "int" and bits in BITS and (by_group or strategy in ("channel", "tensor"))
        if kind == NVFP4 and (bits, number, strategy, size) == (4, "float", "tensor_group", nvfp4.GROUP):
            found.add((NVFP4, bits, size))
        elif kind == INT8 and integers:
            found.add((INT8, 8, size if by_group else None))
        elif kind == COMPRESSED and integers and strategy != "tensor":
            found.add((COMPRESSED, bits, size if by_group else None))
        else:
            return None
    if len(found) != 1:
        return None
    needed = ("weight_zero_point",) if all(asymmetric) else ()
    made = Packed(*found.pop(), kept=names(config, "ignore", file), needed=needed)
    if not fp8 or made.quantization is None:
        return None if fp8 else made
    return dataclasses.replace(made, fp8=compressed({**config, "config_groups": fp8}, file).kind)


def _check_transforms(config: Any, file: Path) -> None:
    """**Raises:** `CheckpointError` for rotations of rows. Those of weights are in the weights."""
    groups = config.get("config_groups") if isinstance(config, Mapping) else config
    schemes = groups.values() if isinstance(groups, Mapping) else [groups] if groups else []
    each = [scheme.get("apply") if isinstance(scheme, Mapping) else None for scheme in schemes]
    each = [arguments for apply in each for arguments in (apply if isinstance(apply, list) else [apply])]
    where = {arguments.get("location") if isinstance(arguments, Mapping) else arguments for arguments in each}
    if of_rows := sorted(map(str, where - {"weight_input", "weight_output"})):
        raise CheckpointError(refusal(file, f"compressed-tensors with transforms at {', '.join(of_rows)}"))


def _group(size: Any, method: str, file: Path) -> int | None:
    """Inputs that share a scale; -1 means all."""
    if type(size) is not int or (size < 1 and size != -1):
        raise CheckpointError(refusal(file, f"{method} with group_size {shown(size)}, not a number of inputs or -1"))
    return None if size == -1 else size


def told(packed: Packed, dtype: str, quantization: str | None) -> str:
    """Describe for the log how the weights are used."""
    weights = "weights in NVFP4" if packed.floats else f"weights of {packed.bits} bits ({packed.kind})"
    if not packed.stays(quantization):
        return f"{weights} are dequantised and made {quantization} as they are read"
    if packed.quantization is not None:
        return f"{weights} stay packed"
    more = "" if quantization else f"; --quantization {ANY_ON_LOAD} makes them smaller"
    now = f"and made {quantization}" if quantization else f"to {dtype}, and take as much memory as unquantised ones"
    return f"{weights} are dequantised {now} as they are read{more}"
