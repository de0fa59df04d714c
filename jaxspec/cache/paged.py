"""Paged rows, the memory of all tokens: layout and writes.

Layout `[layer, page, stream, head, page_slot, width]`, one donated array for each group of layers whose rows have one
shape, updated in place. Attention has two streams, keys and values. Page 0 is the dummy:
writes of padding rows land there and nobody reads it. A drafter with its own keys and values uses the same page ids,
so pages are shared, reused and freed for both together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models.memory import PagedRows
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.positions import Chunks, Window, first_seen
from jaxspec.pallas.attention import kv_write
from jaxspec.pallas.attention.indexed_attention import Index, indexed_attention
from jaxspec.pallas.attention.latent_attention import latent_attention
from jaxspec.pallas.attention.paged_attention import paged_attention
from jaxspec.parallel.collectives import AXIS

KV = Float[Array, "l p k m s h"]
Scales = Float[Array, "l 2 m"]  # float32, of a layer's keys (0) and values (1) by head: pages hold x / scale


@dataclass(frozen=True)
class PageLayout:
    """The number of pages, their tokens and dtype: all that a drafter needs to lay out its own cache."""

    num_pages: int
    page_size: int
    dtype: str
    whole: bool = False  # all devices' pages, where requests are divided among devices

    def groups(self, config: ModelConfig) -> tuple[KV, ...]:
        """An empty cache for a model of this config: the pages of each group of layers."""

        def empty(rows: PagedRows, layers: int) -> KV:
            pages = self.num_pages // (1 if self.whole else rows.by_request)
            return jnp.zeros((layers, pages, rows.streams, rows.heads, self.page_size, rows.width), self.dtype)

        return tuple(empty(*group) for group in config.decoder.groups(PagedRows).items())

    def kv(self, config: ModelConfig) -> KV:
        """Empty pages for a model whose layers are all in one group."""
        (pages,) = self.groups(config)
        return pages


def page_dtype(kv_cache_dtype: str, dtype: str) -> str:
    """The dtype of pages, of `--kv-cache-dtype` and the model's: "auto" is the model's."""
    return dtype if kv_cache_dtype == "auto" else kv_cache_dtype


def kv_bytes_per_token(config: ModelConfig, dtype: str) -> int:
    """Bytes of a token's keys and values in all layers, in pages of this dtype. Where requests are divided among
    devices, a device's mean."""
    groups, item = config.decoder.groups(PagedRows), jnp.dtype(dtype).itemsize
    return sum(-(-n * rows.numbers * item // rows.by_request) for rows, n in groups.items())


@flax.struct.dataclass
class Rows:
    """The KV slots of one forward's rows: row i of request r has its keys and values in slot `start[r] + i` of its
    pages, and is valid if `i < count[r]`.

    `table[r]` lists the pages of request r. Rows outside `count`, before slot 0 or past the table are padding.

    A chain's rows are the text's next tokens, so their slots are their positions, and each sees all up to its own. A
    tree's rows share positions. `mask` says which of the last w slots, up to the last row's own, each row sees, besides
    everything before those (t <= w: earlier rows of the same tree may stand there). `depth` is the distance of its
    position from the first of these w slots.

    Positions are slots, moved by `shift[r]`, as those behind a picture are, or in three `axes` of their own.

    `last_seen`: the last KV slot that each of a prompt's rows sees, as those of a picture see all of it; None: its own.
    `in_windows`: in layers with a window alone.

    `asked[r]`, if given: whether the attention of request r's rows is requested. `fixed`: as of `paged_attention`.

    Where requests are divided among devices, each device's pages follow the other's in the table's numbers, and the
    first of each is a dummy. `uneven`: more than its share of these requests may be one device's.
    """

    start: Int[Array, " b"]
    count: Int[Array, " b"]
    table: Int[Array, "b p"]
    depth: Int[Array, "b t"] | None = None
    mask: Bool[Array, "b t w"] | None = None
    asked: Bool[Array, " b"] | None = None
    shift: Int[Array, " b"] | None = None
    axes: Int[Array, "3 b t"] | None = None
    last_seen: Int[Array, "b t"] | None = None
    in_windows: bool = flax.struct.field(pytree_node=False, default=False)
    fixed: int = flax.struct.field(pytree_node=False, default=0)
    uneven: bool = flax.struct.field(pytree_node=False, default=False)

    def positions(self, t: int) -> Int[Array, "b t"]:
        """Positions of the rows in the text, as the rope table takes them."""
        slots = self._kv_slots(t) if self.depth is None else self._masked_from[:, None] + self.depth
        return slots if self.shift is None else slots + self.shift[:, None]

    def marked_positions(self, t: int) -> Int[Array, "b t"] | Int[Array, "3 b t"]:
        """Positions as a model's forward takes them: -1 for rows outside `count`, since padding needs no experts."""
        positions = self.positions(t) if self.axes is None else self.axes
        return jnp.where(jnp.arange(t) < self.count[:, None], positions, -1)

    def attend(
        self,
        kv: KV,
        layer: Int[Array, ""],
        q: Array,
        k: Array,
        v: Array,
        window: Window | None = None,
        sinks: Float[Array, " n"] | None = None,
        scales: Scales | None = None,
        cap: float | None = None,
    ) -> tuple[Array, KV]:
        """Write these rows' keys and values, then attend to everything that each row sees.

        As in `decoder.mixer.Mixer`, with the pages as its cache.
        """
        return self.look_back(self.write(kv, layer, k, v, scales), layer, q, window, sinks, scales, cap)

    def attend_latent(
        self, kv: KV, layer: Int[Array, ""], q: Array, rows: Array, latent: int, scale: float
    ) -> tuple[Array, KV]:
        """Write one row of each token, then attend as `decoder.mixer.LatentMixer` says."""
        kv = kv_write.write_rows(kv, layer, *self._slots(kv, rows.shape[1]), rows)
        mask = self.mask
        if mask is not None:  # rows that follow those of the mask see nothing of them
            mask = jnp.pad(mask, ((0, 0), (0, q.shape[1] - mask.shape[1]), (0, 0)))
        return latent_attention(q, kv, layer, self.table, self._seen_from(q.shape[1]), latent, scale, mask), kv

    def attend_indexed(
        self, kv: KV, keys: KV, layer: Int[Array, ""], q: Array, k: Array, v: Array, index: Index
    ) -> tuple[Array, KV, KV]:
        """Write keys and values, and index keys into pages of theirs, then attend as `IndexedMixer` says."""
        (b, t), size = k.shape[:2], kv.shape[4]
        kv = self.write(kv, layer, k, v)
        keys = kv_write.write_rows(keys, layer, *self._slots(keys, t), index.rows)

        def read(at: Int[Array, "b t s"]) -> tuple[Array, Array]:
            entry = jnp.clip(at // size, 0, self.table.shape[1] - 1)
            page = jnp.take_along_axis(self.table[:, None], entry, axis=2)
            found = kv[layer, page, :, :, at % size].astype(q.dtype)
            return found[..., 0, :, :], found[..., 1, :, :]

        rows = keys[layer, self.table, 0, 0].reshape(b, -1, keys.shape[5]).astype(q.dtype)
        return indexed_attention(q, index, rows, self._kv_slots(t), read), kv, keys

    def only(self, asked: Bool[Array, " b"]) -> Rows:
        """Request the attention of these requests' rows alone, as `decoder.mixer.Mixer.only` says."""
        return self.replace(asked=asked)

    def pages(self, kv: KV) -> KV:
        return kv

    def here(self, kv: KV) -> Bool[Array, " b"]:
        """Whether this device has a request's pages, as `decoder.mixer.DividedMixer` says."""
        return (self.count > 0) & (self.table[:, 0] // kv.shape[1] == jax.lax.axis_index(AXIS))

    def taken(self, kv: KV, at: Int[Array, " r"], valid: Bool[Array, " r"]) -> Rows:
        """The rows of the requests `at`, whose pages are numbered as this device has them; padding if not `valid`."""
        zero = lambda x: jnp.where(valid.reshape(-1, *[1] * (x.ndim - 1)), x[at], 0)  # noqa: E731
        take = lambda x: None if x is None else x[at]  # noqa: E731
        kept = {name: take(getattr(self, name)) for name in ("depth", "mask", "asked", "shift", "last_seen")}
        table = jnp.maximum(self.table - kv.shape[1] * jax.lax.axis_index(AXIS), 0)
        return self.replace(start=zero(self.start), count=zero(self.count), table=zero(table), axes=None, **kept)

    def attend_written(
        self,
        kv: KV,
        layer: Int[Array, ""],
        t: int,
        write: Callable[[KV, Array, Array | None], tuple[Array, KV]],
        window: Window | None = None,
        sinks: Float[Array, " n"] | None = None,
        scales: Scales | None = None,
    ) -> tuple[Array, KV]:
        """Attend once `write` has stored the keys and values, as `decoder.mixer.PagedMixer` says. Nothing is written to
        the dummy page, which is padding's."""
        q, kv = write(kv, self.written(kv, t), _inverse_scales(scales))
        return self.look_back(kv, layer, q, window, sinks, scales)

    def written(self, kv: KV, t: int) -> Int[Array, "b t"]:
        """The KV slots of t rows' keys and values, counted over all pages; -1 for padding."""
        page, slot = self._slots(kv, t)
        return jnp.where(page > 0, page * kv.shape[4] + slot, -1)

    def look_back(
        self,
        kv: KV,
        layer: Int[Array, ""],
        q: Array,
        window: Window | None,
        sinks: Float[Array, " n"] | None = None,
        scales: Scales | None = None,
        cap: float | None = None,
    ) -> tuple[Array, KV]:
        """Attend to everything that each row sees, once keys and values are written."""
        mask, depth, start = self.mask, self.depth, self._seen_from(q.shape[1])
        if mask is None:
            last = None if self.in_windows and window is None else self.last_seen
            if last is not None and self.asked is not None:
                last = jnp.where(self.asked[:, None], last, -1)
            seen = {"window": window, "sinks": sinks, "scales": scales, "last": last, "cap": cap, "fixed": self.fixed}
            return paged_attention(q, kv, layer, self.table, start, **seen), kv
        padding = (0, q.shape[1] - mask.shape[1])  # rows that follow those of the mask, and see nothing of them
        if window is not None:
            mask, depth = self._within(window), jnp.pad(depth, ((0, 0), padding))
        mask = jnp.pad(mask, ((0, 0), padding, (0, 0)))
        return paged_attention(q, kv, layer, self.table, start, mask, window, depth, sinks, scales, cap=cap), kv

    def _seen_from(self, t: int) -> Int[Array, " b"]:
        """The first of the KV slots whose rows see by themselves or by the mask; requests that aren't asked for see as
        little as can be, from before slot 0."""
        return self._masked_from if self.asked is None else jnp.where(self.asked, self._masked_from, -t)

    def _within(self, window: Window) -> Bool[Array, "b t w"]:
        """The mask without ancestors that are before a row's window or chunk, as a deeper tree's may be."""
        if not isinstance(window, Chunks) and window >= self.mask.shape[2]:
            return self.mask
        if self.mask.shape[1] < self.mask.shape[2]:
            raise NotImplementedError(
                f"a window of {window} positions, and a mask over {self.mask.shape[2]} KV slots whose positions aren't "
                f"all known; windows of at least {self.mask.shape[2]} positions are supported for trees made in steps"
            )
        at = self._masked_from[:, None] + self.depth
        return self.mask & (at[:, None] >= first_seen(at, window)[:, :, None])

    def look(
        self, kv: KV, layer: Int[Array, ""], q: Array, mask: Bool[Array, "b t w"], window: Window | None = None
    ) -> Array:
        """Attention to all before these rows, from each row's window on, and to those of them that its `mask` names."""
        return paged_attention(q, kv, layer, self.table, self.start, mask, window)

    def write(
        self,
        kv: KV,
        layer: Array,
        k: Float[Array, "*l b t m h"],
        v: Float[Array, "*l b t m h"],
        scales: Scales | None = None,
    ) -> KV:
        """Put these rows' keys and values into one `layer` i32[], or into several at once, i32[l, 1, 1]."""
        page, slot = self._slots(kv, k.shape[-3])
        return kv_write.write(kv, layer, page, slot, k, v, _inverse_scales(scales))

    def put(self, pages: Array, values: Array) -> Array:
        """Put a value of each of these rows [b, t, ...] into its KV slot of pages [p, s, ...]."""
        kv_slots, size = self._kv_slots(values.shape[1]), pages.shape[1]
        valid = jnp.arange(values.shape[1]) < self.count[:, None]
        return pages.at[self._pages(kv_slots, valid, size), kv_slots % size].set(values.astype(pages.dtype))

    def compact(self, kv: KV, path: Int[Array, "b k"], count: Int[Array, " b"]) -> KV:
        """Compact a tree's accepted path into a chain: move what pages have of row `path[r, i]` to KV slot
        `start[r] + i` in all layers, for every i below `count[r]`. A path begins at row 0 and continues to later
        rows."""
        layers = jnp.arange(kv.shape[0])[:, None, None]
        kv_slots = self.start[:, None] + path[:, 1:]
        page = self._pages(kv_slots, jnp.arange(1, path.shape[1]) < count[:, None], kv.shape[4])
        moved = kv[layers, page, :, :, kv_slots % kv.shape[4]]  # [l, b, k, streams, m, h]
        into = Rows(self.start + 1, count - 1, self.table)
        if kv.shape[2] == 1:
            return kv_write.write_rows(kv, layers, *into._slots(kv, kv_slots.shape[1]), moved[..., 0, 0, :])
        return into.write(kv, layers, *jnp.moveaxis(moved, 3, 0))

    def _kv_slots(self, t: int) -> Int[Array, "b t"]:
        return self.start[:, None] + jnp.arange(t, dtype=jnp.int32)

    def _slots(self, kv: KV, t: int) -> tuple[Int[Array, "b t"], Int[Array, "b t"]]:
        """The page and the slot in it of each row."""
        kv_slots = self._kv_slots(t)
        valid = jnp.arange(t) < self.count[:, None]
        return self._pages(kv_slots, valid, kv.shape[4]), kv_slots % kv.shape[4]

    @property
    def _masked_from(self) -> Int[Array, " b"]:
        """The first of the KV slots that the mask covers; without one, that of the first row."""
        return self.start if self.mask is None else self.start + (self.mask.shape[1] - self.mask.shape[2])

    def _pages(self, kv_slots: Int[Array, "b t"], valid: Bool[Array, "b t"], page_size: int) -> Int[Array, "b t"]:
        """The pages that hold these KV slots, the dummy page for those that aren't valid or that the table lacks."""
        entry = kv_slots // page_size
        valid = valid & (kv_slots >= 0) & (entry < self.table.shape[1])
        page = jnp.take_along_axis(self.table, jnp.clip(entry, 0, self.table.shape[1] - 1), axis=1)
        return jnp.where(valid, page, 0)


def _inverse_scales(scales: Scales | None) -> Scales | None:
    return None if scales is None else 1 / scales
