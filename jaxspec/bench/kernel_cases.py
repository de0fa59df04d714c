"""The cases of `bench kernels`: operations at the sizes that models have, their plain forms, bytes and FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import Rows
from jaxspec.config import LinearAttention
from jaxspec.models import causal_conv
from jaxspec.models.layers import rms_norm
from jaxspec.pallas import experts, few_rows, gated_delta, project, top_experts, weight_stream
from jaxspec.pallas.paged_attention import paged_attention, reference
from jaxspec.pallas.target import kernels_here

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 64  # Qwen3-8B's attention, pages as on a GPU
BLOCK = 64  # prompt tokens per row of a prefill
DECODE = (
    *((b, context, t) for t in (1, 4) for b, context in ((1, 1024), (1, 16384), (8, 1024), (32, 4096), (128, 1152))),
)  # requests, tokens each, rows each
PROMPTS = ((1, 1024), (1, 2048), (1, 8192), (16, 512))  # prompts, tokens each
SMALL_LAYER = 576, 9, 3, 1536  # SmolLM2-135M's: model width, query heads, KV heads of 64, MLP width
LAYER = 4096, 12288, 6144  # Qwen3-8B's model width, MLP width, columns of q, k and v
ROWS = (1, 8, 32, 128)
FEW_ROWS = (8, 32, 64)
MANY_ROWS = (256, 512, 1024, 2048)
EPS = 1e-6
MIXTURES = {  # model width, expert width, experts, experts of a token
    "35B-A3B": (2048, 512, 256, 8),  # Qwen3.5's
    "30B-A3B": (2048, 768, 128, 8),  # Qwen3's
}
TOKENS = (1, 4, 8, 32, 128, 512, 1024, 8192)
DELTA = 16, 32, 128  # Qwen3-Next's and Qwen3.5-35B-A3B's linear attention: key heads, value heads, width of both
STEPS = tuple((b, t) for t in (1, 4, 8) for b in (1, 8, 32, 128))  # requests, rows each
CHUNKS = ((1, 1024), (1, 8192), (16, 512))  # prompts, tokens each
SMALL = {
    "decode": ((2, 40, 1), (3, 17, 4)),
    "prompts": ((2, 100),),
    "mixtures": {"small": (64, 32, 8, 2)},
    "tokens": (3, 20),
    "delta": (1, 2, 16),
    "steps": ((2, 3),),
    "chunks": ((2, 100),),
    "layer": (64, 64, 96),
    "many": (20,),
}


@dataclass(frozen=True)
class Case:
    """One operation at one size: `op(*operands of a layer)`, and the same in plain jax.numpy.

    `build(key)` makes the operands: (what all layers share, what is each layer's own). An operation is called as
    `op(layer, shared, own)`, so it finds its layer's data in `own` as its kernel does.
    """

    name: str
    group: str
    layers: int
    build: Callable[[jax.Array], tuple[Any, Any]]
    op: Callable[[int, Any, Any], jax.Array]
    plain: Callable[[int, Any, Any], jax.Array]
    size: float  # bytes of one call
    flops: float
    kernel: str | None = None  # that `op` calls itself; None: the operation chooses one, and counts it
    in_place: bool = False  # operations change `own`: they return it after their result


def make_cases(small: bool) -> list[Case]:
    """All cases, at Qwen3-8B's sizes and those of two mixtures of experts, or at tiny ones."""
    layers, dtype = (2, "float32") if small else (16, "bfloat16")
    full = {"decode": DECODE, "prompts": PROMPTS, "mixtures": MIXTURES, "tokens": TOKENS}
    full |= {"delta": DELTA, "steps": STEPS, "chunks": CHUNKS, "layer": LAYER, "many": MANY_ROWS}
    sizes = SMALL if small else full
    cases = [decode_attention(b, context, t, layers, dtype) for b, context, t in sizes["decode"]]
    cases += [prompt_attention(count, length, layers, dtype) for count, length in sizes["prompts"]]
    mixtures = [(name, t, widths) for name, widths in sizes["mixtures"].items() for t in sizes["tokens"]]
    cases += [experts_mlp(name, t, *widths, layers // 2, dtype) for name, t, widths in mixtures]
    cases += [router(name, t, *widths[2:], layers) for name, t, widths in mixtures]
    cases += [cache_write(count, length, layers, dtype) for count, length in sizes["prompts"]]
    cases += [convolution(b, t, *sizes["delta"], layers, dtype) for b, t in sizes["steps"]]
    cases += [delta_step(b, t, *sizes["delta"], layers, dtype) for b, t in sizes["steps"]]
    cases += [prompt_convolution(count, length, *sizes["delta"], layers, dtype) for count, length in sizes["chunks"]]
    cases += [delta_chunk(count, length, *sizes["delta"], layers, dtype) for count, length in sizes["chunks"]]
    for rows in sizes["many"]:
        cases += projections(rows, *sizes["layer"], layers // 2, dtype)
    if not small and kernels_here() is None:  # there is no other path to it: a model without it has plain layers
        cases += [layer_matmuls(rows, *LAYER, layers=8) for rows in ROWS]
        cases += [small_layer(rows, *SMALL_LAYER, layers=30) for rows in FEW_ROWS]
    return cases


def decode_attention(b: int, context: int, t: int, layers: int, dtype: str) -> Case:
    """`t` rows for each of `b` requests with `context` tokens."""
    item, pages = jnp.dtype(dtype).itemsize, -(-context // PAGE)
    rows = b * t * HEADS * HEAD_DIM
    return Case(
        name=f"decode attention {b} x {context}, {t} row{'s' * (t > 1)}",
        group="decode attention",
        layers=layers,
        build=partial(_paged, np.full(b, context - t), t, np.arange(b * pages).reshape(b, pages), layers, dtype),
        op=_attend,
        plain=_attend_plain,
        size=item * (2 * b * context * KV_HEADS * HEAD_DIM + 2 * rows),
        flops=4 * rows * (context - (t - 1) / 2),
    )


def prompt_attention(count: int, length: int, layers: int, dtype: str) -> Case:
    """`count` whole prompts of `length` tokens, in blocks as a prefill has them."""
    item, blocks, pages = jnp.dtype(dtype).itemsize, -(-length // BLOCK), -(-length // PAGE)
    start = np.tile(np.arange(blocks) * BLOCK, count)
    table = np.repeat(np.arange(count * pages).reshape(count, pages), blocks, axis=0)
    tokens = count * blocks * BLOCK
    return Case(
        name=f"prompt attention {count} x {length}",
        group="prompt attention",
        layers=layers,
        build=partial(_paged, start, BLOCK, table, layers, dtype),
        op=_attend,
        plain=_attend_plain,
        size=item * tokens * HEAD_DIM * (2 * KV_HEADS + 2 * HEADS),
        flops=4 * HEADS * HEAD_DIM * count * length * (length + 1) / 2,
    )


def _paged(start: np.ndarray, t: int, table: np.ndarray, layers: int, dtype: str, key: jax.Array) -> tuple[Any, Any]:
    """Queries and tables, the same for all layers, and a random cache; page 0 is the dummy."""
    query_key, cache_key = jax.random.split(key)
    q = jax.random.normal(query_key, (len(start), t, HEADS, HEAD_DIM), dtype)
    shape = (int(table.max()) + 2, 2, KV_HEADS, PAGE, HEAD_DIM)
    # layer by layer: random bits for all at once would take several times the memory of the cache
    cache = jax.lax.map(lambda k: jax.random.normal(k, shape, dtype), jax.random.split(cache_key, layers))
    return (q, jnp.int32(table + 1), jnp.int32(start)), cache


def _attend(layer: int, shared: Any, kv: jax.Array) -> jax.Array:
    q, table, start = shared
    return paged_attention(q, kv, jnp.int32(layer), table, start)


def _attend_plain(layer: int, shared: Any, kv: jax.Array) -> jax.Array:
    q, table, start = shared
    return reference(q, kv, jnp.int32(layer), table, start)


def experts_mlp(name: str, tokens: int, d: int, f: int, e: int, k: int, layers: int, dtype: str) -> Case:
    """A mixture of experts from its input to its output, the router's choice given: `tokens` tokens, of which each
    chooses `k` of `e` experts, all equally likely. What must be read are the weights of experts that anyone chose.
    """
    rng = np.random.default_rng(tokens)
    ids = rng.random((layers, tokens, e)).argpartition(k - 1, axis=-1)[..., :k].astype(np.int32)
    distinct = np.mean([len(np.unique(layer)) for layer in ids])

    def build(key):
        keys = jax.random.split(key, 3)
        x, weights = jax.random.normal(keys[0], (tokens, d), dtype), jax.random.uniform(keys[1], (tokens, k))

        def own(key):  # expert by expert: random bits for all at once would take several times their memory
            matrices = lambda key: (  # noqa: E731
                jax.random.normal(key, (2 * f, d), dtype) * d**-0.5,
                jax.random.normal(jax.random.fold_in(key, 1), (d, f), dtype) * f**-0.5,
            )
            return jax.lax.map(matrices, jax.random.split(key, e))

        return (x, weights, jnp.asarray(ids)), [own(each) for each in jax.random.split(keys[2], layers)]

    return Case(
        name=f"experts {name}, {tokens} token{'s' * (tokens > 1)}",
        group="experts",
        layers=layers,
        build=build,
        op=_mix,
        plain=_mix_plain,
        size=jnp.dtype(dtype).itemsize * (distinct * 3 * d * f + 2 * tokens * d),
        flops=2 * tokens * k * 3 * d * f,
    )


def _mix(layer: int, shared: Any, own: Any) -> jax.Array:
    x, weights, ids = shared
    return experts.experts_mlp(x, [own[layer]], ids[layer], weights)


def _mix_plain(layer: int, shared: Any, own: Any) -> jax.Array:
    x, weights, ids = shared
    rows, items, place = experts.plan(x, ids[layer], len(own[layer][0]))
    return experts.combine(experts.reference(rows, [own[layer]], items), place, weights)


def router(name: str, tokens: int, e: int, k: int, layers: int) -> Case:
    """Each token's `k` likeliest of `e` experts, from their logits."""
    return Case(
        name=f"router {name}, {tokens} token{'s' * (tokens > 1)}",
        group="router",
        layers=layers,
        build=lambda key: (None, jax.random.normal(key, (layers, tokens, e))),
        op=lambda layer, _, logits: top_experts.top_experts(logits[layer], k, True)[1],
        plain=lambda layer, _, logits: top_experts.reference(logits[layer], k, True)[1],
        size=4 * tokens * (e + 2 * k),
        flops=0,
    )


def cache_write(count: int, length: int, layers: int, dtype: str) -> Case:
    """Keys and values of `count` whole prompts of `length` tokens, in a prefill's blocks, into their pages."""
    blocks, pages = -(-length // BLOCK), -(-length // PAGE)
    start = jnp.tile(jnp.arange(blocks, dtype=jnp.int32) * BLOCK, count)
    table = jnp.repeat(1 + jnp.arange(count * pages, dtype=jnp.int32).reshape(count, pages), blocks, axis=0)
    rows = Rows(start, jnp.full_like(start, BLOCK), table)

    def build(key):
        new = jax.random.normal(key, (2, len(start), BLOCK, KV_HEADS, HEAD_DIM), dtype)
        return tuple(new), jnp.zeros((layers, 1 + count * pages, 2, KV_HEADS, PAGE, HEAD_DIM), dtype)

    def write(layer, new, kv, scatter=False):
        which = jnp.full((1, 1, 1), layer) if scatter else jnp.int32(layer)  # several layers at once are a scatter's
        kv = rows.write(kv, which, *(x[None] for x in new)) if scatter else rows.write(kv, which, *new)
        return kv[layer, -1, :, 0, 0], kv

    return Case(
        name=f"cache write {count} x {length}",
        group="cache write",
        layers=layers,
        build=build,
        op=write,
        plain=partial(write, scatter=True),
        in_place=True,
        size=2 * jnp.dtype(dtype).itemsize * 2 * len(start) * BLOCK * KV_HEADS * HEAD_DIM,
        flops=0,
    )


def convolution(b: int, t: int, m: int, n: int, h: int, layers: int, dtype: str) -> Case:
    """The convolution of `t` rows for each of `b` requests, half of the rows of the round before accepted."""
    mix = LinearAttention((), m, n, h, h, taps=4)
    slots, replay = jnp.arange(b, dtype=jnp.int32), jnp.full((b,), t // 2, jnp.int32)

    def build(key):
        x, weight = (
            jax.random.normal(jax.random.fold_in(key, i), (*shape, mix.channels), dtype)
            for i, shape in enumerate(((b, t), (mix.taps,)))
        )
        return (x, weight), causal_conv.empty_windows(layers, b, t, mix.channels, mix.taps, dtype)

    def plain(layer, shared, windows):
        x, weight = shared
        out, windows = causal_conv.conv_step(windows, jnp.int32(layer), slots, replay, x, weight.T)
        return causal_conv.split_heads(out, mix)[0], windows

    def op(layer, shared, windows):
        (q, _, _), windows = causal_conv.step(windows, jnp.int32(layer), slots, replay, *shared, mix)
        return q, windows

    return Case(
        name=f"convolution {b} x {t} row{'s' * (t > 1)}",
        group="convolution",
        layers=layers,
        build=build,
        op=op,
        plain=plain,
        in_place=True,
        size=jnp.dtype(dtype).itemsize * b * mix.channels * 2 * (mix.taps - 1 + 2 * t),
        flops=2 * b * t * mix.channels * mix.taps,
    )


def prompt_convolution(count: int, length: int, m: int, n: int, h: int, layers: int, dtype: str) -> Case:
    """The convolution of `count` whole prompts of `length` tokens, in blocks; among columns that it has no use for."""
    mix = LinearAttention((), m, n, h, h, taps=4)
    blocks = -(-length // BLOCK)
    slots = jnp.repeat(jnp.arange(count, dtype=jnp.int32), blocks)
    which = *_prompts(slots), jnp.full(len(slots), BLOCK, jnp.int32)

    def build(key):
        x, weight = (
            jax.random.normal(jax.random.fold_in(key, i), shape, dtype)
            for i, shape in enumerate(((len(slots), BLOCK, mix.channels + n * h), (mix.taps, mix.channels)))
        )
        return (x, weight), causal_conv.empty_windows(layers, count, 1, mix.channels, mix.taps, dtype)

    def plain(layer, shared, windows):
        x, weight = shared
        inputs = x[..., : mix.channels]
        out, windows = causal_conv.conv_chunk(windows, jnp.int32(layer), *which, inputs, weight.T)
        return jax.lax.optimization_barrier(causal_conv.split_heads(out, mix))[2], windows

    def op(layer, shared, windows):
        heads, windows = causal_conv.chunk(windows, jnp.int32(layer), *which, *shared, mix)
        return jax.lax.optimization_barrier(heads)[2], windows

    return Case(
        name=f"convolution prompts {count} x {length}",
        group="convolution prompts",
        layers=layers,
        build=build,
        op=op,
        plain=plain,
        in_place=True,
        size=2 * jnp.dtype(dtype).itemsize * len(slots) * BLOCK * mix.channels,
        flops=2 * len(slots) * BLOCK * mix.channels * mix.taps,
    )


def delta_step(b: int, t: int, m: int, n: int, h: int, layers: int, dtype: str) -> Case:
    """A round of `t` rows for each of `b` requests, all but one row of the round before accepted; float32 states."""
    return Case(
        name=f"gated delta {b} x {t} row{'s' * (t > 1)}",
        group="gated delta",
        layers=layers,
        build=partial(_delta, b, b, t, m, n, h, layers, dtype),
        op=partial(_run_step, gated_delta.step),
        plain=partial(_run_step, gated_delta.reference_step),
        in_place=True,
        size=2 * 4 * b * n * h * h,
        flops=2 * b * n * h * h * 4 * t,
    )


def delta_chunk(count: int, length: int, m: int, n: int, h: int, layers: int, dtype: str) -> Case:
    """`count` whole prompts of `length` tokens through gated delta-rule attention, in blocks as a prefill has them."""
    blocks = -(-length // BLOCK)
    tokens = count * blocks * BLOCK
    return Case(
        name=f"gated delta prompts {count} x {length}",
        group="gated delta prompts",
        layers=layers,
        build=partial(_delta, count, count * blocks, BLOCK, m, n, h, layers, dtype),
        op=_run_chunk,
        plain=_run_chunk_plain,
        in_place=True,
        size=jnp.dtype(dtype).itemsize * tokens * h * (2 * m + 2 * n),
        flops=2 * tokens * n * h * h * 3,
    )


def _delta(slots: int, b: int, t: int, m: int, n: int, h: int, layers: int, dtype: str, key: jax.Array):
    """b times t tokens, the same for all layers, and a pool of `slots` states of zero."""
    keys = jax.random.split(key, 5)
    rows = (b, t)
    unit = lambda x: (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(dtype)  # noqa: E731
    q, k = (unit(jax.random.normal(k, (*rows, m, h))) for k in keys[:2])
    v = jax.random.normal(keys[2], (*rows, n, h), dtype)
    decay, beta = (
        jax.nn.sigmoid(jax.random.normal(k, (*rows, n)) + bias) for k, bias in zip(keys[3:], (4, 0), strict=True)
    )
    pool = gated_delta.empty(
        layers, slots, t, key_heads=m, value_heads=n, key_width=h, value_width=h, dtype="float32", key_dtype=dtype
    )
    return (jnp.repeat(jnp.arange(slots), b // slots), (q * h**-0.5, k, v, decay, beta)), pool


def _run_step(step: Callable, layer: int, shared: Any, pool: Any) -> tuple[jax.Array, Any]:
    slots, new = shared
    return step(pool, jnp.int32(layer), slots, jnp.full(len(slots), new[0].shape[1] - 1), *new)


def _run_chunk(layer: int, shared: Any, pool: Any) -> tuple[jax.Array, Any]:
    slots, new = shared
    count = jnp.full(len(slots), BLOCK)
    return gated_delta.chunk(pool, jnp.int32(layer), *_prompts(slots), count, *new)


def _run_chunk_plain(layer: int, shared: Any, pool: Any) -> tuple[jax.Array, Any]:
    slots, (q, k, v, decay, beta) = shared
    logs = jnp.cumsum(jnp.log(decay), axis=1).swapaxes(1, 2)
    within = q, k, v, logs, beta.swapaxes(1, 2)
    out, state = gated_delta.reference_chunk(pool.state, jnp.int32(layer), *_prompts(slots), *within)
    return out, pool.replace(state=state)


def _prompts(slots: jax.Array) -> tuple[jax.Array, ...]:
    """Slots, sources and snapshots of blocks of whole prompts."""
    first = jnp.concatenate([jnp.ones(1, bool), slots[1:] != slots[:-1]])
    return slots, jnp.where(first, -1, slots), jnp.full(len(slots), -1)


def layer_matmuls(rows: int, d: int, f: int, n: int, layers: int) -> Case:
    """The matmuls from one attention to the next, with the norms and the gate between them, for `rows` tokens.

    Model width `d`, MLP width `f`, and `n` columns of the next layer's q, k and v.
    """
    shapes = (d, d), (d, 2 * f), (f, d), (d, n)
    weights = sum(k * m for k, m in shapes)

    def build(key):
        def own(key):
            keys = jax.random.split(key, 6)
            pairs = zip(keys[2:], shapes, strict=True)
            matrices = [jax.random.normal(k, shape, "bfloat16") * shape[0] ** -0.5 for k, shape in pairs]
            x, mixed = (jax.random.normal(k, (rows, d), "bfloat16") for k in keys[:2])
            return x, mixed, matrices, [jnp.ones(d, "bfloat16")] * 2

        return (), [own(each) for each in jax.random.split(key, layers)]

    return Case(
        name=f"layer matmuls, {rows} row{'s' * (rows > 1)}",
        group="layer matmuls",
        layers=layers,
        build=build,
        op=_stream,
        plain=_stream_plain,
        size=2 * (weights + rows * (3 * d + n)),
        flops=2 * rows * weights,
        kernel="weight_stream",
    )


def small_layer(rows: int, d: int, heads: int, kv_heads: int, f: int, layers: int) -> Case:
    """A small model's layer but for its attention, whose place the queries take: four kernels, one after the other."""
    width = few_rows.TILE
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
            return matrices | {"scale": jnp.ones(d, "bfloat16")}

        x = jax.random.normal(key, (rows, d), "bfloat16")
        kv = jnp.zeros((layers, 1 + -(-rows // PAGE), 2, kv_heads, PAGE, width), "bfloat16")
        return [own(each) for each in jax.random.split(key, layers)], (x, kv)

    def op(i, own, carried):
        (x, kv), layer = carried, own[i]
        operands = x, layer["scale"], layer["qkv"], cos, sin, kv, jnp.int32(i), place
        q, kv = few_rows.heads(*operands, [layer["out"], layer["gate_up"], layer["down"]], eps=EPS)
        x = few_rows.add_product(x, q, layer["out"])
        hidden = few_rows.gated(x, layer["scale"], layer["gate_up"], [own[(i + 1) % layers]["qkv"]], eps=EPS)
        x = few_rows.add_product(x, hidden, layer["down"])
        return x, (x, kv)

    def plain(i, own, carried):
        (x, kv), layer = carried, own[i]
        qkv = (rms_norm(x, layer["scale"], EPS) @ layer["qkv"]).reshape(rows, -1, 2, width // 2).astype(jnp.float32)
        turned, v = qkv[:, :-kv_heads], qkv[:, -kv_heads:]
        first, second = turned[:, :, 0], turned[:, :, 1]
        c, s = cos[:, None], sin[:, None]
        turned = jnp.stack([first * c - second * s, second * c + first * s], axis=2)
        new = jnp.stack([turned[:, heads:], v], axis=1).reshape(rows, 2, kv_heads, width)
        kv = kv.at[i, place // PAGE, :, :, place % PAGE].set(new.astype(kv.dtype))
        x = x + turned[:, :heads].reshape(rows, -1).astype(x.dtype) @ layer["out"]
        x = x + project.reference(rms_norm(x, layer["scale"], EPS), layer["gate_up"], gated=True) @ layer["down"]
        return x, (x, kv)

    return Case(
        name=f"small layer, {rows} rows",
        group="small layer",
        layers=layers,
        build=build,
        op=op,
        plain=plain,
        size=2 * (weights + rows * (2 * d + (heads + 2 * kv_heads) * width)),
        flops=2 * rows * weights,
        kernel="few_rows",
        in_place=True,
    )


def projections(rows: int, d: int, f: int, n: int, layers: int, dtype: str = "bfloat16") -> list[Case]:
    """The matmuls of a layer one by one, for more rows than `layer_matmuls` takes; names as there."""

    def one(name: str, inputs: int, outputs: int, gated: bool = False) -> Case:
        def build(key):
            def own(key):
                x, weight = (
                    jax.random.normal(k, shape, dtype)
                    for k, shape in zip(jax.random.split(key), ((rows, inputs), (inputs, outputs)), strict=True)
                )
                return x, weight * inputs**-0.5

            return jnp.array([rows], jnp.int32), [own(each) for each in jax.random.split(key, layers)]

        return Case(
            name=f"{name}, {rows} rows",
            group="projections",
            layers=layers,
            build=build,
            op=lambda layer, real, own: project.project(*own[layer], real, gated),
            plain=lambda layer, real, own: project.reference(*own[layer], gated),
            size=jnp.dtype(dtype).itemsize * (inputs * outputs + rows * (inputs + outputs // (1 + gated))),
            flops=2 * rows * inputs * outputs,
        )

    return [one("q, k, v", d, n), one("out", d, d), one("gate, up", d, 2 * f, gated=True), one("down", f, d)]


def _stream(layer: int, shared: Any, own: Any) -> jax.Array:
    x, mixed, weights, scales = own[layer]
    return weight_stream.stream(x, mixed, weights, scales, eps=EPS)[1].sum(0)


def _stream_plain(layer: int, shared: Any, own: Any) -> jax.Array:
    x, mixed, (out, gate_up, down, following), scales = own[layer]
    x = x + mixed @ out
    runs = (rms_norm(x, scales[0], EPS) @ gate_up).reshape(len(x), -1, 2, weight_stream.HALF)
    x = x + (jax.nn.silu(runs[:, :, 0]) * runs[:, :, 1]).reshape(len(x), -1) @ down
    return jnp.matmul(rms_norm(x, scales[1], EPS), following, preferred_element_type=jnp.float32)
