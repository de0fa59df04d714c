"""Attention of a few new rows a request over its paged keys and values, on Hopper: decode, verify, trees.

A Mosaic GPU kernel. A warpgroup owns one request, one KV head, one tile of query rows and a part of the request's
tokens. It streams keys and values through a ring in shared memory, one bulk copy a page, and keeps a running maximum
and sum (online softmax, in base 2). The query heads that share a KV head stand together in a tile, so every key is
read from memory once. Tiles of few rows are the narrow side of the products, or most of the arithmetic would be about
rows that aren't there. If there are few requests, several blocks and their warpgroups divide a request's tokens into
parts, count in memory how many are done, and combine the results before they leave. Invariant: work follows the tokens
that are there, whatever the table's width: a part is a share of a request's actual steps, and may be empty. Parts take
steps in turn, so that what each reads first is known before a request's length is.

The cache must hold finite numbers everywhere, since masked values enter a sum with weight zero.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from jaxspec.pallas.hopper import MULTIPROCESSORS
from jaxspec.pallas.once import lower_once

ROWS = 64  # of a tile, at most: the M of a Hopper warpgroup's matmul, whose N may be as small as `FEW_ROWS`
FEW_ROWS = 8
NARROW_ROWS = 32  # up to which rows are the narrow side: more wouldn't leave a thread registers enough
WARPS, LANES = 4, 32  # of a warpgroup, and of a warp
MAX_ROWS = 32  # new rows a request
MAX_WINDOW = 32  # places that a mask is about: bits of a word
MAX_GROUP = 16
PACK = 4  # rows that parts are combined in at a time, one a warp
HEAD_WIDTHS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
MAX_SPLITS = 16  # blocks that share a request's tokens: each combines what all have left
FLOOR = -1e30  # a running maximum that nothing has raised; finite, so that differences of maxima are numbers
FP8 = jnp.float8_e4m3fn


@dataclass(frozen=True)
class _Plan:
    """Everything about one call that is static."""

    b: int
    t: int
    n: int
    m: int
    h: int
    page: int
    entries: int
    fp8: bool
    window: int  # places that a mask is about; 0: there is none, rows are causal
    splits: int  # blocks that share a request's tokens; all of a call's run at once, since they wait for one another
    warpgroups: int  # of a block, that share those of the block
    interpret: bool  # sums can't start from a value then, and blocks can't count: a second call combines parts

    @property
    def parts(self) -> int:
        """How many warpgroups share a request's tokens."""
        return self.splits * self.warpgroups

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.n // self.m

    @property
    def tile_tokens(self) -> int:
        """New tokens whose rows make up one tile."""
        return min(self.t, ROWS // self.group)

    @property
    def tiles(self) -> int:
        return -(-self.t // self.tile_tokens)

    @property
    def step(self) -> int:
        """Cached tokens that are worked on at a time."""
        return 128 if self.h == 64 else 64

    @property
    def copies(self) -> int:
        """Bulk copies that bring the keys of one step."""
        return max(1, self.step // self.page)

    @property
    def dtype(self) -> jnp.dtype:
        """What the tensor cores multiply. Float16 holds every e4m3 number, and there is an instruction for it."""
        return jnp.dtype(jnp.float16 if self.fp8 else jnp.bfloat16)

    @property
    def stages(self) -> int:
        """Steps whose keys and values each warpgroup has room for: 64 KiB of them, so that two share a processor.

        More room was measured to be slower: blocks with much shared memory start later.
        """
        return 4 if self.fp8 else 2

    @property
    def stage_bytes(self) -> int:
        return 2 * self.step * self.h * (1 if self.fp8 else 2)

    @property
    def rows(self) -> int:
        """Rows of a tile as they are multiplied, some of which may not be there."""
        few = max(FEW_ROWS, 1 << (self.tile_tokens * self.group - 1).bit_length())
        return few if few <= NARROW_ROWS else ROWS

    @property
    def narrow(self) -> bool:
        """Whether scores are [step, rows] and sums of values [h, rows], and not the other way around."""
        return self.rows <= NARROW_ROWS

    @property
    def exchanged(self) -> int:
        """Numbers that the warps of a warpgroup exchange at a time: every lane's, for as many as 16 rows."""
        return WARPS * LANES * min(self.rows, 16) // 4

    @property
    def packs(self) -> int:
        """How many packs of rows a part's result has."""
        return -(-self.tile_tokens * self.group // PACK)


def supported(q_shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype, window: int = 0) -> str | None:
    """Why the kernel can't serve queries [b, t, n, h] over a cache [l, p, 2, m, s, h] of this dtype, with a mask over
    `window` places; None if it can."""
    _, t, n, h = q_shape
    m, s = kv_shape[3], kv_shape[4]
    if jnp.dtype(dtype) not in (jnp.bfloat16, FP8):
        return f"a cache in {jnp.dtype(dtype).name}; bfloat16 and float8_e4m3fn are"
    if h not in HEAD_WIDTHS or kv_shape[5] != h:
        return f"heads of width {h} over keys of width {kv_shape[5]}; equal widths of {_listed(HEAD_WIDTHS)} are"
    if s not in PAGE_SIZES:
        return f"pages of {s} tokens; {_listed(PAGE_SIZES)} are"
    if n % m or n // m > MAX_GROUP:
        return f"{n} query heads over {m} KV heads; whole groups of up to {MAX_GROUP} are"
    if t > MAX_ROWS:
        return f"{t} rows a request; up to {MAX_ROWS} are"
    if window > MAX_WINDOW:
        return f"a mask over {window} places; up to {MAX_WINDOW} are"
    return None


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values[:-1])) + f" and {values[-1]}"


def _division(tiles: int, h: int) -> tuple[int, int]:
    """Into how many blocks, and warpgroups of a block, to divide the tokens that each of `tiles` attends to.

    As many blocks as there are processors, so that all run at once. If those are few all the same, two warpgroups of
    each divide its tokens once more.
    """
    processors = getattr(jax.devices()[0], "core_count", None) or MULTIPROCESSORS
    splits = 1
    while splits < MAX_SPLITS and 2 * splits * tiles <= processors:
        splits *= 2
    return splits, 2 if 2 * splits * tiles <= processors and h < 256 else 1


def decode_attention(
    q: Float[Array, "b t n h"],
    kv: Float[Array, "l p 2 m s h"],
    layer: Int[Array, ""],
    table: Int[Array, "b e"],
    start: Int[Array, " b"],
    *,
    scales: Float[Array, "l 2 m"] | None = None,
    mask: Bool[Array, "b t w"] | None = None,
    interpret=False,
) -> Float[Array, "b t n h"]:
    """Attention of rows at places `start + 0..t-1`, whose keys and values are already in `kv`.

    **Arguments:** `q` in bfloat16, unscaled: scores are scaled by h**-0.5. `kv` in bfloat16 or float8_e4m3fn, and for
    the latter `scales`, float32, which the keys (0) and values (1) of each head are multiplied with. `table[b]` lists a
    request's pages in order. Row i sees places up to its own; or, with a `mask`, all before `start` and those
    `start + j` where `mask[b, i, j]`, wherever its own keys are. `interpret`: as in `plgpu.kernel`.

    Returns the mix of values in bfloat16. Rows that see nothing, as those at negative places, are zero.
    **Raises:** `ValueError` if `supported` has a reason against it.
    """
    if reason := supported(q.shape, kv.shape, kv.dtype, 0 if mask is None else mask.shape[2]):
        raise ValueError(f"decode_attention doesn't support {reason}")
    if q.dtype != jnp.bfloat16:
        raise ValueError(f"decode_attention doesn't support queries in {q.dtype}; bfloat16 is")
    return _attend(q, kv, layer, table, start, scales, mask, interpret=interpret)


@lower_once("decode_attention", "division")
def _attend(q, kv, layer, table, start, scales, mask, *, interpret, division=None):
    b, t, n, h = q.shape
    m, s = kv.shape[3], kv.shape[4]
    tiles = -(-t // min(t, ROWS // (n // m)))
    division = division or _division(b * m * tiles, h)
    window = 0 if mask is None else mask.shape[2]
    plan = _Plan(b, t, n, m, h, s, table.shape[1], kv.dtype == FP8, window, *division, bool(interpret))
    operands = [q, kv, table, start, layer.reshape(1)]
    if scales is not None:
        operands.append(scales)
    if mask is not None:
        operands.append(_row_bits(plan, mask))
    out = jax.ShapeDtypeStruct((b, t, n, h), q.dtype)
    parts = (b, m, plan.tiles, plan.parts, plan.rows)
    sums = (b, m, plan.tiles, plan.parts, 2, plan.rows)
    results = [out] if plan.parts == 1 else [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*parts, h), sums)]

    launch = partial(
        plgpu.kernel,
        kernel_name="decode_attention",
        grid=(b, m, plan.tiles, plan.splits),
        grid_names=("b", "m", "tile", "split"),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        scratch_types=_scratch(plan),
        # Safe here: what warps hand to one another goes through a barrier or `commit_smem`, written out below.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )
    attend = partial(_warpgroup, plan, scales is not None)
    if plan.parts > 1 and not plan.interpret:
        results.append(out)
    results = launch(attend, out_type=results)(*operands)
    if plan.parts > 1 and plan.interpret:
        results = launch(partial(_combine, plan), out_type=[out])(*results)
    return results[-1]


def _row_bits(plan: _Plan, mask):
    """The mask of each row of each tile, a bit for each place: i32[b, tiles, rows]."""
    mask = jnp.pad(mask, ((0, 0), (0, plan.tiles * plan.tile_tokens - plan.t), (0, 0)))
    mask = jnp.repeat(mask.reshape(plan.b, plan.tiles, plan.tile_tokens, plan.window), plan.group, axis=2)
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, plan.rows - mask.shape[2]), (0, 0)))
    # Summed last, so that it is one kernel with all of the above.
    bits = (mask.astype(jnp.uint32) << jnp.arange(plan.window, dtype=jnp.uint32)).sum(3, dtype=jnp.uint32)
    return lax.bitcast_convert_type(bits, jnp.int32)


def _scratch(plan: _Plan) -> dict:
    """Shared memory and barriers. An axis of `w` has an entry for each warpgroup; what lacks it, they share."""
    w, rows = plan.warpgroups, (plan.rows, plan.h)
    ring = plgpu.SMEM((w, plan.stages, 2, plan.step, plan.h), FP8 if plan.fp8 else jnp.bfloat16)
    scratch = dict(
        ring=ring,
        q_s=plgpu.SMEM(rows, plan.dtype),
        # Rows as they are in memory, before and after, all of them or packs; in between the weights of a step, and what
        # warps exchange.
        staging=plgpu.RefUnion(
            plgpu.SMEM(rows, jnp.bfloat16),
            (
                plgpu.SMEM((w, plan.rows, plan.step), plan.dtype),
                *([plgpu.SMEM((w, plan.exchanged), jnp.float32)] if plan.narrow else []),
            ),
            plgpu.SMEM((w, max(1, plan.rows * plan.step // (PACK * plan.h)), PACK, plan.h), jnp.bfloat16),
        ),
        ready=plgpu.Barrier(num_arrivals=plan.copies, num_barriers=(w, plan.stages, 2)),
        q_ready=plgpu.Barrier(num_arrivals=plan.tile_tokens, num_barriers=w),
    )
    if plan.fp8:
        scratch["wide_s"] = plgpu.SMEM((w, plan.step, plan.h), plan.dtype)
    if plan.warpgroups > 1:
        scratch["staged"] = plgpu.Barrier(num_arrivals=w)
    if plan.parts > 1:
        # A part's result takes the place of its ring, so its first axes must stride over as many bytes.
        tiles = plan.stages * plan.stage_bytes // (plan.rows * plan.h * 4)
        scratch["ring"] = plgpu.RefUnion(ring, plgpu.SMEM((w, tiles, *rows), jnp.float32))
        scratch["sums_s"] = plgpu.SMEM((w, 2, plan.rows), jnp.float32)
    return scratch


def _warpgroup(plan: _Plan, scaled: bool, q_g, kv_g, table_g, start_g, layer_g, *refs, ring, q_s, staging, ready,
               q_ready, wide_s=None, staged=None, sums_s=None):  # fmt: skip
    """What one warpgroup of one block does."""
    refs = list(refs)
    scales_g = refs.pop(0) if scaled else None
    bits_g = refs.pop(0) if plan.window else None
    b, head, tile, split, w = (lax.axis_index(name) for name in ("b", "m", "tile", "split", "warpgroup"))
    part = split * plan.warpgroups + w
    ring, part_s = (ring, None) if plan.parts == 1 else (ring[0], ring[1].at[w, 0])
    ring, rows_s = ring.at[w], staging[0]
    p_s, *exchange_s = (ref.at[w] for ref in staging[1])

    def step(i):
        """Which of the request's steps is the i-th of this part."""
        return part + i * plan.parts

    def share(steps):
        """How many of the first `steps` are this part's."""
        return lax.div(jnp.maximum(steps - part, 0) + (plan.parts - 1), jnp.int32(plan.parts))

    def pages(i):
        return _pages(plan, table_g, b, step(i))

    def fetch(i, ids, kind, stage):
        _fetch(plan, kv_g.at[layer], ids, step(i), kind, head, ring.at[stage, kind], ready.at[w, stage, kind])

    # All that comes from memory is asked for together, or each would wait in its turn.
    layer, start = layer_g[0], start_g[b]
    first_ids = [pages(i) for i in range(plan.stages)]
    next_ids = pages(plan.stages)
    for i in range(plan.tile_tokens):
        token = jnp.minimum(tile * plan.tile_tokens + i, plan.t - 1)
        source = q_g.at[b, token, pl.ds(head * plan.group, plan.group)]
        plgpu.copy_gmem_to_smem(source, rows_s.at[pl.ds(i * plan.group, plan.group)], q_ready.at[w])

    first = start + tile * plan.tile_tokens
    end = start + plan.window if plan.window else first + plan.tile_tokens
    end = jnp.clip(end, 0, plan.entries * plan.page)
    count = share(lax.div(end + (plan.step - 1), jnp.int32(plan.step)))

    for i, ids in enumerate(first_ids):

        @pl.when(i < count)
        def _(i=i, ids=ids):
            fetch(i, ids, 0, i)
            fetch(i, ids, 1, i)

    plgpu.barrier_wait(q_ready.at[w])
    q_s[...] = plgpu.load(rows_s, layout=_row_a_warp(plan.h), optimized=False).astype(plan.dtype)
    plgpu.commit_smem()
    if plan.warpgroups > 1:
        # All put the same rows into the same places. Nobody may write weights there before all have read them.
        plgpu.barrier_arrive(staged)
        plgpu.barrier_wait(staged)

    key_scale, value_scale = (scales_g[layer, 0, head], scales_g[layer, 1, head]) if scaled else (None, None)
    factor = plan.h**-0.5 * math.log2(math.e)
    factor = factor * key_scale if scaled else jnp.float32(factor)
    bits = plgpu.load(bits_g.at[b, tile], layout=_by_row(plan), optimized=False) if plan.window else None

    def operand(stage, kind):
        plgpu.barrier_wait(ready.at[w, stage, kind])
        if not plan.fp8:
            return ring.at[stage, kind]
        wide_s[w] = ring[stage, kind].astype(plan.dtype)
        plgpu.commit_smem()
        return wide_s.at[w]

    def body(masked, i, carry):
        acc, top, total, ids = carry
        stage = lax.rem(i, jnp.int32(plan.stages))
        ahead = i + plan.stages
        next_ids = pages(ahead + 1)  # a step before they are needed, since they come from memory
        keys = operand(stage, 0)
        scores = _product(keys, _turned(q_s)) if plan.narrow else _product(q_s, _turned(keys))
        if masked:
            scores = jnp.where(_seen(plan, step(i) * plan.step, start, first, bits), scores, -jnp.inf)
        new_top = jnp.maximum(top, _over_tokens(plan, "max", scores, *exchange_s) * factor)
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores * factor - _spread(plan, new_top, scores))
        if plan.narrow:  # each thread for itself, until the end
            total = total * _spread(plan, shrink, total) + weights
        else:
            total = total * shrink + _over_tokens(plan, "add", weights)
        _put(plan, p_s, weights)
        plgpu.commit_smem()  # all warps are done with the keys, too
        pl.when(ahead < count)(lambda: fetch(ahead, ids, 0, stage))
        acc = acc * _spread(plan, shrink, acc)
        values = operand(stage, 1)
        acc = _add_product(plan, acc, *((_turned(values), _turned(p_s)) if plan.narrow else (p_s, values)))
        plgpu.commit_smem()  # all warps are done with the values and the weights
        pl.when(ahead < count)(lambda: fetch(ahead, ids, 1, stage))
        return acc, new_top, total, next_ids

    # Steps that every row sees in full need no mask; there may be none.
    whole = jnp.maximum(start if plan.window else first + 1, 0)
    whole = jnp.minimum(share(lax.div(whole, jnp.int32(plan.step))), count)
    carry = lax.fori_loop(jnp.int32(0), whole, partial(body, False), (*_nothing(plan), next_ids))
    acc, top, total, _ = lax.fori_loop(whole, count, partial(body, True), carry)
    if plan.narrow:
        total = _over_tokens(plan, "add", total, *exchange_s)
    if scaled:
        acc = acc * value_scale

    if plan.parts == 1:
        _write_rows(plan, acc, total, rows_s, refs[0].at[b], tile, head)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        return
    _write_part(plan, acc, top, total, part_s, sums_s.at[w], *(ref.at[b, head, tile, part] for ref in refs[:2]))
    if not plan.interpret:
        done = pl.get_global(plgpu.SemaphoreType.REGULAR((plan.b, plan.m, plan.tiles))).at[b, head, tile]
        plgpu.semaphore_signal(done, memory_scope="gpu")
        plgpu.semaphore_wait(done, plan.parts, decrement=False, memory_scope="gpu")
        _combine(plan, *refs, staging=staging)


def _nothing(plan: _Plan):
    """The weighted sum of values, the largest score and the sum of weights of rows that have seen no token yet."""
    layout = plgpu.Layout.WGMMA
    acc, scores = ((width, plan.rows) if plan.narrow else (plan.rows, width) for width in (plan.h, plan.step))
    total = jnp.zeros(scores if plan.narrow else plan.rows, jnp.float32)
    return (
        plgpu.layout_cast(jnp.zeros(acc, jnp.float32), layout),
        plgpu.layout_cast(jnp.full((plan.rows,), FLOOR, jnp.float32), _by_row(plan)),
        plgpu.layout_cast(total, layout if plan.narrow else _by_row(plan)),
    )


def _by_row(plan: _Plan):
    """The layout of a number for each row."""
    return plgpu.Layout.WGMMA.reduce(0 if plan.narrow else 1)


def _turned(ref):
    return ref.transpose((1, 0))


def _spread(plan: _Plan, x, like):
    """Each row's number for all that `like` has of the row."""
    return lax.broadcast_in_dim(x, like.shape, [1 if plan.narrow else 0])


def _put(plan: _Plan, ref, x):
    """Write to `ref`, which has rows first, what is narrow if the plan is."""
    if plan.narrow:
        ref, x = _turned(ref), plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
    ref[...] = x.astype(ref.dtype)


def _over_tokens(plan: _Plan, kind, x, exchange_s=None):
    """Each row's largest score ("max") or sum ("add"), f32[rows]. If rows are narrow, all warps have some of a row."""
    if not plan.narrow or plan.interpret:
        axis = 0 if plan.narrow else 1
        return x.max(axis=axis) if kind == "max" else x.sum(axis=axis)
    result = plgpu.ShapeDtypeStruct((plan.rows,), jnp.float32, layout=_by_row(plan))
    # Pallas itself would have all warpgroups exchange in one and the same place.
    return plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()), return_type=result)(
        lambda _, x, exchange_s: x.reduce(kind, 0, exchange_s)
    )(x, exchange_s)


def _pages(plan: _Plan, table_g, b, step):
    """The pages that hold a step's tokens. Past the table's end its last page stands in, and is masked."""
    first = lax.div(step, jnp.int32(plan.page // plan.step)) if plan.page > plan.step else step * plan.copies
    return [table_g[b, jnp.minimum(first + i, plan.entries - 1)] for i in range(plan.copies)]


def _fetch(plan: _Plan, kv_g, ids, step, kind, head, slot, ready):
    """Begin to copy the keys (kind 0) or values (1) of a step into a slot of the ring."""
    for i, page in enumerate(ids):
        source, target = kv_g.at[page, kind, head], slot
        if plan.page > plan.step:
            source = source.at[pl.ds(lax.rem(step, jnp.int32(plan.page // plan.step)) * plan.step, plan.step)]
        if plan.page < plan.step:
            target = slot.at[pl.ds(i * plan.page, plan.page)]
        plgpu.copy_gmem_to_smem(source, target, ready)


def _product(a_s, b_s):
    """The product of two tiles in shared memory, in registers."""

    def run(acc):
        plgpu.wgmma(acc, a_s, b_s)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((a_s.shape[0], b_s.shape[1]), jnp.float32))


def _add_product(plan: _Plan, value, a_s, b_s):
    """`value` and the product of two tiles in shared memory, in the same registers."""
    if plan.interpret:
        return value + _product(a_s, b_s)

    def run(acc):
        acc[...] = value
        plgpu.wgmma(acc, a_s, b_s)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC(value.shape, jnp.float32))


def _seen(plan: _Plan, position, start, first, bits):
    """Which tokens of the step at `position` each row sees, a bool for each score."""
    shape, layout = (plan.step, plan.rows) if plan.narrow else (plan.rows, plan.step), plgpu.Layout.WGMMA
    tokens, rows = (0, 1) if plan.narrow else (1, 0)
    position = plgpu.broadcasted_iota(jnp.int32, shape, tokens, layout=layout) + position
    if not plan.window:
        row = plgpu.broadcasted_iota(jnp.int32, shape, rows, layout=layout)
        return position <= first + lax.div(row, jnp.int32(plan.group))
    new = position - start
    bit = lax.shift_right_logical(_spread(plan, bits, position), jnp.clip(new, 0, MAX_WINDOW - 1)) & 1
    return (new < 0) | ((new < plan.window) & (bit == 1))


def _write_rows(plan: _Plan, acc, total, rows_s, out_g, tile, head):
    """Begin to write the rows that one warpgroup has seen all tokens for."""
    _put(plan, rows_s, acc * _spread(plan, 1 / jnp.maximum(total, 1e-30), acc))
    plgpu.commit_smem()
    for i in range(plan.tile_tokens):
        token = tile * plan.tile_tokens + i
        target = out_g.at[token, pl.ds(head * plan.group, plan.group)]
        source = rows_s.at[pl.ds(i * plan.group, plan.group)]
        pl.when(token < plan.t)(partial(plgpu.copy_smem_to_gmem, source, target))


def _write_part(plan: _Plan, acc, top, total, part_s, sums_s, part_g, sums_g):
    """Write one part's sums, and see them arrive."""
    _put(plan, part_s, acc)
    sums_s[0], sums_s[1] = top, total
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(part_s, part_g)
    plgpu.copy_smem_to_gmem(sums_s, sums_g)
    plgpu.wait_smem_to_gmem(0)


def _combine(plan: _Plan, parts_g, sums_g, out_g, *, staging, **_):
    """Combine the parts; each warpgroup does a share of the packs of rows."""
    b, head, tile, split, w = (lax.axis_index(name) for name in ("b", "m", "tile", "split", "warpgroup"))
    part, layout, mixed_s = split * plan.warpgroups + w, _row_a_warp(plan.h), staging[2].at[w, 0]
    parts_g, sums_g, out_g = parts_g.at[b, head, tile], sums_g.at[b, head, tile], out_g.at[b]

    def body(i, _):
        first = (i * plan.parts + part) * PACK
        rows = pl.ds(first, PACK)
        load = partial(plgpu.load, optimized=False)
        tops, totals = (
            [load(sums_g.at[s, kind, rows], layout=layout.reduce(1)) for s in range(plan.parts)] for kind in (0, 1)
        )
        mixes = [load(parts_g.at[s, rows], layout=layout) for s in range(plan.parts)]
        top = functools.reduce(jnp.maximum, tops)
        weights = [jnp.exp2(x - top) for x in tops]
        total = sum(w * x for w, x in zip(weights, totals, strict=True))
        mix = sum(x * lax.broadcast_in_dim(w, x.shape, [0]) for w, x in zip(weights, mixes, strict=True))
        mix = mix * lax.broadcast_in_dim(1 / jnp.maximum(total, 1e-30), mix.shape, [0])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        mixed_s[...] = mix.astype(jnp.bfloat16)
        plgpu.commit_smem()
        for r in range(PACK):
            row = first + r
            token = tile * plan.tile_tokens + lax.div(row, jnp.int32(plan.group))
            target = out_g.at[token, head * plan.group + lax.rem(row, jnp.int32(plan.group))]
            real = (row < plan.tile_tokens * plan.group) & (token < plan.t)
            pl.when(real)(partial(plgpu.copy_smem_to_gmem, mixed_s.at[r], target))
        return _

    lax.fori_loop(jnp.int32(0), lax.div(plan.packs - part + (plan.parts - 1), jnp.int32(plan.parts)), body, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _row_a_warp(h: int) -> plgpu.Layout:
    """Of a pack's rows one in each warp, whose lanes hold neighbours."""
    vector = min(h // 32, 4)
    tiling = plgpu.Tiling(((PACK, 32 * vector), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
