"""Make tests/golden/images.npz: what transformers' image processors make of drawn pictures.

Needs PyTorch and torchvision, which jaxspec and its tests do not. Make an environment for it once, then run this from
anywhere:

    python3.12 -m venv torch-venv
    torch-venv/bin/pip install torch torchvision transformers==5.23.0 'pillow<13'
    torch-venv/bin/python tests/golden/make_images.py

By case of `CASES`: `NAME.grid` and every `STRIDE`th of its pixel values in order, by the processor with Pillow
(`NAME.pillow`) and by the one with torchvision (`NAME.torchvision`). Both resize in uint8, and round to it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

STRIDE = 97
# Processor, its settings, and the picture's height, width and mode.
QWEN3 = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
CASES = {
    "qwen2_vl": ("qwen", {}, 123, 457, "RGB"),
    "qwen2_vl-upscaled": ("qwen", {}, 30, 41, "RGB"),
    "qwen2_vl-bounded": ("qwen", {"min_pixels": 3136, "max_pixels": 50176}, 611, 333, "RGB"),
    "qwen3_vl": ("qwen", QWEN3 | {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}, 200, 336, "RGB"),
    "qwen3_vl-narrow": ("qwen", QWEN3 | {"size": {"shortest_edge": 65536, "longest_edge": 200000}}, 20, 1900, "RGB"),
    "qwen3_5-halves": ("qwen", QWEN3 | {"size": {"shortest_edge": 4096, "longest_edge": 90000}}, 80, 144, "RGBA"),
    "qwen3_vl-wider": ("qwen", QWEN3 | {"size": {"shortest_edge": 4096, "longest_edge": 90000}}, 100, 180, "RGB"),
    "gemma3": ("gemma", {"size": {"height": 896, "width": 896}}, 150, 211, "RGB"),
    "gemma3-grey": ("gemma", {"size": {"height": 896, "width": 896}}, 301, 97, "L"),
}


def drawn(height: int, width: int, mode: str) -> np.ndarray:
    """A picture with edges, slopes and noise: u8[height, width, channels]."""
    y, x = np.mgrid[:height, :width]
    noise = np.random.default_rng(height).integers(0, 64, (height, width))
    channels = {"L": 1, "RGB": 3, "RGBA": 4}[mode]
    planes = [(x * (c + 1) + y * 3 + 96 * ((x // 7 + y // 5) % 2) + noise) % 256 for c in range(channels)]
    return np.stack(planes, -1).astype(np.uint8)


def main() -> None:
    from PIL import Image
    from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    kinds = {
        ("qwen", "pillow"): Qwen2VLImageProcessorPil,
        ("qwen", "torchvision"): Qwen2VLImageProcessor,
        ("gemma", "pillow"): Gemma3ImageProcessorPil,
        ("gemma", "torchvision"): Gemma3ImageProcessor,
    }
    arrays = {}
    for name, (kind, settings, height, width, mode) in CASES.items():
        picture = drawn(height, width, mode)
        picture = Image.fromarray(picture[:, :, 0] if mode == "L" else picture)
        for backend in ("pillow", "torchvision"):
            made = kinds[kind, backend](**settings)(picture, return_tensors="np")
            arrays[f"{name}.{backend}"] = np.asarray(made["pixel_values"], np.float32).ravel()[::STRIDE]
        if kind == "qwen":
            arrays[f"{name}.grid"] = made["image_grid_thw"][0]
        print(name, np.abs(arrays[f"{name}.pillow"] - arrays[f"{name}.torchvision"]).max())
    np.savez_compressed(Path(__file__).with_name("images.npz"), **arrays)


if __name__ == "__main__":
    main()
