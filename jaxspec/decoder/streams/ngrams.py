"""Rows of a large table by the hashes of each token's n-grams, and what they add to residual streams.

Hashes have 64 bits and numbers here 32, so that a hash is four limbs of 16, the lowest first.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxspec.decoder.functions import normed
from jaxspec.decoder.matmul import project
from jaxspec.decoder.mixer import NGramMixer
from jaxspec.decoder.mixings.kind import Weights
from jaxspec.models.description import Layer, NGrams
from jaxspec.models.weights import Weight
from jaxspec.parallel.collectives import AXIS, devices, total

LIMB = 16  # bits
LEAST = 1e-6  # of what a root is taken


@jax.named_scope("ngrams")
def ngrams_of(
    layer: Layer,
    weights: Weights,
    mixers: tuple[NGramMixer, NGramMixer],
    tokens: Int[Array, "b t"],
    x: Float[Array, "b t s d"],
    valid: Int[Array, "1"],
    cache: Any,
) -> tuple[Float[Array, "b t s d"], Any]:
    """Rows that n-grams of these tokens add to the streams x, and the cache. `mixers`: of both memories of `NGrams`."""
    of, (b, t, s, d) = layer.ngrams, x.shape
    norm = lambda x, name: normed(x, weights[f"ngram_{name}_norm"].reshape(s, d), layer.norm)  # noqa: E731
    kept, cache = mixers[0].before(cache, jnp.int32(of.number), tokens[..., None] + 1, of.longest - 1)
    rows = looked_up(of, weights["ngram_table"], shifted(of, kept[..., 0] - 1, tokens), x.dtype)
    keys = norm(project(rows, weights["ngram_key"], valid).reshape(x.shape), "key")
    gate = (keys * norm(x, "query")).sum(-1, keepdims=True) * jnp.asarray(d**-0.5, x.dtype)
    gate = jax.nn.sigmoid(jnp.sign(gate) * jnp.sqrt(jnp.maximum(jnp.abs(gate), LEAST)))
    values = gate * project(rows, weights["ngram_value"], valid)[:, :, None]
    inputs = norm(values, "conv").reshape(b, t, s * d)
    before, cache = mixers[1].before(cache, jnp.int32(of.number), inputs, of.reach)
    inputs = jnp.concatenate([before, inputs], axis=1).astype(jnp.float32)
    taps = (inputs[:, i * of.longest :][:, :t] * weights["ngram_conv"][i].astype(jnp.float32) for i in range(of.taps))
    return values + jax.nn.silu(sum(taps)).astype(x.dtype).reshape(x.shape), cache


def shifted(of: NGrams, before: Int[Array, "b k"], tokens: Int[Array, "b t"]) -> list[Int[Array, "b t"]]:
    """The tokens, those before them, and so on. `before`: those before the first; -1: there is none."""
    t, whole = tokens.shape[1], jnp.concatenate([before, tokens], axis=1)
    out, ended = [tokens], jnp.zeros(tokens.shape, bool)
    for back in range(1, of.longest):
        earlier = whole[:, of.longest - 1 - back :][:, :t]
        ended |= (earlier < 0) | (earlier == of.end)
        out.append(jnp.where(ended, of.end, earlier))
    return out


def looked_up(of: NGrams, table: Weight, tokens: list[Int[Array, "b t"]], dtype: Any) -> Float[Array, "b t w"]:
    """All hashes' rows, side by side. Each of several devices has columns of the table."""
    starts = list(itertools.accumulate(of.sizes, initial=0))[:-1]
    at = hashes(of, tokens) + jnp.array(starts, jnp.int32)
    part, row = at // (of.rows // of.parts), at % (of.rows // of.parts)
    rows = table.values[part, row]
    if table.format.inputs_per_value > 1:
        raise NotImplementedError(
            f"a table of n-grams in {type(table.format).__name__} is not supported; supported: FP8, or unquantised"
        )
    if table.quantised:
        scales = table.scales[part, row // (table.values.shape[1] // table.scales.shape[1])]
        rows = table.format.dequantise(rows[..., None, :], scales[..., None, :])[..., 0, :].astype(dtype)
    return every_column(rows).reshape(*at.shape[:2], -1)


def every_column(x: Float[Array, "*b w"]) -> Float[Array, "*b v"]:
    """All devices' columns, of which each has some."""
    if devices() == 1:
        return x
    here = jnp.arange(devices()) == jax.lax.axis_index(AXIS)
    return total(jnp.where(here[:, None], x[..., None, :], 0).reshape(*x.shape[:-1], -1))


def hashes(of: NGrams, tokens: list[Int[Array, "b t"]]) -> Int[Array, "b t n"]:
    """The hashes of n-grams, each modulo its number of rows."""
    each, products = len(of.sizes) // (of.longest - 1), map(product, tokens, of.multipliers)
    longer = list(itertools.accumulate(products, lambda a, b: [x ^ y for x, y in zip(a, b, strict=True)]))[1:]
    sizes = [of.sizes[i * each :][:each] for i in range(len(longer))]
    return jnp.concatenate([remainder(*of) for of in zip(longer, sizes, strict=True)], axis=-1).astype(jnp.int32)


def product(token: Int[Array, "b t"], by: int) -> list[UInt32[Array, "b t"]]:
    """The product of a token and a number of 64 bits, in limbs."""
    token, mask = token.astype(jnp.uint32), jnp.uint32(2**LIMB - 1)
    limbs = [jnp.uint32(by >> LIMB * i & (2**LIMB - 1)) for i in range(4)]
    columns: list[list[Array]] = [[], [], [], [], []]
    for i, part in enumerate((token & mask, token >> LIMB)):
        for j in range(4 - i):
            whole = part * limbs[j]
            columns[i + j].append(whole & mask)
            columns[i + j + 1].append(whole >> LIMB)
    out, carry = [], jnp.uint32(0)
    for column in columns[:4]:
        total = functools.reduce(jnp.add, column) + carry
        out.append(total & mask)
        carry = total >> LIMB
    return out


def remainder(limbs: list[UInt32[Array, "b t"]], sizes: tuple[int, ...]) -> UInt32[Array, "b t n"]:
    """The number in limbs modulo each of these, a few bits at a time."""
    step, by = 32 - max(sizes).bit_length(), jnp.array(sizes, jnp.uint32)
    left = jnp.zeros((*limbs[0].shape, len(sizes)), jnp.uint32)
    for limb in reversed(limbs):
        for high in range(LIMB, 0, -step):
            low = max(high - step, 0)
            bits = limb >> low & jnp.uint32((1 << high - low) - 1)
            left = (left << (high - low) | bits[..., None]) % by
    return left
