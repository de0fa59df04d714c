"""The experts of a few tokens as one kernel on Hopper, from the tokens to their weighted sums.

At one token a mixture's weights are read in some 12 us, so reading must never pause: no kernel gathers rows before or
adds results up after, and no block has more to read than another.

- `up`: all blocks share the chosen experts' hidden columns in waves. In each wave a block makes a tile of 64 weight
  rows for the tensor cores, half of them gate; the tokens are the narrow side, eight. The rest that doesn't fill a wave
  is divided `PART` columns at a time. Parts of several experts make up a tile, since all of them multiply the same
  rows. So the first experts' hidden rows are done long before the last's, and a block ahead of the others has work. The
  first waves are of the first token's experts: meanwhile a block finds out which other experts there are.
- `down`: a block has `COLUMNS` outputs of all experts. Four experts' make up a tile, which is multiplied by the hidden
  rows of all four; of the product, each expert's own rows are taken. The block adds its results by weight, adds that to
  the residual stream, and writes its columns.

Weights go through a ring in shared memory. Its producer runs ahead of the products: while a block waits for other
blocks' hidden rows, its weights of `down` are on their way, and at one token all of them fit. Only a few are in flight
at a time: with more, everything is slower, presumably because writes wait among the reads. Copies are few and large,
because all of a warpgroup's threads announce each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxspec.pallas.expert_stream import Stack
from jaxspec.pallas.few_rows.block import by_row
from jaxspec.pallas.hopper import BULK_COPY, WGMMA_ROWS
from jaxspec.pallas.once import lower_once
from jaxspec.pallas.weight_stream import ROOM

ROWS = 8  # of tokens in a product, whether they are tokens or not
MOST = 16  # experts of a token
PAIRS = ROWS * MOST  # threads of a warpgroup: each has one where the different experts are sought
TILE = WGMMA_ROWS  # rows of weights in a product
HALF = TILE // 2  # of gate, then of up
COLUMNS = 16  # outputs of a block
TOGETHER = TILE // COLUMNS  # experts in a tile of `down`
BLOCKS = (128,)  # a grid of which most multiprocessors have a block, all are resident, and an H200 has run it
# Sizes as they were run on an H200. There others (STEP 128, PART 32) gave wrong results for some shapes, presumably as
# Mosaic swizzles parts of arrays otherwise than the whole.
STEP = BULK_COPY  # inputs that one copy brings
PART = 16  # rows of gate, and of up, that one copy brings where a tile isn't one expert's
PARTS = HALF // PART  # of a tile of `up`
ARRIVALS = max(2 * PARTS, TOGETHER)  # of copies into a slot: as many as any tile has
ALIGNED = 1024  # bytes: what each array in shared memory begins at a multiple of
AHEAD = 768  # inputs of `down` whose hidden rows there is room for
FLIGHT = 2  # slots of weights that are under way at once
ODD = 2  # rows before the results, so that slices begin at no multiple of four: Mosaic swizzles such slices wrongly
_i32, _f32 = jnp.int32, jnp.float32


@dataclass(frozen=True)
class _Plan:
    """Sizes of one launch: t tokens, model width d, k experts of width f each, and how many each stack has."""

    t: int
    k: int
    d: int
    f: int
    stacks: tuple[int, ...]

    @property
    def experts(self) -> int:
        return sum(self.stacks)

    @property
    def groups(self) -> int:
        """Of `TOGETHER` experts, if all that are chosen differ."""
        return -(-self.t * self.k // TOGETHER)

    @property
    def blocks(self) -> int:
        return self.d // COLUMNS

    @property
    def pitch(self) -> int:
        """Rows between an expert's hidden rows and the next's: bulk copies begin at a multiple of eight."""
        return max(2, self.t + self.t % 2)

    @property
    def beside(self) -> int:
        """Hidden rows that are multiplied at once."""
        return TOGETHER * self.pitch

    @property
    def parts(self) -> int:
        """Of an expert."""
        return self.f // PART

    @property
    def wave(self) -> int:
        """Parts that all blocks make at once, a tile each."""
        return self.blocks * PARTS

    @property
    def ahead(self) -> int:
        """Waves of the first token's experts only."""
        return self.k * self.parts // self.wave

    @property
    def hidden_slots(self) -> int:
        return AHEAD // STEP

    @property
    def slots(self) -> int:
        rows, hidden = 2 * ROWS * self.d, 2 * AHEAD * self.beside
        results = 4 * ROWS * TILE, 2 * ROWS * HALF, 2 * (ODD + self.beside + ROWS) * TILE, 2 * ROWS * COLUMNS
        taken = sum(-(-each // ALIGNED) * ALIGNED for each in (rows, hidden, *results, *[8 * PAIRS] * 2))
        return (ROOM - taken) // (2 * TILE * STEP)


def supported(tokens: int, each: int, dtype: Any, stacks: list[Stack]) -> str | None:
    """Why the kernel can't serve so many tokens, or rows of the residual stream, of `each` experts; None if it can."""
    if tokens > ROWS or each > MOST:
        return f"{tokens} tokens of {each} experts; supported: up to {ROWS} of {MOST}"
    if dtype != jnp.bfloat16:
        return f"weights are {jnp.dtype(dtype).name}, not bfloat16"
    (d, f), *others = [down.shape[1:] for _, down in stacks]
    if others and others != [(d, f)] * len(others):
        return f"experts of widths {f} and {others[0][1]} in one mixture"
    if d % 256 or d // COLUMNS not in BLOCKS:
        return f"a model {d} wide, which makes {d // COLUMNS} blocks"
    if f % 256:
        return f"experts {f} wide, not a multiple of 256"
    return None


def mix(
    x: Float[Array, "t d"],
    stacks: list[Stack],
    ids: Int[Array, "t w"],
    weights: Float[Array, "t w"],
    residual: Float[Array, "n d"] | None = None,
    *,
    each: int | None = None,
    fused: bool = True,
    interpret: Any = False,
) -> Float[Array, "n d"]:
    """What `experts.experts_mlp` says. An id that is no expert's number counts for nothing.

    `fused=False` makes each of the two matmuls a kernel of its own: what interpret mode, which has no counters between
    blocks, can run.

    **Raises:** `ValueError` if `supported` has a reason against it.
    """
    each = each or ids.shape[1]
    if reason := supported(len(x if residual is None else residual), each, x.dtype, stacks):
        raise ValueError(f"the kernel for a few tokens' experts can't run: {reason}")
    gate_ups, downs = (list(part) for part in zip(*stacks, strict=True))
    launch = partial(_launch, ids, weights, shape=(len(x), each), interpret=interpret)
    if fused:
        return launch(up=(x, gate_ups), down=(None, downs, residual))[-1]
    (hidden,) = launch(up=(x, gate_ups), down=None)
    return launch(up=None, down=(hidden, downs, residual))[0]


@lower_once("expert_few", "shape")
def _launch(ids, weights, *, up, down, shape, interpret):
    """Hidden rows, which `up`, (tokens' rows, weights), makes; what `down`, (hidden rows, weights, the residual stream
    or None), makes of them, of up's if it has none."""
    if up is None:
        (f, d), stacks = down[1][0].shape[:0:-1], down[1]
    else:
        (d, f), stacks = (up[1][0].shape[2], up[1][0].shape[1] // 2), up[1]
    plan, dtype = _Plan(*shape, d, f, tuple(len(stack) for stack in stacks)), stacks[0].dtype
    outs = {}
    if up:
        outs["hidden"] = jax.ShapeDtypeStruct((plan.groups * plan.beside, f), dtype)
    if down:
        outs["out"] = jax.ShapeDtypeStruct((plan.t if down[2] is None else len(down[2]), d), dtype)
    held = {"ids": ids, "weights": weights if down else None, "x": up and up[0], "hidden": down and down[0]}
    held["residual"] = down and down[2]
    held |= {f"up{i}": stack for i, stack in enumerate(up[1] if up else ())}
    held |= {f"down{i}": stack for i, stack in enumerate(down[1] if down else ())}
    held = {name: value for name, value in held.items() if value is not None}
    barrier = partial(plgpu.Barrier, num_barriers=plan.slots)
    return plgpu.kernel(
        partial(_kernel, plan, tuple(held), tuple(outs)),
        kernel_name="expert_few",
        out_type=list(outs.values()),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=dict(
            weight_s=plgpu.SMEM((plan.slots, TILE, STEP), dtype),
            x_s=plgpu.SMEM((d // STEP, ROWS, STEP), dtype),
            hidden_s=plgpu.SMEM((plan.hidden_slots, plan.beside, STEP), dtype),
            both_s=plgpu.SMEM((ROWS, TILE), _f32),
            part_s=plgpu.SMEM((PARTS, ROWS, PART), dtype),
            each_s=plgpu.SMEM((ODD + plan.beside + ROWS, TILE), dtype),
            out_s=plgpu.SMEM((ROWS, COLUMNS), dtype),
            rank_s=plgpu.SMEM((2, PAIRS), _i32),
            experts_s=plgpu.SMEM((2, PAIRS), _i32),
            known=plgpu.Barrier(),
            weight_full=barrier(num_arrivals=ARRIVALS),
            weight_empty=barrier(num_arrivals=1),
            x_full=plgpu.Barrier(num_arrivals=d // STEP),
            residual_full=plgpu.Barrier(),
            hidden_full=plgpu.Barrier(num_barriers=plan.hidden_slots),
            hidden_empty=plgpu.Barrier(num_barriers=plan.hidden_slots),
        ),
        # Safe here: every hand-over within a block goes through a barrier or `commit_smem`, written out below. What is
        # reduced lies within a warp.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(*held.values())


def _kernel(plan, held, outs, *refs, **scratch):
    refs = dict(zip((*held, *outs), refs, strict=True))
    ups = [refs[f"up{i}"] for i in range(len(plan.stacks)) if "up0" in refs]
    downs = [refs[f"down{i}"] for i in range(len(plan.stacks)) if "down0" in refs]
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    columns = pl.ds(block * COLUMNS, COLUMNS)  # of the result, and of what it is added to
    first_experts = refs["ids"].at[0]  # known without a search: their weights are prefetched
    experts = first_experts if plan.t == 1 else scratch["experts_s"].at[0]
    # by group of experts, how many of their parts of `up` are done
    done = pl.get_global(plgpu.SemaphoreType.REGULAR((plan.groups,))) if ups and downs else None

    def await_work():
        """What there is to do, when all experts are known."""
        if plan.t == 1:
            return _Work(plan, block, _i32(plan.k))
        plgpu.barrier_wait(scratch["known"])
        return _Work(plan, block, scratch["experts_s"][1, 0])

    @pl.when(warpgroup == 1)
    def weight_producer():
        plgpu.set_max_registers(96, action="decrease")
        ring, full, empty = scratch["weight_s"], scratch["weight_full"], scratch["weight_empty"]

        def bring(stacks, real, expert, rows, inputs, slot, place):
            """Copy weight rows of an expert to a place in a slot, or if it isn't `real`, only say so."""
            first, left = 0, real
            for i, (stack, size) in enumerate(zip(stacks, plan.stacks, strict=True)):
                mine = left & (expert < first + size) if i + 1 < len(stacks) else left
                left = left & (expert >= first + size)

                @pl.when(mine)
                def _(stack=stack, first=first):
                    source = stack.at[expert - first, rows, inputs]
                    plgpu.copy_gmem_to_smem(source, ring.at[slot, place], full.at[slot])

                first += size
            pl.when(~real)(lambda: plgpu.barrier_arrive(full.at[slot]))

        def up(size, first, high, experts, step):
            """A tile's parts, `size` rows of gate and of up each, from `first` on."""
            parts = []
            for part in (first + j for j in range(HALF // size)):
                item = _expert_of(part, high, plan.f // size)
                expert = experts[item]
                parts.append(((part < high) & (expert < plan.experts), expert, part - item * (plan.f // size)))

            def fetch(k, slot):
                inputs = pl.ds(k * STEP, STEP)
                for half in range(2):
                    for j, (real, expert, part) in enumerate(parts):
                        rows, place = pl.ds(part * size + half * plan.f, size), pl.ds(half * HALF + j * size, size)
                        bring(ups, real, expert, rows, inputs, slot, place)
                for _ in range(2 * len(parts), ARRIVALS):
                    plgpu.barrier_arrive(full.at[slot])

            return _fill(plan.d // STEP, fetch, empty, plan.slots, step, full)

        def waves(first, end, experts, step):
            def wave(i, step):
                tile = i * plan.blocks + block
                return up(HALF, tile, tile + 1, experts, step)

            return lax.fori_loop(_i32(first), end, wave, step)

        def down(i, step):
            items = []
            for item in (i * TOGETHER + j for j in range(TOGETHER)):
                expert = experts[jnp.minimum(item, work.count - 1)]
                items.append(((item < work.count) & (expert < plan.experts), expert))

            def fetch(k, slot):
                inputs = pl.ds(k * STEP, STEP)
                for j, (real, expert) in enumerate(items):
                    bring(downs, real, expert, columns, inputs, slot, pl.ds(j * COLUMNS, COLUMNS))
                for _ in range(TOGETHER, ARRIVALS):
                    plgpu.barrier_arrive(full.at[slot])

            return _fill(plan.f // STEP, fetch, empty, plan.slots, step, full)

        step = _i32(0)
        if ups:
            step = waves(0, _i32(plan.ahead), first_experts, step)
        work = await_work()
        if ups:
            step = waves(plan.ahead, work.waves, experts, step)
            rest = partial(up, PART, work.low, work.high, experts)
            step = lax.fori_loop(work.waves, work.tiles, lambda i, step: rest(step), step)
        if downs:
            step = lax.fori_loop(_i32(0), work.groups, down, step)

        _drain(full, plan.slots, step, FLIGHT)
        _drain(empty, plan.slots, step, plan.slots)

    @pl.when(warpgroup == 2)
    def rows_producer():
        if ups and plan.t == ROWS:
            for k in range(plan.d // STEP):
                inputs = refs["x"].at[:, pl.ds(k * STEP, STEP)]
                plgpu.copy_gmem_to_smem(inputs, scratch["x_s"].at[k], scratch["x_full"])
        if plan.t > 1:
            _find(plan, refs["ids"], scratch)
        plgpu.set_max_registers(96, action="decrease")
        if not downs:
            return
        if "residual" in refs:
            before = refs["residual"].at[:, columns]
            plgpu.copy_gmem_to_smem(before, scratch["out_s"].at[pl.ds(0, before.shape[0])], scratch["residual_full"])
        work, full, empty = await_work(), scratch["hidden_full"], scratch["hidden_empty"]

        def group(i, step):
            if done is not None:
                parts = jnp.minimum(work.count - i * TOGETHER, TOGETHER) * plan.parts
                plgpu.semaphore_wait(done.at[i], parts, decrement=False, memory_scope="gpu")

            def fetch(k, slot):
                rows, inputs = pl.ds(i * plan.beside, plan.beside), pl.ds(k * STEP, STEP)
                plgpu.copy_gmem_to_smem(refs["hidden"].at[rows, inputs], scratch["hidden_s"].at[slot], full.at[slot])

            return _fill(plan.f // STEP, fetch, empty, plan.hidden_slots, step)

        _drain(empty, plan.hidden_slots, lax.fori_loop(_i32(0), work.groups, group, _i32(0)), plan.hidden_slots)

    @pl.when(warpgroup == 0)
    def consumer():
        plgpu.set_max_registers(200, action="increase")
        step = _i32(0)
        if ups:
            _place_rows(plan, refs["x"], scratch["x_s"], scratch["x_full"])
        work = await_work()
        if ups:

            def tile(i, step):
                both, step = _multiply(plan, scratch, plan.d, ROWS, step)
                first, high = work.parts(i)
                _write_hidden(plan, scratch, both, refs["hidden"], first, high)
                if done is not None:
                    _tell(plan, done, first, high)
                return step

            step = lax.fori_loop(_i32(0), work.tiles, tile, step)
        if not downs:
            plgpu.wait_smem_to_gmem(0)
            return

        share_of = _share_of(plan, refs["ids"], refs["weights"])

        def group(i, carry):
            step, total = carry
            shares = _shares(plan, experts, share_of, i, work.count)  # loaded before anything is waited for
            first = i * (plan.f // STEP)
            each, step = _multiply(plan, scratch, plan.f, plan.beside, step, first)
            return step, _add(plan, scratch["each_s"], each, shares, total)

        total = plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), _f32), _everywhere(COLUMNS))
        _, total = lax.fori_loop(_i32(0), work.groups, group, (step, total))
        out_s = scratch["out_s"]
        out = total.astype(out_s.dtype)
        if "residual" in refs:
            plgpu.barrier_wait(scratch["residual_full"])
            before = plgpu.load(out_s, layout=_everywhere(COLUMNS), optimized=False)
            is_token = plgpu.broadcasted_iota(_i32, (ROWS, COLUMNS), 0, layout=_everywhere(COLUMNS)) < plan.t
            out = before + jnp.where(is_token, out, jnp.zeros_like(out))
            plgpu.commit_smem()  # all have read what was there before
        out_s[...] = out
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, refs["out"].shape[0])], refs["out"].at[:, columns])
        plgpu.wait_smem_to_gmem(0)


class _Work:
    """What a block does: `waves` that are whole, then the parts from `low` to `high` if there are any, and all groups
    of experts."""

    def __init__(self, plan: _Plan, block, count):
        self.plan, self.block, self.count = plan, block, count
        self.groups = lax.div(count + (TOGETHER - 1), _i32(TOGETHER))
        self.waves = lax.div(count * plan.parts, _i32(plan.wave))
        before = self.waves * plan.wave
        left = count * plan.parts - before
        self.low, self.high = (before + lax.div((block + end) * left, _i32(plan.blocks)) for end in (0, 1))
        self.tiles = self.waves + (self.low < self.high).astype(_i32)

    def parts(self, tile):
        """The first of a tile, and the one behind its last."""
        first, whole = tile * self.plan.wave + self.block * PARTS, tile < self.waves
        return jnp.where(whole, first, self.low), jnp.where(whole, first + PARTS, self.high)


def _expert_of(part, high, parts):
    """Which of the chosen experts has a part, of so many that each has; of those behind the last, the last's."""
    return lax.div(jnp.minimum(part, high - 1), _i32(parts))


def _each(plan, tokens, body, carry):
    """`body(token, j, pair, carry)` for the j-th expert of each of so many tokens, a token's experts at once."""

    def one(token, carry):
        for j in range(plan.k):
            carry = body(token, j, token * MOST + j, carry)
        return carry

    return lax.fori_loop(_i32(0), _i32(tokens), one, carry)


def _find(plan, ids_g, scratch):
    """The different experts that the tokens chose, in the order in which they come, and how many they are: first all
    that the first token has, even if they are nobody.

    A thread for each pair of a token and its expert compares it with all of those before it.
    """
    first_s, rank_s = (scratch["rank_s"].at[i] for i in range(2))
    experts_s, count_s = (scratch["experts_s"].at[i] for i in range(2))
    lane = plgpu.broadcasted_iota(_i32, (PAIRS,), 0, layout=plgpu.Layout.WG_STRIDED((PAIRS,), 1))
    none = jnp.zeros_like(lane)

    def take(token, j, pair, own):
        return jnp.where(lane == pair, ids_g[token, j], own)

    def compare(token, j, pair, found):
        return jnp.where((own == ids_g[token, j]) & (lane > pair), 1, found)

    def count(token, j, pair, counts):
        before, total = counts
        one = first_s[pair]
        return before + jnp.where(lane > pair, one, 0), total + one

    def place(token, j, pair, found):
        return jnp.where(lane == rank_s[pair], ids_g[token, j], found)

    own = _each(plan, plan.t, take, none + plan.experts)
    is_first = (own < plan.experts) & (_each(plan, plan.t - 1, compare, none) == 0) | (lane < plan.k)
    first_s[...] = is_first.astype(_i32)
    plgpu.commit_smem()
    before, total = _each(plan, plan.t, count, (none, _i32(0)))
    rank_s[...] = jnp.where(is_first, before, -1)
    count_s[...] = lax.broadcast_in_dim(total, (PAIRS,), [])
    plgpu.commit_smem()
    experts_s[...] = _each(plan, plan.t, place, none)
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch["known"])


def _everywhere(width: int) -> Any:
    """Eight rows in the lanes of each warp: four lanes have a row, and all four warps the same."""
    tiling = plgpu.Tiling(((ROWS, width), (width // 4,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(plgpu.Replicated(4),), lane_dims=(-3, -2), vector_dim=-1)


def _place_rows(plan, x_g, x_s, x_full):
    """The tokens' rows where the tensor cores take them from; below them the first one's, which nobody looks at."""
    if plan.t == ROWS:
        plgpu.barrier_wait(x_full)
        return
    step, layout = STEP, by_row(4)
    across = lambda row: plgpu.layout_cast(lax.broadcast_in_dim(row, (ROWS, step), [1]), layout)  # noqa: E731
    place = plgpu.broadcasted_iota(_i32, (ROWS, step), 0, layout=layout)
    pieces = plan.d // step
    at_once = max(pieces // plan.t, 1)  # loaded before the first is stored
    for first in range(0, pieces, at_once):
        those = range(first, min(first + at_once, pieces))
        load = partial(plgpu.load, layout=layout.reduce(0), optimized=False)
        loaded = [[load(x_g.at[i, pl.ds(k * step, step)]) for i in range(plan.t)] for k in those]
        for k, (row, *others) in zip(those, loaded, strict=True):
            rows = across(row)
            for i, other in enumerate(others, 1):
                rows = jnp.where(place == i, across(other), rows)
            x_s[k] = rows
    plgpu.commit_smem()


def _fill(steps, fetch, empty, slots, step, full=None):
    """Run `fetch(k, slot)` over so many steps as slots come free; `step` is how many there were before.

    Given `full`, no more than `FLIGHT` are under way.
    """

    def one(k, step):
        slot = lax.rem(step, _i32(slots))
        pl.when(step >= slots)(lambda: plgpu.barrier_wait(empty.at[slot]))
        if full is not None:
            pl.when(step >= FLIGHT)(lambda: plgpu.barrier_wait(full.at[lax.rem(step - FLIGHT, _i32(slots))]))
        fetch(k, slot)
        return step + 1

    return lax.fori_loop(_i32(0), _i32(steps), one, step)


def _drain(barriers, slots, step, left):
    """See the last `left` steps: who waits for a barrier must not leave it before it has seen all arrivals."""

    def observe(step, _):
        plgpu.barrier_wait(barriers.at[lax.rem(step, _i32(slots))])
        return _

    lax.fori_loop(jnp.maximum(step - left, 0), step, observe, _i32(0))


def _multiply(plan, scratch, inputs, rows, step, hidden_step=None):
    """A tile of weights times the tokens' rows, or from `hidden_step` on hidden ones, f32[TILE, rows], as its steps
    arrive. `step` is how many the block has used."""
    slot_of = lambda step: lax.rem(step, _i32(plan.slots))  # noqa: E731
    hidden_slot_of = lambda k: lax.rem(hidden_step + k, _i32(plan.hidden_slots))  # noqa: E731

    def release(k):
        plgpu.barrier_arrive(scratch["weight_empty"].at[slot_of(step + k)])
        if hidden_step is not None:
            plgpu.barrier_arrive(scratch["hidden_empty"].at[hidden_slot_of(k)])

    def accumulate(total):
        def one(k, _):
            if hidden_step is None:
                operand = scratch["x_s"].at[k]
            else:
                plgpu.barrier_wait(scratch["hidden_full"].at[hidden_slot_of(k)])
                operand = scratch["hidden_s"].at[hidden_slot_of(k)]
            plgpu.barrier_wait(scratch["weight_full"].at[slot_of(step + k)])
            plgpu.wgmma(total, scratch["weight_s"].at[slot_of(step + k)], operand.transpose((1, 0)))
            plgpu.wgmma_wait(1)  # this step's may go on: that of the step before is done
            pl.when(k > 0)(lambda: release(k - 1))
            return _

        steps = inputs // STEP
        lax.fori_loop(_i32(0), _i32(steps), one, _i32(0))
        result = total[...]
        release(_i32(steps - 1))
        return result

    return pl.run_scoped(accumulate, plgpu.ACC((TILE, rows), _f32)), step + inputs // STEP


def _write_hidden(plan, scratch, both, hidden_g, first, high):
    """silu(gate) * up of a tile's parts, each to its expert's hidden rows."""
    size, both_s, part_s = PART, scratch["both_s"], scratch["part_s"]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    both_s.transpose((1, 0))[...] = plgpu.layout_cast(both, plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    load = partial(plgpu.load, layout=_everywhere(size), optimized=False)
    for j in range(PARTS):
        gate, up = (load(both_s.at[:, pl.ds(at + j * size, size)]) for at in (0, HALF))
        part_s[j] = (gate / (1 + jnp.exp(-gate)) * up).astype(part_s.dtype)
    plgpu.commit_smem()
    for j in range(PARTS):
        part = first + j

        @pl.when(part < high)
        def _(j=j, part=part):
            item = _expert_of(part, high, plan.parts)
            place = hidden_g.at[pl.ds(item * plan.pitch, plan.t), pl.ds((part - item * plan.parts) * size, size)]
            plgpu.copy_smem_to_gmem(part_s.at[j, pl.ds(0, plan.t)], place)


def _tell(plan, done, first, high):
    """That a tile's parts, from `first` on, are in memory."""
    plgpu.wait_smem_to_gmem(0)
    parts, group_of = PARTS, lambda part: lax.div(part, _i32(plan.parts * TOGETHER))
    signal = partial(plgpu.semaphore_signal, memory_scope="gpu")
    whole = (first + parts <= high) & (group_of(first) == group_of(first + parts - 1))
    pl.when(whole)(lambda: signal(done.at[group_of(first)], parts))
    for part in (first + j for j in range(parts)):
        pl.when(~whole & (part < high))(lambda part=part: signal(done.at[group_of(part)]))


def _share_of(plan, ids_g, weights_g):
    """What gives each token's share of an expert's result, of the i-th of those chosen: a number for one token."""
    if plan.t == 1:
        return lambda i, expert: weights_g[0, i]
    token_of, which = (plgpu.broadcasted_iota(_i32, (ROWS, MOST), i, layout=_everywhere(MOST)) for i in range(2))
    lane = token_of * MOST + which

    def take(token, j, pair, taken):
        ids, weights = taken
        return jnp.where(lane == pair, ids_g[token, j], ids), jnp.where(lane == pair, weights_g[token, j], weights)

    none = jnp.zeros_like(lane)
    ids, weights = _each(plan, plan.t, take, (none + plan.experts, none.astype(_f32)))
    return lambda i, expert: jnp.sum(jnp.where(ids == expert, weights, 0.0), axis=1)


def _shares(plan, experts, share_of, group, count):
    """Of the group's experts: each token's share, zero of those there aren't."""
    shares = []
    for item in (group * TOGETHER + j for j in range(TOGETHER)):
        real, item = item < count, jnp.minimum(item, count - 1)
        expert = experts[item]
        real = real & (expert < plan.experts)
        shares.append(share_of(item, expert) * jnp.where(real, 1.0, 0.0).astype(_f32))
    return shares


def _add(plan, each_s, each, shares, total):
    """The sums and what the group's experts add to them, each expert's result rounded before it is weighted."""
    plgpu.commit_smem()  # all have read what was there before
    rounded = plgpu.layout_cast(each.astype(each_s.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    each_s.at[pl.ds(ODD, plan.beside)].transpose((1, 0))[...] = rounded
    plgpu.commit_smem()
    for j, share in enumerate(shares):
        own = each_s.at[pl.ds(ODD + j * plan.pitch, ROWS), pl.ds(j * COLUMNS, COLUMNS)]
        own = plgpu.load(own, layout=_everywhere(COLUMNS), optimized=False).astype(_f32)
        share = lax.broadcast_in_dim(share, (ROWS, COLUMNS), [0] if plan.t > 1 else [])
        # Chosen, not multiplied by zero: what nobody made may not be a number.
        total = total + jnp.where(share != 0, own * share, 0.0)
    return total
