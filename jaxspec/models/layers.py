"""What every model family is made of: parameter declarations and the small pure functions between matmuls.

Axis letters: b batch, t tokens, d model width, n query heads, m KV heads, h head width, f MLP width, v vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxspec.config import LinearAttention, ModelConfig, RopeScaling


class Mixer(Protocol):
    """What mixes tokens with those before them: a forward hands it each layer's rows, and it owns what came before.

    The `cache` is whatever it keeps that in, passed through the forward. `layer` i32[] counts among the layers that mix
    in the same way: attention reads keys and values of all tokens so far, `convolve` and `recur` a state of fixed size.
    Models without linear attention call `attend` alone.
    """

    def only(self, asked: Bool[Array, " b"]) -> Mixer:
        """The same, where nobody reads what attention makes of other sequences: it may make anything finite of them."""
        ...

    def attend(
        self,
        cache: Any,
        layer: Int[Array, ""],
        q: Float[Array, "b t n h"],
        k: Float[Array, "b t m h"],
        v: Float[Array, "b t m h"],
    ) -> tuple[Float[Array, "b t n h"], Any]:
        """Causal attention, scores scaled by h**-0.5."""
        ...

    def convolve(
        self,
        cache: Any,
        layer: Int[Array, ""],
        x: Float[Array, "b t d"],
        weight: Float[Array, "w c"],
        mix: LinearAttention,
    ) -> tuple[tuple[Float[Array, "b t m k"], Float[Array, "b t m k"], Float[Array, "b t n v"]], Any]:
        """Each channel's causal convolution over its newest w rows, the last tap on the row itself, then SiLU.

        The channels are the first c columns of x: queries, keys and values of `mix`'s heads. They come out by head,
        queries and keys of length one, queries scaled by k**-0.5.
        """
        ...

    def recur(
        self,
        cache: Any,
        layer: Int[Array, ""],
        q: Float[Array, "b t m k"],
        k: Float[Array, "b t m k"],
        v: Float[Array, "b t n v"],
        decay: Float[Array, "b t n"],
        beta: Float[Array, "b t n"],
        filled: int,
    ) -> tuple[Float[Array, "b r n v"], Any]:
        """The gated delta rule, S = decay S + beta (v - decay S k) k', out = S q; key head i serves n/m value heads.

        The result has r = `filled` rows a request, of which those from t on may hold anything.
        """
        ...


class PagedMixer(Mixer, Protocol):
    """One that keeps keys and values in pages, and lets a kernel of the layer's own write them there."""

    def pages(self, cache: Any) -> Float[Array, "l p 2 m s h"]:
        """The pages of all layers, as `cache.KV`."""
        ...

    def attend_written(
        self,
        cache: Any,
        layer: Int[Array, ""],
        t: int,
        write: Callable[[Array, Int[Array, "b t"]], tuple[Float[Array, "b t n h"], Array]],
    ) -> tuple[Float[Array, "b t n h"], Any]:
        """As `attend`, of t rows a request whose keys and values `write(pages, place)` puts where they belong.

        It gives their queries and the pages. A row's place is a slot counted over all pages, and -1 for padding.
        """
        ...


@dataclass(frozen=True)
class Attention:
    """A `Mixer` for models without linear attention, made of a function that attends."""

    attend: Callable[[Any, Array, Array, Array, Array], tuple[Array, Any]]

    def only(self, asked: Bool[Array, " b"]) -> Attention:
        return self


@dataclass(frozen=True)
class Param:
    """One array of a params pytree: its shape here, the checkpoint tensors it is made of, how to make it up.

    `sources` are Hugging Face tensor names. Each is `[out, in]` there and is transposed to `[in, out]` if `transpose`;
    several are concatenated along the last axis, with widths `splits` (their last axes after transposing), or, if
    `interleave`, alternate along it in runs of that many columns. Columns that come in groups, each of parts of the
    widths `grouped`, are put part by part instead. A `depthwise` convolution's weight is `[out, 1, in]` there.
    `dtype` is this array's own, whatever that of the rest.

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


@flax.struct.dataclass
class Hidden:
    """A forward's result: `last` is the final-norm output; `features` the residual stream after each captured layer.

    Where one row a sequence was wanted, t is 1 in `last`, and in all that is of the last layer.

    `unnormed` is what the final norm was taken of, if that is a `rms_norm`.
    """

    last: Float[Array, "b t d"]
    features: tuple[Float[Array, "b t d"], ...]
    cache: Any
    unnormed: Float[Array, "b t d"] | None = None


def row_of(x: Shaped[Array, "b t ..."], row: Int[Array, " b"] | None) -> Shaped[Array, "b _ ..."]:
    """Of each sequence the one row named, `[b, 1, ...]`; all of them if none is."""
    return x if row is None else jnp.take_along_axis(x, row.reshape(-1, *[1] * (x.ndim - 1)), axis=1)


def linear(inputs: int, sources: dict[str, int], interleave: int = 0) -> Param:
    """A matmul weight `[inputs, sum of widths]` fused from the named `[width, inputs]` checkpoint tensors."""
    widths = tuple(sources.values())
    return Param((inputs, sum(widths)), tuple(sources), widths, transpose=True, interleave=interleave)


def bias(sources: dict[str, int], interleave: int = 0) -> Param:
    widths = tuple(sources.values())
    return Param((sum(widths),), tuple(sources), widths, interleave=interleave, init="zeros")


def scale(width: int, source: str) -> Param:
    return Param((width,), (source,), (width,), init="ones")


def expert_stack(experts: int, inputs: int, whole: str, sources: dict[str, int]) -> Param:
    """Weights `[experts, out, inputs]`, kept as checkpoints have them: `sources` are the tensors of expert `{}`."""
    names = tuple(name.format(i) for i in range(experts) for name in sources)
    shape = experts, sum(sources.values()), inputs
    return Param(shape, names, tuple(sources.values()) * experts, whole=whole)


def rms_norm(x: Float[Array, "*b d"], weight: Float[Array, " d"], eps: float) -> Float[Array, "*b d"]:
    """Root-mean-square norm, in float32 whatever x's dtype (https://arxiv.org/abs/1910.07467)."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32.astype(x.dtype) * weight).astype(x.dtype)


def centred_scale(width: int, source: str) -> Param:
    """The weight of a `centred_rms_norm`."""
    return Param((width,), (source,), (width,), init="zeros")


def centred_rms_norm(x: Float[Array, "*b d"], weight: Float[Array, " d"], eps: float) -> Float[Array, "*b d"]:
    """As `rms_norm`, but the weight is an offset from one, and is applied in float32 (Gemma's, and Qwen3-Next's)."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * (1 + weight.astype(jnp.float32))).astype(x.dtype)


def rope_frequencies(config: ModelConfig) -> Float[Array, " half"]:
    """Inverse frequencies of the rotary embedding, with Llama 3's long-context scaling where the config has it."""
    half = config.rotary_dim // 2
    frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    return frequency if config.rope_scaling is None else _llama3(frequency, config.rope_scaling)


def _llama3(frequency: Array, scaling: RopeScaling) -> Array:
    """Divide slow frequencies by `factor`, keep fast ones, interpolate between (Llama 3.1 model card)."""
    wavelength = 2 * math.pi / frequency
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = jnp.clip((scaling.original_max_position / wavelength - low) / (high - low), 0.0, 1.0)
    return frequency * (smooth + (1 - smooth) / scaling.factor)


def cos_sin(
    positions: Int[Array, "*b"], frequencies: Float[Array, " half"]
) -> tuple[Float[Array, "*b half"], Float[Array, "*b half"]]:
    """Cosine and sine of the angles by which each position rotates, float32."""
    angle = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angle), jnp.sin(angle)


def rope(
    x: Float[Array, "b t n h"], positions: Int[Array, "b t"], frequencies: Float[Array, " half"]
) -> Float[Array, "b t n h"]:
    """Rotary embedding, first half against second half (the "neox" pairing), computed in float32.

    Where there are fewer frequencies than pairs, the first 2 * half columns rotate and the others stay.
    """
    half = len(frequencies)
    cos, sin = cos_sin(positions[..., None], frequencies)
    first, second, rest = jnp.split(x.astype(jnp.float32), [half, 2 * half], axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1).astype(x.dtype)


def causal_attention(cache: Any, layer: Int[Array, ""], q: Array, k: Array, v: Array) -> tuple[Array, Any]:
    """Attention among the given tokens alone, each sequence starting at its row 0; `cache` passes through."""
    b, t, n, h = q.shape
    m = k.shape[2]
    q = q.reshape(b, t, m, n // m, h)
    scores = jnp.einsum("btmgh,bsmh->bmgts", q, k, preferred_element_type=jnp.float32) * h**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bmgts,bsmh->btmgh", weights, v).reshape(b, t, n, h), cache
