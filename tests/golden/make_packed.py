"""Make tests/golden/packed: a weight of 128 inputs and 32 outputs as each tool packs it, and what the tool makes of it.

    python3.11 -m venv torch-venv
    torch-venv/bin/pip install torch safetensors transformers pydantic loguru psutil
    torch-venv/bin/pip install --no-deps compressed-tensors auto-gptq
    torch-venv/bin/pip install --no-deps --no-build-isolation autoawq
    torch-venv/bin/python tests/golden/make_packed.py

Each file has the tensors of the module `m` and `expected`, f32[out, in], by the tool's own code with scales in float32.
AutoGPTQ and AutoAWQ need more packages when imported whole, so their files are loaded one by one.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import torch
from compressed_tensors.compressors.naive_quantized.base import IntQuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import save_file

OUT = Path(__file__).resolve().parent / "packed"
INPUTS, OUTPUTS = 128, 32


def module(package: str, path: str) -> ModuleType:
    """A file of an installed package, without what the package imports."""
    folder = Path(importlib.util.find_spec(package).submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location(Path(path).stem, folder / path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def grid(bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random weights [out, in], and float16 scales and zero points [out, groups] that span each group."""
    weight = torch.randn(OUTPUTS, INPUTS)
    each = weight.reshape(OUTPUTS, -1, group)
    low, high = each.amin(-1).clamp(max=0), each.amax(-1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half()
    zeros = torch.round(-low / scales.float()).clamp(1, 2**bits - 1)  # AutoGPTQ can't store a zero point of 0
    least, most = (((end - zeros) * scales.float())[..., None] for end in (0, 2**bits - 1))
    return each.clamp(least, most).reshape(OUTPUTS, INPUTS), scales, zeros  # AutoGPTQ doesn't clamp


def save(name: str, tensors: dict[str, torch.Tensor], expected: torch.Tensor, weight: torch.Tensor) -> None:
    assert (expected - weight).abs().max() < 1.1 * tensors.get("scales", tensors.get("weight_scale")).max()
    stored = {f"m.{part}": tensor.contiguous() for part, tensor in tensors.items()}
    save_file(stored | {"expected": expected.detach().float().contiguous()}, OUT / f"{name}.safetensors")


def awq(group: int) -> None:
    packing = module("awq", "utils/packing_utils.py")
    weight, scales, zeros = grid(4, group)
    numbers = torch.round(weight.reshape(OUTPUTS, -1, group) / scales.float()[..., None] + zeros[..., None])
    numbers = numbers.clamp(0, 15).reshape(OUTPUTS, INPUTS).to(torch.int32).T
    order = packing.AWQ_ORDER

    def pack(values: torch.Tensor) -> torch.Tensor:  # as WQLinear_GEMM.from_linear does it, inside
        each = values.reshape(len(values), -1, 8)[..., order].to(torch.int64)
        words = (each << torch.arange(0, 32, 4)).sum(-1)
        return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)

    qweight, qzeros = pack(numbers), pack(zeros.to(torch.int32).T)
    made = packing.dequantize_gemm(qweight, qzeros, scales.T.float(), 4, group)
    save(f"awq-{group}", {"qweight": qweight, "qzeros": qzeros, "scales": scales.T}, made.T, weight)


def gptq(name: str, bits: int, group: int, ordered: bool) -> None:
    layer = module("auto_gptq", "nn_modules/qlinear/qlinear_cuda.py").QuantLinear(bits, group, INPUTS, OUTPUTS, False)
    weight, scales, zeros = grid(bits, group)
    order = torch.randperm(INPUTS) if ordered else torch.arange(INPUTS)
    weight, groups = weight[:, order], order // group
    linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    linear.weight.data = weight
    layer.pack(linear, scales.float(), zeros, groups.to(torch.int32))
    parts = {part: getattr(layer, part) for part in ("qweight", "qzeros", "scales", "g_idx")}
    parts["scales"] = parts["scales"].half()
    layer.scales = parts["scales"].float()
    layer.wf = layer.wf.to(layer.qzeros.device)
    layer.autogptq_cuda_available = False
    save(name, parts, layer(torch.eye(INPUTS)).T, weight)


def compressed(
    name: str, bits: int, group: int | None, symmetric: bool, tool: type = PackedQuantizationCompressor
) -> None:
    weight, scales, zeros = grid(bits, group or INPUTS)
    if symmetric:
        most = weight.reshape(OUTPUTS, -1, group or INPUTS).abs().amax(-1)
        scales = (most / (2 ** (bits - 1) - 1)).half()
    settings = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group}
    args = QuantizationArgs(**settings, strategy="group" if group else "channel")
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight": weight, "weight_scale": scales.float()}
    if not symmetric:
        state["weight_zero_point"] = (zeros - 2 ** (bits - 1)).to(torch.int8)
    packed = tool.compress(state, scheme)
    made = tool.decompress(packed, scheme)["weight"]
    save(name, packed | {"weight_scale": scales}, made, weight)


def nvfp4(name: str) -> None:
    weight = torch.randn(OUTPUTS, INPUTS)
    factor = (6 * 448 / weight.abs().max()).float().reshape(1)  # a divisor
    most = weight.reshape(OUTPUTS, -1, 16).abs().amax(-1)
    scales = (most / 6 * factor).to(torch.float8_e4m3fn).float()
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight": weight, "weight_scale": scales, "weight_global_scale": factor}
    packed = NVFP4PackedCompressor.compress(state, scheme)
    numbers = unpack_fp4_from_uint8(packed["weight_packed"], OUTPUTS, INPUTS, dtype=torch.float32)
    made = dequantize(numbers, scales, args=args, global_scale=factor, dtype=torch.float32)
    assert (made.float() - weight).abs().max() < 1.1 * (scales / factor).max()
    # numpy writes no e4m3, so a scale's bits are stored.
    parts = packed | {"weight_scale": packed["weight_scale"].view(torch.uint8), "expected": made.float()}
    save_file({part if part == "expected" else f"m.{part}": x.contiguous() for part, x in parts.items()}, OUT / name)


if __name__ == "__main__":
    torch.manual_seed(0)
    OUT.mkdir(exist_ok=True)
    awq(32)
    awq(128)
    gptq("gptq", 4, 32, ordered=False)
    gptq("gptq-order", 4, 32, ordered=True)
    gptq("gptq-8", 8, 64, ordered=False)
    compressed("compressed", 4, 32, symmetric=True)
    compressed("compressed-zeros", 4, 32, symmetric=False)
    compressed("compressed-channel-8", 8, None, symmetric=True)
    torch.manual_seed(1)
    compressed("compressed-channel", 4, None, symmetric=True)
    nvfp4("nvfp4.safetensors")
    torch.manual_seed(2)
    compressed("int8", 8, None, symmetric=True, tool=IntQuantizationCompressor)
    compressed("int8-zeros", 8, 32, symmetric=False, tool=IntQuantizationCompressor)
