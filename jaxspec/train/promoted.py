"""A DFlash drafter as the start of a DSpark one: its block, and heads that change nothing yet.

`python -m jaxspec.train dspark --init DFLASH` begins here. The new drafter's blocks begin with the known token, as
DFlash's do (`sample_from_anchor` is false). `markov_after` is zero, so the first drafts are DFlash's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint import ModelFolder
from jaxspec.drafters.dflash_checkpoint import canonical, flat, open_folder, recognise
from jaxspec.train.data import TrainError
from jaxspec.train.export import dspark_settings, write_tensors

RANK = 256
MLP = "mlp.{}_proj.weight"  # of a layer: [n, d] for gate and up, [d, n] for down


def is_dflash(source: str) -> bool:
    """Whether `source` is a plain DFlash drafter. **Raises:** as `load_drafter` for one that can't be read."""
    return recognise(open_folder(source, "auto").hf) == "dflash"


def promote(
    folder: Path, source: str, rank: int | None, head: str | None, mlp_size: int | None = None, seed: int = 0
) -> Path:
    """Write a DSpark drafter that drafts as the DFlash drafter `source` does.

    **Arguments:** `rank` of the Markov head (256), and its kind, `head` (vanilla). `mlp_size`: neurons that each MLP
    keeps, those with the largest weights; None: all.

    **Raises:** `TrainError` if an MLP has fewer neurons.
    """
    files = open_folder(source, "auto")
    rank, own, rng = rank or RANK, flat(files.hf), np.random.default_rng(seed)
    width, vocab = own["hidden_size"], own["vocab_size"]
    tensors = {canonical(name): files.tensor(name) for name in files.tensors()}
    if mlp_size is not None:
        if mlp_size > own["intermediate_size"]:
            raise TrainError(
                f"--mlp-size {mlp_size}: --init {source} has {own['intermediate_size']} neurons in each MLP, and "
                "fewer can be kept, not more"
            )
        for layer in range(own["num_hidden_layers"]):
            tensors |= _kept(tensors, f"layers.{layer}.", mlp_size)
    drawn = lambda *shape: (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(jnp.bfloat16)  # noqa: E731
    zero = lambda *shape: np.zeros(shape, jnp.bfloat16)  # noqa: E731
    tensors |= {
        "markov_head.markov_w1.weight": drawn(vocab, rank),
        "markov_head.markov_w2.weight": zero(vocab, rank),
        "confidence_head.proj.weight": zero(1, width + rank),
        "confidence_head.proj.bias": zero(1),
    }
    joint = {"gated": ("gate", width + rank, rank), "rnn": ("joint", 2 * rank + width, 3 * rank)}
    if head in joint:
        name, inputs, outputs = joint[head]
        tensors[f"markov_head.{name}_proj.weight"] = drawn(outputs, inputs)
        tensors[f"markov_head.{name}_proj.bias"] = zero(outputs)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(files, own, rank, head, mlp_size), indent=2) + "\n")
    write_tensors(folder, tensors)
    return folder


def _kept(tensors: dict[str, np.ndarray], layer: str, size: int) -> dict[str, np.ndarray]:
    """A layer's MLP without the neurons whose weights are smallest, by the product of their norms."""
    gate, up, down = (tensors[layer + MLP.format(name)] for name in ("gate", "up", "down"))
    norm = lambda x: np.linalg.norm(np.asarray(x, np.float32), axis=1)  # noqa: E731
    kept = np.sort(np.argsort(-norm(gate) * norm(up) * norm(down.T), kind="stable")[:size])
    return {
        layer + MLP.format(name): np.ascontiguousarray(x)
        for name, x in (("gate", gate[kept]), ("up", up[kept]), ("down", down[:, kept]))
    }


def _config(
    files: ModelFolder, own: dict[str, Any], rank: int, head: str | None, mlp_size: int | None
) -> dict[str, Any]:
    heads = own["num_attention_heads"], own["num_key_value_heads"]
    settings = dict(files.hf.get("dflash_config") or {}) | dspark_settings(*heads, rank, head or "vanilla")
    settings |= {"sample_from_anchor": False}
    size = {} if mlp_size is None else {"intermediate_size": mlp_size}
    return {**files.hf, **size, "architectures": ["DSparkDraftModel"], "dflash_config": settings}
