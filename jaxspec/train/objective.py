"""Shared by all methods: a batch of packed texts, the target's forward over it, and the report of a training step.

A target that is divided among devices (`--tp-size`) reads a batch as it does when it serves, each device its part of
the layers. What comes out stands in for the target's own forward, as features from disk do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.checkpoint import Model
from jaxspec.decoder.forward import Hidden, forward
from jaxspec.drafters.base import Drafter
from jaxspec.models.description import Mixture
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import Layout, Weight
from jaxspec.pallas.dense.weight_stream import MAX_ROWS
from jaxspec.pallas.hopper import kernels_here
from jaxspec.parallel import sharding
from jaxspec.train.attention import OneText, packed_attention
from jaxspec.train.data import TrainError
from jaxspec.train.losses import imported


@flax.struct.dataclass
class Batch:
    """Packed texts. `first` is the row that the text at each row begins at; rows of padding are a text of their own."""

    tokens: Int[Array, "b t"]
    first: Int[Array, "b t"]
    answer: Bool[Array, "b t"]  # the target wrote this token
    kept: tuple[Array, tuple[Array, ...]] | None = None  # final hidden states and the drafter's features, from disk

    @property
    def positions(self) -> Int[Array, "b t"]:
        """Position of each token in its own text."""
        return jnp.arange(self.tokens.shape[1]) - self.first

    def draftable(self, length: int) -> Bool[Array, "b t"]:
        """Where a round can begin with the token at a row, and the answer goes on for `length` tokens after it."""
        there = lambda x: jnp.roll(x, -length, axis=1)  # noqa: E731
        inside = jnp.arange(self.tokens.shape[1]) < self.tokens.shape[1] - length
        return self.answer & there(self.answer) & (there(self.first) == self.first) & inside


Read = Callable[[Batch], tuple[Array, tuple[Array, ...]]]  # a target's final hidden states and features


@flax.struct.dataclass
class Report:
    """Report of one batch: the mean loss of a draft, the weight of all drafts in it, and by draft position, how many
    rounds there were and how many of them accepted all drafts up to this one, were every draft the drafter's favourite
    and the target greedy."""

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    accepted: Float[Array, " n"]
    rounds: Float[Array, " n"]


@dataclass(frozen=True)
class Objective:
    """A method's loss. `loss(trained, frozen, target_params, batch, keys, done)` is pure; `positions` drafts are
    reported.

    It is given one device's rows, and `keys` has one for each of them: what is drawn for a row depends on nothing else.
    `done` is the share of the run's steps that are behind it.

    `dtype` is what activations are computed in; trained params are float32.
    """

    drafter: Drafter
    target: ModelConfig
    dtype: str
    kind: str

    @property
    def positions(self) -> int:
        raise NotImplementedError

    def loss(
        self,
        trained: Any,
        frozen: Any,
        target_params: Any,
        batch: Batch,
        keys: Key[Array, " b"],
        done: Float[Array, ""] | float = 0.0,
    ) -> tuple[Float[Array, ""], Report]:
        raise NotImplementedError

    def flops(self, trained: Any, row_length: int) -> float:
        """Floating-point operations in matrix multiplications by weights, for one token of one training step."""
        raise NotImplementedError

    def read(self, target_params: Any, batch: Batch) -> Hidden:
        """The target's forward: what the drafter is told, and what it is to learn. No gradient flows into it."""
        if batch.kept is not None:
            return Hidden(*batch.kept, None)
        check_rows(batch.tokens.size)
        mixer = (OneText if self.target.recurrent else packed_attention)(batch.first)
        layers = self.drafter.feature_layers
        hidden = forward(self.target.decoder, target_params, batch.tokens, batch.positions, mixer, None, layers)
        return jax.lax.stop_gradient(hidden)

    def cast(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(self.dtype), tree)


def without_layers(target: Model) -> Model:
    """The target as one device's, of which embedding, norm and head are left.

    **Raises:** `TrainError` for a quantised head.
    """
    vocab = target.config.vocab_size
    put = partial(jax.device_put, device=jax.local_devices()[0])
    params = {name: put(target.params[name]) for name in ("embed", "norm")}
    params["embed"] = params["embed"][:vocab]  # devices have padded parts
    if (head := target.params.get("head")) is not None:
        if head.quantised:
            raise TrainError(f"{target.name} has a quantised head, which --tp-size can't divide for training")
        params["head"] = Weight(put(head.values)[:, :vocab], layout=Layout((vocab,)))
    return replace(target, params=params, tp_size=1)


def reader(target: Model, layers: tuple[int, ...]) -> Read:
    """The divided target's forward: a batch's final hidden states, and the features after these layers."""
    mesh, config, drafter = sharding.mesh_of(target.tp_size), target.config.on_one_of(target.tp_size), _Reads(layers)
    objective = Objective(drafter, config, target.dtype, "soft")

    def read(params: Any, batch: Batch) -> tuple[Array, tuple[Array, ...]]:
        hidden = objective.read(params, batch)
        return hidden.last, hidden.features

    everywhere = sharding.EVERYWHERE
    run = jax.jit(sharding.spread(read, mesh, (sharding.specs_of(target.params), everywhere), everywhere))
    return partial(run, target.params)


@dataclass(frozen=True)
class _Reads:
    """Stands for a drafter, of which reading needs the layers alone."""

    feature_layers: tuple[int, ...]


def own(name: str, kind: type[Objective]) -> type[Objective]:
    """Import an objective of the user's, `module:Class`, to take the place of the method's `kind`.

    **Raises:** `TrainError` for a class that can't be imported, isn't a subclass, or adds fields without defaults.
    """
    found = imported("--objective", name)
    if not issubclass(found, kind):
        raise TrainError(f"--objective {name} must be a subclass of {kind.__module__}.{kind.__name__}")
    try:
        inspect.signature(found).bind(*fields(kind))
    except TypeError as error:
        raise TrainError(f"--objective {name} must take {kind.__name__}'s fields alone: {error}") from error
    return found


def check_rows(rows: int) -> None:
    """**Raises:** `TrainError` for so few that models would run in a kernel for decoding, which has no gradient."""
    if rows <= MAX_ROWS and kernels_here() is None:
        raise TrainError(
            f"a step has {rows} rows, and takes more than {MAX_ROWS}: raise --batch-size or --row-length, or "
            "DFlash's --anchors"
        )


def report(
    total: Float[Array, ""], right: Bool[Array, "n ..."], valid: Bool[Array, "n ..."], weights: Float[Array, "n ..."]
) -> tuple[Float[Array, ""], Report]:
    """The mean of a summed loss, and the report: draft i of a round stands if all before it do. Leading axis: drafts.

    `valid` is where a draft has an answer to be compared to, `weights` how much it counted.
    """
    weight = jnp.maximum(weights.sum(), 1.0)
    mean = total / weight
    standing = jnp.cumprod(right & valid, axis=0)
    axes = tuple(range(1, right.ndim))
    return mean, Report(mean, weight, standing.sum(axes).astype(jnp.float32), valid.sum(axes).astype(jnp.float32))


def matmul_weights(config: ModelConfig) -> int:
    """Weights that one token is multiplied by in a decoder, its head not counted."""
    d, total = config.hidden_size, 0
    for layer in config.decoder.layers:
        feed = layer.feed
        width = feed.per_token * feed.width + feed.shared if isinstance(feed, Mixture) else feed.width
        width += feed.beside.width if isinstance(feed, Mixture) and feed.beside else 0
        total += d * (layer.mixing.columns + 3 * width)
    return total
