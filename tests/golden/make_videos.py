"""Make tests/golden/videos.npz: what transformers' video processor and models make of a video.

Run `make_pictures.py` and `make_pictures_qwen3_vl.py` before, then this in the environment of `make_images.py`:

    torch-venv/bin/python tests/golden/make_videos.py

By case of `CASES`: `NAME.grid`, `NAME.chosen` frames, every `STRIDE`th of its pixel values, and its `NAME.text`, with
`#` for a row of it. And by family with a tiny checkpoint in `pictures`: patches `FAMILY.pixels` and `FAMILY.grid` of a
video, its `FAMILY.embeddings`; and of a prompt with it between texts and a picture's frames, `FAMILY.ids`,
`FAMILY.positions`, `FAMILY.logits` and `FAMILY.greedy`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

STRIDE = 97
IMAGE, START, END, VIDEO = 60, 61, 62, 63  # as make_pictures.py has them
SIZE = {"size": {"shortest_edge": 4096, "longest_edge": 32 * 32 * 300}}
# Settings, the clip's frames, their rate (None: they are chosen already), and their height and width.
CASES = {
    "sampled": (SIZE, 30, 10.0, 100, 180),
    "odd": (SIZE | {"fps": 4}, 25, 12.5, 64, 96),
    "few": (SIZE, 9, 30.0, 40, 33),
    "many": (SIZE | {"max_frames": 6}, 40, 8.0, 48, 48),
    "given": (SIZE, 5, None, 70, 50),
    "enlarged": ({"size": {"shortest_edge": 32 * 32 * 64, "longest_edge": 32 * 32 * 300}}, 4, 2.0, 20, 44),
    "capped": (SIZE | {"cap_pixels_per_frame": True, "max_video_tokens": 9}, 12, 6.0, 150, 150),
}
GRID, TEXTS = (3, 4, 6), (6, 3, 2, 5)
GREEDY = 24


def drawn(frames: int, height: int, width: int) -> np.ndarray:
    """A video whose frames move: u8[frames, height, width, 3]."""
    t, y, x = np.mgrid[:frames, :height, :width]
    noise = np.random.default_rng(frames).integers(0, 64, (frames, height, width))
    return np.stack([(x * (c + 1) + y * 3 + t * 11 + 96 * ((x // 7 + y // 5) % 2) + noise) % 256 for c in range(3)], -1
                    ).astype(np.uint8)  # fmt: skip


def processed() -> dict[str, np.ndarray]:
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    arrays = {}
    for name, (settings, frames, rate, height, width) in CASES.items():
        process = Qwen3VLVideoProcessor(**settings)
        metadata = {"total_num_frames": frames, "fps": rate or process.fps, "frames_indices": [*range(frames)]}
        made = process(
            drawn(frames, height, width), video_metadata=[metadata], do_sample_frames=rate is not None,
            return_metadata=True, return_tensors="np",
        )  # fmt: skip
        whole = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
        whole.video_processor = process
        whole.vision_start_token, whole.video_token, whole.vision_end_token = "[", "#", "]"
        chosen = np.array(made["video_metadata"][0].frames_indices)
        arrays |= {
            f"{name}.grid": made["video_grid_thw"][0], f"{name}.chosen": chosen,
            f"{name}.pixels": np.asarray(made["pixel_values_videos"], np.float32).ravel()[::STRIDE],
            f"{name}.text": np.array(whole.replace_video_token(made, 0)),
        }  # fmt: skip
    return arrays


def computed(family: str, cls) -> dict[str, np.ndarray]:
    import torch

    torch.manual_seed(7)
    model = cls.from_pretrained(Path(__file__).with_name("pictures") / family, dtype=torch.float32).eval()
    pixels, grid = torch.randn(np.prod(GRID), 24), torch.tensor([GRID])
    ids = torch.randint(0, IMAGE, (TEXTS[0],)).tolist()
    for text in TEXTS[1:]:
        ids += [START, *[VIDEO] * (GRID[1] * GRID[2] // 4), END, *torch.randint(0, IMAGE, (text,)).tolist()]

    def run(text: list[int]):
        types = 2 * (torch.tensor([text]) == VIDEO).int()
        given = {"pixel_values_videos": pixels, "video_grid_thw": grid, "mm_token_type_ids": types}
        return model(torch.tensor([text]), use_cache=False, **given).logits[0]

    with torch.no_grad():
        rows = model.model.visual(pixels, grid)
        types = 2 * (torch.tensor([ids]) == VIDEO).int()
        positions, _ = model.model.get_rope_index(torch.tensor([ids]), types, video_grid_thw=grid)
        greedy = list(ids)
        for _ in range(GREEDY):
            last = run(greedy)[-1]
            last[IMAGE:] = -torch.inf
            greedy.append(int(last.argmax()))
        return {
            "pixels": pixels.numpy(), "grid": np.array(GRID), "ids": np.array(ids, np.int32),
            "embeddings": torch.cat([rows.pooler_output, *getattr(rows, "deepstack_features", [])], dim=1).numpy(),
            "positions": positions[:, 0].int().numpy(), "logits": run(ids).numpy(),
            "greedy": np.array(greedy[len(ids):], np.int32),
        }  # fmt: skip


def main() -> None:
    from transformers import Qwen3_5ForConditionalGeneration, Qwen3VLForConditionalGeneration

    arrays = processed()
    for family, cls in (("qwen3_5", Qwen3_5ForConditionalGeneration), ("qwen3_vl", Qwen3VLForConditionalGeneration)):
        arrays |= {f"{family}.{name}": array for name, array in computed(family, cls).items()}
    np.savez_compressed(Path(__file__).with_name("videos.npz"), **arrays)


if __name__ == "__main__":
    main()
