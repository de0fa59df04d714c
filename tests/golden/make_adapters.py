"""Make tests/golden/adapters: LoRA adapters that PEFT wrote for tiny models of this folder, and the logits it computes.

Runs in the environment of make_llama_qwen3.py with `pip install peft==0.21.2`. `adapters/NAME/` is a folder of PEFT's
`save_pretrained`, and `adapters/NAME.npz` has `ids` i32[t], `logits` f32[t, v] of the model with that adapter, and
`plain` f32[t, v] of the model without.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
LENGTH = 40
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LINEAR = ["in_proj_qkvz", "in_proj_ba", "out_proj"]
VARIANTS = {
    "llama": ("checkpoints/llama-untied", LoraConfig(r=4, lora_alpha=10, target_modules=ALL)),
    "qwen3": (
        "checkpoints/qwen3-untied",
        LoraConfig(
            r=8, lora_alpha=6, use_rslora=True, target_modules=ALL,
            rank_pattern={"q_proj": 3, "model.layers.1.mlp.down_proj": 12, r"layers\.[02]\.self_attn\.o_proj": 5},
            alpha_pattern={"k_proj": 20, r"layers\.2\..*up_proj": 1.5},
        ),
    ),
    "gemma3": ("checkpoints/gemma3-tied", LoraConfig(r=2, lora_alpha=3, target_modules="all-linear")),
    "qwen3_next": ("hybrid/qwen3_next", LoraConfig(r=4, lora_alpha=8, target_modules=[*ALL[:4], *LINEAR])),
}  # fmt: skip


def main() -> None:
    for seed, (name, (folder, config)) in enumerate(VARIANTS.items()):
        if name not in (sys.argv[1:] or VARIANTS):
            continue
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(HERE / folder, dtype=torch.float32, attn_implementation="eager")
        model = get_peft_model(base, config).eval()
        for key, parameter in model.named_parameters():
            if "lora_B" in key:  # PEFT begins with zeros
                parameter.data = torch.randn(parameter.shape) * 0.3
        ids = torch.randint(0, base.config.vocab_size, (LENGTH,))
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0].numpy()
            with model.disable_adapter():
                plain = model(input_ids=ids[None], use_cache=False).logits[0].numpy()
        out = HERE / "adapters" / name
        shutil.rmtree(out, ignore_errors=True)
        model.peft_config["default"].base_model_name_or_path = folder
        model.save_pretrained(out)
        (out / "README.md").unlink(missing_ok=True)
        np.savez_compressed(HERE / "adapters" / f"{name}.npz", ids=ids.int().numpy(), logits=logits, plain=plain)
        print(name, f"logits spread {logits.std():.2f}, moved by up to {np.abs(logits - plain).max():.2f}")


if __name__ == "__main__":
    main()
