"""What the tests of DSpark and DFlash 2 share: golden tensors, random checkpoints, and drafters that are watched."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import functional, load_drafter, load_model
from jaxspec.config import ModelConfig
from jaxspec.weights import Param
from tests.tiny import tiny_config

GOLDEN = Path(__file__).parent / "golden"
LENGTHS = (7, 33, 150)  # of the golden prompts


@functools.cache
def golden(method, variant):
    """The target of the golden tensors, the drafter, and what its own package drafts."""
    model = load_model(str(GOLDEN / "dflash" / "target"), progress=False)
    loaded = load_drafter(f"{method}:{GOLDEN / method / variant}", model)
    return model, loaded, load_file(GOLDEN / "expected" / f"{method}-{variant}.safetensors")


def proposals(method, variant, monkeypatch):
    """By prompt length, what is drafted behind each golden prompt, by one program for all; and what is expected."""
    model, loaded, expected = golden(method, variant)
    monkeypatch.setattr(functional, "SHORTEST", 256)
    for length in LENGTHS:
        ids = expected[f"ids_{length}"].tolist()
        proposed = jaxspec.propose(model, loaded, ids[:-1], loaded.drafter.num_draft_tokens)
        assert proposed.next_token == ids[-1]
        yield (
            proposed,
            {key.removesuffix(f"_{length}"): expected[key] for key in expected if key.endswith(f"_{length}")},
        )


def write_drafter(kind, folder, target_folder, seed=0, **settings):
    """A random checkpoint of class `kind` for a target: two layers, blocks of 5, and `settings` in its config."""
    target = json.loads((Path(target_folder) / "config.json").read_text())
    hf = tiny_config("qwen3", target["vocab_size"], hidden_size=target["hidden_size"]) | {
        "block_size": 5,
        "mask_token_id": target["vocab_size"] - 1,
        "target_layer_ids": [target["num_hidden_layers"] - 1, -1],
        **settings,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    declared = kind.from_hf(hf, ModelConfig.from_hf(target)).parameters()
    rng, tensors = np.random.default_rng(seed), {}
    for param in jax.tree.leaves(declared, is_leaf=lambda leaf: isinstance(leaf, Param)):
        for name, shape in param.stored_values().items():
            noise = rng.standard_normal(shape, np.float32)
            if len(shape) > 1:
                tensors[name] = noise * shape[-1] ** (-0.5 if param.transpose else 0)
            else:
                tensors[name] = 0.3 * noise + (not name.endswith(".bias"))
    save_file({name: np.float32(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)
