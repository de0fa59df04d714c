"""The matmuls of dense layers: chained from one attention to the next, and one by one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxspec import fp8
from jaxspec.bench.cases.case import PAGE, Case
from jaxspec.decoder import matmul
from jaxspec.decoder.functions import rms_norm
from jaxspec.decoder.mixture_rows import operand
from jaxspec.pallas import few_rows, weight_stream
from jaxspec.weights import HALF, Format, Fp8, Layout, Unquantised, Weight

EPS = 1e-6
EXACT, BLOCKS, GIVEN = Unquantised(), Fp8(fp8.BLOCK), Layout()


def layer_matmuls(rows: int, d: int, f: int, n: int, layers: int, quantised: bool = False) -> Case:
    """The matmuls from one attention to the next, with the norms and the gate between them, for `rows` tokens.

    Model width `d`, MLP width `f`, and `n` columns of the next layer's q, k and v. `quantised`: with FP8 weights.
    """
    shapes = (d, d), (d, 2 * f), (f, d), (d, n)
    weights = sum(k * m for k, m in shapes)

    def build(key):
        def own(key):
            keys = jax.random.split(key, 6)
            pairs = zip(keys[2:], shapes, strict=True)
            matrices = [jax.random.normal(k, shape, "bfloat16") * shape[0] ** -0.5 for k, shape in pairs]
            if quantised:  # gate and up alternate, so their scales are for fewer outputs
                gated = Layout(interleave=HALF)
                matrices = [_fp8(w, layout) for w, layout in zip(matrices, (GIVEN, gated, GIVEN, GIVEN), strict=True)]
            x, mixed = (jax.random.normal(k, (rows, d), "bfloat16") for k in keys[:2])
            return x, mixed, matrices, [jnp.ones(d, "bfloat16")] * 2

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

    Heads are `width` wide, `normed` or not; a narrow model's weights are brought ahead, as in its forward.
    `quantised`: with FP8 weights.
    """
    narrow = d <= few_rows.NARROW
    shapes = {
        "qkv": (d, (heads + 2 * kv_heads) * width),
        "out": (heads * width, d),
        "gate_up": (d, 2 * f),
        "down": (f, d),
    }
    weights = sum(k * m for k, m in shapes.values())
    place = PAGE + jnp.arange(rows, dtype=jnp.int32)
    cos, sin = (of(place[:, None] * jnp.geomspace(1, 1e-4, width // 2)) for of in (jnp.cos, jnp.sin))

    def build(key):
        def own(key):
            keys = jax.random.split(key, len(shapes))
            pairs = zip(keys, shapes.items(), strict=True)
            matrices = {name: jax.random.normal(k, shape, "bfloat16") * shape[0] ** -0.5 for k, (name, shape) in pairs}
            if quantised:
                layouts = {"gate_up": Layout(interleave=HALF)}
                matrices = {name: _fp8(matrix, layouts.get(name, GIVEN)) for name, matrix in matrices.items()}
            return matrices | {"scale": jnp.ones(d, "bfloat16"), "norms": [jnp.ones(width, "bfloat16")] * 2 * normed}

        x = jax.random.normal(key, (rows, d), "bfloat16")
        scaled = () if narrow else few_rows.scale_rows(x, jnp.ones(d, "bfloat16"))
        kv = jnp.zeros((layers, 1 + -(-rows // PAGE), 2, kv_heads, PAGE, width), "bfloat16")
        return [own(each) for each in jax.random.split(key, layers)], (x, scaled, kv)

    def op(i, own, carried):
        (x, scaled, kv), layer = carried, own[i]
        weights = {name: operand(layer[name]) if quantised else layer[name] for name in shapes}

        def add(x, rows, weight):  # what is given to the norm after it, too
            if narrow:
                return few_rows.add_product(x, rows, weight), ()
            return few_rows.add_product(x, rows, weight, layer["scale"])

        rows, of = scaled or (x, layer["scale"])
        ahead = [layer["out"], layer["gate_up"], layer["down"], own[(i + 1) % layers]["qkv"]] if narrow else []
        q, kv = few_rows.heads(
            [rows], [of], weights["qkv"], cos, sin, kv, jnp.int32(i), place, layer["norms"], ahead[:3], eps=EPS
        )
        x, scaled = add(x, q, weights["out"])
        hidden = few_rows.gated(*(scaled or (x, layer["scale"])), weights["gate_up"], ahead[3:], eps=EPS)
        x, scaled = add(x, hidden, weights["down"])
        return x, (x, scaled, kv)

    def plain(i, own, carried):
        (x, scaled, kv), layer = carried, own[i]
        whole = lambda each: each.dequantised(x.dtype) if isinstance(each, Weight) else each  # noqa: E731
        layer = {name: whole(each) for name, each in layer.items()}
        qkv = (rms_norm(x, layer["scale"], EPS) @ layer["qkv"]).reshape(rows, -1, width)
        if normed:
            qkv = jnp.concatenate([rms_norm(qkv[:, :-kv_heads], layer["norms"][0], EPS), qkv[:, -kv_heads:]], axis=1)
        qkv = qkv.reshape(rows, -1, 2, width // 2).astype(jnp.float32)
        turned, v = qkv[:, :-kv_heads], qkv[:, -kv_heads:]
        first, second = turned[:, :, 0], turned[:, :, 1]
        c, s = cos[:, None], sin[:, None]
        turned = jnp.stack([first * c - second * s, second * c + first * s], axis=2)
        new = jnp.stack([turned[:, heads:], v], axis=1).reshape(rows, 2, kv_heads, width)
        kv = kv.at[i, place // PAGE, :, :, place % PAGE].set(new.astype(kv.dtype))
        x = x + turned[:, :heads].reshape(rows, -1).astype(x.dtype) @ layer["out"]
        hidden = matmul.gate(rms_norm(x, layer["scale"], EPS) @ layer["gate_up"], HALF)
        x = x + hidden @ layer["down"]
        return x, (x, scaled, kv)

    return Case(
        name=f"{'FP8 ' * quantised}layer of width {d}, {rows} rows",
        group="few rows' layer",
        layers=layers,
        build=build,
        op=op,
        plain=plain,
        size=(2 - quantised) * weights + 2 * rows * (2 * d + (heads + 2 * kv_heads) * width),
        flops=2 * rows * weights,
        kernel="few_rows",
        in_place=True,
    )


def projections(
    rows: int, d: int, f: int, n: int, layers: int, dtype: str = "bfloat16", fmt: Format = EXACT
) -> list[Case]:
    """The matmuls of a layer one by one, for more rows than `layer_matmuls` takes, or with FP8 ones. Names as there.

    With quantised activations, quantising them is a part of each.
    """
    quantised = isinstance(fmt, Fp8)
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


def _fp8(weight: jax.Array, layout: Layout, fmt: Format = BLOCKS) -> Weight:
    """A weight [inputs, outputs] in blocks."""
    values, scales = fp8.quantise_blocks(weight.T)
    scales = jnp.repeat(scales, fp8.BLOCK // layout.unit, axis=0)[: len(values) // layout.unit]
    return Weight(values, fmt, layout, scales)


def _stream(layer: int, shared: Any, own: Any) -> jax.Array:
    x, mixed, weights, scales = own[layer]
    return weight_stream.stream(x, mixed, weights, scales, eps=EPS)[1].sum(0)


def _stream_fp8(layer: int, shared: Any, own: Any) -> jax.Array:
    x, mixed, weights, scales = own[layer]
    weights = [(weight.values, weight.scales) for weight in weights]
    return weight_stream.stream_fp8(x, mixed, weights, scales, eps=EPS)[1].sum(0)


def _stream_plain(layer: int, shared: Any, own: Any) -> jax.Array:
    x, mixed, weights, scales = own[layer]
    out, gate_up, down, following = (w.dequantised(x.dtype) if isinstance(w, Weight) else w for w in weights)
    x = x + mixed @ out
    runs = (rms_norm(x, scales[0], EPS) @ gate_up).reshape(len(x), -1, 2, HALF)
    x = x + (jax.nn.silu(runs[:, :, 0]) * runs[:, :, 1]).reshape(len(x), -1) @ down
    return jnp.matmul(rms_norm(x, scales[1], EPS), following, preferred_element_type=jnp.float32)
