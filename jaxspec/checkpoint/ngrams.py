"""Numbers that a checkpoint has of its hashes of n-grams, which follow from its config: checked, and not read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from jaxspec.checkpoint.check import CheckpointError
from jaxspec.checkpoint.shards import ModelFolder
from jaxspec.models.description import Decoder, NGrams


def check_hashes(files: ModelFolder, decoder: Decoder, rename: Callable[[str], str | None]) -> None:
    """**Raises:** `CheckpointError` for numbers that aren't those of the config: other rows would be looked up.

    Tensors of `files` are called `rename(their name)`.
    """
    wanted = {f"model.layers.{i}.ple.ple_embedding.{name}": numbers for i, layer in enumerate(decoder.layers)
              if layer.ngrams for name, numbers in _numbers(layer.ngrams).items()}  # fmt: skip
    if not wanted:
        return
    names = {name: rename(name) for name in files.tensors()}
    for name, found in files.some({name for name, ours in names.items() if ours in wanted}):
        expected = list(wanted[names[name]])
        if np.ravel(found).tolist() != expected:
            raise CheckpointError(f"{files.path}: {name} is {np.ravel(found).tolist()}; by the config it is {expected}")


def _numbers(of: NGrams) -> dict[str, Sequence[int]]:
    starts = list(itertools.accumulate(of.sizes, initial=0))[:-1]
    return {"layer_multipliers": of.multipliers, "ngram_heads_vocab_sizes": of.sizes, "ngram_heads_offsets": starts}
