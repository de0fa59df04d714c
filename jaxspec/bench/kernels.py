"""Device kernels by themselves, against plain jax.numpy and the floor.

Each case calls its operation on LAYERS different layers' data in one compiled program, as a model does, so that no
layer finds its operands in a cache; the time is that of one call, the mean over the program's calls and many runs of
it. `TB/s` counts the bytes that must be read and written once, `TFLOP/s` the operations that must be done (causal
attention at half). `ran` is the kernel that the operation chose. `plain` is its reference in jax.numpy on the same
data, `error` the largest difference between the two over the largest value.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxspec.bench import floors
from jaxspec.bench.results import BenchError, Column, Document, Result, Row, Table, device_facts
from jaxspec.models.layers import rms_norm
from jaxspec.pallas import experts, gated_delta, project, weight_stream
from jaxspec.pallas.paged_attention import paged_attention, reference
from jaxspec.pallas.target import KERNELS, kernels_here

COLUMNS = (
    Column("case", "case", "<34", 34),
    Column("ran", "ran", width=16),
    Column("us", "us", ".1f"),
    Column("tb_per_s", "TB/s", ".2f"),
    Column("tflops", "TFLOP/s", ".1f"),
    Column("floor_us", "floor us", ".1f"),
    Column("ratio", "ratio", ".2f"),
    Column("plain_us", "plain us", ".1f"),
    Column("error", "error", ".1e"),
)
TABLES = (Table("kernels: time of one call", COLUMNS),)

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 64  # Qwen3-8B's attention, pages as on a GPU
BLOCK = 64  # prompt tokens per row of a prefill
DECODE = (
    *((b, context, t) for t in (1, 4) for b, context in ((1, 1024), (1, 16384), (8, 1024), (32, 4096), (128, 1152))),
)  # requests, tokens each, rows each
PROMPTS = ((1, 1024), (1, 2048), (1, 8192), (16, 512))  # prompts, tokens each
LAYER = 4096, 12288, 6144  # Qwen3-8B's model width, MLP width, columns of q, k and v
ROWS = (1, 8, 32, 128)
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", default="", metavar="TEXT", help="cases whose name holds this")
    add("--repeats", type=int, default=30, metavar="N", help="runs of each program that are timed (%(default)s)")
    add("--no-plain", action="store_true", help="leave the comparison with plain jax.numpy out")
    add("--small", action="store_true", help="tiny sizes in float32, to try the command out on a CPU")
    floors.add_arguments(parser)


def run(args: argparse.Namespace, result: Result) -> None:
    """Time every case."""
    result.fact(**device_facts())
    cases = [case for case in make_cases(args.small) if args.only in case.name]
    if not cases:
        names = ", ".join(case.name for case in make_cases(args.small))
        raise BenchError(f"--only {args.only}: no case has this in its name; there are {names}")
    limits = floors.ceilings(args)
    for number, case in enumerate(tqdm(cases, desc="kernels", unit="case", disable=None)):
        result.add(measure(case, args.repeats, limits, not args.no_plain, seed=number))
    if args.small or (reason := kernels_here()):
        why = "--small" if args.small else reason
        result.note(f"layer matmuls are left out ({why}): their kernel runs on a Hopper GPU at full size only")


def measure(case: Case, repeats: int, limits: floors.Ceilings, plain: bool, seed: int) -> Row:
    """Time one case; with `plain` also its counterpart, and how far the two are apart."""
    operands = jax.block_until_ready(jax.jit(case.build)(jax.random.key(seed)))
    before = KERNELS.copy()
    seconds, out = timed(case.op, operands, case.layers, repeats, case.in_place)
    floor = limits.seconds(case.size, case.flops)
    row = {
        "case": case.name,
        "group": case.group,
        "ran": case.kernel or ", ".join(KERNELS - before) or "reference",
        "layers": case.layers,
        "bytes": case.size,
        "flops": case.flops,
        "us": seconds * 1e6,
        "tb_per_s": case.size / seconds / 1e12,
        "tflops": case.flops / seconds / 1e12,
        "floor_us": floor * 1e6,
        "ratio": seconds / floor,
    }
    if plain:
        plain_seconds, expected = timed(case.plain, operands, case.layers, max(repeats // 10, 1), case.in_place)
        difference = jnp.max(jnp.abs(out.astype(jnp.float32) - expected.astype(jnp.float32)))
        scale = jnp.max(jnp.abs(expected.astype(jnp.float32)))
        row |= {"plain_us": plain_seconds * 1e6, "error": float(difference / scale)}
    return row


def timed(op: Callable, operands: Any, layers: int, repeats: int, in_place: bool = False) -> tuple[float, Any]:
    """Seconds of one call, and what the call on the first layer gave."""

    @partial(jax.jit, donate_argnums=1 if in_place else ())
    def program(shared, own):
        outs = []
        for layer in range(layers):
            out = op(layer, shared, own)
            out, own = out if in_place else (out, own)
            outs.append(out)
        return outs, own if in_place else None

    shared, own = operands
    if in_place:
        own = jax.tree.map(jnp.copy, own)  # the caller's stays
    compiled = program.lower(shared, own).compile()
    (first, *_), changed = jax.block_until_ready(compiled(shared, own))
    for count in (1, repeats):  # the first to warm up
        began = time.perf_counter()
        for _ in range(count):
            outs, changed = compiled(shared, changed if in_place else own)
        jax.block_until_ready(outs)
    return (time.perf_counter() - began) / repeats / layers, first


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
    cases += [delta_step(b, t, *sizes["delta"], layers, dtype) for b, t in sizes["steps"]]
    cases += [delta_chunk(count, length, *sizes["delta"], layers, dtype) for count, length in sizes["chunks"]]
    for rows in sizes["many"]:
        cases += projections(rows, *sizes["layer"], layers // 2, dtype)
    if not small and kernels_here() is None:  # there is no other path to it: a model without it has plain layers
        cases += [layer_matmuls(rows, *LAYER, layers=8) for rows in ROWS]
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
    return jnp.moveaxis(out, 3, 1), pool.replace(state=state)


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


def plot(document: Document, figure: Any) -> None:
    """Each case's time over its floor, the kernel's and plain jax.numpy's."""
    rows = document["rows"][::-1]
    axes = figure.subplots()
    figure.set_figheight(1.5 + 0.28 * len(rows))
    y = np.arange(len(rows))
    axes.barh(y, [row["ratio"] for row in rows], 0.6, label="kernel")
    marked = [(i, row["plain_us"] / row["floor_us"]) for i, row in enumerate(rows) if "plain_us" in row]
    if marked:
        axes.plot([x for _, x in marked], [i for i, _ in marked], "k|", markersize=10, label="plain jax.numpy")
    axes.axvline(1, color="k", linestyle="--", label="floor")
    axes.set(xscale="log", xlabel="time over the floor", yticks=y, yticklabels=[row["case"] for row in rows])
    axes.legend()
