"""The short causal convolution in front of gated delta-rule attention, whose latest inputs are kept by slot.

Each channel is convolved by itself: out_t = silu(sum_j weight[j] x_(t - w + 1 + j)), as `conv1d` of Qwen3-Next and
Qwen3.5 does, with no bias and w = 4. Mamba 2's has a bias.

Invariant, the same as for the attention's state (`pallas.recurrence.gated_delta`): a slot's window holds the last w - 1
committed inputs from before its last round, then that round's inputs. The next round gets the number of those that were
accepted. Nothing is undone.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxspec.models.memory import Recurrence
from jaxspec.pallas.operation import ANY, HOPPER, Implementation, choose, nothing
from jaxspec.pallas.recurrence import conv_chunk as chunk_kernel
from jaxspec.pallas.recurrence import conv_step as step_kernel
from jaxspec.pallas.sliced_rows import SLICE, sliced

NO_HEADS = "channels of a state space"
L2_EPS = 1e-6  # avoids a division by zero, the length of a query or key of zeros

Windows = Float[Array, "l r s c"]  # s = w - 1 + q: what came before the last round, then its q rows
Parts = tuple[Array, Array, Array]  # queries, keys and values; or those of `Channels`


class Channels(NamedTuple):
    """Channels that need no length of one: those of x from the column `first` on, in parts of these widths. Only the
    first `rows` of each request are convolved."""

    first: int
    widths: tuple[int, ...]
    rows: int


def empty_windows(num_layers: int, num_slots: int, rows: int, channels: int, width: int, dtype) -> Windows:
    """Windows of zeros, for rounds of at most `rows` rows before a convolution of this `width`."""
    return jnp.zeros((num_layers, num_slots, width - 1 + rows, channels), dtype)


def split_heads(x: Float[Array, "b t c"], mix: Recurrence) -> tuple[Array, Array, Array]:
    """Queries and keys [b, t, m, k], of length one and queries scaled by k**-0.5, and values [b, t, n, v]."""

    def unit(part: Array) -> Array:
        part = part.reshape(*part.shape[:-1], mix.key_heads, mix.key_dim).astype(jnp.float32)
        return part * jax.lax.rsqrt((part * part).sum(-1, keepdims=True) + L2_EPS)

    keys = mix.key_heads * mix.key_dim
    q, k, v = jnp.split(x, [keys, 2 * keys], axis=-1)
    v = v.reshape(*v.shape[:-1], mix.value_heads, mix.value_dim)
    return (unit(q) * mix.key_dim**-0.5).astype(v.dtype), unit(k).astype(v.dtype), v


def step(
    windows: Windows,
    layer: Int[Array, ""],
    slots: Int[Array, " b"],
    replay: Int[Array, " b"],
    x: Float[Array, "b t d"],
    weight: Float[Array, "w c"],
    mix: Recurrence | Channels,
    fixed: bool = False,
    bias: Float[Array, " c"] | None = None,
) -> tuple[Parts, Windows]:
    """Convolve c columns of t new rows of each slot; the first `replay[r]` rows of its last round were accepted.

    They are the first ones, and split as `split_heads` does; or as `Channels` has them, with `bias` added before SiLU.
    `fixed`: a row's bits don't depend on how many rows there are. Returns the rows in the windows' dtype, and the
    windows after them.

    **Raises:** `ValueError` for more rows than a window has room for.
    """
    t, room = _rows(x, mix), windows.shape[2] - len(weight) + 1
    if t > room:
        raise ValueError(f"a step of {t} rows with windows for rounds of {room}; make them for {t} or more")
    call = windows, layer, slots, replay, x, weight, mix, fixed, bias
    return choose("a round's convolution", CONVOLUTION_STEP, *call).run(*call)


def _step_refuses(windows, layer, slots, replay, x, weight, mix, fixed, bias) -> str | None:
    dtypes = windows.dtype, x.dtype, weight.dtype
    if isinstance(mix, Channels):
        dtypes += () if bias is None else (bias.dtype,)
        return step_kernel.channels_supported(mix.rows, mix.first, mix.widths, *dtypes)
    return step_kernel.supported(x.shape[1], mix.key_dim, mix.value_dim, *dtypes)


def _step(windows, layer, slots, replay, x, weight, mix, fixed, bias) -> tuple[Parts, Windows]:
    if isinstance(mix, Channels):
        return step_kernel.conv_channels(windows, layer, slots, replay, x, weight, bias, **mix._asdict())
    return step_kernel.conv_step(windows, layer, slots, replay, x, weight, key_heads=mix.key_heads, eps=L2_EPS)


def step_before(
    windows: Windows,
    layer: Int[Array, ""],
    slots: Int[Array, " b"],
    replay: Int[Array, " b"],
    x: Shaped[Array, "b t c"],
    back: int,
) -> tuple[Shaped[Array, "b k c"], Windows]:
    """The `back` inputs before a round's rows x, and the windows after them."""
    before = windows[layer, slots[:, None], replay[:, None] + jnp.arange(back)]
    return before, windows.at[layer, slots, : back + x.shape[1]].set(jnp.concatenate([before, x], axis=1))


def chunk_before(
    windows: Windows,
    layer: Int[Array, ""],
    slots: Int[Array, " b"],
    source: Int[Array, " b"],
    keep: Int[Array, " b"],
    count: Int[Array, " b"],
    x: Shaped[Array, "b t c"],
    back: int,
) -> tuple[Shaped[Array, "b k c"], Windows]:
    """The `back` inputs before each of a prompt's blocks, zeros before a text, and the windows after them; slots as in
    `chunk`."""
    before, num_slots = _before(windows, layer, slots, source, keep, count, x, back), windows.shape[1]
    tail, targets = _tail(before, x, count), _targets(slots, keep, num_slots)
    targets = jnp.where(targets < 0, num_slots, targets)
    return before, windows.at[layer, targets, :back].set(jnp.concatenate([tail, tail]), mode="drop")


def reference_step(windows, layer, slots, replay, x, weight, mix, fixed=False, bias=None):
    """`step` in plain jnp."""
    taps, x = len(weight), _convolved(x, weight, mix).astype(windows.dtype)
    before, windows = step_before(windows, layer, slots, replay, x, taps - 1)
    return _heads(before, x, weight, mix, fixed, bias), windows


def _convolved(x: Float[Array, "b t d"], weight: Float[Array, "w c"], mix: Recurrence | Channels) -> Array:
    """The rows and columns of x that are convolved."""
    first = mix.first if isinstance(mix, Channels) else 0
    return x[:, : _rows(x, mix), first : first + weight.shape[1]]


def _rows(x: Float[Array, "b t d"], mix: Recurrence | Channels) -> int:
    return mix.rows if isinstance(mix, Channels) else x.shape[1]


def _heads(before, x, weight, mix, fixed, bias):
    """Convolve rows, in parts."""
    out = (_convolve_in_slices if fixed else _convolve)(before, x, weight.T, bias).astype(x.dtype)
    if isinstance(mix, Channels):
        return tuple(jnp.split(out, list(itertools.accumulate(mix.widths))[:-1], axis=-1))
    return (_split_in_slices if fixed else split_heads)(out, mix)


CONVOLUTION_STEP = (
    Implementation("conv_step", HOPPER, _step_refuses, _step),
    Implementation("reference", ANY, nothing, reference_step, slow=True),
)


def chunk(
    windows: Windows,
    layer: Int[Array, ""],
    slots: Int[Array, " b"],
    source: Int[Array, " b"],
    keep: Int[Array, " b"],
    count: Int[Array, " b"],
    x: Float[Array, "b t d"],
    weight: Float[Array, "w c"],
    mix: Recurrence | Channels,
    fixed: bool = False,
    bias: Float[Array, " c"] | None = None,
) -> tuple[Parts, Windows]:
    """Convolve blocks of t prompt tokens, in order; they read and write slots as `gated_delta.chunk` does.

    `mix`, `fixed` and `bias` as in `step`. A block that another of this call starts from must have a valid token.
    Nothing is left to replay.
    """
    call = windows, layer, slots, source, keep, count, x, weight, mix, fixed, bias
    return choose("a prompt's convolution", CONVOLUTION_CHUNK, *call).run(*call)


def _chunk_refuses(windows, layer, slots, source, keep, count, x, weight, mix, fixed, bias) -> str | None:
    if isinstance(mix, Channels):
        return NO_HEADS
    (b, t, _), taps = x.shape, len(weight)
    counted = max(b, chunk_kernel.FEWEST) if fixed else b  # then few rows go the way of many
    dtypes = windows.dtype, x.dtype, weight.dtype
    return chunk_kernel.supported(counted, t, taps, mix.key_dim, mix.value_dim, *dtypes)


def _chunk(windows, layer, slots, source, keep, count, x, weight, mix, fixed, bias) -> tuple[Parts, Windows]:
    taps, channels = weight.shape
    before = _before(windows, layer, slots, source, keep, count, x[..., :channels], taps - 1)
    targets = _targets(slots, keep, windows.shape[1]).reshape(2, len(slots)).T
    given = windows, layer, targets, count, before, x, weight
    return chunk_kernel.conv_chunk(*given, key_heads=mix.key_heads, eps=L2_EPS)


def reference_chunk(windows, layer, slots, source, keep, count, x, weight, mix, fixed=False, bias=None):
    """`chunk` in plain jnp."""
    taps, x = len(weight), _convolved(x, weight, mix).astype(windows.dtype)
    before, windows = chunk_before(windows, layer, slots, source, keep, count, x, taps - 1)
    return _heads(before, x, weight, mix, fixed, bias), windows


CONVOLUTION_CHUNK = (
    Implementation("conv_chunk", HOPPER, _chunk_refuses, _chunk),
    Implementation("reference", ANY, nothing, reference_chunk),
)


def _before(windows, layer, slots, source, keep, count, x, back: int) -> Float[Array, "b k c"]:
    """The `back` inputs before each block's first row: its source's, as earlier blocks of this call leave them."""
    blocks = jnp.arange(len(slots))
    wrote = (slots == source[:, None]) | ((keep == source[:, None]) & (keep >= 0))
    wrote &= (blocks < blocks[:, None]) & (source >= 0)[:, None]
    earlier = jnp.where(wrote, blocks, -1).max(axis=1)  # the block of this call that each one starts from, or -1
    stored = jnp.where((source < 0)[:, None, None], 0, windows[layer, jnp.maximum(source, 0), :back])
    before = stored
    # Each iteration looks one block further back, so it reaches at least one more token.
    for _ in range(min(back, len(slots))):
        before = jnp.where((earlier < 0)[:, None, None], stored, _tail(before, x, count)[earlier])
    return before


def _targets(slots: Int[Array, " b"], keep: Int[Array, " b"], num_slots: int) -> Int[Array, " 2*b"]:
    """The slot for each block's last inputs, then the slot for a copy of them; -1 if there is none, or if a later block
    of this call writes it."""
    targets, order = jnp.concatenate([slots, keep]), jnp.tile(jnp.arange(len(slots)), 2)
    stays = _last_to_write(targets, order) & (targets < num_slots)
    return jnp.where(stays, targets, -1).astype(jnp.int32)


def _tail(before: Float[Array, "b k c"], x: Float[Array, "b t c"], count: Int[Array, " b"]) -> Float[Array, "b k c"]:
    """The last k inputs up to the end of each block's `count` valid rows."""
    back = before.shape[1]
    at = count[:, None] + jnp.arange(back)

    def of(inputs, at):
        there = jnp.clip(at, 0, inputs.shape[1] - 1)[..., None]
        return jnp.take_along_axis(inputs, there, axis=1, mode="promise_in_bounds", wrap_negative_indices=False)

    return jnp.where((at < back)[..., None], of(before, at), of(x, at - back))


def _last_to_write(targets: Int[Array, " b"], order: Int[Array, " b"]) -> Bool[Array, " b"]:
    """Whether each write stays: it has a target (>= 0), and no write of a later order has the same."""
    over = (targets == targets[:, None]) & (order > order[:, None])
    return ~over.any(axis=1) & (targets >= 0)


def _convolve(
    before: Float[Array, "b k c"],
    x: Float[Array, "b t c"],
    weight: Float[Array, "c w"],
    bias: Float[Array, " c"] | None,
) -> Array:
    """The convolution of x's rows, which follow k = w - 1 others, in float32.

    A tap's inputs are the sum of two padded arrays, one of which is zero in each row. All of it fuses into the
    operation that reads the result; concatenated rows would be written to memory.
    """
    (back, t), weight = (before.shape[1], x.shape[1]), weight.astype(jnp.float32)

    def tap(j):
        late = min(back - j, t)  # rows for which this tap reads the inputs before x
        earlier = jnp.pad(before[:, j : j + late], ((0, 0), (0, t - late), (0, 0)))
        return (earlier + jnp.pad(x[:, : t - late], ((0, 0), (late, 0), (0, 0)))).astype(jnp.float32)

    return jax.nn.silu(sum((tap(j) * weight[:, j] for j in range(weight.shape[1])), _start(bias)))


def _start(bias: Float[Array, " c"] | None) -> Array | int:
    return 0 if bias is None else bias.astype(jnp.float32)


def _convolve_in_slices(
    before: Float[Array, "b k c"],
    x: Float[Array, "b t c"],
    weight: Float[Array, "c w"],
    bias: Float[Array, " c"] | None,
) -> Array:
    """Convolve `SLICE` rows at a time, in float32, so that a row's bits don't depend on how many rows there are.

    The w inputs of each row's taps are gathered first, [b, t, w, c].
    """
    t, taps = x.shape[1], weight.shape[1]
    inputs, weight = jnp.concatenate([before, x], axis=1), weight.astype(jnp.float32)
    seen = jnp.stack([inputs[:, j : j + t] for j in range(taps)], axis=2)

    def convolve(seen):
        return jax.nn.silu(sum((seen[:, j].astype(jnp.float32) * weight[:, j] for j in range(taps)), _start(bias)))

    return sliced(convolve, SLICE, seen.reshape(-1, taps, x.shape[2])).reshape(x.shape)


def _split_in_slices(x: Float[Array, "b t c"], mix: Recurrence) -> tuple[Array, Array, Array]:
    parts = sliced(lambda rows: split_heads(rows, mix), SLICE, x.reshape(-1, x.shape[2]))
    return jax.tree.map(lambda part: part.reshape(*x.shape[:2], *part.shape[1:]), parts)
