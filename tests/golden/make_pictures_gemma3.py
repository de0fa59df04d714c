"""Add to tests/golden/pictures: a tiny Gemma 3 with SigLIP and its projector, and what transformers computes.

As `make_pictures.py`, with files of the same contents:

    torch-venv/bin/python tests/golden/make_pictures_gemma3.py

Rows of a picture see all of it, in layers with a window as far as that goes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

HERE = Path(__file__).resolve().parent / "pictures"
IMAGE, START, END = 60, 61, 62
SIDE, PATCH, TOKENS = 16, 2, 16  # pixels, pixels of a patch, tokens of a picture
# Texts around pictures: each part is a number of text tokens, or a picture's as (number,).
PROMPTS = {
    "one": [5, (0,), 7],
    "other": [5, (2,), 7],
    "two": [3, (0,), 4, (1,), 6],
    "first": [(1,), 2],
    "long": [70, (0,), 40, (1,), 30],
}
GREEDY = 24


def main() -> None:
    torch.manual_seed(0)
    text = dict(
        vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=12, sliding_window=12, max_position_embeddings=512,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], eos_token_id=None, pad_token_id=0,
        bos_token_id=None,
    )  # fmt: skip
    vision = dict(
        hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, image_size=SIDE,
        patch_size=PATCH, vision_use_head=False,
    )  # fmt: skip
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=TOKENS, image_token_index=IMAGE,
        boi_token_index=START, eoi_token_index=END, image_token_id=IMAGE, eos_token_id=None,
    )  # fmt: skip
    model = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if "norm" in name and name.endswith("weight"):
                noise = 0.3 * noise + (1 if ".layer_norm" in name or "post_layernorm" in name else 0)
            elif "embed_tokens" in name:
                noise = noise * 0.05  # tied: a larger one would say each token again
            elif name.endswith("mm_input_projection_weight"):
                noise = noise * len(parameter) ** -0.5
            elif parameter.ndim > 1 and "position_embedding" not in name:
                noise = noise * (parameter.numel() // len(parameter)) ** -0.5
            parameter.copy_((noise * (0.3 if name.endswith("bias") else 1.0)).bfloat16())
    tensors: dict[str, np.ndarray] = {}
    with torch.no_grad():
        pictures(model, tensors)
    np.savez_compressed(HERE / "gemma3.npz", **tensors)
    folder = HERE / "gemma3"
    shutil.rmtree(folder, ignore_errors=True)
    model.bfloat16().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file({k: v.bfloat16().contiguous() for k, v in state.items()}, folder / "model.safetensors", {"format": "pt"})
    saved = json.loads(config.to_json_string(use_diff=False))
    saved |= {"architectures": ["Gemma3ForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(saved, indent=1))


def pictures(model, tensors: dict[str, np.ndarray]) -> None:
    pixels, rows = torch.randn(3, 3, SIDE, SIDE), SIDE // PATCH
    for i, values in enumerate(pixels):
        out = model.model.get_image_features(values[None]).pooler_output[0]
        patches = values.reshape(3, rows, PATCH, rows, PATCH).permute(1, 3, 0, 2, 4).reshape(rows * rows, -1)
        tensors |= {f"pixels_{i}": patches.numpy(), f"grid_{i}": np.array((1, rows, rows))}
        tensors[f"embeddings_{i}"] = out.numpy()
    for name, parts in PROMPTS.items():
        ids, used = [], []
        for part in parts:
            ids += torch.randint(0, IMAGE, (part,)).tolist() if isinstance(part, int) else [IMAGE] * TOKENS
            used += [] if isinstance(part, int) else [part[0]]

        def run(text, values=pixels[used]):
            given = torch.tensor([text])
            types = (given == IMAGE).int()
            return model(given, pixel_values=values, token_type_ids=types, use_cache=False).logits[0]

        greedy = list(ids)
        for _ in range(GREEDY):
            last = run(greedy)[-1]
            last[IMAGE:] = -torch.inf
            greedy.append(int(last.argmax()))
        tensors |= {
            f"{name}_ids": np.array(ids, np.int32), f"{name}_logits": run(ids).numpy(),
            f"{name}_greedy": np.array(greedy[len(ids):], np.int32),
        }  # fmt: skip


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    main()
