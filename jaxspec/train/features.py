"""Features kept on disk: a target's hidden states of texts, for drafters that are trained elsewhere, or here.

A folder has `features.json`, which names model, layers and files, and files of safetensors. Text i of a file is

- `i.tokens` i32[t] and `i.loss_mask` bool[t]: where the target wrote the token,
- `i.features` [l, t, d]: the residual stream after each of the layers,
- `i.hidden_states` [t, d]: the final norm's output, which the target's head makes logits of.

A file is there whole or not at all, so the same command goes on where it was interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from jaxspec.checkpoint import Model
from jaxspec.engine.functional import checked_layers, hidden_states
from jaxspec.train.data import Text, TrainError
from jaxspec.train.folder import agree, as_stored, read, write
from jaxspec.train.interrupted import Interrupted, Stop
from jaxspec.train.objective import Batch, reader

INDEX = "features.json"
Rows = Float[np.ndarray, "t d"]
_FACTS = {"model", "layers", "dtype", "row_length", "width", "vocab_size", "files"}  # that a reader needs of the index
SHORTEST = 32  # tokens that texts are padded to, at least: to a power of two, so that few programs are compiled


@dataclass(frozen=True, eq=False)
class KeptText(Text):
    """A text whose features, after these `layers`, are number `index` of a `file`."""

    file: Path | None = None
    index: int = 0
    layers: tuple[int, ...] = ()

    def rows(self, length: int, layers: Sequence[int]) -> tuple[Rows, list[Rows]]:
        """The final hidden states of the first `length` tokens, and the features after these layers.

        **Raises:** `TrainError` for a layer whose features aren't kept.
        """
        if lacking := [layer for layer in layers if layer not in self.layers]:
            raise TrainError(
                f"--data {self.file.parent}: its features are of layers {list(self.layers)}, and the drafter reads "
                f"{list(layers)}; write layer {lacking[0]} too, or name others by --target-layers"
            )
        held = _opened(self.file)
        kept = held.get_slice(f"{self.index}.features")
        places = [self.layers.index(layer) for layer in layers]
        return held.get_slice(f"{self.index}.hidden_states")[:length], [kept[place, :length] for place in places]


@cache
def _opened(file: Path) -> Any:
    """**Raises:** `TrainError` for a file that isn't whole."""
    try:
        return safe_open(file, "np")
    except SafetensorError as error:
        raise TrainError(f"{file} is damaged ({error}). Remove it, and repeat the command that wrote it") from error


def extract(
    folder: Path, target: Model, texts: Sequence[Text], layers: Sequence[int], facts: dict[str, Any], *,
    row_length: int, batch_size: int, texts_per_file: int,
) -> None:  # fmt: skip
    """Write the features of texts into a folder, from the first file on that isn't there.

    `facts`: what they are made of. A text longer than `row_length` loses its end.

    **Raises:** `TrainError` if the folder has features of other facts; `RequestError` for layers that the model lacks;
    `Interrupted` for a Ctrl-C, once a file is whole.
    """
    layers = checked_layers(target, layers)
    record = {**as_stored(facts), "layers": list(layers), "dtype": target.dtype, "texts": len(texts)}
    record |= {"row_length": row_length, "texts_per_file": texts_per_file}
    record |= {"width": target.config.hidden_size, "vocab_size": target.config.vocab_size}
    index = folder / INDEX
    if index.exists():
        agree(
            folder, "other features", {k: v for k, v in read(index).items() if k not in ("files", "categories")}, record
        )
    starts = range(0, len(texts), texts_per_file)
    files = [f"features-{i:05d}.safetensors" for i in range(len(starts))]
    write(index, record | {"files": files, "categories": [text.category for text in texts]})
    with Stop() as stop, tqdm(total=len(texts), desc="features", unit="text") as bar:
        for name, start in zip(files, starts, strict=True):
            some = texts[start : start + texts_per_file]
            if not (folder / name).exists():
                if stop.asked:
                    raise Interrupted(f"interrupted before {name}; the same command resumes")
                part = folder / f"{name}.part"
                save_file(_tensors(target, some, layers, row_length, batch_size), part)
                part.replace(folder / name)
            bar.update(len(some))


def _tensors(
    target: Model, texts: Sequence[Text], layers: tuple[int, ...], row_length: int, batch_size: int
) -> dict[str, np.ndarray]:
    """A file's tensors by name. Batches have texts of similar lengths."""
    tensors: dict[str, np.ndarray] = {}
    lengths = [min(len(text.tokens), row_length) for text in texts]
    order = sorted(range(len(texts)), key=lambda i: lengths[i])
    states = _states(target, layers)
    for begin in range(0, len(order), batch_size):
        some = order[begin : begin + batch_size]
        width = max(SHORTEST, 1 << (lengths[some[-1]] - 1).bit_length())
        tokens = np.zeros((batch_size, width), np.int32)
        for row, i in enumerate(some):
            tokens[row, : lengths[i]] = texts[i].tokens[: lengths[i]]
        found = states(tokens)
        for row, i in enumerate(some):
            own = np.ascontiguousarray(found[:, row, : lengths[i]])
            tensors |= {f"{i}.features": own[:-1], f"{i}.hidden_states": own[-1]}
    for i, text in enumerate(texts):
        tensors |= {f"{i}.tokens": text.tokens[: lengths[i]], f"{i}.loss_mask": _mask(text, lengths[i])}
    return tensors


def _states(target: Model, layers: tuple[int, ...]) -> Callable[[np.ndarray], np.ndarray]:
    """A function of tokens [b, t]: the features after these layers and the final hidden states, [l, b, t, d]."""
    dtype = np.dtype(target.dtype)
    if target.tp_size == 1:
        every = (*layers, target.config.num_layers)
        return lambda tokens: np.asarray(hidden_states(target, tokens, every)).astype(dtype)
    read = reader(target, layers)

    def states(tokens: np.ndarray) -> np.ndarray:
        last, features = read(Batch(tokens, np.zeros_like(tokens), np.zeros(tokens.shape, bool)))
        return np.stack([*features, last]).astype(dtype)

    return states


def _mask(text: Text, length: int) -> Bool[np.ndarray, " t"]:
    mask = np.zeros(length, bool)
    for begin, end in text.answers:
        mask[begin:end] = True
    return mask


def holds_features(path: Path) -> bool:
    """Whether a path is a folder that `extract` wrote."""
    return (path / INDEX).is_file()


def read_features(folder: Path, target: Model, row_length: int) -> list[KeptText]:
    """The texts of a folder. Their features are read when they are needed.

    **Raises:** `TrainError` for features of another model, dtype or length, or an unfinished folder.
    """
    record, texts = read(folder / INDEX, "--data"), []
    if not isinstance(record, dict) or not record.keys() >= _FACTS:
        raise TrainError(f"--data {folder}: {INDEX} isn't one that `features` wrote")
    width, vocab, problem = target.config.hidden_size, target.config.vocab_size, None
    if missing := [name for name in record["files"] if not (folder / name).is_file()]:
        problem = f"unfinished: {missing[0]} isn't there; repeat the command that wrote them"
    elif record["dtype"] != target.dtype:
        problem = f"in {record['dtype']}, and --dtype is {target.dtype}"
    elif record["row_length"] < row_length:
        problem = f"of rows of {record['row_length']} tokens, and --row-length is {row_length}"
    elif record["width"] != width or record["vocab_size"] != vocab:
        problem = f"of another model, {record['model']}"
    if problem:
        raise TrainError(f"--data {folder}: its features are {problem}")
    for name in record["files"]:
        held = _opened(folder / name)
        count = sum(key.endswith(".tokens") for key in held.keys())  # noqa: SIM118
        for i in range(count):
            edges = np.flatnonzero(np.diff(np.pad(held.get_tensor(f"{i}.loss_mask"), 1).astype(np.int8)))
            answers = tuple(map(tuple, edges.reshape(-1, 2).tolist()))
            tokens = held.get_tensor(f"{i}.tokens")
            category = record["categories"][len(texts)] if "categories" in record else KeptText.category
            layers = tuple(record["layers"])
            texts.append(KeptText(tokens, answers, category, file=folder / name, index=i, layers=layers))
    return texts
