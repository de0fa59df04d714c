"""One block: a warpgroup that fetches weights, one that fetches rows, and one that multiplies."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.experts.expert_few import four, fp8, turns
from jaxspec.pallas.experts.expert_few.find import find
from jaxspec.pallas.experts.expert_few.plan import (
    ARRIVALS,
    COLUMNS,
    HALF,
    PART,
    PARTS,
    ROWS,
    STEP,
    TOGETHER,
    Plan,
    Work,
    expert_of,
)
from jaxspec.pallas.experts.expert_few.products import everywhere, multiply, place_rows, tell, write_hidden
from jaxspec.pallas.experts.expert_few.results import add, share_of, shares
from jaxspec.pallas.experts.expert_few.ring import drain, fill

_i32, _f32 = jnp.int32, jnp.float32


def kernel(plan, centred, interpret, held, outs, *refs, **scratch):
    """Run one block. `held` and `outs` name the references: operands, then results."""
    block = _Block(plan, dict(zip((*held, *outs), refs, strict=True)), scratch)
    block.centred, block.interpret = centred, interpret
    pl.when(block.warpgroup == 1)(lambda: _Weights(block).produce())
    pl.when(block.warpgroup == 2)(lambda: _produce_rows(block))
    for turn, warpgroup in enumerate((0, 3)[: plan.multipliers]):
        pl.when(block.warpgroup == warpgroup)(partial(_consume, block, turn))


class _Block:
    """State that the warpgroups of a block share. `centred`: whether the norm that follows is."""

    centred: bool
    interpret: bool

    def __init__(self, plan: Plan, refs: dict[str, Any], scratch: dict[str, Any]):
        self.plan, self.refs, self.scratch = plan, refs, scratch
        stacks = range(len(plan.stacks))
        of_all = lambda name: [refs[f"{name}{i}"] for i in stacks if f"{name}0" in refs]  # noqa: E731
        self.ups, self.downs = of_all("up"), of_all("down")
        self.scales, self.factors = (
            {of: of_all(f"{of}_{each}") for of in ("up", "down")} for each in ("scales", "factors")
        )
        self.number, self.warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        self.columns = pl.ds(self.number * COLUMNS, COLUMNS)  # of the result and of the residual stream
        self.first_experts = refs["ids"].at[0]  # known without a search: their weights are prefetched
        self.experts = self.first_experts if plan.t == 1 else scratch["experts_s"].at[0]
        # By group of experts: how many of their parts of `up` are done.
        both = self.ups and self.downs
        self.done = pl.get_global(plgpu.SemaphoreType.REGULAR((plan.groups,))) if both else None

    def await_work(self) -> Work:
        """Wait until all experts are known, and return the block's work."""
        if self.plan.t == 1:
            return Work(self.plan, self.number, _i32(self.plan.k))
        plgpu.barrier_wait(self.scratch["known"])
        return Work(self.plan, self.number, self.scratch["experts_s"][1, 0])


class _Weights:
    """The warpgroup that fetches weights: waves of the first token's experts, of all others, the rest, then `down`."""

    def __init__(self, block: _Block):
        self.block, self.plan, scratch = block, block.plan, block.scratch
        self.ring, self.full, self.empty = scratch["weight_s"], scratch["weight_full"], scratch["weight_empty"]

    def produce(self):
        block, plan = self.block, self.plan
        plgpu.set_max_registers(plan.registers[0], action="decrease")
        step = _i32(0)
        if block.ups:
            step = self._waves(0, _i32(plan.ahead), block.first_experts, step)
        work = block.await_work()
        if block.ups:
            step = self._waves(plan.ahead, work.waves, block.experts, step)
            rest = partial(self._up, PART, work.low, work.high, block.experts)
            step = lax.fori_loop(work.waves, work.tiles, lambda i, step: rest(step), step)
        if block.downs:
            step = lax.fori_loop(_i32(0), work.groups, partial(self._down, work), step)

        drain(self.full, plan.slots, step, plan.flight)
        drain(self.empty, plan.slots, step, plan.slots)
        if plan.four:
            tiles = (work.tiles if block.ups else 0) + (work.groups if block.downs else _i32(0))
            drain(block.scratch["scale_empty"], plan.scale_slots, tiles, plan.scale_slots)

    def _waves(self, first, end, experts, step):
        def wave(i, step):
            tile = i * self.plan.blocks + self.block.number
            return self._up(HALF, tile, tile + 1, experts, step)

        return lax.fori_loop(_i32(first), end, wave, step)

    def _up(self, size, first, high, experts, step):
        """Fetch a tile's parts, `size` rows of gate and of up each, from `first` on."""
        plan, parts = self.plan, []
        for part in (first + j for j in range(HALF // size)):
            item = expert_of(part, high, plan.f // size)
            expert = experts[item]
            parts.append(((part < high) & (expert < plan.experts), expert, part - item * (plan.f // size)))

        def pieces():
            for half in range(2):
                for j in range(PARTS):
                    valid, expert, part = parts[j * PART // size]
                    yield valid, expert, part * size + half * plan.f + j * PART % size

        def fetch(k, slot):
            inputs = self._inputs(k)
            for half in range(2):
                for j, (valid, expert, part) in enumerate(parts):
                    rows, place = pl.ds(part * size + half * plan.f, size), pl.ds(half * HALF + j * size, size)
                    self._fetch(self.block.ups, valid, expert, rows, inputs, slot, place)
            for _ in range(2 * len(parts), ARRIVALS):
                plgpu.barrier_arrive(self.full.at[slot])
            self._fetch_scales("up", k, lax.div(step, _i32(steps)), pieces())

        steps = plan.d // STEP
        return fill(steps, fetch, self.empty, plan.slots, step, self.full, plan.flight)

    def _down(self, work, i, step):
        """Fetch the weights of the block's outputs of a group of experts."""
        plan, items = self.plan, []
        for item in (i * TOGETHER + j for j in range(TOGETHER)):
            expert = self.block.experts[jnp.minimum(item, work.count - 1)]
            items.append(((item < work.count) & (expert < plan.experts), expert))

        def fetch(k, slot):
            inputs = self._inputs(k)
            for j, (valid, expert) in enumerate(items):
                place = pl.ds(j * COLUMNS, COLUMNS)
                self._fetch(self.block.downs, valid, expert, self.block.columns, inputs, slot, place)
            for _ in range(TOGETHER, ARRIVALS):
                plgpu.barrier_arrive(self.full.at[slot])
            column = self.block.number * COLUMNS
            tiles = work.tiles if self.block.ups else 0
            self._fetch_scales("down", k, tiles + i, [(*item, column) for item in items])

        return fill(plan.f // STEP, fetch, self.empty, plan.slots, step, self.full, plan.flight)

    def _inputs(self, k):
        """A step's part of a weight's last axis."""
        size = STEP // (2 if self.plan.four else 1)
        return pl.ds(k * size, size)

    def _fetch(self, stacks, valid, expert, rows, inputs, slot, place):
        """Copy weight rows of an expert to rows `place` of a slot; if it isn't `valid`, only arrive at the barrier."""
        source = lambda stack, own: stack.at[own, rows, inputs]  # noqa: E731
        self._copy(stacks, valid, expert, source, self.ring.at[slot, place], self.full.at[slot])

    def _copy(self, stacks, valid, expert, source, target, full):
        """Copy `source(stack, expert)` of the stack that has an expert; if it isn't `valid`, only arrive at `full`."""
        first, left = 0, valid
        for i, (stack, size) in enumerate(zip(stacks, self.plan.stacks, strict=True)):
            mine = left & (expert < first + size) if i + 1 < len(stacks) else left
            left = left & (expert >= first + size)

            @pl.when(mine)
            def _(stack=stack, first=first):
                plgpu.copy_gmem_to_smem(source(stack, expert - first), target, full)

            first += size
        pl.when(~valid)(lambda: plgpu.barrier_arrive(full))

    def _fetch_scales(self, name, k, tile, pieces):
        """Behind a tile's first step, copy its scales of four bits: of each warp's piece, valid or not, the expert's
        outputs from a row on."""
        if not self.plan.four:
            return
        refs, stored = self.block.scales[name], self.plan.four[name == "down"]
        slot, scratch = lax.rem(tile, _i32(self.plan.scale_slots)), self.block.scratch

        @pl.when(k == 0)
        def _():
            pl.when(tile >= self.plan.scale_slots)(lambda: plgpu.barrier_wait(scratch["scale_empty"].at[slot]))
            for j, (valid, expert, row) in enumerate(pieces):
                source = lambda ref, own, row=row: four.scales_at(stored, ref, own, row)  # noqa: E731
                target = scratch["scales_s"].at[slot, j, pl.ds(0, refs[0].shape[1])]
                self._copy(refs, valid, expert, source, target, scratch["scale_full"].at[slot])


def _produce_rows(block: _Block):
    """Fetch the tokens' rows, find the experts, then fetch hidden rows as the blocks that make them signal."""
    plan, refs, scratch = block.plan, block.refs, block.scratch
    if block.ups and plan.t == ROWS and not plan.pairs:
        for k in range(plan.d // STEP):
            inputs = refs["x"].at[:, pl.ds(k * STEP, STEP)]
            plgpu.copy_gmem_to_smem(inputs, scratch["x_s"].at[k], scratch["x_full"])
    if plan.t > 1:
        find(plan, refs["ids"], scratch)
    plgpu.set_max_registers(plan.registers[0], action="decrease")
    if not block.downs:
        return
    if "residual" in refs:
        before = refs["residual"].at[:, block.columns]
        plgpu.copy_gmem_to_smem(before, scratch["out_s"].at[pl.ds(0, before.shape[0])], scratch["residual_full"])
    work, full, empty = block.await_work(), scratch["hidden_full"], scratch["hidden_empty"]

    def group(i, step):
        if block.done is not None:
            parts = jnp.minimum(work.count - i * TOGETHER, TOGETHER) * plan.parts
            plgpu.semaphore_wait(block.done.at[i], parts, decrement=False, memory_scope="gpu")

        def fetch(k, slot):
            rows, inputs = pl.ds(i * plan.beside, plan.beside), pl.ds(k * STEP, STEP)
            plgpu.copy_gmem_to_smem(refs["hidden"].at[rows, inputs], scratch["hidden_s"].at[slot], full.at[slot])

        return fill(plan.f // STEP, fetch, empty, plan.hidden_slots, step)

    drain(empty, plan.hidden_slots, lax.fori_loop(_i32(0), work.groups, group, _i32(0)), plan.hidden_slots)


def _consume(block: _Block, turn: int):
    """Multiply the block's tiles of `up`, then its columns of `down`. The first multiplying warpgroup adds up."""
    plan, refs, scratch = block.plan, block.refs, block.scratch
    plgpu.set_max_registers(plan.registers[1], action="increase")
    rows = fp8.load_rows(plan, turn, refs["x"]) if block.ups and plan.pairs else None  # long before they are needed
    work, step = block.await_work(), _i32(0)
    scales = partial(_scales, block, work)
    up, down = scales("up", _i32(0)), scales("down", _i32(0))  # before any wait
    if rows is not None:
        fp8.place_pieces(plan, turn, rows, scratch["pieces_s"], scratch["factors_s"])
    elif block.ups:
        if turn == 0 or plan.t == ROWS:
            place_rows(plan, refs["x"], scratch["x_s"], scratch["x_full"])
        if plan.multipliers > 1 and plan.t < ROWS:  # the other warpgroup waits until they are there
            pl.when(turn == 0)(lambda: plgpu.barrier_arrive(scratch["x_full"]))
            plgpu.barrier_wait(scratch["x_full"])
    if block.ups:

        def tile(i, carry):
            step, own = carry
            following = scales("up", i + 1)
            both, step = _multiplied(block, turn, i, own, plan.d, ROWS, step)
            if turn == 0:
                first, high = work.parts(i)
                write_hidden(plan, scratch, both, refs["hidden"], first, high)
                if block.done is not None:
                    tell(plan, block.done, first, high)
            return step, following

        step, _ = lax.fori_loop(_i32(0), work.tiles, tile, (step, up))
    if block.downs:
        scale = _load_scale(block) if turn == 0 else None  # before any wait
        total = _sum_up(block, work, turn, step, down)
        if turn == 0:
            _write_out(block, total, scale)
    if turn == 0:
        plgpu.wait_smem_to_gmem(0)
    else:
        sent = (work.tiles if block.ups else 0) + (work.groups if block.downs else 0)
        pl.when(sent > 0)(lambda: plgpu.barrier_wait(scratch["taken"]))


def _scales(block: _Block, work: Work, name: str, i):
    """Load what a tile of `up`, or a group of experts of `down`, has in memory: FP8's scales, outputs' factors; None
    for other weights."""
    plan, interpret, fp8_scales = block.plan, block.interpret, block.plan.fp8 and block.scales[name]
    if not fp8_scales and not block.factors[name]:
        return None
    if name == "up":
        first, high = work.parts(jnp.minimum(i, jnp.maximum(work.tiles - 1, 0)))
        rows = turns.up_rows(plan, block.experts, first, high)
    else:
        rows = turns.down_rows(plan, block.experts, work.count, i, block.number * COLUMNS)
    if plan.four:
        return four.factors_of(plan, block.factors[name], rows, interpret)
    if not fp8_scales:
        return fp8.of_outputs(plan, block.factors[name], rows, interpret)
    return fp8.scales_of(plan, fp8_scales, 2 * plan.f if name == "up" else plan.d, rows, interpret)


def _multiplied(block: _Block, turn: int, before, scales, inputs, rows, step, hidden_step=None):
    """Multiply a tile of weights by `rows` rows; the first warpgroup gets all sums. `before`: tiles done so far."""
    plan, scratch, factors = block.plan, block.scratch, None
    if not plan.quantised:
        return multiply(plan, scratch, inputs, rows, step, hidden_step)
    if plan.four:
        slot, factors = lax.rem(before, _i32(plan.scale_slots)), scales
        scales = four.Scales(scratch["scales_s"].at[slot], plan.four[hidden_step is not None])
        plgpu.barrier_wait(scratch["scale_full"].at[slot])
    elif not block.scales["up" if hidden_step is None else "down"]:
        scales, factors = None, scales
    total, step = turns.multiply(plan, scratch, turn, scales, inputs, step, hidden_step, block.interpret)
    if plan.four:
        plgpu.barrier_arrive(scratch["scale_empty"].at[slot])
    if turn > 0:
        turns.send(scratch, total, before)
        return total, step
    total = turns.receive(scratch, total)
    return total if factors is None else total * lax.broadcast_in_dim(factors, total.shape, [0]), step


def _sum_up(block: _Block, work: Work, turn: int, step, scales):
    """Sum the experts' results for each token in the block's columns, f32[ROWS, COLUMNS]."""
    plan, refs, scratch = block.plan, block.refs, block.scratch
    share = share_of(plan, refs["ids"], refs["weights"]) if turn == 0 else None
    tiles = work.tiles if block.ups else _i32(0)

    def group(i, carry):
        step, own, total = carry
        following = _scales(block, work, "down", i + 1)
        each_share = shares(plan, block.experts, share, i, work.count) if turn == 0 else None  # before any wait
        first = i * (plan.f // STEP)
        each, step = _multiplied(block, turn, tiles + i, own, plan.f, plan.beside, step, first)
        if turn == 0:
            total = add(plan, scratch["each_s"], each, each_share, total)
        return step, following, total

    total = plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), _f32), everywhere(COLUMNS))
    return lax.fori_loop(_i32(0), work.groups, group, (step, scales, total))[2]


def _load_scale(block: _Block):
    """Load the next norm's scale of the block's columns, f32[COLUMNS], or None if there is none."""
    if "scale" not in block.refs:
        return None
    of_columns = block.refs["scale"].at[block.columns]
    scale = plgpu.load(of_columns, layout=everywhere(COLUMNS).reduce(0), optimized=False).astype(_f32)
    return 1 + scale if block.centred else scale


def _write_out(block: _Block, total, scale):
    """Write the block's columns, added to the residual stream if there is one. `scale`: of the norm after it."""
    plan, refs, scratch = block.plan, block.refs, block.scratch
    out_s = scratch["out_s"]
    out = total.astype(out_s.dtype)
    if "residual" in refs:
        plgpu.barrier_wait(scratch["residual_full"])
        before = plgpu.load(out_s, layout=everywhere(COLUMNS), optimized=False)
        is_token = plgpu.broadcasted_iota(_i32, (ROWS, COLUMNS), 0, layout=everywhere(COLUMNS)) < plan.t
        out = before + jnp.where(is_token, out, jnp.zeros_like(out))
        plgpu.commit_smem()  # all warps have read what was there before
    if scale is not None:
        wide = out.astype(_f32)
        scaled = wide * lax.broadcast_in_dim(scale, wide.shape, [1])
        refs["scaled"][:, block.columns] = scaled.astype(out.dtype)
        refs["squares"][block.number] = jnp.sum(wide * wide, axis=1)
    out_s[...] = out
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, refs["out"].shape[0])], refs["out"].at[:, block.columns])
