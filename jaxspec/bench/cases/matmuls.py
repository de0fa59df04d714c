"""The matmuls of dense layers: chained from one attention to the next, and one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.bench.cases.case import BLOCKS, EXACT, PAGE, Case
from jaxspec.decoder import matmul
from jaxspec.decoder.functions import normed, rms_norm
from jaxspec.decoder.markov import greedy_chain
from jaxspec.decoder.mixture_rows import operand
from jaxspec.models import fp8
from jaxspec.models.description import Norm
from jaxspec.models.weights import HALF, Format, Layout, Weight
from jaxspec.pallas.dense import few_rows, markov_chain, post_norm, weight_stream

EPS = 1e-6
GIVEN = Layout()


def layer_matmuls(rows: int, d: int, f: int, n: int, layers: int, quantised: bool = False) -> Case:
    """The matmuls from one attention to the next, with the norms and the gate between them, for `rows` tokens.

    Model width `d`, MLP width `f`, and `n` columns of the next layer's q, k and v. `quantised`: with FP8 weights.
    """
    shapes = {"out": (d, d), "gate_up": (d, 2 * f), "down": (f, d), "following": (d, n)}
    weights = sum(k * m for k, m in shapes.values())

    def build(key):
        def own(key):
            matrices = random_matrices(key, shapes, quantised)
            keys = jax.random.split(jax.random.fold_in(key, 1))
            x, mixed = (jax.random.normal(k, (rows, d), "bfloat16") for k in keys)
            return x, mixed, list(matrices.values()), [jnp.ones(d, "bfloat16")] * 2

        return (), [own(each) for each in jax.random.split(key, layers)]

    return Case(
        name=f"{'FP8 ' * quantised}layer matmuls, {rows} row{'s' * (rows > 1)}",
        group="layer matmuls",
        layers=layers,
        build=build,
        op=_stream_fp8 if quantised else _stream,
        plain=_stream_plain,
        size=(2 - quantised) * weights + 2 * rows * (3 * d + n),
        flops=2 * rows * weights,
        kernel="fp8_stream" if quantised else "weight_stream",
    )


def few_rows_layer(
    rows: int,
    d: int,
    heads: int,
    kv_heads: int,
    width: int,
    f: int,
    normed: bool,
    layers: int,
    quantised: bool = False,
) -> Case:
    """A layer at few rows but for its attention, whose place the queries take: four kernels, one after the other.

    Heads are `width` wide, `normed` or not; a narrow model's weights are prefetched, as in its forward. `quantised`:
    with FP8 weights.
    """
    slots = PAGE + jnp.arange(rows, dtype=jnp.int32)  # the first page is nobody's
    angles = slots[:, None] * jnp.geomspace(1, 1e-4, width // 2)
    table = jnp.cos(angles), jnp.sin(angles)  # made here, so that no call computes it
    layer = _FewRows(rows, d, heads, kv_heads, width, f, normed, layers, quantised, slots, table)
    weights = sum(k * m for k, m in layer.shapes.values())
    return Case(
        name=f"{'FP8 ' * quantised}layer of width {d}, {rows} rows",
        group="few rows' layer",
        layers=layers,
        build=layer.build,
        op=layer.op,
        plain=layer.plain,
        size=(2 - quantised) * weights + 2 * rows * (2 * d + (heads + 2 * kv_heads) * width),
        flops=2 * rows * weights,
        kernel="few_rows",
        in_place=True,
    )


@dataclass(frozen=True)
class _FewRows:
    """`few_rows_layer`'s operands, and both forms of it. A layer's own: its weights, then the rows, the rows scaled for
    the next norm (none in a narrow model), and all layers' pages, which it changes."""

    rows: int
    d: int
    heads: int
    kv_heads: int
    width: int
    f: int
    normed: bool
    layers: int
    quantised: bool
    slots: jax.Array  # of each row, in the pages
    table: tuple[jax.Array, jax.Array]  # of ropes, f32[r, half] each

    @property
    def narrow(self) -> bool:
        return self.d <= few_rows.NARROW

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        return {
            "qkv": (self.d, (self.heads + 2 * self.kv_heads) * self.width),
            "out": (self.heads * self.width, self.d),
            "gate_up": (self.d, 2 * self.f),
            "down": (self.f, self.d),
        }

    def build(self, key: jax.Array) -> tuple[list, tuple]:
        x = jax.random.normal(key, (self.rows, self.d), "bfloat16")
        scaled = () if self.narrow else few_rows.scale_rows(x, jnp.ones(self.d, "bfloat16"))
        pages = 1 + -(-self.rows // PAGE)
        kv = jnp.zeros((self.layers, pages, 2, self.kv_heads, PAGE, self.width), "bfloat16")
        return [self._weights(each) for each in jax.random.split(key, self.layers)], (x, scaled, kv)

    def _weights(self, key: jax.Array) -> dict[str, Any]:
        norms = [jnp.ones(self.width, "bfloat16")] * 2 * self.normed
        made = random_matrices(key, self.shapes, self.quantised)
        return made | {"scale": jnp.ones(self.d, "bfloat16"), "norms": norms}

    def op(self, i: int, own: list, carried: tuple) -> tuple[jax.Array, tuple]:
        (x, scaled, kv), layer = carried, own[i]
        weights = {name: operand(layer[name]) if self.quantised else layer[name] for name in self.shapes}
        scale = layer["scale"]

        def add(x, rows, weight):  # what is given to the norm after it, too
            if self.narrow:
                return few_rows.add_product(x, rows, weight), ()
            return few_rows.add_product(x, rows, weight, scale)

        rows, of = scaled or (x, scale)
        following = own[(i + 1) % self.layers]["qkv"]
        prefetched = [layer["out"], layer["gate_up"], layer["down"], following] if self.narrow else []
        cos, sin = self.table
        paged = kv, jnp.int32(i), self.slots
        q, kv = few_rows.heads([rows], [of], weights["qkv"], cos, sin, *paged, layer["norms"], prefetched[:3], eps=EPS)
        x, scaled = add(x, q, weights["out"])
        hidden = few_rows.gated(*(scaled or (x, scale)), weights["gate_up"], prefetched[3:], eps=EPS)
        x, scaled = add(x, hidden, weights["down"])
        return x, (x, scaled, kv)

    def plain(self, i: int, own: list, carried: tuple) -> tuple[jax.Array, tuple]:
        (x, scaled, kv), layer = carried, own[i]
        layer = {name: dequantised(each, x.dtype) for name, each in layer.items()}
        qkv = (rms_norm(x, layer["scale"], EPS) @ layer["qkv"]).reshape(self.rows, -1, self.width)
        qk, v = qkv[:, : -self.kv_heads], qkv[:, -self.kv_heads :]
        if self.normed:
            qk = rms_norm(qk, layer["norms"][0], EPS)
        cos, sin = (each[:, None] for each in self.table)
        first, second = jnp.split(qk.astype(jnp.float32), 2, axis=-1)
        qk = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        q, k = qk[:, : self.heads], qk[:, self.heads :]
        new = jnp.stack([k, v.astype(jnp.float32)], axis=1)
        kv = kv.at[i, self.slots // PAGE, :, :, self.slots % PAGE].set(new.astype(kv.dtype))
        x = x + q.reshape(self.rows, -1).astype(x.dtype) @ layer["out"]
        hidden = matmul.gate(rms_norm(x, layer["scale"], EPS) @ layer["gate_up"], HALF)
        x = x + hidden @ layer["down"]
        return x, (x, scaled, kv)


def projections(
    rows: int, d: int, f: int, n: int, layers: int, dtype: str = "bfloat16", fmt: Format = EXACT
) -> list[Case]:
    """The matmuls of a layer one by one, for more rows than `layer_matmuls` takes, or with FP8 ones. Names as there.

    With quantised activations, quantising them is a part of each.
    """
    quantised = fmt.quantised
    name = "FP8 " * quantised
    if quantised and fmt.activations:
        name = "FP8 x FP8 " if fmt.block else "FP8 x FP8 by tensor "

    def one(matrix: str, inputs: int, outputs: int, gated: bool = False) -> Case:
        layout = Layout((outputs,), interleave=HALF if gated else 0)

        def made(weight):
            if not quantised:
                return Weight(weight, layout=layout)
            if fmt.block is None:
                scale = jnp.max(jnp.abs(weight.astype(jnp.float32))) / fp8.LARGEST
                return Weight((weight.T / scale).astype(fp8.E4M3), fmt, layout, scale[None, None])
            return _fp8(weight, layout, fmt)

        def build(key):
            def own(key):
                x, weight = (
                    jax.random.normal(k, shape, dtype)
                    for k, shape in zip(jax.random.split(key), ((rows, inputs), (inputs, outputs)), strict=True)
                )
                return x, made(weight * inputs**-0.5)

            return jnp.array([rows], jnp.int32), [own(each) for each in jax.random.split(key, layers)]

        item = jnp.dtype(dtype).itemsize
        return Case(
            name=f"{name}{matrix}, {rows} row{'s' * (rows > 1)}",
            group="projections",
            layers=layers,
            build=build,
            op=lambda layer, real, own: matmul.project(*own[layer], real, gated=gated),
            plain=lambda layer, real, own: matmul.reference(*own[layer], gated=gated),
            size=(1 if quantised else item) * inputs * outputs + item * rows * (inputs + outputs // (1 + gated)),
            flops=2 * rows * inputs * outputs,
            speed=2 if quantised and fmt.activations else 1,
        )

    return [one("q, k, v", d, n), one("out", d, d), one("gate, up", d, 2 * f, gated=True), one("down", f, d)]


def post_norms(rows: int, d: int, parts: int, following: int, layers: int) -> Case:
    """The norms behind a sub-layer whose output is `parts` added up, and those that follow, as of Gemma 4's layers."""
    norm = Norm(EPS)

    def build(key):
        def own(key):
            keys = jax.random.split(key, 1 + parts)
            x, *made = (jax.random.normal(each, (rows, d), "bfloat16") for each in keys)
            scales = [jnp.ones(d, "bfloat16")] * (parts + 1 + following)
            return x, made, scales[: parts if parts > 1 else 0], scales[0], scales[:following]

        return (), [own(each) for each in jax.random.split(key, layers)]

    def plain(layer, shared, own):
        x, made, scales, scale, next_scales = own[layer]
        made = [normed(part, each, norm) for part, each in zip(made, scales, strict=True)] if scales else made
        return normed(x + normed(sum(made[1:], made[0]), scale, norm), next_scales[-1], norm)

    return Case(
        name=f"norms behind {parts} of {d}, {rows} row{'s' * (rows > 1)}",
        group="norms",
        layers=layers,
        build=build,
        op=lambda layer, shared, own: post_norm.post_norm(*own[layer], eps=EPS)[1][-1],
        plain=plain,
        size=2 * rows * d * (2 + parts + following),
        flops=10 * rows * d,
        kernel="post_norm",
    )


def draft_chain(rows: int, steps: int, tokens: int, rank: int) -> Case:
    """DSpark's greedy chain: each draft's embedding, times a matrix over the vocabulary, adds to the next logits."""

    def build(key):
        keys = jax.random.split(key, 4)
        base, newest = (
            jax.random.normal(keys[0], (rows, steps, tokens)),
            jax.random.randint(keys[1], (rows,), 0, tokens),
        )
        before = jax.random.normal(keys[2], (tokens, rank), "bfloat16")
        after = jax.random.normal(keys[3], (rank, tokens), "bfloat16") * rank**-0.5
        return (base, newest), (before, after)

    def plain(layer, shared, own):
        return markov_chain.reference(shared[0], own[0][shared[1]], *own)

    return Case(
        name=f"Markov chain of {steps}, {rows} request{'s' * (rows > 1)}",
        group="drafts",
        layers=1,
        build=build,
        op=lambda layer, shared, own: greedy_chain(*shared, own[0], Weight(own[1])),
        plain=plain,
        size=steps * (2 * rank * tokens + 4 * rows * tokens),
        flops=2 * rows * steps * rank * tokens,
    )


def random_matrices(key: jax.Array, shapes: dict[str, tuple[int, int]], quantised: bool) -> dict[str, Any]:
    """A layer's matrices [inputs, outputs]; `quantised`, in FP8, where gate and up alternate, so that their scales are
    for fewer outputs."""
    keys = jax.random.split(key, len(shapes))
    pairs = zip(keys, shapes.items(), strict=True)
    made = {name: jax.random.normal(key, shape, "bfloat16") * shape[0] ** -0.5 for key, (name, shape) in pairs}
    layouts = {"gate_up": Layout(interleave=HALF)}
    return {name: _fp8(x, layouts.get(name, GIVEN)) for name, x in made.items()} if quantised else made


def dequantised(weight: Any, dtype: Any) -> Any:
    """The matrix in numbers; one that isn't quantised as it is."""
    return weight.dequantised(dtype) if isinstance(weight, Weight) else weight


def _fp8(weight: jax.Array, layout: Layout, fmt: Format = BLOCKS) -> Weight:
    """A weight [inputs, outputs] in blocks."""
    values, scales = fp8.quantise_blocks(weight.T)
    return Weight(values, fmt, layout, fp8.finer(scales, len(values), layout.unit))


def _stream(layer: int, shared: Any, own: Any) -> jax.Array:
    x, mixed, weights, scales = own[layer]
    return weight_stream.stream(x, mixed, weights, scales, eps=EPS)[1].sum(0)


def _stream_fp8(layer: int, shared: Any, own: Any) -> jax.Array:
    x, mixed, weights, scales = own[layer]
    weights = [(weight.values, weight.scales) for weight in weights]
    return weight_stream.stream_fp8(x, mixed, weights, scales, eps=EPS)[1].sum(0)


def _stream_plain(layer: int, shared: Any, own: Any) -> jax.Array:
    x, mixed, weights, scales = own[layer]
    out, gate_up, down, following = (dequantised(weight, x.dtype) for weight in weights)
    x = x + mixed @ out
    runs = (rms_norm(x, scales[0], EPS) @ gate_up).reshape(len(x), -1, 2, HALF)
    x = x + (jax.nn.silu(runs[:, :, 0]) * runs[:, :, 1]).reshape(len(x), -1) @ down
    return jnp.matmul(rms_norm(x, scales[1], EPS), following, preferred_element_type=jnp.float32)
