"""Adapters for tests: PEFT's folders with random matrices, and logits of whole texts, each with its own adapter."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxspec import EngineConfig
from jaxspec.cache.mixers import WholeTexts
from jaxspec.checkpoint import Model, peft
from jaxspec.decoder.forward import forward, unembed
from jaxspec.engine.adapters import Adapters, with_adapters
from jaxspec.models.weights import LowRank
from tests.support import drawn


def matrices(model: Model, seed: int = 0, rank: int = 4, modules: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """Random A and B of all modules that adapters may change, or of these, under PEFT's names."""
    rng, found = np.random.default_rng(seed), {}
    for tensor, (param, i) in peft.adaptable(model.family.tensors(model.config.decoder)).items():
        if not modules or peft.module_of(tensor) in modules:
            name = f"base_model.model.{tensor.removesuffix('.weight')}"
            inputs, outputs = param.shape[0], param.layout.splits[i]
            found[f"{name}.lora_A.weight"] = rng.normal(size=(rank, inputs)).astype(np.float32) * inputs**-0.5
            found[f"{name}.lora_B.weight"] = rng.normal(size=(outputs, rank)).astype(np.float32) * 0.7
    return found


def write(folder: Path, tensors: dict[str, np.ndarray], **config: Any) -> str:
    """Write a folder as PEFT does, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 6, **config}))
    return str(folder)


def several(root: Path, model: Model, count: int, **options: Any) -> dict[str, str]:
    """Folders of so many random adapters, by name."""
    return {f"a{i}": write(root / f"a{i}", matrices(model, i, **options)) for i in range(count)}


def stacks(layers: list[dict[str, Any]], first: int = 0) -> list[dict[str, LowRank]]:
    """Arrays of four random adapters of rank 16 for all dense weights; the first is in place `first`."""

    def both(name: str, seed: int, weight: Any) -> LowRank:
        parts = {"qkv": 3, "gate_up": 2}.get(name, 1)
        draw = lambda key, *shape: drawn.normal(jax.random.key(key), shape).astype(weight.dtype)  # noqa: E731
        a = draw(seed, weight.inputs, parts, 4, 16) * weight.inputs**-0.5
        return LowRank(jnp.roll(a, first, axis=2), jnp.roll(draw(seed + 9, 4, 16, weight.outputs) * 0.3, first, axis=0))

    names = ("qkv", "out", "gate_up", "down")
    return [{name: both(name, seed, layer[name]) for seed, name in enumerate(names)} for layer in layers]


@functools.partial(jax.jit, static_argnums=0)
def logits(config, params, tokens, places):
    """Logits of whole texts, of which each has the adapter in its place."""
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    hidden = forward(config.decoder, params, tokens, positions, WholeTexts(), adapters=places)
    return unembed(params, hidden.last, config.decoder)


def assert_own(model: Model, folders: dict[str, str], outs: list, names: list[str | None]) -> None:
    """Each token is the argmax after those before it, by a forward over whole texts with the request's adapter."""
    adapters = Adapters(EngineConfig(lora_modules=folders, max_loras=len(folders)), model, len(folders))
    for slot, name in enumerate(folders):
        adapters.places.hold(adapters.find(name), slot)
    adapters.written()
    places = np.array([-1 if name is None else list(folders).index(name) for name in names], np.int32)
    texts = [[*out.prompt_token_ids, *out.token_ids] for out in outs]
    padded = np.array([text + [0] * (max(map(len, texts)) - len(text)) for text in texts], np.int32)
    chosen = np.asarray(logits(model.config, with_adapters(model.params, adapters), padded, places)).argmax(-1)
    for out, name, row in zip(outs, names, chosen, strict=True):
        start = len(out.prompt_token_ids) - 1
        assert list(out.token_ids) == row[start : start + len(out.token_ids)].tolist(), name
