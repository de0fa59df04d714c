"""Drafters that exist already, to be trained on with texts of one's own: `--init`.

The folder gets the drafter's config as it is, and its file has the names that the drafter's has. Tensors that aren't
trained are copied: embeddings, token ids.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.checkpoint import Model, ModelFolder, locate
from jaxspec.config.options import ConfigError
from jaxspec.drafters.blocks.dspark import DSpark
from jaxspec.drafters.dflash import DERIVED, DFlash
from jaxspec.drafters.dflash_checkpoint import canonical as dflash_name
from jaxspec.drafters.eagle import Eagle3
from jaxspec.drafters.eagle_checkpoint import canonical as eagle_name
from jaxspec.drafters.eagle_checkpoint import find_eagle3
from jaxspec.drafters.loading import load_drafter, parse_draft
from jaxspec.drafters.mtp import Mtp
from jaxspec.drafters.mtp_streams import MtpStreams
from jaxspec.drafters.registry import DRAFTERS
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import Weight, formats
from jaxspec.train.data import TrainError
from jaxspec.train.export import Fresh, checkpoint_tensors, write_tensors


@dataclass(frozen=True, eq=False)
class Continued(Fresh):
    """`files`: of the drafter that training starts from. `name` turns its tensors' names into declared ones."""

    files: ModelFolder | None = None
    name: Callable[[str], str] = str

    def save(self, trained: Any) -> Path:
        """Write the folder's weights: `trained` in bfloat16, the others as they were."""
        made = checkpoint_tensors(self.declared, trained)
        tensors = {}
        for stored in self.files.tensors():
            new = made.get(self.name(stored))
            tensors[stored] = self.files.tensor(stored) if new is None else new
        return write_tensors(self.folder, tensors)


def continued(folder: Path, method: str, source: str, target: Model) -> Continued:
    """The drafter that `--draft method:source` serves, in its folder-to-be.

    **Raises:** `TrainError` for one that isn't trained as it drafts, and as `load_drafter` does.
    """
    loaded = load_drafter(f"{method}:{source}", target)
    drafter, params, files = loaded.drafter, loaded.params, locate(source)
    if reason := untrainable(drafter, params):
        raise TrainError(f"--init {source}: {reason}. Train a new drafter, without --init")
    if isinstance(drafter, Eagle3):
        declared, name = find_eagle3(source, target.config, "auto").declared, eagle_name
    else:
        declared, name = drafter.parameters({dflash_name(stored) for stored in files.tensors()}), dflash_name
    declared = {key: tree for key, tree in declared.items() if key != "embed"}
    if isinstance(drafter, DFlash):
        declared.pop("head", None)  # the target's, or `untrainable` had refused it
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(files.path / "config.json", folder / "config.json")
    trained = jax.tree.map(lambda x: jnp.array(x, jnp.float32), {key: params[key] for key in declared})
    made = (*declared, *DERIVED)  # the latter of trained params, anew in each step
    frozen = {key: value for key, value in params.items() if key not in made}
    return Continued(folder, drafter, declared, trained, frozen, files=files, name=name)


def check_init(method: str, source: str, target: ModelConfig) -> int | None:
    """Refuse a drafter of another method or target, as far as its config tells. Returns how many drafts a block has;
    None: any number.

    **Raises:** `TrainError`; `CheckpointError` for one that isn't there.
    """
    files = locate(source)
    try:
        cls, _, _ = parse_draft(source, "the target", "auto")
        kind = next(name for name, each in DRAFTERS.items() if each is cls)
        if kind != method and (kind, method) != ("dflash", "dspark"):
            raise TrainError(f"--init {source} is a drafter of the method {kind}, and {method} trains others")
        if method == "eagle3":
            find_eagle3(source, target, "auto")
            return None
        drafter = cls.from_hf(files.hf, target)
    except ConfigError as error:
        raise TrainError(f"--init {source} can't be trained by {method}: {error}") from error
    return drafter.block_size - (drafter.first if kind == method else 1)  # a DSpark drafter made of it has first 1


def heads_alone(fresh: Continued, names: Container[str], dtype: str) -> Continued:
    """Freeze all params but those with these names. The frozen ones are cast to `dtype`."""
    trained = {name: value for name, value in fresh.trained.items() if name in names}
    fixed = {name: value for name, value in fresh.trained.items() if name not in names}
    frozen = {**fresh.frozen, **jax.tree.map(lambda x: x.astype(dtype), fixed)}
    declared = {name: tree for name, tree in fresh.declared.items() if name in names}
    return replace(fresh, trained=trained, frozen=frozen, declared=declared)


def untrainable(drafter: Any, params: Any) -> str | None:
    """Why training wouldn't compute what the drafter does, or None if it does."""
    weights = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Weight))
    if any(each.quantised for each in formats(weights)):
        return "its weights are quantised"
    if isinstance(drafter, MtpStreams):
        return "it reads several residual streams"
    if isinstance(drafter, Eagle3 | Mtp):
        return None
    if not isinstance(drafter, DFlash):
        return f"it is {type(drafter).__name__}, and only EAGLE-3, MTP and block drafters are trained"
    if isinstance(drafter, DSpark) and not (drafter.rank and drafter.guesses_by_draft):
        return "it has no Markov head, or no confidence head that reads the draft before"
    if any(drafter.causal) or any(layer.mixing.window for layer in drafter.config.decoder.layers):
        return "it has layers that are causal within a block, or sliding ones"
    if drafter.multiplier != 1 or drafter.softcap is not None or drafter.config.decoder.embed_scale != 1:
        return "it scales its embeddings or logits"
    if drafter.draft_ids is not None:
        return "it has a vocabulary of its own"
    return None
