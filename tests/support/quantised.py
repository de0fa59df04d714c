"""Quantised checkpoints for tests, written by numpy and loops from the formats' definitions: nothing of ours but names.

An element of a matrix is its e4m3 number times the scale of its block, its row or its matrix.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

E4M3, E8M0, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16
NAMES = {
    np.dtype(E4M3): "F8_E4M3", np.dtype(E8M0): "F8_E8M0", np.dtype(BF16): "BF16", np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16", np.dtype(np.uint8): "U8", np.dtype(np.int32): "I32", np.dtype(np.int64): "I64",
    np.dtype(np.int8): "I8",
}  # fmt: skip
# Of matrices, those that published checkpoints leave as they are.
KEPT = re.compile(
    r".*(lm_head|embed_tokens|mlp\.gate|(mlp|feed_forward)\.router|shared_expert_gate|in_proj_ba|in_proj_a|in_proj_b|conv1d)\.weight"
    r"|.*(embeddings|mixer\.gate)\.weight|.*_bias"
)
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


def compressed(strategy: str, **weights) -> dict:
    """A quantization_config of compressed-tensors."""
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


def quantised(matrix: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """e4m3 numbers, scales and the matrix that they stand for, float32. `kind`: block, channel or tensor."""
    n, k = matrix.shape
    rows, columns = {"block": (128, 128), "channel": (1, k), "tensor": (n, k)}[kind]
    values, whole = np.zeros((n, k), E4M3), np.zeros((n, k), np.float32)
    scales = np.zeros((-(-n // rows), -(-k // columns)), np.float32)
    for i in range(0, n, rows):
        for j in range(0, k, columns):
            part = matrix[i : i + rows, j : j + columns]
            scale = np.float32(np.abs(part).max() / 448 or 1)
            values[i : i + rows, j : j + columns] = (part / scale).astype(E4M3)
            whole[i : i + rows, j : j + columns] = values[i : i + rows, j : j + columns].astype(np.float32) * scale
            scales[i // rows, j // columns] = scale
    return values, scales, whole


def write(
    source: Path,
    into: Path,
    kind: str = "block",
    config: dict = BLOCKS,
    suffix: str = "_scale_inv",
    scale_dtype=np.float32,
    kept: re.Pattern = KEPT,
) -> tuple[Path, Path]:
    """A checkpoint with FP8 weights and the same one dequantised, of the float32 one in `source`."""
    tensors, whole = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors[name] = whole[name] = tensor
        if tensor.ndim == 2 and not kept.fullmatch(name):
            values, scales, whole[name] = quantised(tensor, kind)
            if scale_dtype is not np.float32:  # scales that were rounded stand for another matrix
                rounded = scales.astype(scale_dtype)
                whole[name] = whole[name] / spread(scales, tensor.shape) * spread(rounded, tensor.shape)
                scales = rounded
            tensors[name], tensors[name + suffix] = values, scales.reshape(-1) if kind == "tensor" else scales
        elif "experts" in name and tensor.ndim == 3:  # each [inputs, outputs]
            made = zip(*(quantised(matrix.T, kind) for matrix in tensor), strict=True)
            tensors[name], tensors[name + suffix], whole[name] = (np.stack(each).swapaxes(1, 2) for each in made)
    return _folders(source, into, "fp8", tensors, whole, config)


def _folders(
    source: Path, into: Path, name: str, tensors: dict[str, np.ndarray], whole: dict[str, np.ndarray], config: dict
) -> tuple[Path, Path]:
    """Checkpoints of quantised tensors and of dequantised ones, everything else as in `source`."""
    for folder, content, more in (
        (into / name, tensors, {"quantization_config": config}),
        (into / "whole", whole, {}),
    ):
        folder.mkdir(parents=True)
        for file in source.iterdir():
            if file.suffix != ".safetensors":
                shutil.copy(file, folder)
        hf = json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**hf, **more}))
        save(content, folder / "model.safetensors")
    return into / name, into / "whole"


def spread(scales: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """A block's scale at each of its elements, float32."""
    rows, columns = (128 if n > 1 or size > 1 else size for n, size in zip(scales.shape, shape, strict=True))
    wide = np.repeat(np.repeat(scales.astype(np.float32), rows, axis=0), columns, axis=1)
    return wide[: shape[0], : shape[1]]


def save(tensors: dict[str, np.ndarray], file: Path) -> None:
    """A safetensors file, whose own library doesn't write e4m3 from numpy: a header's length, a header, the bytes."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = np.ascontiguousarray(tensor).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read(file: Path) -> dict[str, np.ndarray]:
    """Read a file of `save`."""
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header, dtypes = json.loads(raw[8:start]), {name: dtype for dtype, name in NAMES.items()}
    return {
        name: np.frombuffer(raw[start + a : start + b], dtypes[each["dtype"]]).reshape(each["shape"])
        for name, each in header.items()
        if name != "__metadata__"
        for a, b in [each["data_offsets"]]
    }


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
    ],
}  # fmt: skip


def mxfp4(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes [n, k / 32, 16], scales [n, k / 32] and the matrix f32[n, k] that they stand for, of one f32[n, k]."""
    n, k = matrix.shape
    blocks = matrix.reshape(n, k // 32, 32)
    largest = np.abs(blocks).max(-1)
    power = np.where(largest > 0, np.floor(np.log2(np.where(largest > 0, largest, 1))) - 2, 0)
    wide = 2.0 ** power[..., None]
    distance = np.abs(blocks[..., None] / wide[..., None] - E2M1)
    # The nearest, of two as near the one with an even mantissa. Zero has no sign.
    code = np.argmin(np.where(np.arange(16) == 8, np.inf, distance + 1e-7 * (np.arange(16) % 2)), axis=-1)
    packed = (code[..., 0::2] | code[..., 1::2] << 4).astype(np.uint8)
    return packed, (power + 127).astype(np.uint8), (E2M1[code] * wide).reshape(n, k).astype(np.float32)


def write_mxfp4(source: Path, into: Path) -> tuple[Path, Path]:
    """A checkpoint whose experts are packed and the same one dequantised, of gpt-oss' float32 one in `source`."""
    tensors, whole = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors[name] = whole[name] = tensor
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed, scales, values = zip(*(mxfp4(matrix.T) for matrix in tensors.pop(name)), strict=True)
            tensors |= {f"{name}_blocks": np.stack(packed), f"{name}_scales": np.stack(scales)}
            whole[name] = np.stack(values).swapaxes(1, 2)
    return _folders(source, into, "mxfp4", tensors, whole, MXFP4)
