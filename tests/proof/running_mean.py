"""A kind of mixing of our own: each head's running mean of its values, S = a S + (1 - a) v, with a of each head."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.decoder.mixings import MIXINGS
from jaxspec.decoder.mixings.kind import Mixing
from jaxspec.models.memory import Recurrence
from jaxspec.models.weights import Layout, Param, by_inputs, by_outputs, linear


@dataclass(frozen=True)
class RunningMean:
    heads: int
    width: int

    @property
    def memory(self):
        return Recurrence(1, self.heads, 1, self.width)

    @property
    def columns(self):
        return 2 * self.heads * self.width

    def divided(self, share):
        return dataclasses.replace(self, heads=share("heads of a running mean", self.heads))


def tensors(layer, d, prefix):
    n, w = layer.mixing.heads, layer.mixing.width
    return {
        "values": linear(d, {prefix + "mean.values.weight": n * w}, split=by_outputs(((n, w),))),
        "keep": Param((n,), (prefix + "mean.keep",), Layout((n,)), init="zeros", split=by_outputs(((n, 1),))),
        "out": linear(n * w, {prefix + "mean.out.weight": d}, split=by_inputs(n, w)),
    }


def mix(layer, weights, i, made, positions, mixer, cache, dtype=None):
    (values,), (b, t) = made, positions.shape
    values, one = values.reshape(b, t, layer.mixing.heads, -1), jnp.ones((b, t, 1, 1), values.dtype)
    keep = jax.nn.sigmoid(weights["keep"].astype(jnp.float32))
    update = ((1 - keep)[:, None] * values).astype(values.dtype)
    out, cache = mixer.accumulate(cache, i, one, one, update, jnp.broadcast_to(keep, (b, t, layer.mixing.heads)))
    return out.reshape(b, t, -1), cache


MIXINGS[RunningMean] = Mixing(("values",), mix, implements={"plain": frozenset({"heads", "width"})})
