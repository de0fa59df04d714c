"""What the arrays of a params pytree are made of: declarations that checkpoints are read, checked, written by."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container
from dataclasses import dataclass

HALF = 32  # columns of gate, then as many of up, in the weight of a gated MLP: so a tile of columns holds both


@dataclass(frozen=True)
class Param:
    """One array of a params pytree: its shape here, the checkpoint tensors it is made of, how to make it up.

    `sources` are Hugging Face tensor names. Each is `[out, in]` there and is transposed to `[in, out]` if `transpose`;
    several are concatenated along the last axis, with widths `splits` (their last axes after transposing). If
    `interleave`, the two halves of that then alternate in runs of that many columns. Columns that come in groups, each
    of parts of the widths `grouped`, are put part by part instead. A `depthwise` convolution's weight is `[out, 1, in]`
    there. `dtype` is this array's own, whatever that of the rest.

    A stack of experts' weights, `[experts, out, in]`, has one matrix or several an expert for sources, each with
    `splits` rows, one under the other; or else the tensor `whole`, which holds them all already.
    """

    shape: tuple[int, ...]
    sources: tuple[str, ...]
    splits: tuple[int, ...] = ()
    transpose: bool = False
    interleave: int = 0
    grouped: tuple[int, ...] = ()
    depthwise: bool = False
    dtype: str | None = None
    init: str = "normal"  # "normal" (fan-in scaled) | "ones" | "zeros", for dummy weights
    whole: str = ""

    @property
    def stacked(self) -> bool:
        return len(self.shape) == 3

    def stored(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each checkpoint tensor that it is made of."""
        if self.sources == (self.whole,):
            return {self.whole: self.shape}
        if self.stacked:
            return {name: (rows, self.shape[-1]) for name, rows in zip(self.sources, self.splits, strict=True)}
        widths = zip(self.sources, self.splits, strict=True)
        shapes = {name: (*self.shape[:-1], width) for name, width in widths}
        shapes = {name: shape[::-1] if self.transpose else shape for name, shape in shapes.items()}
        return {name: (out, 1, taps) for name, (out, taps) in shapes.items()} if self.depthwise else shapes

    def as_found(self, names: Container[str]) -> Param:
        """The same, made of `whole` if that is what a checkpoint with these tensors has."""
        return dataclasses.replace(self, sources=(self.whole,), splits=()) if self.whole in names else self


def linear(inputs: int, sources: dict[str, int], interleave: int = 0) -> Param:
    """A matmul weight `[inputs, sum of widths]` fused from the named `[width, inputs]` checkpoint tensors."""
    widths = tuple(sources.values())
    return Param((inputs, sum(widths)), tuple(sources), widths, transpose=True, interleave=interleave)


def bias(sources: dict[str, int], interleave: int = 0) -> Param:
    widths = tuple(sources.values())
    return Param((sum(widths),), tuple(sources), widths, interleave=interleave, init="zeros")


def norm_scale(width: int, source: str, centred: bool = False) -> Param:
    """The weight of a norm: `centred`, an offset from one."""
    return Param((width,), (source,), (width,), init="zeros" if centred else "ones")


def expert_stack(experts: int, inputs: int, whole: str, sources: dict[str, int]) -> Param:
    """Weights `[experts, out, inputs]`, kept as checkpoints have them: `sources` are the tensors of expert `{}`."""
    names = tuple(name.format(i) for i in range(experts) for name in sources)
    shape = experts, sum(sources.values()), inputs
    return Param(shape, names, tuple(sources.values()) * experts, whole=whole)


def run_length(mlp_size: int) -> int:
    """How many columns of gate alternate with as many of up."""
    return math.gcd(mlp_size, HALF)
