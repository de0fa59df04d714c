"""Models that read pictures against transformers (tests/golden/pictures): embeddings, positions, logits, texts."""

import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import CheckpointError, ConfigError
from jaxspec.cache.mixers import WholeTexts
from jaxspec.checkpoint import ModelFolder, vision
from jaxspec.checkpoint.quantization import MODELOPT
from jaxspec.decoder.forward import forward, unembed
from jaxspec.decoder.towers import embed_pictures, places
from jaxspec.images.placement import Placement
from jaxspec.models.model_config import ModelConfig
from tests.checkpoint.test_four_bits import CONFIG, pack_as
from tests.support.picture_prompts import (
    DEEP,
    FAMILIES,
    GOLDEN,
    IMAGES,
    PROMPTS,
    VIDEOS,
    WITH_VIDEO,
    expected,
    prompt,
    video,
)
from tests.support.quantised import BLOCKS, compressed, quantised, read, save
from tests.support.sample import rare

CLOSE = dict(rtol=0, atol=5e-4)
MERGE = 2


@functools.cache
def model(family="qwen3_5"):
    return jaxspec.load_model(str(GOLDEN / family), dtype="float32", progress=False)


def embedded(pictures, size, family="qwen3_5"):
    tower = model(family).config.tower
    pixels = np.zeros((size, tower.patch), np.float32)
    pixels[: sum(len(each.pixels) for each in pictures)] = np.concatenate([each.pixels for each in pictures])
    patches = places(tower, [each.grid for each in pictures], size)
    return np.asarray(jax.jit(functools.partial(embed_pictures, tower))(model(family).tower, pixels, patches))


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_transformers_alone_and_beside_others(family):
    pictures = [prompt(name, family).images[0].picture for name in ("other", "first", "one")]
    rows = embedded(pictures, 256 if family == "gemma3" else 64, family)
    ends = np.cumsum([picture.tokens for picture in pictures])
    for i, end, picture in zip((2, 1, 0), ends, pictures, strict=True):
        np.testing.assert_allclose(rows[end - picture.tokens : end], expected(family)[f"embeddings_{i}"], **CLOSE)


@pytest.mark.parametrize("kind", ["block", MODELOPT, rare("channel"), rare("tensor")])
def test_a_quantised_tower_is_dequantised(kind, tmp_path):
    tensors, pack, towers = read(GOLDEN / "qwen3_vl" / "model.safetensors"), pack_as(MODELOPT), []
    config = {MODELOPT: CONFIG[MODELOPT], "block": BLOCKS}.get(kind) or compressed(kind)
    stored, whole = dict(tensors), dict(tensors)
    for name in [name for name in tensors if re.search(r"visual\.blocks\..*\.(qkv|proj|linear_fc\d)\.weight$", name)]:
        matrix, module = np.float32(tensors[name]), name.removesuffix("weight")
        if kind == MODELOPT:
            if matrix.shape[1] % 32:
                continue
            parts, whole[name] = pack(kind, matrix)
        else:
            parts = dict(zip(("weight", "weight_scale"), (made := quantised(matrix, kind))[:2], strict=True))
            whole[name] = made[2]
        stored |= {module + part: np.asarray(value) for part, value in parts.items()}
    for each, more in ((stored, {"quantization_config": config}), (whole, {})):
        save(each, tmp_path / "model.safetensors")
        hf = json.loads((GOLDEN / "qwen3_vl" / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(hf | more))
        folder = ModelFolder(tmp_path, tmp_path / "config.json")
        towers.append(vision.load(folder.config.tower, folder, "float32", "auto", 0))
    assert len(stored) > len(whole)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), *towers)


@pytest.mark.parametrize("family", WITH_VIDEO)
def test_embeddings_of_a_video_are_transformers(family):
    rows = embedded(video(family), 128, family)
    np.testing.assert_allclose(rows[: 3 * 6], expected(family)["video_embeddings"], **CLOSE)


@pytest.mark.parametrize("name", [*PROMPTS, "video"])
@pytest.mark.parametrize("family", WITH_VIDEO)
def test_positions_are_transformers(name, family):
    placement, positions = Placement.of(prompt(name, family).images, MERGE), expected(family)[f"{name}_positions"]
    length = positions.shape[1]
    np.testing.assert_array_equal(placement.positions(np.arange(length)), positions)
    assert length + placement.shift == positions.max() + 1


@pytest.mark.parametrize(
    "name,family",
    [
        ("two", "qwen3_5"),
        *(("two", family) for family in DEEP),
        *(rare("video", family) if family == "qwen3_5" else ("video", family) for family in WITH_VIDEO),
        rare("long", "qwen3_5"),
    ],
)
def test_logits_are_transformers(name, family):
    given, decoder, params = prompt(name, family), model(family).config.decoder, model(family).params
    tokens = np.array([given.tokens])
    axes = Placement.of(given.images, MERGE).positions(np.arange(tokens.size))[:, None]
    pictures = [each.picture for each in given.images]
    at = np.full(tokens.shape, -1)
    own = tokens == (VIDEOS if name == "video" else IMAGES)
    at[own] = np.arange(own.sum())
    rows = embedded(pictures, 128, family)
    run = jax.jit(lambda params: forward(
        decoder, params, tokens, axes, WholeTexts(), overrides=(jnp.asarray(rows), at)
    ).last)  # fmt: skip
    logits = unembed(params, run(params), decoder)[0]
    np.testing.assert_allclose(logits, expected(family)[f"{name}_logits"], **CLOSE)


def test_a_folder_without_the_towers_tensors_is_a_text_model(tmp_path):
    folder = Path(shutil.copytree(GOLDEN / "qwen3_5", tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    text = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.visual.")}
    save_file(text, folder / "model.safetensors")
    found = jaxspec.load_model(str(folder), dtype="float32", progress=False)
    assert found.config.tower is None and found.tower is None
    save_file(tensors | {"model.visual.merger.norm.weight": np.ones(3, np.float32)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.visual\.merger\.norm\.weight has shape \[3\], \[32\]"):
        jaxspec.load_model(str(folder), progress=False)
    del tensors["model.visual.blocks.1.attn.qkv.bias"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 tensors .* blocks\.1\.attn\.qkv\.bias"):
        jaxspec.load_model(str(folder), progress=False)


@pytest.mark.parametrize("family,key,value", [
    ("qwen3_5", "hidden_act", "relu"), ("qwen3_5", "num_heads", 5), ("qwen3_5", "num_position_embeddings", 26),
    ("qwen3_5", "out_hidden_size", 33), ("qwen3_5", "deepstack_visual_indexes", [1]),
    *(("qwen3_vl", "deepstack_visual_indexes", each) for each in ([0, 3], [1, 0], [0, 1, 2], "0", [True])),
    ("gemma4", "hidden_activation", "relu"), ("gemma4", "num_attention_heads", 3), ("gemma4", "head_dim", 6),
    ("gemma4", "attention_bias", True), ("gemma4", "rope_parameters", {"rope_type": "yarn"}),
    ("gemma3", "hidden_act", "relu"), ("gemma3", "num_attention_heads", 5), ("gemma3", "image_size", 15),
])  # fmt: skip
def test_a_tower_that_isnt_served_is_refused_by_its_key(family, key, value):
    hf = json.loads((GOLDEN / family / "config.json").read_text())
    hf["vision_config"][key] = value
    with pytest.raises(ConfigError, match="pictures of 15 x 15" if key == "image_size" else key.removeprefix("num_")):
        ModelConfig.from_hf(hf)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_towers_numbers_are_counted(family):
    numbers = sum(array.size for array in jax.tree.leaves(model(family).tower))
    assert model(family).config.tower.numbers == numbers
    assert dataclasses.replace(model(family).config.tower, layers=9).numbers > numbers
