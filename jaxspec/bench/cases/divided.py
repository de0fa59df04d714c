"""One of several GPUs' share of a layer: kernels at local sizes, without the sums (`bench sums` has those)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.cases.case import PAGE, Case
from jaxspec.decoder import matmul
from jaxspec.models import fp8
from jaxspec.models.weights import HALF, Fp8, Layout, Weight
from jaxspec.pallas.dense import few_rows
from jaxspec.pallas.experts import experts_mlp as experts

EPS, ROWS = 1e-6, 8
TOKENS = 1, 8
BLOCKS = Fp8(fp8.BLOCK)


@dataclass(frozen=True)
class Model:
    """Its width and its commonest layer: heads of attention with columns of an MLP, or `projected` columns of linear
    attention; experts by width, number and how many a token has."""

    width: int
    heads: tuple[int, int, int] | None  # of queries, of keys and values, their width
    projected: tuple[int, int] | None = None  # q, k, v, z, and what the output projection takes
    mlp: int | None = None
    experts: tuple[int, int, int] | None = None


MODELS = {
    "Llama-70B": Model(8192, (64, 8, 128), mlp=28672),
    "Qwen3-235B": Model(4096, (64, 4, 128), experts=(1536, 128, 8)),
    "Next-80B": Model(2048, None, (12288, 4096), experts=(512, 512, 10)),
    "397B": Model(4096, None, (20480, 8192), experts=(1024, 512, 10)),
}
SIZES = 2, 4, 8


def make_cases() -> list[Case]:
    """All models over each number of GPUs, in bfloat16 and in FP8 where its blocks can be cut so; the dense one whole,
    too, for what dividing it costs."""
    cases = []
    for name, model in MODELS.items():
        for size in SIZES if model.experts else (1, *SIZES):
            shapes, told = local_shapes(model, size), f"{name} over {size}"
            for quantised in (False, True):
                if quantised and any(each % fp8.BLOCK for shape in shapes.values() for each in shape):
                    continue
                cases.append(products(told, shapes, model, size, quantised))
            if model.experts:
                f, count, each = model.experts
                for quantised in (False, True):
                    groups = next(n for n in (1, 2, 4, 8) if not quantised or f * n // size % fp8.BLOCK == 0)
                    of = model.width, f * groups // size, count // groups, each
                    cases += [experts_mlp(told, tokens, *of, groups, quantised) for tokens in TOKENS]
    return cases


def local_shapes(model: Model, size: int) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each product with one of `size` GPUs' weights, but for the experts'."""
    d = model.width
    if model.projected:
        made, taken = model.projected
        return {"qkvz": (d, made // size), "out": (taken // size, d)}
    heads, kv_heads, width = model.heads
    shapes = {"qkv": (d, (heads // size + 2 * max(kv_heads // size, 1)) * width), "out": (heads // size * width, d)}
    return shapes | ({"gate_up": (d, 2 * model.mlp // size), "down": (model.mlp // size, d)} if model.mlp else {})


def products(name: str, shapes: dict[str, tuple[int, int]], model: Model, size: int, quantised: bool) -> Case:
    """A layer's products with eight rows, each with what few rows' kernels have in it; FP8 ones one by one."""
    weights = sum(k * n for k, n in shapes.values())
    layers = max(4, min(64, 2**27 // weights))  # more than a cache holds
    kv_heads = max(model.heads[1] // size, 1) if model.heads else 1
    width = model.heads[2] if model.heads else 128
    kv_slots = PAGE + jnp.arange(ROWS, dtype=jnp.int32)
    cos, sin = (of(kv_slots[:, None] * jnp.geomspace(1, 1e-4, width // 2)) for of in (jnp.cos, jnp.sin))

    def build(key):
        def own(key):
            keys = jax.random.split(key, len(shapes))
            pairs = zip(keys, shapes.items(), strict=True)
            made = {each: jax.random.normal(k, shape, "bfloat16") * shape[0] ** -0.5 for k, (each, shape) in pairs}
            return {each: _fp8(weight, each) for each, weight in made.items()} if quantised else made

        x = {k: jax.random.normal(key, (ROWS, k), "bfloat16") for k, _ in shapes.values()}
        scaled = few_rows.scale_rows(x[model.width], jnp.ones(model.width, "bfloat16"))
        kv = jnp.zeros((layers, 2, 2, kv_heads, PAGE, width), "bfloat16")
        return [own(each) for each in jax.random.split(key, layers)], (x, scaled, kv)

    def carried_on(scaled, made):
        """Input of the next layer. It depends on all products, so that none is left out."""
        return scaled._replace(squares=scaled.squares + 0 * sum(each[0, 0].astype(jnp.float32) for each in made))

    def op(i, own, carried):
        (x, scaled, kv), layer, made = carried, own[i], []
        if model.heads:
            q, kv = few_rows.heads(
                *([each] for each in scaled), layer["qkv"], cos, sin, kv, jnp.int32(i), kv_slots, eps=EPS
            )
            made.append(q)
        else:
            made += few_rows.normed(*scaled, [layer["qkvz"]], eps=EPS, dtypes=("bfloat16",))
        made.append(few_rows.product([x[shapes["out"][0]]], layer["out"]))
        if model.mlp:
            made.append(few_rows.gated(*scaled, layer["gate_up"], eps=EPS))
            made.append(few_rows.product([x[shapes["down"][0]]], layer["down"]))
        return made[-1], (x, carried_on(scaled, made), kv)

    def one_by_one(i, own, carried):
        (x, scaled, kv), valid = carried, jnp.array([ROWS], jnp.int32)
        made = [matmul.project(x[k], own[i][each], valid, gated=each == "gate_up") for each, (k, _) in shapes.items()]
        return made[-1], (x, carried_on(scaled, made), kv)

    def plain(i, own, carried):
        x, weight = carried[0], own[i][list(shapes)[-1]]
        rows = x[shapes[list(shapes)[-1]][0]]
        return rows @ (weight.dequantised(rows.dtype) if quantised else weight), carried

    return Case(
        name=f"{name}: {'FP8 ' * quantised}products, {ROWS} rows",
        group="divided layers",
        layers=layers,
        build=build,
        op=one_by_one if quantised else op,
        plain=plain,
        size=(2 - quantised) * weights + 2 * ROWS * sum(k + n for k, n in shapes.values()),
        flops=2 * ROWS * weights,
        kernel=None if quantised else "few_rows",
        in_place=True,
    )


def experts_mlp(name: str, tokens: int, d: int, f: int, e: int, k: int, groups: int, quantised: bool) -> Case:
    """A mixture of which a GPU has `f` columns of each of `e` experts, one of so many `groups`.

    Each token chooses k of all groups' experts, all equally likely.
    """
    chosen = (2 - quantised) * 3 * d * f * tokens * k / groups  # bytes of a layer, at most
    layers = max(4, min(48, int(1.5e8 / chosen)))  # more than a cache holds
    rng = np.random.default_rng(tokens)
    ids = rng.random((layers, tokens, e * groups)).argpartition(k - 1, axis=-1)[..., :k].astype(np.int32)
    ids = np.where(ids < e, ids, experts.NOBODY)
    distinct = np.mean([len(np.unique(layer[layer < e])) for layer in ids])

    def build(key):
        keys = jax.random.split(key, 3)
        x, weights = jax.random.normal(keys[0], (tokens, d), "bfloat16"), jax.random.uniform(keys[1], (tokens, k))

        def matrix(key, outputs, inputs):
            each = lambda key: jax.random.normal(key, (outputs, inputs), "bfloat16") * inputs**-0.5  # noqa: E731
            if not quantised:
                return Weight(jax.lax.map(each, jax.random.split(key, e)))
            values = jax.lax.map(lambda key: each(key).astype(fp8.E4M3), jax.random.split(key, e))
            scales = jnp.ones((e, outputs // fp8.BLOCK, inputs // fp8.BLOCK), jnp.float32)
            return Weight(values, BLOCKS, Layout(), scales)

        own = lambda key: (matrix(key, 2 * f, d), matrix(jax.random.fold_in(key, 1), d, f))  # noqa: E731
        return (x, weights, [jnp.asarray(each) for each in ids]), [own(k) for k in jax.random.split(keys[2], layers)]

    def op(layer: int, shared: Any, own: Any) -> jax.Array:
        x, weights, ids = shared
        return experts.experts_mlp(x, [own[layer]], ids[layer], weights, residual=jnp.zeros_like(x))

    def plain(layer: int, shared: Any, own: Any) -> jax.Array:
        x, weights, ids = shared
        rows, items, place = experts.plan(x, ids[layer], e)
        return experts.combine(experts.reference(rows, [own[layer]], items), place, weights)

    among = f" in {groups} groups" if groups > 1 else ""
    return Case(
        name=f"{name}: {'FP8 ' * quantised}experts{among}, {tokens} token{'s' * (tokens > 1)}",
        group="divided layers",
        layers=layers,
        build=build,
        op=op,
        plain=plain,
        size=(2 - quantised) * distinct * 3 * d * f + 4 * tokens * d,
        flops=2 * float(np.mean((ids < e).sum((1, 2)))) * 3 * d * f,
    )


def _fp8(weight: jax.Array, name: str) -> Weight:
    """A weight [inputs, outputs] in blocks; gate and up alternate, so their scales are for fewer outputs."""
    layout = Layout(interleave=HALF) if name == "gate_up" else Layout()
    values, scales = fp8.quantise_blocks(weight.T)
    scales = jnp.repeat(scales, fp8.BLOCK // layout.unit, axis=0)[: len(values) // layout.unit]
    return Weight(values, BLOCKS, layout, scales)
