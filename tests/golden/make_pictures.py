"""Make tests/golden/pictures: a tiny Qwen3.5 with its vision tower and MTP module, and what transformers computes.

As `make_hybrid.py`, whose environment it needs:

    torch-venv/bin/python tests/golden/make_pictures.py

`pictures/qwen3_5` is a Hugging Face folder, weights in bfloat16, computed with in float32. `pictures/qwen3_5.npz` has
patches `pixels_I` and `grid_I` of three pictures, of which 0 and 2 have one grid, with their `embeddings_I`; and for
each prompt NAME of `PROMPTS`, its `NAME_ids`, `NAME_positions` i32[3, t], `NAME_logits` f32[t, v], and `NAME_greedy`,
how it goes on.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import make_hybrid
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

HERE = Path(__file__).resolve().parent / "pictures"
IMAGE, START, END = 60, 61, 62
GRIDS = [(1, 4, 6), (1, 6, 2), (1, 4, 6)]
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
    text = {**make_hybrid.SIZES, "intermediate_size": 40, "num_hidden_layers": 4, "eos_token_id": None}
    rope = {**make_hybrid.MROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    config = Qwen3_5Config(
        text_config={**text, "rope_parameters": rope},
        vision_config=dict(
            depth=2, hidden_size=32, num_heads=4, intermediate_size=40, patch_size=2, temporal_patch_size=2,
            spatial_merge_size=2, out_hidden_size=32, num_position_embeddings=25,
        ),
        image_token_id=IMAGE, video_token_id=63, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    model = Qwen3_5ForConditionalGeneration(config).float().eval()
    make_hybrid.randomise(model.model.language_model, False)
    make_hybrid.randomise(model.lm_head, False)
    randomise_tower(model.model.visual)
    tensors = {}
    with torch.no_grad():
        pictures(model, tensors)
        mtp = mtp_tensors(model)
    np.savez_compressed(HERE / "qwen3_5.npz", **tensors)
    folder = HERE / "qwen3_5"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    state = {**model.state_dict(), **mtp}
    save_file({k: v.bfloat16().contiguous() for k, v in state.items()}, folder / "model.safetensors", {"format": "pt"})
    saved = json.loads(config.to_json_string(use_diff=False))
    saved |= {"architectures": ["Qwen3_5ForConditionalGeneration"]}
    saved["text_config"]["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(saved, indent=1))


def randomise_tower(visual) -> None:
    with torch.no_grad():
        for name, parameter in visual.named_parameters():
            noise = torch.randn(parameter.shape)
            if "norm" in name and name.endswith("weight"):
                noise = 1 + 0.3 * noise
            elif parameter.ndim > 1 and "pos_embed" not in name:
                noise = noise * (parameter.numel() // len(parameter)) ** -0.5
            parameter.copy_((noise * (0.3 if name.endswith("bias") else 1.0)).bfloat16())


def mtp_tensors(model) -> dict[str, torch.Tensor]:
    """An MTP module that is right now and then: a copy of the last layer."""
    d, own = model.config.text_config.hidden_size, "model.language_model.layers.3."
    layer = {k.replace(own, "mtp.layers.0."): v for k, v in model.state_dict().items() if k.startswith(own)}
    return layer | {
        "mtp.fc.weight": torch.cat([torch.eye(d), torch.eye(d)], dim=1),
        "mtp.pre_fc_norm_embedding.weight": torch.zeros(d),
        "mtp.pre_fc_norm_hidden.weight": torch.zeros(d),
        "mtp.norm.weight": model.state_dict()["model.language_model.norm.weight"].clone(),
    }


def pictures(model, tensors: dict[str, np.ndarray]) -> None:
    pixels = [torch.randn(grid[1] * grid[2], 24) for grid in GRIDS]
    for i, (values, grid) in enumerate(zip(pixels, GRIDS, strict=True)):
        rows = model.model.visual(values, torch.tensor([grid]))
        out = torch.cat([rows.pooler_output, *getattr(rows, "deepstack_features", [])], dim=1)
        tensors |= {f"pixels_{i}": values.numpy(), f"grid_{i}": np.array(grid), f"embeddings_{i}": out.numpy()}
    for name, parts in PROMPTS.items():
        ids, used = [], []
        for part in parts:
            if isinstance(part, int):
                ids += torch.randint(0, IMAGE, (part,)).tolist()
            else:
                ids += [IMAGE] * (GRIDS[part[0]][1] * GRIDS[part[0]][2] // 4)
                used.append(part[0])
        given = {
            "pixel_values": torch.cat([pixels[i] for i in used]),
            "image_grid_thw": torch.tensor([GRIDS[i] for i in used]),
        }

        def run(text, given=given):
            types = (torch.tensor([text]) == IMAGE).int()
            return model(torch.tensor([text]), mm_token_type_ids=types, use_cache=False, **given).logits[0]

        types = (torch.tensor([ids]) == IMAGE).int()
        positions, _ = model.model.get_rope_index(torch.tensor([ids]), types, given["image_grid_thw"])
        greedy = list(ids)
        for _ in range(GREEDY):
            last = run(greedy)[-1]
            last[IMAGE:] = -torch.inf
            greedy.append(int(last.argmax()))
        tensors |= {
            f"{name}_ids": np.array(ids, np.int32), f"{name}_positions": positions[:, 0].int().numpy(),
            f"{name}_logits": run(ids).numpy(), f"{name}_greedy": np.array(greedy[len(ids):], np.int32),
        }  # fmt: skip


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    main()
