"""Tiny EAGLE drafters for the tests' targets: one that is nearly always right, one that is random."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.engine import test_lossless as lossless

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_root = tempfile.TemporaryDirectory(prefix="jaxspec-eagle-")


def folder_of(tensors, hf):
    folder = Path(tempfile.mkdtemp(dir=_root.name))
    (folder / "config.json").write_text(json.dumps(hf))
    save_file({k: np.ascontiguousarray(v, np.float32) if v.dtype != np.int64 else v for k, v in tensors.items()},
              folder / "model.safetensors")  # fmt: skip
    return folder


def hf_of(checkpoint, **more):
    return {**json.loads((checkpoint / "config.json").read_text()), "num_hidden_layers": 1, **more}


@functools.cache
def mimic(checkpoint):
    """An EAGLE drafter that computes nearly what its target of one layer does, so that most of its drafts are right.

    It has no first and no last norm, so what those multiply by goes into the matrices around them. What is left to
    differ is how long each row is, and the text's first token, which no row of a drafter is paired with.
    """
    held = load_file(checkpoint / "model.safetensors")
    layer = {k.removeprefix("model."): v for k, v in held.items() if k.startswith("model.layers.0.")}
    last, first = held["model.norm.weight"], layer.pop("layers.0.input_layernorm.weight")
    d = len(last)
    for k in "qkv":
        layer[f"layers.0.self_attn.{k}_proj.weight"] *= first / last
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        layer[f"layers.0.{name}.weight"] *= last[:, None]
    layer["layers.0.post_attention_layernorm.weight"] /= last
    fc = np.concatenate([np.diag(last), np.zeros((d, d))], axis=1)
    hf = hf_of(checkpoint, architectures=["LlamaForCausalLMEagle"], bias=False)
    return folder_of({**layer, "fc.weight": fc}, hf)


@functools.cache
def random_eagle3(checkpoint, ids, layers, seed=0):
    """A random EAGLE-3 drafter that knows the tokens `ids` alone."""
    hf = hf_of(checkpoint)
    d, f, h = hf["hidden_size"], hf["intermediate_size"], hf["head_dim"]
    n, m = hf["num_attention_heads"] * h, hf["num_key_value_heads"] * h
    rng = np.random.default_rng(seed)
    matrix = lambda out, width: rng.standard_normal((out, width)) * width**-0.5  # noqa: E731
    norm = lambda: 1 + 0.2 * rng.standard_normal(d)  # noqa: E731
    tensors = {
        "fc.weight": matrix(d, len(layers) * d),
        "norm.weight": norm(),
        "lm_head.weight": matrix(len(ids), d),
        "d2t": np.array(ids) - np.arange(len(ids)),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.self_attn.o_proj.weight": matrix(d, n),
        "midlayer.mlp.gate_proj.weight": matrix(f, d),
        "midlayer.mlp.up_proj.weight": matrix(f, d),
        "midlayer.mlp.down_proj.weight": matrix(d, f),
        **{f"midlayer.self_attn.{k}_proj.weight": matrix(w, 2 * d) for k, w in (("q", n), ("k", m), ("v", m))},
    }
    settings = {LAYER_IDS: list(layers)}
    return folder_of(
        tensors,
        {**hf, "layer_types": None, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(ids)}
        | {"eagle_config": settings},
    )


@functools.cache
def folder_for(kind, family="qwen3"):
    """A drafter for a target of test_lossless. EAGLE-3's vocabulary is what that target likes to say."""
    checkpoint = lossless.checkpoint(family)
    if kind == "eagle":
        return mimic(checkpoint)
    said = [token for out in lossless.plain(family, "preempted") for token in out.token_ids]
    ids = sorted(np.argsort(-np.bincount(said), kind="stable")[:6].tolist())
    return random_eagle3(checkpoint, tuple(ids), (0, 0, 0))
