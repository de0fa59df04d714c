"""How a checkpoint's weights are quantised: config.json's `quantization_config`, and which parameters it means.

What can't be read is refused by its name before a weight is. Of files that are there, their headers decide: a weight
stored as FP8 is quantised and must have its scales, any other isn't, whatever config.json says of it. Its lists of
modules that aren't quantised decide for dummy weights alone, which have no files.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.check import CheckpointError, TensorInfo, read_json
from jaxspec.config.json_values import shown
from jaxspec.models import int4, mxfp4, nvfp4
from jaxspec.models.fp8 import BLOCK
from jaxspec.models.weights import FourBits, Fp8, Int4, Mxfp4, Nvfp4, Param

INT4, MXFP4, NVFP4, MODELOPT = "int4", "mxfp4", "nvfp4", "modelopt"
F8, U8 = "F8_E4M3", "U8"  # one byte an element; quantised weights alone are stored so, and MXFP4's scales
E8M0 = "F8_E8M0"  # scales of FP8 that are powers of two ("scale_fmt": "ue8m0")
KINDS = ("block", "channel", "tensor")  # what has an FP8 scale: 128 x 128 numbers, an output, a whole matrix
MODELOPT_FP8 = {  # ModelOpt's algorithms of FP8 weights
    "FP8": "tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "channel",
    "FP8_PB_WO": "block",
    "FP8_BLOCK_SCALES": "block",
}
_INSTEAD = (
    "use the model's FP8 or unquantised checkpoint (with --quantization fp8, the latter is made FP8 while it loads)"
)
_METHODS = "awq, gptq, auto-round, compressed-tensors, fp8, fbgemm_fp8, modelopt or mxfp4"
_COMPRESSED = (
    "integers of 4 or 8 bits in one group (pack-quantized, int-quantized), NVFP4 (nvfp4-pack-quantized) or 8-bit floats"
)
_UNUSED = re.compile(
    r".*\.((input|output|q|k|v|kv)_scale|input_(global_scale|scale_ub|zero_point)|(\w+_)?activation_scale)"
)


@dataclass(frozen=True)
class Quantization:
    """FP8 weights of which each block of 128 x 128, each output, or each matrix has a scale: `kind`. Of files that are
    there, the shapes of scales decide.

    Or, of kind "mxfp4", stacks of experts' weights in MXFP4. Or, of kind "int4" or "nvfp4", weights of four bits of
    which `group` inputs share a scale, or all of them if that is None, and with `zeros` a zero point; `fp8` is the kind
    of FP8 weights beside these, if there are any.

    `kept` are names of modules that aren't quantised: a whole name, its first or its last parts, with `*` for any
    characters, or a regular expression behind `re:`.
    """

    kind: str
    kept: tuple[str, ...] = ()
    group: int | None = None
    zeros: bool = False
    fp8: str | None = None

    @property
    def kind_of_fp8(self) -> str | None:
        """The kind of scales that FP8 weights have; None: there are none."""
        return self.kind if self.kind in KINDS else self.fp8

    @property
    def block(self) -> int | None:
        """Inputs that share a scale of FP8; None: all of them."""
        return BLOCK if self.kind_of_fp8 == "block" else None

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes of one byte in which quantised weights and their scales are stored."""
        of_fp8 = (F8, E8M0) if self.kind_of_fp8 else ()
        return of_fp8 + {MXFP4: (U8,), NVFP4: (U8, F8)}.get(self.kind, ())

    def keeps(self, module: str) -> bool:
        """Whether a module isn't quantised."""
        return any(_names(pattern, module) for pattern in self.kept)


def read(hf: Mapping[str, Any], file: Path) -> Quantization | None:
    """Read config.json's description of quantised weights; None if they aren't quantised.

    Packed weights are `packed.read`'s.

    **Raises:** `CheckpointError` for any format but FP8 with float32 or bfloat16 scales, and MXFP4.
    """
    config = config_of(hf, file)
    if config is None:
        return None
    match config.get("quant_method"):
        case "fp8":
            return _fp8(config, file)
        case "fbgemm_fp8":
            return Quantization("channel", names(config, "modules_to_not_convert", file))
        case "compressed-tensors":
            return compressed(config, file)
        case "mxfp4":
            return Quantization(MXFP4, names(config, "modules_to_not_convert", file))
        case "modelopt" if modelopt_algorithms(config) <= MODELOPT_FP8.keys():
            return Quantization(modelopt_fp8(config), names(config, "ignore", file))
        case "modelopt" if config.get("quant_algo") is None:
            return None  # scales of keys and values alone
        case method:
            name, allowed = method if isinstance(method, str) else f"quant_method {shown(method)}", _METHODS
            if isinstance(config.get("quant_algo"), str):
                name += f" {' beside '.join(sorted(modelopt_algorithms(config)))}"
            if isinstance(bits := config.get("bits", config.get("w_bit")), int):
                name += f" in {bits} bits"
            if method == MODELOPT:
                allowed = f"NVFP4, W4A16_NVFP4, {', '.join(MODELOPT_FP8)}, or MIXED_PRECISION of these"
            raise CheckpointError(refusal(file, f"{name}, not {allowed}"))


def config_of(hf: Mapping[str, Any], file: Path) -> Mapping[str, Any] | None:
    """The `quantization_config` of a config.json, or of its text model; `compression_config` in older ones of
    compressed-tensors. **Raises:** `CheckpointError` if it is no mapping."""
    parts = [part for part in (hf, hf.get("text_config")) if isinstance(part, Mapping)]
    found = (part.get(key) for key in ("quantization_config", "compression_config") for part in parts)
    config = next((each for each in found if each), None)
    if config is not None and not isinstance(config, Mapping):
        raise CheckpointError(f"{file}: quantization_config must be a mapping, got {shown(config)}")
    own = config is not None and config.get("quant_method") == MODELOPT and "quantization" in config
    return _modelopts_own(config, file) if own else config


def beside_config(folder: Path) -> dict[str, Any] | None:
    """The `quantization_config` that a tool's own file stands for, as ModelOpt writes and older AutoGPTQ and AutoAWQ
    did; None if there is none. **Raises:** `CheckpointError`."""
    for name, method in (
        ("hf_quant_config.json", MODELOPT),
        ("quantize_config.json", "gptq"),
        ("quant_config.json", "awq"),
    ):
        if not (file := folder / name).is_file():
            continue
        config = read_json(file)
        if method != MODELOPT:
            return {"quant_method": method, **config}
        return _modelopts_own(config, file)
    return None


def _modelopts_own(config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """ModelOpt's own file, as a `quantization_config`. **Raises:** `CheckpointError`."""
    if not isinstance(own := config.get("quantization"), Mapping):
        raise CheckpointError(f"{file}: quantization must be a mapping, got {shown(own)}")
    return {**own, "quant_method": MODELOPT, "ignore": own.get("exclude_modules")}


def modelopt_algorithms(config: Mapping[str, Any]) -> set[str]:
    """Names of the formats that a checkpoint's layers have, NVFP4's with its group where that isn't 16 inputs."""
    layers = config.get("quantized_layers")
    if str(config.get("quant_algo")).upper() != "MIXED_PRECISION" or not isinstance(layers, Mapping) or not layers:
        layers = {"": config}

    def algorithm(layer: Any) -> str:
        layer = layer if isinstance(layer, Mapping) else {}
        name, group = str(layer.get("quant_algo")).upper(), layer.get("group_size")
        own = nvfp4.GROUP if "NVFP4" in name else BLOCK if MODELOPT_FP8.get(name) == "block" else group
        return f"{name} in groups of {shown(group)}" if group not in (None, own) else name

    return set(map(algorithm, layers.values()))


def modelopt_fp8(config: Mapping[str, Any]) -> str | None:
    """The kind of scales that a checkpoint's FP8 weights have, or most of its algorithms; None if there are none."""
    kinds = [MODELOPT_FP8[name] for name in modelopt_algorithms(config) if name in MODELOPT_FP8]
    return max(sorted(kinds), key=kinds.count, default=None)


def _fp8(config: Mapping[str, Any], file: Path) -> Quantization:
    block = config.get("weight_block_size")
    if block is not None and (not isinstance(block, list | tuple) or list(block) != [BLOCK, BLOCK]):
        raise CheckpointError(refusal(file, f"fp8 with weight_block_size {shown(block)}, not [{BLOCK}, {BLOCK}]"))
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise CheckpointError(refusal(file, f"fp8 with fmt {shown(config['fmt'])}, not e4m3"))
    return Quantization("tensor" if block is None else "block", names(config, "modules_to_not_convert", file))


def compressed(config: Mapping[str, Any], file: Path) -> Quantization | None:
    """Read compressed-tensors' description of FP8 weights. Groups without weights are of keys, values and scores.

    **Raises:** `CheckpointError` for any other format.
    """
    groups = config.get("config_groups")
    if isinstance(groups, Mapping):
        groups = {name: g for name, g in groups.items() if not isinstance(g, Mapping) or g.get("weights") is not None}
    if groups == {}:
        return None  # scales of keys and values alone
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(g, Mapping) for g in groups.values()):
        raise CheckpointError(f"{file}: compressed-tensors: config_groups must be a mapping, got {shown(groups)}")
    if not all(isinstance(group.get("weights"), Mapping) for group in groups.values()):
        raise CheckpointError(f"{file}: compressed-tensors: a group's weights must be a mapping")
    found, all_of_them = [], " beside ".join(dict.fromkeys(map(_described, groups.values())))
    for group in groups.values():
        weights = group["weights"]
        bits, number, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
        if (bits, number) != (8, "float") or strategy not in KINDS:
            layout = config.get("format") or group.get("format")
            raise CheckpointError(refusal(file, f"compressed-tensors {layout}, {all_of_them}, not {_COMPRESSED}"))
        block = weights.get("block_structure")
        if strategy == "block" and block not in ([BLOCK, BLOCK], (BLOCK, BLOCK), f"{BLOCK}x{BLOCK}", None):
            raise CheckpointError(refusal(file, f"compressed-tensors in blocks {shown(block)}, not {BLOCK} x {BLOCK}"))
        found.append(strategy)
    return Quantization(found[0], names(config, "ignore", file))


def _described(group: Mapping[str, Any]) -> str:
    """Describe what one of compressed-tensors' groups has, for a refusal."""
    weights, rows = group["weights"], group.get("input_activations")
    said = f"{weights.get('num_bits')}-bit {weights.get('type')} with strategy {shown(weights.get('strategy'))}"
    if (size := weights.get("group_size")) is not None:
        said += f" of {shown(size)} inputs"
    return f"{said} and {rows.get('num_bits')}-bit activations" if isinstance(rows, Mapping) else said


def names(config: Mapping[str, Any], key: str, file: Path) -> tuple[str, ...]:
    """A config's list of modules. **Raises:** `CheckpointError` if it is none, or for a name that is no pattern."""
    given = config.get(key) or ()
    if not isinstance(given, list | tuple) or not all(isinstance(name, str) for name in given):
        raise CheckpointError(f"{file}: quantization_config: {key} must be a list of names, got {shown(given)}")
    for name in given:
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except re.error as error:
            raise CheckpointError(
                f"{file}: quantization_config: {key}: {shown(name)} is no pattern: {error}"
            ) from error
    return tuple(given)


def refusal(file: Path, what: str) -> str:
    """The message for a format that isn't read."""
    return f"{file}: weights quantised by {what} (quantization_config) are not supported; {_INSTEAD}"


def _names(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    pattern = pattern.replace("model.language_model.", "model.", 1)
    if "*" in pattern:
        return re.fullmatch(re.escape(pattern).replace(r"\*", ".*") + r"(\..*)?", module) is not None
    return module == pattern or module.startswith(pattern + ".") or module.endswith("." + pattern)


def unused(name: str) -> bool:
    """Whether a tensor belongs to the format, but is no weight's: scales of activations, or of keys and values.

    Activations are quantised by their own largest magnitude, which is never less exact. `kv_scales` reads those of keys
    and values.
    """
    return _UNUSED.fullmatch(name) is not None


def as_stored(param: Param, found: Mapping[str, TensorInfo], how: Quantization, activations: bool, where: str) -> Param:
    """The declaration with format and scales as the file has them.

    **Raises:** `CheckpointError` for FP8 where it can't be read: an embedding or a norm, or one projection of several
    that are fused, or several whose scales are of different kinds.
    """
    if how.kind == MXFP4:
        return _stored_as_mxfp4(param, found, where)
    if how.kind in (INT4, NVFP4) and any(is_packed(source, found) for source in param.sources):
        return _stored_in_four_bits(param, found, how, where)
    stored = [source for source in param.sources if source in found and found[source].dtype == F8]
    if not stored:
        return param
    if not param.of_matmul:
        raise CheckpointError(f"{where}: {stored[0]} is stored as {F8}; only weights of matmuls can be")
    if other := [source for source in param.sources if source not in stored and source in found]:
        raise CheckpointError(
            f"{where}: {stored[0]} is quantised and {other[0]} isn't. They are one matmul here: quantise both or none"
        )
    if (shared := f"{param.whole}_scale") in found and param.sources != (param.whole,):  # one of all sources
        return dataclasses.replace(param, format=Fp8(None), scales=((shared, (1,)),) * len(param.sources))
    by_input = param.stacked and param.transpose
    each = {source: _scale(source, shape, found, how, by_input) for source, shape in param.stored_values().items()}
    in_blocks = {kind == "block": source for source, (_, _, kind) in each.items()}
    if len(in_blocks) > 1:
        raise CheckpointError(
            f"{where}: {in_blocks[True]} has scales in blocks and {in_blocks[False]} hasn't. They are one matmul here: "
            "give both scales of one kind"
        )
    format = _e4m3(param, BLOCK if True in in_blocks else None, activations)
    return dataclasses.replace(param, format=format, scales=tuple((name, shape) for name, shape, _ in each.values()))


def is_packed(source: str, found: Mapping[str, TensorInfo]) -> bool:
    """Whether a weight is stored in four bits, under the names of `packed`."""
    return source in found and found[source].dtype == U8


def beside(source: str, what: str) -> str:
    """Name of the tensor that `packed` gives beside a weight's numbers: its "weight_scale", or its "order"."""
    return f"{source.removesuffix('.weight')}.{what}"


def _stored_in_four_bits(param: Param, found: Mapping[str, TensorInfo], how: Quantization, where: str) -> Param:
    """The declaration of a weight all of whose sources are packed alike."""
    if not param.of_matmul:
        raise CheckpointError(f"{where}: {param.sources[0]} is packed; only weights of matmuls can be")
    of_first = found[beside(param.sources[0], "weight_scale")].shape
    order = beside(param.sources[0], "order")
    order = order if order in found else ""
    format = Nvfp4() if how.kind == NVFP4 else Int4(how.group, of_first[2] == 2, bool(order))
    rows = (shape[0] for shape in param.stored_values().values())
    scales = tuple((beside(s, "weight_scale"), (n, *of_first[1:])) for s, n in zip(param.sources, rows, strict=True))
    return dataclasses.replace(param, format=format, scales=scales, order=order)


def to_dequantise(
    declared: Iterable[Param],
    found: Mapping[str, TensorInfo],
    orders: Mapping[str, np.ndarray],
    divided: bool,
) -> set[str]:
    """Packed sources of parameters that can't stay packed here.

    Those are weights that something else is asked of, or that are no matmul's; fused ones some of which aren't packed,
    or not alike; and those whose inputs are in an order of their own, if they are `divided` by it among devices, or are
    experts'.
    """
    out = set()
    for param in declared:
        stored = [source for source in param.sources if is_packed(source, found)]
        if not stored or isinstance(param.format, Mxfp4):
            continue
        alike = {found[beside(source, "weight_scale")].shape[1:] for source in stored}
        each = [orders.get(beside(source, "order"), ()) for source in stored]  # empty: in order
        same, in_order = all(np.array_equal(order, each[0]) for order in each), not any(map(len, each))
        by_input = divided and param.split is not None and param.split.along == "inputs"
        fits = len(stored) == len(param.sources) and len(alike) == 1 and same and param.of_matmul
        if not fits or param.format.quantised or (not in_order and (param.stacked or by_input)):
            out.update(stored)
    return out


def _stored_as_mxfp4(param: Param, found: Mapping[str, TensorInfo], where: str) -> Param:
    if param.stacked and any(f"{param.whole}_{ending}" in found for ending in ("blocks", "scales")):
        param = as_mxfp4(param, where)
    packed = isinstance(param.format, Mxfp4)
    for name in param.stored():
        if name in found and (found[name].dtype == U8) != packed:
            raise CheckpointError(
                f"{where}: {name} is stored as {found[name].dtype}; blocks and scales of experts are {U8} in MXFP4 "
                "checkpoints, and nothing else is"
            )
    return param


def as_mxfp4(param: Param, where: str) -> Param:
    """The declaration of a stack of experts' weights that is stored in MXFP4.

    **Raises:** `CheckpointError` for inputs that no blocks of 32 divide.
    """
    experts, outputs, inputs = param.shape
    if inputs % mxfp4.BLOCK:
        raise CheckpointError(
            f"{where}: {param.whole} has {inputs} inputs by the config; MXFP4 weights have a multiple of {mxfp4.BLOCK}"
        )
    scales = (f"{param.whole}_scales", (experts, outputs, inputs // mxfp4.BLOCK))
    name = f"{param.whole}_blocks"
    return dataclasses.replace(param, sources=(name,), whole=name, transpose=False, format=Mxfp4(), scales=(scales,))


def _scale(
    source: str, shape: tuple[int, ...], found: Mapping[str, TensorInfo], how: Quantization, by_input: bool
) -> tuple[str, tuple[int, ...], str | None]:
    """Name, shape and kind of the tensor of a source's scales. `by_input`: experts' matrices are [inputs, outputs].

    The kind is the config's, unless the shape is exactly another's.
    """
    own = how.kind_of_fp8 or "tensor"
    names = [f"{source}_{ending}" for ending in ("scale_inv", "scale")]
    name = next((name for name in names if name in found), names[own != "block"])
    *stack, rows, inputs = shape
    shapes = {
        "block": (*stack, -(-rows // BLOCK), -(-inputs // BLOCK)),
        "channel": (*stack, 1, inputs) if by_input else (*stack, rows, 1),
        "tensor": (*stack, 1),
    }
    there = found[name].shape if name in found else shapes[own]
    exact = there[::2] if len(there) == 4 else there  # ModelOpt's of blocks are [out, 1, in, 1]
    kind = next((kind for kind in (own, *KINDS) if shapes[kind] == exact), own)
    # Exporters differ in axes of one.
    long = [[n for n in each if n != 1] for each in (there, shapes[kind])]
    alike = exact == shapes[kind] if kind == "block" else long[0] == long[1]
    return name, there if alike else shapes[kind], kind


def _e4m3(param: Param, block: int | None, activations: bool) -> Fp8:
    """The format of a weight that is made or stored as FP8. Rows of experts, and of what is never quantised on load,
    keep their dtype."""
    return Fp8(block, activations and not param.stacked and not param.exact)


def quantised_on_load(param: Param, activations: bool, how: Quantization | None = None, to: str | None = None) -> Param:
    """The declaration of a weight that is quantised `to` "fp8", "int4" or "nvfp4" while it loads, or as `how` says,
    of dummy weights. FP8 is in blocks, unless the declaration says `by_output`; int4 symmetric in groups of 128 inputs,
    or the largest divisor of their number.

    **Raises:** `CheckpointError` as `as_mxfp4`.
    """
    if not param.of_matmul or param.exact:
        return param
    if how is not None and any(how.keeps(source.removesuffix(".weight")) for source in param.sources):
        return param
    if how is not None and how.kind == MXFP4:
        return as_mxfp4(param, "config.json") if param.stacked and param.whole else param
    if (format := _four_bits_on_load(param.shape[-1 if param.stacked else 0], how, to)) is not None:
        return dataclasses.replace(param, format=format)
    if (to if how is None else how.kind) in (INT4, NVFP4):
        return param
    block = how.block if how is not None else None if param.by_output else BLOCK
    return dataclasses.replace(param, format=_e4m3(param, block, activations))


def _four_bits_on_load(inputs: int, how: Quantization | None, to: str | None) -> FourBits | None:
    """The format of a weight of so many inputs that is to have four bits; None if it isn't, or can't."""
    if (to if how is None else how.kind) == NVFP4:
        return None if inputs % mxfp4.BLOCK else Nvfp4()
    if how is None:
        group = int4.group_of(inputs) if to == INT4 else None
        return None if group is None else Int4(group)
    if how.kind != INT4 or inputs % (how.group or int4.BLOCK):
        return None
    return Int4(how.group)
