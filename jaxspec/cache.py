"""The paged key/value cache: layout, writes, and the memory plan that sizes it.

Layout `[layer, page, k/v, kv_head, page_slot, head_dim]`, one donated array, updated in place. Page 0 is the dummy:
writes of padding rows land there and nobody reads it. A drafter with its own keys and values uses the same page ids,
so pages are shared, reused and freed for both together.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import flax.struct
import jax
import jax.numpy as jnp
from jax._src import xla_bridge  # there is no public way to ask whether a device has been used
from jaxtyping import Array, Bool, Float, Int

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.decoder.spec import Mixture, Mlp
from jaxspec.pallas import kv_write
from jaxspec.pallas.hopper import chosen
from jaxspec.pallas.paged_attention import paged_attention

log = logging.getLogger("jaxspec")

KV = Float[Array, "l p 2 m s h"]
Scales = Float[Array, "l 2 m"]  # float32, of a layer's keys (0) and values (1) by head: pages hold x / scale


@dataclass(frozen=True)
class PageLayout:
    """The number of pages, their tokens and dtype: all that a drafter needs to lay out its own cache."""

    num_pages: int
    page_size: int
    dtype: str

    def kv(self, config: ModelConfig) -> KV:
        """An empty cache for a model of this config."""
        shape = (config.num_kv_layers, self.num_pages, 2, config.num_kv_heads, self.page_size, config.head_dim)
        return jnp.zeros(shape, self.dtype)


def page_dtype(kv_cache_dtype: str, dtype: str) -> str:
    """The dtype of pages, of `--kv-cache-dtype` and the model's: "auto" is the model's."""
    return dtype if kv_cache_dtype == "auto" else kv_cache_dtype


def kv_bytes_per_token(config: ModelConfig, dtype: str) -> int:
    """Of a token's keys and values in all layers, in pages of this dtype."""
    return config.num_kv_layers * 2 * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize


@flax.struct.dataclass
class Rows:
    """The KV slots of one forward's rows: row i of request r has its keys and values in slot `start[r] + i` of its
    pages, and is valid if `i < count[r]`.

    `table[r]` lists the pages of request r. Rows outside `count`, before slot 0 or past the table are padding.

    A chain's rows are the text's next tokens, so their slots are their positions, and each sees all up to its own. A
    tree's rows share positions. `mask` says which of the last w slots, up to the last row's own, each row sees, besides
    everything before those (t <= w: earlier rows of the same tree may stand there). `depth` is the distance of its
    position from the first of these w slots.

    `asked[r]`, if given: whether the attention of request r's rows is requested. `fixed`: as of `paged_attention`.
    """

    start: Int[Array, " b"]
    count: Int[Array, " b"]
    table: Int[Array, "b p"]
    depth: Int[Array, "b t"] | None = None
    mask: Bool[Array, "b t w"] | None = None
    asked: Bool[Array, " b"] | None = None
    fixed: int = flax.struct.field(pytree_node=False, default=0)

    def positions(self, t: int) -> Int[Array, "b t"]:
        """Of each row in the text, as rotary embeddings have it."""
        return self._kv_slots(t) if self.depth is None else self._masked_from[:, None] + self.depth

    def marked_positions(self, t: int) -> Int[Array, "b t"]:
        """The same, and -1 for rows outside `count`, as a model's forward is given them: padding needs no experts."""
        return jnp.where(jnp.arange(t) < self.count[:, None], self.positions(t), -1)

    def attend(
        self,
        kv: KV,
        layer: Int[Array, ""],
        q: Array,
        k: Array,
        v: Array,
        window: int | None = None,
        sinks: Float[Array, " n"] | None = None,
        scales: Scales | None = None,
    ) -> tuple[Array, KV]:
        """Write these rows' keys and values, then attend to everything that each row sees.

        As in `decoder.mixer.Mixer`, with the pages as its cache.
        """
        return self._look(self.write(kv, layer, k, v, scales), layer, q, window, sinks, scales)

    def only(self, asked: Bool[Array, " b"]) -> Rows:
        """As in `decoder.mixer.Mixer`."""
        return self.replace(asked=asked)

    def pages(self, kv: KV) -> KV:
        return kv

    def attend_written(
        self,
        kv: KV,
        layer: Int[Array, ""],
        t: int,
        write: Callable[[KV, Array, Array | None], tuple[Array, KV]],
        window: int | None = None,
        sinks: Float[Array, " n"] | None = None,
        scales: Scales | None = None,
    ) -> tuple[Array, KV]:
        """As in `decoder.mixer.PagedMixer`. The dummy page is padding's, and nothing is written there."""
        q, kv = write(kv, self.written(kv, t), _inverse_scales(scales))
        return self._look(kv, layer, q, window, sinks, scales)

    def written(self, kv: KV, t: int) -> Int[Array, "b t"]:
        """The KV slots of t rows' keys and values, counted over all pages; -1 for padding."""
        page, slot = self._slots(kv, t)
        return jnp.where(page > 0, page * kv.shape[4] + slot, -1)

    def _look(
        self,
        kv: KV,
        layer: Int[Array, ""],
        q: Array,
        window: int | None,
        sinks: Float[Array, " n"] | None = None,
        scales: Scales | None = None,
    ) -> tuple[Array, KV]:
        mask, depth, start = self.mask, self.depth, self._masked_from
        if self.asked is not None:
            start = jnp.where(self.asked, start, -q.shape[1])  # before KV slot 0: others see as little as can be
        if mask is None:
            seen = {"window": window, "sinks": sinks, "scales": scales, "fixed": self.fixed}
            return paged_attention(q, kv, layer, self.table, start, **seen), kv
        padding = (0, q.shape[1] - mask.shape[1])  # rows that follow those of the mask, and see nothing of them
        if window is not None:
            mask, depth = self._within(window), jnp.pad(depth, ((0, 0), padding))
        mask = jnp.pad(mask, ((0, 0), padding, (0, 0)))
        return paged_attention(q, kv, layer, self.table, start, mask, window, depth, sinks, scales), kv

    def _within(self, window: int) -> Bool[Array, "b t w"]:
        """The mask without ancestors that are before a row's window, as a tree's may be that is deeper."""
        if window >= self.mask.shape[2]:
            return self.mask
        if self.mask.shape[1] < self.mask.shape[2]:
            raise NotImplementedError(
                f"a window of {window} positions, and a mask over {self.mask.shape[2]} KV slots whose positions aren't "
                f"all known; windows of at least {self.mask.shape[2]} positions are supported for trees made in steps"
            )
        return self.mask & (self.depth[:, :, None] - self.depth[:, None] < window)

    def look(
        self, kv: KV, layer: Int[Array, ""], q: Array, mask: Bool[Array, "b t w"], window: int | None = None
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
        fits = kv_write.supported(page.size, *kv.shape[3::2], kv.dtype, k.dtype, v.dtype)
        if layer.ndim == 0 and chosen(fits):
            return kv_write.kv_write(kv, layer, page, slot, k, v)
        new = jnp.stack([k, v], axis=-3)
        inverse_scales = None if scales is None else _inverse_scales(scales)[layer, ..., None]  # [*l 1 1, 2, m, 1]
        return kv.at[layer, page, :, :, slot].set(kv_write.stored(new, kv.dtype, inverse_scales))

    def compact(self, kv: KV, path: Int[Array, "b k"], count: Int[Array, " b"]) -> KV:
        """Compact a tree's accepted path into a chain: move the keys and values of row `path[r, i]` to KV slot
        `start[r] + i` in all layers, for every i below `count[r]`. A path begins at row 0 and continues to later
        rows."""
        layers = jnp.arange(kv.shape[0])[:, None, None]
        kv_slots = self.start[:, None] + path[:, 1:]
        page = self._pages(kv_slots, jnp.arange(1, path.shape[1]) < count[:, None], kv.shape[4])
        k, v = jnp.moveaxis(kv[layers, page, :, :, kv_slots % kv.shape[4]], 3, 0)
        return Rows(self.start + 1, count - 1, self.table).write(kv, layers, k, v)

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


# Of snapshots of linear attention's states, unless the user says how many: so many for each request, within this share
# of what weights leave on the device, or so many bytes of a host's memory.
SNAPSHOTS_PER_REQUEST = 8
SNAPSHOT_SHARE = 0.25
SNAPSHOT_BYTES = 2**28

POOL_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # XLA's own option: what it takes of a GPU, when first used
POOL_SHARES = (POOL_SHARE, "XLA_CLIENT_MEM_FRACTION")  # its names, of which XLA refuses to have both
DEFAULT_SHARE = 0.75  # XLA's own
STUCK = "--xla_gpu_nccl_termination_timeout_seconds"  # XLA's own flag: how long a device may keep NCCL's others waiting
STUCK_SECONDS = 30


def claim_device() -> None:
    """Let XLA take nearly all of the GPU, unless the user set its share. Once jax has used one, that is too late: then
    the log says what is missing and why.

    And let it end a process whose devices wait for one that never comes, unless XLA_FLAGS say how long they may. Not on
    several hosts, where a node may come late because it compiles, and the others watch it.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if not (STUCK in flags or xla_bridge.backends_are_initialized() or jax.distributed.is_initialized()):
        os.environ["XLA_FLAGS"] = f"{flags} {STUCK}={STUCK_SECONDS}".strip()
    if _pool_share() is not None:
        return
    if not xla_bridge.backends_are_initialized():
        os.environ[POOL_SHARE] = "0.95"
    elif memory := device_memory():
        log.warning(
            "jax had used the device before the engine was made, so XLA keeps its default share, %s of %s. For more, "
            "make the LLM before anything else uses jax, or set %s=0.95 in the environment",
            *(gib(size) for size in reversed(memory)),
            POOL_SHARE,
        )


def resident_memory() -> int:
    """Bytes of the host's memory that this process holds now; 0 where the system doesn't say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def device_memory(devices: int = 1) -> tuple[int, int] | None:
    """The device's memory and what XLA may use of it, in bytes; None where the device doesn't say (a CPU). Of several
    devices, the least."""
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()[:devices]]
    usable = None if None in limits else min(limits)
    return None if usable is None else (int(usable / (_pool_share() or DEFAULT_SHARE)), usable)


def _pool_share() -> float | None:
    """XLA's share of a GPU's memory by the environment; None if it doesn't say."""
    return next((float(share) for name in POOL_SHARES if (share := os.environ.get(name))), None)


@dataclass(frozen=True)
class StateSlots:
    """The state slots of linear attention, `bytes` each, for so many requests and snapshots, and for the dummy.

    `copies`: bytes that a copy of each request's state for each row of a round would take, as other engines keep them.
    """

    requests: int = 0
    snapshots: int = 0
    bytes: int = 0
    copies: int = 0

    @property
    def total(self) -> int:
        return (self.requests + self.snapshots + 1) * self.bytes


@dataclass(frozen=True)
class MemoryPlan:
    """Where the device's memory goes, in bytes. Printed at start; `str()` is the table."""

    device_bytes: int | None  # None: the device doesn't say (a CPU)
    weight_bytes: int
    draft_weight_bytes: int
    kv_bytes: int
    slot_bytes: int
    workspace_bytes: int
    tokens: int
    page_size: int
    states: StateSlots = StateSlots()
    devices: int = 1  # each of which has all of the above
    host_bytes: int = 0  # resident in this process once it is ready; on a CPU, all of the above is part of it

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the dummy page included."""
        return self.tokens // self.page_size + 1

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        static = self.weight_bytes + self.draft_weight_bytes + self.kv_bytes + self.slot_bytes + self.states.total
        return static + self.workspace_bytes

    def __str__(self) -> str:
        rows = [
            ("weights", self.weight_bytes, ""),
            ("draft weights", self.draft_weight_bytes, ""),
            ("KV cache", self.kv_bytes, f"{self.tokens} tokens in pages of {self.page_size}"),
            ("request slots", self.slot_bytes, "histories and sampling settings"),
            ("workspace", self.workspace_bytes, "activations and logits of the largest program"),
        ]
        if self.states.requests:
            states, per_slot = self.states, gib(self.states.bytes)
            note = f"{states.requests} requests, {states.snapshots} snapshots, {per_slot} each"
            rows.insert(
                -1, ("state slots", states.total, f"{note}; a copy for each verified row: {gib(states.copies)} more")
            )
        if self.device_bytes is not None:
            rows.append(("left", self.device_bytes - self.total, f"of {gib(self.device_bytes)}"))
        if self.host_bytes:
            planned = (self.total - self.workspace_bytes) * self.devices if self.device_bytes is None else 0
            note = f"; {gib(self.host_bytes)} resident so far" if planned else ""
            rows.append(("host", self.host_bytes - planned, f"Python, jax, the tokenizer and compiled programs{note}"))
        of = f" of each of {self.devices} devices" if self.devices > 1 else ""
        return f"memory plan{of}\n" + "\n".join(f"  {n:<14} {gib(b):>10}  {note}".rstrip() for n, b, note in rows)


def gib(size: int) -> str:
    """A size in words, in GiB or MiB."""
    return f"{size / 2**30:.2f} GiB" if abs(size) >= 2**27 else f"{size / 2**20:.1f} MiB"


def _trials(usable: int) -> int:
    """Memory in which XLA tries kernels while it compiles: copies of operands, a head's weight among them."""
    return min(usable // 20, 2**32)


def workspace_estimate(config: ModelConfig, rows: int, tokens: int, devices: int) -> int:
    """Bytes that programs need beside weights and state, until they are compiled and say so themselves.

    Logits of `rows` and the few arrays of their size that sampling makes, or a layer's MLP in a prompt of `tokens`: a
    dense one's activations, or each chosen expert's rows.
    """

    def held(feed: Mixture | Mlp) -> int:
        return feed.per_token * (2 * config.hidden_size + feed.width) if isinstance(feed, Mixture) else 4 * feed.width

    widest = max(held(layer.feed) for layer in config.decoder.layers)
    return 4 * (4 * rows * config.vocab_size) // devices + 4 * tokens * widest


def plan_memory(
    *,
    weight_bytes: int,
    draft_weight_bytes: int,
    bytes_per_token: int,
    slot_bytes: int,
    workspace_bytes: int,
    page_size: int,
    mem_fraction: float,
    max_total_tokens: int | None,
    most_useful_tokens: int,
    states: StateSlots = StateSlots(),
    max_snapshots: int | None = 0,
    memory: tuple[int, int] | None = None,
    devices: int = 1,
) -> MemoryPlan:
    """Plan the page pool: `mem_fraction` of the device's memory, less weights, slots and states. Of several `devices`,
    all sizes are one's.

    Of `states`, the number of snapshots is settled here: `max_snapshots`, or if that is None, some for each request and
    no more than a share of what weights leave.

    Programs keep `workspace_bytes` of what XLA may use, and XLA some more to try kernels out. The pool never exceeds
    `most_useful_tokens`, what all slots together could ever hold; on a CPU it is at most 2 GiB unless
    `max_total_tokens` says otherwise, since host memory is everyone's.

    `memory`: of a device that isn't here, as `device_memory` tells it; None: of the one that is.

    **Raises:** `ConfigError` with the arithmetic when nothing is left for a single page.
    """
    device, usable = memory or device_memory(devices) or (None, None)
    budget = min(int(device * mem_fraction), usable - workspace_bytes - _trials(usable)) if device else None
    weights = weight_bytes + draft_weight_bytes
    if max_snapshots is None:
        room = SNAPSHOT_BYTES if budget is None else int((budget - weights) * SNAPSHOT_SHARE)
        max_snapshots = max(min(SNAPSHOTS_PER_REQUEST * states.requests, room // states.bytes), 0)
    states = replace(states, snapshots=max_snapshots)
    if max_total_tokens is not None:
        tokens = max_total_tokens
    elif budget is None:
        tokens = min(most_useful_tokens, max(2**31 // bytes_per_token, page_size))
    else:
        free = budget - weights - slot_bytes - states.total
        if free < 2 * page_size * bytes_per_token:
            slots = f"request slots {gib(slot_bytes)}"
            if states.total:
                slots += f", state slots {gib(states.total)} (--max-state-snapshots {states.snapshots})"
            raise ConfigError(
                f"no memory is left for the KV cache: {gib(device)} on the device x --mem-fraction-static "
                f"{mem_fraction} leaves {gib(budget)}; weights take {gib(weights)}, "
                f"{slots}, and one page {gib(page_size * bytes_per_token)}. Raise "
                "--mem-fraction-static, lower --max-running-requests or --context-length, or use a smaller model"
            )
        tokens = min(free // bytes_per_token - page_size, most_useful_tokens)
    tokens = max(-(-tokens // page_size), 1) * page_size
    return MemoryPlan(
        device_bytes=device,
        weight_bytes=weight_bytes,
        draft_weight_bytes=draft_weight_bytes,
        kv_bytes=(tokens + page_size) * bytes_per_token,
        slot_bytes=slot_bytes,
        workspace_bytes=workspace_bytes,
        tokens=tokens,
        page_size=page_size,
        states=states,
        devices=devices,
    )
