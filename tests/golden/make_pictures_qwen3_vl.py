"""Add to tests/golden/pictures: a tiny Qwen3-VL, dense and with experts, and what transformers computes.

As `make_pictures.py`, with files of the same contents, whose `embeddings_I` have the rows of deepstack behind them:

    torch-venv/bin/python tests/golden/make_pictures_qwen3_vl.py

Experts are saved as published, each matrix transposed.
"""

from __future__ import annotations

import json
import shutil

import make_hybrid
import numpy as np
import torch
from make_pictures import END, HERE, IMAGE, START, pictures, randomise_tower
from safetensors.torch import save_file
from transformers import (
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

TEXT = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=40, max_position_embeddings=1024, eos_token_id=None, pad_token_id=None, bos_token_id=None,
    tie_word_embeddings=False,
    rope_parameters=dict(rope_type="default", rope_theta=1000.0, mrope_section=[4, 2, 2], mrope_interleaved=True),
)  # fmt: skip
VISION = dict(
    depth=3, hidden_size=32, num_heads=4, intermediate_size=40, patch_size=2, temporal_patch_size=2,
    spatial_merge_size=2, out_hidden_size=32, num_position_embeddings=25, deepstack_visual_indexes=[0, 2],
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1)
FAMILIES = {
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration, TEXT),
    "qwen3_vl_moe": (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration, TEXT | EXPERTS),
}


def main() -> None:
    for family, (kind, cls, text) in FAMILIES.items():
        torch.manual_seed(0)
        config = kind(
            text_config=text, vision_config=VISION, image_token_id=IMAGE, video_token_id=63,
            vision_start_token_id=START, vision_end_token_id=END, tie_word_embeddings=False,
        )  # fmt: skip
        model = cls(config).float().eval()
        make_hybrid.randomise(model.model.language_model, False, plain=True)
        make_hybrid.randomise(model.lm_head, False, plain=True)
        randomise_tower(model.model.visual)
        tensors = {}
        with torch.no_grad():
            pictures(model, tensors)
        np.savez_compressed(HERE / f"{family}.npz", **tensors)
        folder = HERE / family
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        published = lambda name, x: x.transpose(1, 2) if ".experts." in name else x  # noqa: E731
        state = {name: published(name, x).bfloat16().contiguous() for name, x in model.state_dict().items()}
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        saved = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [cls.__name__]}
        (folder / "config.json").write_text(json.dumps(saved, indent=1))


if __name__ == "__main__":
    main()
