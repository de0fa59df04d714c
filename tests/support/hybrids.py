"""Tiny hybrid checkpoints whose MTP module is right often, and what their states ought to be."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxspec.cache.mixers import PromptBlocks, RoundRows, empty_cache
from jaxspec.cache.paged import PageLayout, Rows
from jaxspec.cache.recurrent import NOTHING
from jaxspec.checkpoint.params import dummy
from jaxspec.decoder.forward import forward, unembed
from jaxspec.engine.deterministic import widened
from jaxspec.models.families import MODELS
from jaxspec.models.memory import Recurrence
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import Weight
from tests.support.tiny import tiny_checkpoint

FAMILIES = ("nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_next")


@functools.cache
def checkpoint(family: str, vocab: int = 64, seed: int = 0, **sizes: int) -> Path:
    """One linear layer and one of full attention, of which the MTP module is a copy.

    It takes each token without the hidden state, so it computes what the target does but for the linear layer, whose
    part is small enough for most drafts to be right and large enough for some to be wrong.
    """
    if family == "nemotron_h":
        return _nemotron(vocab, seed, **sizes)
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


def _nemotron(vocab: int, seed: int, **sizes: int) -> Path:
    """A state-space layer, attention and experts, of which the last two are the MTP module, as two layers."""
    source = tiny_checkpoint("nemotron_h", vocab, seed, hybrid_override_pattern="M*E", **sizes)
    folder = shutil.copytree(source, source.with_name(source.name + "-mtp"))
    tensors = load_file(folder / "model.safetensors")
    tensors["backbone.layers.0.mixer.out_proj.weight"] *= 0.5
    for name in ("A_log", "dt_bias"):
        tensors[f"backbone.layers.0.mixer.{name}"] -= 2
    d = tensors["backbone.norm_f.weight"].shape[0]
    for i in (0, 1):
        layer = {k: v for k, v in tensors.items() if k.startswith(f"backbone.layers.{i + 1}.")}
        tensors |= {k.replace(f"backbone.layers.{i + 1}.", f"mtp.layers.{i}."): v for k, v in layer.items()}
    tensors |= {
        "mtp.layers.0.eh_proj.weight": np.eye(d, 2 * d, dtype=np.float32),
        "mtp.layers.0.enorm.weight": np.ones(d, np.float32),
        "mtp.layers.0.hnorm.weight": np.zeros(d, np.float32),
        "mtp.layers.1.final_layernorm.weight": tensors["backbone.norm_f.weight"],
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    hf = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**hf, "num_nextn_predict_layers": 1}))
    return folder


class Rounds:
    """A deterministic decoder with made-up weights over pages and states of requests, each with tokens of its own."""

    def __init__(
        self, hf: dict, dtype: str, state_dtype: str, page: int, requests: int = 4, rows: int = 4, pages: int = 8
    ):
        config = ModelConfig.from_hf(hf)
        self.page, self.pages, self.snapshot, self.vocabulary = page, pages, requests, config.vocab_size
        self.decoder = dataclasses.replace(config.decoder, deterministic=256)
        self.params = dummy(MODELS[config.model_type].tensors(config.decoder), dtype, seed=3)
        self.params.setdefault("head", Weight(self.params["embed"].T))
        self.params = widened(self.params, self.decoder)
        layout = PageLayout(1 + requests * pages, page, dtype)
        self.cache = empty_cache(config, layout, requests + 1, rows, dtype, state_dtype)

        def logits(mixer, t, params, number, cache):
            positions = mixer.rows.positions(t)
            said = (positions * 7 + number[:, None] * 31) % self.vocabulary
            hidden = forward(self.decoder, params, said, positions, mixer, cache)
            return unembed(params, hidden.last, self.decoder), hidden.cache

        self._logits = jax.jit(logits, static_argnums=1)

    def begun(self) -> Rounds:
        """Copy it as it was before any token, with the programs that are there."""
        return copy.copy(self)

    def prompts(self, blocks: list[tuple[int, int]], size: int, source: int | None = None) -> np.ndarray:
        """The logits of blocks (request, begin) of `size` tokens. `source`: a slot that the first goes on from. Each
        leaves a snapshot."""
        number, begin = (jnp.array(x, jnp.int32) for x in zip(*blocks, strict=True))
        sources = jnp.array([i if at else NOTHING for i, at in blocks], jnp.int32)
        sources = sources if source is None else sources.at[0].set(source)
        keep = jnp.full(len(blocks), self.snapshot, jnp.int32)
        return self._run(PromptBlocks(self._rows(number, begin, size), number, sources, keep), size)

    def round(self, requests: list[tuple[int, int, int]], t: int) -> np.ndarray:
        """The logits of t rows of requests (number, position of the first, rows of its last round that count)."""
        number, begin, replay = (jnp.array(x, jnp.int32) for x in zip(*requests, strict=True))
        return self._run(RoundRows(self._rows(number, begin, t), number, replay), t)

    def state(self, number: int) -> np.ndarray:
        return np.asarray(self.cache.states[0].delta.state[:, number], np.float32)

    def _run(self, mixer, t: int) -> np.ndarray:
        logits, self.cache = self._logits(mixer, t, self.params, mixer.slots, self.cache)
        return np.asarray(logits)

    def _rows(self, number, begin, t: int) -> Rows:
        table = 1 + self.pages * number[:, None] + jnp.arange(self.pages)
        return Rows(begin, jnp.full(number.shape, t), table, fixed=256)


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
    (states,), (memory,) = cache.states, config.decoder.groups(Recurrence)
    return states.delta.state[:, 0], states.windows[:, 0, : memory.taps - 1]
