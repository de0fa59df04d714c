"""One of several GPUs' share of a layer: kernels at local sizes, without the sums (`bench sums` has those)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.bench.cases.case import BLOCKS, EXACT, PAGE, Case
from jaxspec.bench.cases.matmuls import EPS, dequantised, random_matrices
from jaxspec.bench.cases.mixtures import experts_mlp
from jaxspec.decoder import matmul
from jaxspec.models import fp8
from jaxspec.pallas.dense import few_rows

ROWS = 8
TOKENS = 1, 8


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
            shapes, title = local_shapes(model, size), f"{name} over {size}"
            for quantised in (False, True):
                if quantised and any(each % fp8.BLOCK for shape in shapes.values() for each in shape):
                    continue
                cases.append(products(title, shapes, model, size, quantised))
            for quantised in (False, True) if model.experts else ():
                cases += [mixture(title, model, size, tokens, quantised) for tokens in TOKENS]
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
        x = {k: jax.random.normal(key, (ROWS, k), "bfloat16") for k, _ in shapes.values()}
        scaled = few_rows.scale_rows(x[model.width], jnp.ones(model.width, "bfloat16"))
        kv = jnp.zeros((layers, 2, 2, kv_heads, PAGE, width), "bfloat16")
        own = [random_matrices(each, shapes, quantised) for each in jax.random.split(key, layers)]
        return own, (x, scaled, kv)

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
        return rows @ dequantised(weight, rows.dtype), carried

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


def mixture(name: str, model: Model, size: int, tokens: int, quantised: bool) -> Case:
    """One of `size` GPUs' share of a layer's experts. Where blocks that share scales can't be cut so finely, the
    experts are divided among groups of GPUs."""
    width, count, k = model.experts
    groups = next(n for n in (1, 2, 4, 8) if not quantised or width * n // size % fp8.BLOCK == 0)
    d, f, e = model.width, width * groups // size, count // groups
    chosen = (2 - quantised) * 3 * d * f * tokens * k / groups  # bytes of a layer, at most
    layers = max(4, min(48, int(1.5e8 / chosen)))  # more than a cache holds
    name = f"{name}: {'FP8 ' * quantised}experts" + (f" in {groups} groups" if groups > 1 else "")
    kind = BLOCKS if quantised else EXACT
    how = {"group": "divided layers", "groups": groups, "kind": kind, "residual": True}
    return experts_mlp(name, tokens, d, f, e, k, layers, "bfloat16", **how)
