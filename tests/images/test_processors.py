from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from jaxspec.config.options import ConfigError
from jaxspec.config.request import RequestError
from jaxspec.images.processors import read_processor
from jaxspec.images.reading import read_picture
from tests.golden.make_images import CASES, STRIDE, drawn

GOLDEN = Path(__file__).resolve().parents[1] / "golden/images.npz"
GEMMA4 = {"model_type": "gemma4", "vision_config": {}}
# As make_pictures_gemma4.py has them: the picture's height, width and `max_soft_tokens`.
PROCESSED = {"wide": (100, 180, 70), "narrow": (4, 700, 70), "high": (700, 5, 70), "large": (900, 611, 280)}
MODEL_TYPES = {"qwen": "qwen2_vl", "gemma": "gemma3"}


def test_gemma4s_pixel_values_are_the_published_processors():
    """But for the order of patches, which come in blocks of a token."""
    held = np.load(GOLDEN.with_name("pictures") / "gemma4.npz")
    for name, (height, width, most) in PROCESSED.items():
        process = read_processor(GEMMA4, {"preprocessor_config.json": {"max_soft_tokens": most, "do_normalize": False}})
        picture = process(drawn(height, width, "RGB"))
        assert picture.grid == tuple(held[f"{name}_grid"]) and picture.tokens == process.tokens(height, width) <= most
        assert np.array_equal(picture.pixels.ravel()[::STRIDE], held[f"{name}_values"])
    assert read_processor(GEMMA4, {}).within(70).tokens(900, 900) == 64
    assert process.tokens(1, 10**6) == process.tokens(10**6, 1) == 280
    with pytest.raises(ConfigError, match="patch_size 14 differs"):
        read_processor(GEMMA4, {"preprocessor_config.json": {"patch_size": 14}})


@cache
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN))


def processor(kind: str, settings: dict):
    config = {"model_type": MODEL_TYPES[kind], "vision_config": {"patch_size": settings.get("patch_size", 14)}}
    return read_processor(config, {"preprocessor_config.json": settings})


@pytest.mark.parametrize("name", CASES)
def test_pixel_values_are_the_published_processors(name):
    """Equal to those with Pillow; with torchvision's, at most one step of 255 away."""
    kind, settings, height, width, mode = CASES[name]
    process = processor(kind, settings)
    picture = process(read_picture(drawn(height, width, mode)))
    pixels = picture.pixels
    if kind == "qwen":
        assert picture.grid == tuple(golden()[f"{name}.grid"])
    else:  # the published processor doesn't cut
        pixels = pixels.reshape(64, 64, 3, 14, 14).transpose(2, 0, 3, 1, 4)
    assert pixels.dtype == np.float32 and len(picture.pixels) == np.prod(picture.grid)
    assert np.array_equal(pixels.ravel()[::STRIDE], golden()[f"{name}.pillow"])
    step = 1 / 255 / min(process.pixels.std)
    assert np.abs(pixels.ravel()[::STRIDE] - golden()[f"{name}.torchvision"]).max() < 1.01 * step
    assert picture.tokens == process.tokens(height, width)
    assert picture.tokens == (256 if kind == "gemma" else np.prod(picture.grid) // 4)


def test_a_key_is_of_pixels_and_grid():
    process = processor("qwen", {})
    one, again, other = (process(drawn(height, 56, "RGB")) for height in (112, 112, 113))
    assert one.key == again.key != other.key and 0 <= one.key < 2**64
    blank, turned = (process(np.zeros(shape, np.uint8)) for shape in ((56, 112, 3), (112, 56, 3)))
    assert np.array_equal(blank.pixels, turned.pixels) and blank.key != turned.key


def test_sides_too_unequal_are_refused():
    with pytest.raises(RequestError, match=r"1 x 20000 pixels.*at most 200"):
        processor("qwen", {}).tokens(20000, 1)
    assert processor("gemma", {}).tokens(20000, 1) == 256


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "qwen3_vl", "gemma3"])
def test_without_a_file_the_published_values_hold(kind):
    process = read_processor({"model_type": kind, "vision_config": {}}, {})
    assert process.pixels.mean == (0.5, 0.5, 0.5)
    assert process.tokens(1024, 1024) == (256 if kind == "gemma3" else 1024)


def test_processor_config_comes_first():
    files = {"processor_config.json": {"image_processor": {"max_pixels": 4096, "min_pixels": 1024}},
             "preprocessor_config.json": {"max_pixels": 8192}}  # fmt: skip
    assert read_processor({"model_type": "qwen3_vl", "vision_config": {}}, files).most == 4096


def test_models_without_vision_have_none():
    assert read_processor({"model_type": "llama"}, {}) is None
    assert read_processor({"model_type": "gemma3"}, {}) is None
    assert read_processor({"model_type": "qwen3_5"}, {}) is None


@pytest.mark.parametrize("settings,says", [
    ({"do_resize": False}, "do_resize false|do_resize False"),
    ({"size": 7}, "size"),
    ({"size": {"shortest_edge": 10, "longest_edge": 5}}, "fit together"),
    ({"max_pixels": "many"}, "max_pixels"),
    ({"patch_size": 15}, "patch_size 15 differs"),
    ({"resample": 1}, "resample"),
    ({"image_mean": [0.5]}, "image_mean"),
    ({"image_std": [0.5, 0.5, 0]}, "image_std"),
    ({"rescale_factor": None, "image_std": "x"}, "image_std"),
    ({"rescale_factor": -1}, "rescale_factor"),
])  # fmt: skip
def test_senseless_files_are_refused(settings, says):
    config = {"model_type": "qwen3_5", "vision_config": {"patch_size": 16}}
    with pytest.raises(ConfigError, match=says):
        read_processor(config, {"preprocessor_config.json": settings})


@pytest.mark.parametrize("settings,says", [
    ({"do_pan_and_scan": True}, "do_pan_and_scan"),
    ({"size": {"height": 224, "width": 224}}, "image_size"),
    ({"image_seq_length": 64}, "image_seq_length 64"),
])  # fmt: skip
def test_gemmas_file_agrees_with_its_config(settings, says):
    with pytest.raises(ConfigError, match=says):
        processor("gemma", settings)
