"""What params pytrees are made of: weights of matmuls with their format and layout, and declarations of every array.

The weight of a matmul is a `Weight`, wherever it is kept; norms' scales, biases and embeddings are plain arrays. A
kernel reads a weight through `Weight.unquantised`, which raises for any other format, so that no kernel ever takes
quantised values for numbers. `Param` declares one array or weight: checkpoints are read, checked and written by it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

HALF = 32  # columns of gate, then as many of up, in the weight of a gated MLP: so a tile of columns holds both


@dataclass(frozen=True)
class Unquantised:
    """The values are the weight itself, in a floating-point dtype."""


Format = Unquantised


@dataclass(frozen=True)
class Layout:
    """How several projections' outputs stand in one weight. Like `Format`, static under jit.

    `splits` are the outputs of each projection, one after the other. With `interleave`, the two halves of them all
    alternate in runs of that many. With `grouped`, the checkpoint has outputs in groups, each of parts of these widths;
    here all groups' first parts come first, then their second ones.
    """

    splits: tuple[int, ...] = ()
    interleave: int = 0
    grouped: tuple[int, ...] = ()

    def pack(self, parts: Sequence[Array]) -> Array:
        """The projections' outputs, each the last axis of an array of `parts`, as they stand in the weight."""
        flat = lambda x, rank: x.reshape(*x.shape[:-rank], -1)  # noqa: E731
        whole = jnp.concatenate(parts, axis=-1)
        if self.interleave:
            halves = whole.reshape(*whole.shape[:-1], 2, -1, self.interleave)
            return flat(jnp.swapaxes(halves, -3, -2), 3)
        if not self.grouped:
            return whole
        groups = whole.reshape(*whole.shape[:-1], -1, sum(self.grouped))
        parts = jnp.split(groups, list(itertools.accumulate(self.grouped))[:-1], axis=-1)
        return jnp.concatenate([flat(part, 2) for part in parts], axis=-1)

    def unpack(self, whole: Array) -> list[Array]:
        """`pack` undone."""
        if self.interleave:
            runs = whole.reshape(*whole.shape[:-1], -1, 2, self.interleave)
            whole = jnp.swapaxes(runs, -3, -2).reshape(whole.shape)
        if self.grouped:
            groups = whole.shape[-1] // sum(self.grouped)
            parts = jnp.split(whole, [groups * end for end in itertools.accumulate(self.grouped)][:-1], axis=-1)
            parts = [part.reshape(*whole.shape[:-1], groups, -1) for part in parts]
            whole = jnp.concatenate(parts, axis=-1).reshape(whole.shape)
        return jnp.split(whole, list(itertools.accumulate(self.splits))[:-1], axis=-1)


@flax.struct.dataclass
class Weight:
    """The weight of a matmul, `values` [inputs, outputs], or of many experts' [experts, outputs, inputs].

    `format` says how to read the values, `layout` whose outputs they are. Both are static under jit.
    """

    values: Float[Array, "*e k n"]
    format: Format = flax.struct.field(pytree_node=False, default=Unquantised())
    layout: Layout = flax.struct.field(pytree_node=False, default=Layout())

    @property
    def inputs(self) -> int:
        return self.values.shape[-1 if self.values.ndim == 3 else -2]

    @property
    def outputs(self) -> int:
        return self.values.shape[-2 if self.values.ndim == 3 else -1]

    @property
    def dtype(self) -> Any:
        """Of the values as they are stored."""
        return self.values.dtype

    @property
    def unquantised(self) -> Float[Array, "*e k n"]:
        """The values, for kernels that take no scales. **Raises:** `TypeError` if they aren't the weight itself."""
        if not isinstance(self.format, Unquantised):
            raise TypeError(f"a weight in {self.format} was given to a kernel that takes unquantised ones")
        return self.values

    def dequantised(self, dtype: Any) -> Float[Array, "*e k n"]:
        """The whole weight in `dtype`, in the shape that unquantised values have."""
        return self.unquantised.astype(dtype)

    def matrix(self, i: Any, dtype: Any) -> Float[Array, "n k"]:
        """The i-th expert's weight of a stack, in `dtype`."""
        return self.unquantised[i].astype(dtype)

    def parts(self) -> list[Array]:
        """Each projection's columns, in the order of `layout.splits`."""
        return self.layout.unpack(self.unquantised)


def formats(tree: Any) -> tuple[Format, ...]:
    """The formats of all weights of a pytree, each once."""
    weights = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Weight))
    return tuple(dict.fromkeys(weight.format for weight in weights if isinstance(weight, Weight)))


@dataclass(frozen=True)
class Param:
    """One array or weight of a params pytree: its shape, the checkpoint tensors it is made of, how to make it up.

    `sources` are Hugging Face tensor names. Each is `[out, in]` there and is transposed to `[in, out]` if `transpose`;
    several are put together along the last axis as `layout` says, whose splits are their last axes after transposing.
    A `depthwise` convolution's weight is `[out, 1, in]` there. `dtype` is this array's own, whatever that of the rest.

    A stack of experts' weights, `[experts, out, in]`, has one matrix or several an expert for sources, with the rows of
    `layout.splits`, one under the other; or else the tensor `whole`, which holds them all already.
    """

    shape: tuple[int, ...]
    sources: tuple[str, ...]
    layout: Layout
    transpose: bool = False
    depthwise: bool = False
    dtype: str | None = None
    init: str = "normal"  # "normal" (fan-in scaled) | "ones" | "zeros", for dummy weights
    whole: str = ""

    @property
    def stacked(self) -> bool:
        return len(self.shape) == 3

    @property
    def of_matmul(self) -> bool:
        """Whether it is a `Weight`, not an array."""
        return self.stacked or (self.transpose and not self.depthwise)

    def made(self, values: Any) -> Any:
        """What stands in the params for these values, of `shape`: an array, or a `Weight` of it."""
        return Weight(values, layout=self.layout) if self.of_matmul else values

    def stored(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each checkpoint tensor that it is made of."""
        if self.sources == (self.whole,):
            return {self.whole: self.shape}
        splits = self.layout.splits
        if self.stacked:
            rows = zip(self.sources, splits * self.shape[0], strict=True)
            return {name: (count, self.shape[-1]) for name, count in rows}
        shapes = {name: (*self.shape[:-1], width) for name, width in zip(self.sources, splits, strict=True)}
        shapes = {name: shape[::-1] if self.transpose else shape for name, shape in shapes.items()}
        return {name: (out, 1, taps) for name, (out, taps) in shapes.items()} if self.depthwise else shapes

    def as_found(self, names: Container[str]) -> Param:
        """The same, made of `whole` if that is what a checkpoint with these tensors has."""
        return dataclasses.replace(self, sources=(self.whole,)) if self.whole in names else self


def is_param(leaf: Any) -> bool:
    return isinstance(leaf, Param)


def linear(inputs: int, sources: dict[str, int], interleave: int = 0) -> Param:
    """A matmul weight `[inputs, sum of widths]` fused from the named `[width, inputs]` checkpoint tensors."""
    layout = Layout(tuple(sources.values()), interleave)
    return Param((inputs, sum(sources.values())), tuple(sources), layout, transpose=True)


def bias(sources: dict[str, int], interleave: int = 0) -> Param:
    layout = Layout(tuple(sources.values()), interleave)
    return Param((sum(sources.values()),), tuple(sources), layout, init="zeros")


def norm_scale(width: int, source: str, centred: bool = False) -> Param:
    """The weight of a norm: `centred`, an offset from one."""
    return Param((width,), (source,), Layout((width,)), init="zeros" if centred else "ones")


def expert_stack(experts: int, inputs: int, whole: str, sources: dict[str, int]) -> Param:
    """Weights `[experts, out, inputs]`, kept as checkpoints have them: `sources` are the tensors of expert `{}`."""
    names = tuple(name.format(i) for i in range(experts) for name in sources)
    shape = experts, sum(sources.values()), inputs
    return Param(shape, names, Layout(tuple(sources.values())), whole=whole)


def run_length(mlp_size: int) -> int:
    """How many columns of gate alternate with as many of up."""
    return math.gcd(mlp_size, HALF)
