"""Tiny hybrid checkpoints whose MTP module is right often, and what their states ought to be."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxspec.cache import PageLayout, Rows
from jaxspec.decoder.forward import forward
from jaxspec.mixers import NOTHING, PromptBlocks, empty_cache
from tests.tiny import tiny_checkpoint

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")


@functools.cache
def checkpoint(family: str, vocab: int = 64, seed: int = 0, **sizes: int) -> Path:
    """One linear layer and one of full attention, of which the MTP module is a copy.

    It takes each token without the hidden state, so it computes what the target does but for the linear layer, whose
    part is small enough for most drafts to be right and large enough for some to be wrong.
    """
    source = tiny_checkpoint(family, vocab, seed, **sizes)
    folder = shutil.copytree(source, source.with_name(source.name + "-mtp"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.linear_attn.out_proj.weight"] *= 0.5
    for name in ("A_log", "dt_bias"):  # remember for about fifty tokens instead of one or two
        tensors[f"model.layers.0.linear_attn.{name}"] -= 2
    for name in tensors:
        if name.startswith("model.layers.0.mlp."):
            tensors[name] = tensors[name] * 0.6
    d = tensors["model.norm.weight"].shape[0]
    layer = {k.replace("model.layers.1.", "mtp.layers.0."): v for k, v in tensors.items() if "model.layers.1." in k}
    tensors |= layer | {
        "mtp.fc.weight": np.eye(d, 2 * d, dtype=np.float32),
        "mtp.pre_fc_norm_embedding.weight": np.zeros(d, np.float32),
        "mtp.pre_fc_norm_hidden.weight": np.zeros(d, np.float32),
        "mtp.norm.weight": tensors["model.norm.weight"],
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    hf = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**hf, "mtp_num_hidden_layers": 1}))
    return folder


def state_after(model, tokens: list[int], capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """The state after `tokens`, and the inputs that the convolution looks back on, by one block over an empty cache."""
    padded = np.zeros((1, capacity), np.int32)
    padded[0, : len(tokens)] = tokens
    state, windows = _state_after(model.config, model.params, padded, np.array([len(tokens)], np.int32))
    return np.asarray(state), np.asarray(windows)


@functools.partial(jax.jit, static_argnums=0)
def _state_after(config, params, tokens, count):
    capacity = tokens.shape[1]
    cache = empty_cache(config, PageLayout(2, capacity, "float32"), 1, 1, "float32")
    rows = Rows(jnp.zeros((1,), jnp.int32), count, jnp.ones((1, 1), jnp.int32))
    none = jnp.full((1,), NOTHING, jnp.int32)
    mixer = PromptBlocks(rows, jnp.zeros((1,), jnp.int32), none, none)
    cache = forward(config.decoder, params, tokens, rows.positions(capacity), mixer, cache).cache
    back = config.linear.taps - 1
    return cache.states.delta.state[:, 0], cache.states.windows[:, 0, :back]
