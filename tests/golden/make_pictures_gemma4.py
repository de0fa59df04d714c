"""Add to tests/golden/pictures: two tiny Gemma 4 with their towers, and what transformers computes.

As `make_pictures.py`, with files of the same contents:

    torch-venv/bin/python tests/golden/make_pictures_gemma4.py

Rows of a picture of `gemma4` see all of it in layers with a window. `gemma4_e` is a small one: its rows see earlier
ones alone, layers have inputs of their own and share keys and values, and its tower's products are bounded. Patches are
in blocks of a token, which transformers takes row by row.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from make_images import STRIDE, drawn
from make_pictures_gemma3 import GREEDY, PROMPTS
from PIL import Image
from safetensors.torch import save_file
from transformers import Gemma4Config, Gemma4ForConditionalGeneration
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

HERE = Path(__file__).resolve().parent / "pictures"
IMAGE, START, END = 60, 61, 62
POOLED, PATCH = 2, 2
GRIDS = [(4, 6), (6, 2), (4, 6)]
TEXT = dict(
    vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, global_head_dim=32, sliding_window=12, max_position_embeddings=512,
    layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"], eos_token_id=None,
    pad_token_id=3, bos_token_id=None, hidden_size_per_layer_input=0, num_kv_shared_layers=0,
    use_bidirectional_attention="vision",
)  # fmt: skip
SMALL = dict(
    hidden_size_per_layer_input=8, vocab_size_per_layer_input=64, num_kv_shared_layers=2,
    use_bidirectional_attention=None,
)  # fmt: skip
VISION = dict(
    hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
    patch_size=PATCH, pooling_kernel_size=POOLED, position_embedding_size=16, standardize=True,
)  # fmt: skip
# The picture's height, width and `max_soft_tokens`.
PROCESSED = {"wide": (100, 180, 70), "narrow": (4, 700, 70), "high": (700, 5, 70), "large": (900, 611, 280)}


def blocks(values, rows: int, columns: int, k: int):
    """Patches that came row by row, in blocks of `k` x `k`."""
    return values.reshape(rows // k, k, columns // k, k, -1).swapaxes(1, 2).reshape(rows * columns, -1)


def main() -> None:
    HERE.mkdir(exist_ok=True)
    for name, text, vision in (("gemma4", TEXT, VISION), ("gemma4_e", TEXT | SMALL, VISION | {
        "use_clipped_linears": True, "standardize": False,
    })):  # fmt: skip
        torch.manual_seed(0)
        config = Gemma4Config(
            text_config=text, vision_config=vision, audio_config=None, image_token_id=IMAGE, boi_token_id=START,
            eoi_token_id=END, video_token_id=63, audio_token_id=END, eos_token_id=None,
        )  # fmt: skip
        model = Gemma4ForConditionalGeneration._from_config(config, attn_implementation="eager").float().eval()
        with torch.no_grad():
            for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if key.endswith(("inv_freq", "embed_scale")):
                    continue
                noise = torch.randn(tensor.shape)
                if key.endswith(("_min", "_max")):
                    noise = (0.8 + 0.1 * noise) * (-1 if key.endswith("_min") else 1)
                elif "norm" in key or key.endswith(("std_scale", "layer_scalar", "router.scale")):
                    noise = 1 + 0.3 * noise
                elif "embed_tokens" in key or "std_bias" in key:
                    noise = noise * 0.1
                elif tensor.ndim > 1 and "position_embedding" not in key:
                    noise = noise * (tensor.numel() // len(tensor)) ** -0.5
                tensor.copy_(noise.bfloat16())
        tensors: dict[str, np.ndarray] = processed() if name == "gemma4" else {}
        with torch.no_grad():
            pictures(model, tensors)
        np.savez_compressed(HERE / f"{name}.npz", **tensors)
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        state = {k: v.bfloat16().contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        saved = json.loads(config.to_json_string(use_diff=False))
        saved |= {"architectures": ["Gemma4ForConditionalGeneration"], "vision_soft_tokens_per_image": 16}
        (folder / "config.json").write_text(json.dumps(saved, indent=1))


def processed() -> dict[str, np.ndarray]:
    arrays = {}
    for name, (height, width, most) in PROCESSED.items():
        process = Gemma4ImageProcessorPil(max_soft_tokens=most)
        made = process(Image.fromarray(drawn(height, width, "RGB")), return_tensors="np")
        columns, rows = made["image_position_ids"][0].max(0) + 1
        values = np.asarray(made["pixel_values"][0][: rows * columns], np.float32)
        arrays |= {f"{name}_grid": np.array((1, rows, columns))}
        arrays[f"{name}_values"] = blocks(values, rows, columns, 3).ravel()[::STRIDE]
    return arrays


def pictures(model, tensors: dict[str, np.ndarray]) -> None:
    given, most = [], max(rows * columns for rows, columns in GRIDS)
    for i, (rows, columns) in enumerate(GRIDS):
        values, places = torch.rand(rows * columns, 3 * PATCH**2), torch.full((most, 2), -1)
        places[: rows * columns] = torch.stack(torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy"),
                                               -1).reshape(-1, 2)  # fmt: skip
        padded = torch.nn.functional.pad(values, (0, 0, 0, most - len(values)))
        given.append((padded, places))
        out = model.model.get_image_features(padded[None], places[None]).pooler_output[0]
        tensors |= {
            f"pixels_{i}": blocks(values.numpy(), rows, columns, POOLED), f"grid_{i}": np.array((1, rows, columns)),
            f"embeddings_{i}": out.numpy(),
        }  # fmt: skip
    for name, parts in PROMPTS.items():
        ids, used = [], []
        for part in parts:
            number = part if isinstance(part, int) else GRIDS[part[0]][0] * GRIDS[part[0]][1] // POOLED**2
            ids += torch.randint(0, 59, (number,)).tolist() if isinstance(part, int) else [IMAGE] * number
            used += [] if isinstance(part, int) else [part[0]]
        values, places = (torch.stack([given[i][part] for i in used]) for part in (0, 1))

        def run(text, values=values, places=places):
            types = (torch.tensor([text]) == IMAGE).int()
            more = {"pixel_values": values, "image_position_ids": places, "mm_token_type_ids": types}
            return model(torch.tensor([text]), use_cache=False, **more).logits[0]

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
    main()
