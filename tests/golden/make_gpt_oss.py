"""Add tiny gpt_oss models, and what transformers computes, to tests/golden/checkpoints and tests/golden/expected.

Runs in the same environment as make_llama_qwen3.py, and makes files of the same kind. `gpt-oss-stacked` has experts in
float32, `[experts, in, out]`, as dequantised checkpoints have them. `gpt-oss-mxfp4` has them packed, as published ones
do: bytes and scales are drawn at random, and transformers' own `convert_moe_packed_tensors` makes of them the weights
that it computes with.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from make_llama_qwen3 import EPS, HERE, SIZES, YARN, expected, randomise
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

EXPERTS = dict(num_local_experts=5, num_experts_per_tok=2)
VARIANTS = {
    "gpt-oss-stacked": GptOssConfig(
        **SIZES | dict(intermediate_size=24), **EXPERTS, head_dim=16, sliding_window=20, rms_norm_eps=EPS,
        rope_parameters=YARN | dict(truncate=False), swiglu_limit=1.5, swiglu_alpha=1.2, tie_word_embeddings=True,
    ),
    "gpt-oss-mxfp4": GptOssConfig(
        **SIZES | dict(hidden_size=64, intermediate_size=32), **EXPERTS, head_dim=32, sliding_window=7,
        layer_types=["full_attention", "sliding_attention", "full_attention"], swiglu_limit=3.0,
    ),
}  # fmt: skip
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
    ],
}  # fmt: skip


def draw(model: GptOssForCausalLM) -> None:
    """Experts' matrices have their inputs first, and their biases two axes."""
    randomise(model, model.config.tie_word_embeddings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj_bias"):
                parameter.copy_(0.3 * torch.randn(parameter.shape))
            elif ".experts." in name:
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[1] ** -0.5)
            elif "embed_tokens" in name and model.config.tie_word_embeddings:
                parameter.mul_(0.3)  # sinks leave attention little to change a token's own likelihood with
            elif name.endswith("sinks"):  # so large that they take a share of most rows
                parameter.copy_(1 + 2 * torch.randn(parameter.shape))


def pack(model: GptOssForCausalLM) -> dict[str, torch.Tensor]:
    """Packed tensors drawn at random, whose values the model is given."""
    packed = {}
    for i, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name)
            experts, inputs, outputs = weight.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            # Three times the power of two are the numbers' deviation from zero.
            scales = torch.randint(121, 124, blocks.shape[:-1], dtype=torch.uint8)
            with torch.no_grad():
                weight.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            stem = f"model.layers.{i}.mlp.experts.{name}"
            packed |= {f"{stem}_blocks": blocks, f"{stem}_scales": scales}
    return packed


def main() -> None:
    for seed, (name, config) in enumerate(VARIANTS.items(), start=42):
        torch.manual_seed(seed)
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        model = GptOssForCausalLM(config).float().eval()
        draw(model)
        packed = pack(model) if name.endswith("mxfp4") else {}
        tensors = {key: value.clone().contiguous() for key, value in model.state_dict().items()}
        for key in {key.removesuffix("_blocks") for key in packed if key.endswith("_blocks")}:
            del tensors[key]
        if config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        folder = HERE / "checkpoints" / name
        shutil.rmtree(folder, ignore_errors=True)
        config.save_pretrained(folder)
        if packed:
            write_config(folder)
        save_file(tensors | packed, folder / "model.safetensors", metadata={"format": "pt"})
        results = expected(model)
        save_file(results, HERE / "expected" / f"{name}.safetensors")
        print(name, f"logits spread {results['logits_150'].std():.2f}", results["greedy_33"].unique().numel())


def write_config(folder: Path) -> None:
    """Published configs have their scaling in `rope_scaling`, and say how weights are packed."""
    hf = json.loads((folder / "config.json").read_text())
    scaling = hf.pop("rope_parameters")
    hf |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling, "quantization_config": CONFIG}
    (folder / "config.json").write_text(json.dumps(hf, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
