"""The host's memory behind the page pool (`--host-kv-gb`): dispatches the copies that `host_tier` decides on.

Nothing here waits while a round is in flight. Copies to the host are dispatched before a plan's programs, and run
beside them. Of a load, slices of pages are on their way to the device while rounds and others' prompts run; a slice is
written into its pages once it is there, and its checksums are read a step later. All that is on its way takes at most
`staging` bytes of the devices. The disk behind it (`--disk-kv-gb`) has threads, which are told here, and heard.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxspec.cache.host_blocks import PAGES, STATES
from jaxspec.cache.memory_check import host_memory
from jaxspec.cache.memory_plan import gib
from jaxspec.config.options import ConfigError
from jaxspec.engine.runner import Runner
from jaxspec.engine.tiers.disk_files import HEADER, DiskFiles, identity
from jaxspec.parallel.sharding import AXIS
from jaxspec.scheduling.host_tier import Copy, HostTier, Load
from jaxspec.scheduling.kept_blocks import Block, DiskTier
from jaxspec.scheduling.scheduler import Scheduler
from jaxspec.scheduling.sequence import SequenceState, Status

log = logging.getLogger("jaxspec")

BUCKET_BYTES, BUCKET = 2**27, 32  # of a program that moves pages: about so many bytes, at most so many pages
AHEAD = 3  # slices that are copied at once, enough for the link
RESERVED_AT_ONCE = 2**28  # bytes of the host's memory
WRITING = 1 / 16  # share of the host's memory that waits for the disk at most
PATIENCE = 0.002  # seconds that an idle step waits for the disk
STALLED = 5.0  # seconds beyond twice the expected ones after which a prompt waits for the disk no more


@dataclass(eq=False)
class Slice:
    """Blocks of a load that travel together, and the pages, or the state slot, that they are for."""

    load: Loading
    kind: str
    rows: list[int]
    blocks: list[Block]
    arrays: list[jax.Array]
    started: float  # seconds; 0: something else was in flight then
    arrived: bool = False
    checksums: jax.Array | None = None  # once they are written

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)


@dataclass(eq=False)
class Loading:
    """A sequence's load on its way: slices still to be sent, and how many of those sent haven't been checked."""

    seq: SequenceState
    epoch: int
    load: Load
    slices: Iterator[tuple[str, list[int], list[Block]]]
    following: tuple[str, list[int], list[Block]] | None = None
    open: int = 0
    sent: bool = False
    alone: bool = True  # no program has run, and no other load, since it began
    began: float = field(default_factory=time.monotonic)
    stalled_at: float = 0.0  # seconds; beyond them by `STALLED`, what the disk hasn't read is given up

    @property
    def over(self) -> bool:
        """Whether the sequence has lost its pages."""
        return self.seq.epoch != self.epoch


@dataclass
class Figures:
    """Since start: bytes and blocks each way, and those that were lost on the way."""

    stored_bytes: int = 0
    stored_blocks: int = 0
    loaded_bytes: int = 0
    loaded_blocks: int = 0
    loads: int = 0
    failed_loads: int = 0
    lost_blocks: int = 0
    damaged_blocks: int = 0


@dataclass
class DiskFigures:
    """Bytes and blocks to the disk and back, and those lost."""

    written_bytes: int = 0
    read_bytes: int = 0
    lost_blocks: int = 0


class HostCache:
    """Moves blocks between a runner's state and the host's memory, at most `capacity` bytes there.

    **Raises:** `ConfigError` if the host hasn't so much memory, or if not even one page fits.
    """

    def __init__(self, runner: Runner, capacity: int):
        if runner.hosts is not None:
            raise ConfigError("--host-kv-gb: a model on several hosts keeps its KV on the devices; drop the option")
        self._runner, mesh = runner, runner.mesh
        sharding = SingleDeviceSharding if mesh is None else lambda on, **kind: NamedSharding(*on, **kind)
        on = jax.local_devices()[0] if mesh is None else (mesh, PartitionSpec(AXIS))
        self._there, self._here = sharding(on, memory_kind="pinned_host"), sharding(on, memory_kind="device")
        sizes = {kind: runner.programs.block_bytes(kind, runner.state) for kind in kinds_of(runner)}
        page, state = sizes[PAGES], sizes.get(STATES, 0)
        self.bucket = max(min(BUCKET, BUCKET_BYTES * runner.config.tp_size // page), 1)
        self.staging = max(runner.host_staging * runner.config.tp_size, 4 * max(self.bucket * page, state))
        if page + state > capacity:
            raise ConfigError(
                f"--host-kv-gb {capacity / 2**30:g}: one page of {runner.config.page_size} tokens takes {gib(page)}"
                f"{f' and a state snapshot {gib(state)}' if state else ''}; give more"
            )
        if capacity > host_memory():
            raise ConfigError(
                f"--host-kv-gb {capacity / 2**30:g} is more than this machine has, {gib(host_memory())}; give less"
            )
        self.disk, self.disk_figures, of_disk = None, DiskFigures(), int(runner.config.disk_kv_gb * 2**30)
        if of_disk:
            self.disk = DiskFiles(runner.config.disk_kv_path, partial(jax.device_put, device=self._there))
        self.tier = HostTier(capacity, page, state, DiskTier(of_disk, HEADER) if of_disk else None)
        self.figures = Figures()
        self._storing: deque[tuple[list[jax.Array], list[Block]]] = deque()
        self._loads: deque[Loading] = deque()
        self._slices: deque[Slice] = deque()
        self._scheduler: Scheduler | None = None
        self._warned, self._writing = set[str](), 0  # kinds of failure that the log has; bytes on their way to the disk
        self._reserve()
        if not runner.config.skip_warmup:
            self._warm_up()

    def serves(self, scheduler: Scheduler) -> None:
        """Carry out what this scheduler plans."""
        self._scheduler = scheduler
        self.know_weights()

    def know_weights(self) -> None:
        """Find pages of these weights on the disk from now on, and no others."""
        if self.disk is not None:
            self._scheduler.trees[0].begin_with(identity(self._runner))

    @property
    def busy(self) -> bool:
        """Whether copies are on their way, or due."""
        of_disk = self.disk is not None and (self.disk.pending or self.tier.disk.gone or self.tier.writes)
        return bool(self._storing or self._loads or self.tier.waits or of_disk)

    def _reserve(self) -> None:
        """Have XLA lock all of the memory now: while rounds run, that would hold them up. XLA keeps what is freed."""
        if jax.default_backend() == "cpu":
            return
        started, held, left = time.monotonic(), [], self.tier.capacity
        zeros = np.zeros(RESERVED_AT_ONCE // 4, np.uint32)
        try:
            while left > 0:
                held.append(jax.device_put(zeros, self._there))
                left -= zeros.nbytes
            jax.block_until_ready(held)
        except jax.errors.JaxRuntimeError as error:
            raise ConfigError(
                f"--host-kv-gb {self.tier.capacity / 2**30:g}: {gib(self.tier.capacity - left)} of pinned memory could "
                "be had. Give less, raise the container's memory and locked-memory limits, or make the engine before "
                f"anything else uses jax, which sets XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB ({error})"
            ) from error
        log.info("host cache: %s pinned in %.1f s", gib(self.tier.capacity), time.monotonic() - started)

    def _warm_up(self) -> None:
        """Compile the programs, and measure how fast blocks come back."""
        runner, tier = self._runner, self.tier
        for kind, rows in ((PAGES, self.bucket), (STATES, 1)):
            if kind not in kinds_of(runner):
                continue
            at = np.full(rows, 0 if kind == PAGES else runner.shapes.num_slots, np.int32)  # the dummies
            for _ in range(3):  # the first is slower
                blocks, _ = runner.programs.take(kind, runner.state, at)
                there = jax.block_until_ready(jax.device_put(list(blocks), [self._there] * rows))
                started = time.monotonic()
                here = jax.block_until_ready(jax.device_put(there, [self._here] * rows))
                seconds = time.monotonic() - started
                runner.state, checksums = runner.programs.put(kind, runner.state, at, tuple(here))
                jax.block_until_ready(checksums)
            if kind == PAGES:
                tier.took(rows * tier.page_bytes, seconds, at_start=True)
                log.info(
                    "host cache: %d pages of %s, which come back at %.1f GB/s",
                    *(tier.capacity // tier.page_bytes, gib(tier.page_bytes), tier.speed / 1e9),
                )
        if self.disk is not None:
            if (measured := self.disk.speed(tier.page_bytes // 4)) is None:
                log.warning(
                    "disk cache: %s is full: pages are read from there, and none written until it has room. Free some, "
                    "or lower --disk-kv-gb",
                    self.disk.folder,
                )
                return
            tier.disk.took(*measured, at_start=True)
            log.info("disk cache: in %s, read at %.1f GB/s", self.disk.folder, tier.disk.speed / 1e9)

    def store(self, admitted: list[SequenceState]) -> None:
        """Start the loads of those that a plan admits: to dispatch copies the other way takes the host some time, in
        which the link would be idle. Then dispatch copies of pages and snapshots to the host, before the plan's
        programs, or a slice that has arrived, overwrite any of them."""
        tier = self.tier
        for seq in admitted:
            if seq.status is Status.LOADING:
                self._begin(seq)
        while self._storing and all(array.is_ready() for array in self._storing[0][0]):
            self._stored()
        under_way = sum(block.size for _, blocks in self._storing for block in blocks)
        copies = tier.to_copy(self.staging // 2 - under_way)
        states = [copy for copy in copies if copy.state]
        pages = [copy for copy in copies if not copy.state]
        groups = [pages[i : i + self.bucket] for i in range(0, len(pages), self.bucket)]
        for group in [*groups, *([state] for state in states)]:
            try:
                self._store(group, STATES if group[0].state else PAGES)
            except (jax.errors.JaxRuntimeError, MemoryError) as error:  # the pages are lost, and nothing else
                self._lose(len(group), "a copy to the host failed", error)
        if self.disk is not None:
            due, tier.to_read = tier.to_read, []
            self.disk.read(due)
            most = max(int(WRITING * tier.capacity), tier.page_bytes, tier.state_bytes)
            due = tier.to_write(most - self._writing)
            self._writing += sum(block.size for block in due)
            self.disk.write(due)
            due, tier.disk.gone = tier.disk.gone, []
            self.disk.delete(due)

    def _hear(self, wait: float) -> None:
        """Take note of what the disk's threads have done."""
        tier, figures = self.tier, self.disk_figures
        for result in self.disk.results(wait):
            block, error = result.block, result.error
            if result.kind == "found":
                tier.disk.found(block)
                continue
            if error is not None:
                figures.lost_blocks += 1
                self._warn(f"a page's file couldn't be {'read' if result.kind == 'read' else 'written'}", error)
                tier.drop_from_disk(block)
            if result.kind == "read":
                tier.disk.backlog -= block.size
                block.data, block.checksums = result.data, result.checksums
                if error is None:
                    figures.read_bytes += block.size
                    tier.disk.took(block.size, result.seconds)
                else:
                    tier.drop(block)
                    for each in [load for load in self._loads if block in load.load.blocks]:
                        self._fail(each, DamagedError("a page of it isn't on the disk any more"))
            else:
                self._writing -= block.size
                figures.written_bytes += 0 if error else block.size
            tier.unpin([block])

    def _store(self, copies: list[Copy], kind: str) -> None:
        tier, most = self.tier, 1 if kind == STATES else self.bucket
        if not tier.make_room(sum(tier.bytes_of(copy) for copy in copies)):
            tier.skipped += len(copies)  # loads and writes read all that is there
            return
        rows = np.zeros(most, np.int32)
        rows[: len(copies)] = [copy.at for copy in copies]
        blocks, checksums = self._runner.programs.take(kind, self._runner.state, rows)
        there = jax.device_put(list(blocks[: len(copies)]), [self._there] * len(copies))
        checksums.copy_to_host_async()
        added = [tier.add(*each, (checksums, i)) for i, each in enumerate(zip(copies, there, strict=True))]
        self._storing.append((there, [block for block in added if block is not None]))

    def _stored(self) -> None:
        """Take note of copies that have arrived."""
        arrays, blocks = self._storing.popleft()
        try:
            jax.block_until_ready(arrays)
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            for block in blocks:
                self.tier.drop(block)
            self._lose(len(blocks), "a copy to the host failed", error)
            return
        for block in blocks:
            if not block.dropped:
                checksums, row = block.checksums
                block.checksums = np.asarray(checksums)[row]
        self.figures.stored_blocks += len(blocks)
        self.figures.stored_bytes += sum(block.size for block in blocks)

    def _begin(self, seq: SequenceState) -> None:
        load, tier = seq.load, self.tier
        first = load.depth - len(load.pages)

        def slices() -> Iterator[tuple[str, list[int], list[Block]]]:
            few = len(load.pages) % self.bucket  # first, so that no small slice comes behind all others
            for i in range(few - self.bucket if few else 0, len(load.pages), self.bucket):
                i, blocks = max(i, 0), load.pages[max(i, 0) : i + self.bucket]
                yield PAGES, seq.pages[first + i : first + i + len(blocks)], blocks
            if load.state is not None:
                yield STATES, [seq.slot], [load.state]

        tier.backlog += load.size
        late = 2 * tier.disk.backlog / (tier.disk.speed or 1e9) if self.disk is not None else 0.0
        self._loads.append(Loading(seq, seq.epoch, load, slices(), stalled_at=time.monotonic() + late))
        self._send(idle=False)

    def move(self, idle: bool) -> list[SequenceState]:
        """Go on with loads; sequences all of whose blocks are there. `idle`: nothing else is in flight, so wait until
        one slice has got further."""
        landed: list[SequenceState] = []
        if self.disk is not None:
            waits = idle and self.disk.pending and not self._slices
            self._hear(PATIENCE if waits and (self._loads or not self._scheduler.waiting) else 0.0)
        if idle and self._slices:
            first = self._slices[0]
            _settle([first.checksums] if first.checksums is not None else first.arrays)
        for each in self._loads:
            each.alone &= idle and len(self._loads) == 1
        for part in list(self._slices):
            if part.load not in self._loads:  # it failed at an earlier slice
                continue
            try:
                if part.checksums is None and all(array.is_ready() for array in part.arrays):
                    self._arrive(part, idle)
                elif part.checksums is not None and part.checksums.is_ready():
                    self._check(part)
                    self._slices.remove(part)
                    part.load.open -= 1
            except (jax.errors.JaxRuntimeError, MemoryError, DamagedError) as error:
                self._fail(part.load, error)
        self._send(idle)
        for each in list(self._loads):
            if each.over or (each.sent and not each.open):
                self._end(each)
                if not each.over:
                    self.figures.loads += 1
                    if each.alone and not any(block.from_disk for block in each.load.blocks):
                        self.tier.lasted(each.load, time.monotonic() - each.began)
                    landed.append(each.seq)
        if idle and not (landed or self._slices or self._scheduler.waiting) and self._storing:
            _settle(self._storing[0][0])
        return landed

    def _send(self, idle: bool) -> None:
        """Start slices: at most `AHEAD` that haven't arrived, and as many as `staging` has room for."""
        for each in list(self._loads):
            while not (each.sent or each.over):
                under_way = sum(part.size for part in self._slices)
                if self._slices and under_way + self.bucket * self.tier.page_bytes > self.staging // 2:
                    return
                if sum(not part.arrived for part in self._slices) >= AHEAD:
                    return
                each.following = each.following or next(each.slices, None)
                if each.following is None:
                    each.sent = True
                    break
                kind, rows, blocks = each.following
                if any(block.data is None for block in blocks):  # the disk has them still
                    if time.monotonic() > each.stalled_at + STALLED:
                        self._give_up(each)
                    break
                each.following = None
                try:
                    arrays = jax.device_put([block.data for block in blocks], [self._here] * len(blocks))
                except (jax.errors.JaxRuntimeError, MemoryError) as error:
                    self._fail(each, error)
                    break
                started = time.monotonic() if idle and not self._slices else 0.0
                self._slices.append(Slice(each, kind, rows, blocks, arrays, started))
                each.open += 1

    def _arrive(self, part: Slice, idle: bool) -> None:
        """Send others, so that the link goes on, and write a slice that is on the device."""
        jax.block_until_ready(part.arrays)  # raises what went wrong, before the state depends on it
        if part.started and idle:
            self.tier.took(part.size, time.monotonic() - part.started)
        part.arrived = True
        self._send(idle)
        if part.load.over:  # which `move` ends
            self._slices = deque(each for each in self._slices if each is not part)
        else:
            self._write(part)

    def _write(self, part: Slice) -> None:
        """Dispatch the program that writes a slice."""
        most = 1 if part.kind == STATES else self.bucket
        rows = np.zeros(most, np.int32)  # the dummy page
        rows[: len(part.rows)] = part.rows
        arrays = (*part.arrays, *[part.arrays[0]] * (most - len(part.arrays)))
        self._runner.state, part.checksums = self._runner.programs.put(part.kind, self._runner.state, rows, arrays)
        part.checksums.copy_to_host_async()
        part.arrays = []

    def _check(self, part: Slice) -> None:
        """**Raises:** `DamagedError` if a block isn't what left the device; then it is forgotten."""
        damaged = 0
        for block, found in zip(part.blocks, np.asarray(part.checksums), strict=False):
            due = block.checksums if isinstance(block.checksums, np.ndarray) else None
            if due is None and block.checksums is not None:
                checksums, row = block.checksums
                due = np.asarray(checksums)[row]
            if due is not None and not np.array_equal(found, due):
                damaged += 1
                self.tier.drop(block)
                self.tier.drop_from_disk(block)
        self.figures.loaded_blocks += len(part.blocks)
        self.figures.loaded_bytes += part.size
        if damaged:
            self.figures.damaged_blocks += damaged
            raise DamagedError(f"{damaged} of {len(part.blocks)} blocks have changed in the host's memory")

    def _give_up(self, loading: Loading) -> None:
        """Have a prompt computed whose blocks the disk doesn't give."""
        for block in loading.load.blocks:
            if block.data is None:
                self.tier.drop(block)
                self.tier.drop_from_disk(block)
        self._fail(loading, DamagedError("the disk doesn't answer"))

    def _fail(self, loading: Loading, error: Exception) -> None:
        """Give up a load: its blocks are forgotten, and its sequence computes what it lacks."""
        if loading not in self._loads:
            return
        if not loading.over:
            for block in () if isinstance(error, DamagedError) else loading.load.blocks:
                self.tier.drop(block)
            self._scheduler.not_landed(loading.seq)
        self._end(loading)
        self.figures.failed_loads += 1
        self._lose(len(loading.load.blocks), "a reload from the host failed; its prompt is computed", error)

    def _end(self, loading: Loading) -> None:
        self._loads.remove(loading)
        self._slices = deque(part for part in self._slices if part.load is not loading)
        self.tier.backlog -= loading.load.size

    def _lose(self, blocks: int, what: str, error: Exception) -> None:
        self.figures.lost_blocks += blocks
        self._warn(what, error)

    def _warn(self, what: str, error: Exception) -> None:
        (log.debug if what in self._warned else log.warning)(
            "host cache: %s: %s. Nothing but cached pages is lost", what, error
        )
        self._warned.add(what)

    def reset(self) -> None:
        """Forget what is on its way: the state that it came from, or was for, is gone."""
        self._storing.clear()
        self._slices.clear()
        self._loads.clear()
        self.tier.backlog = 0

    def close(self) -> None:
        """Let another engine have the disk's folder."""
        if self.disk is not None:
            self.disk.close()


class DamagedError(Exception):
    """A block came back with another checksum than it left with."""


def kinds_of(runner: Runner) -> tuple[str, ...]:
    """Parts of a runner's state that the cache keeps, so that a prompt can go on from there."""
    return (PAGES, STATES) if runner.model.config.recurrent else (PAGES,)


def stats(cache: HostCache | None) -> dict[str, Any]:
    """Figures for `Engine.stats`; zeros without a cache."""
    tier, figures = (HostTier(0, 1), Figures()) if cache is None else (cache.tier, cache.figures)
    disk = DiskTier(0) if tier.disk is None else tier.disk
    of_disk = DiskFigures() if cache is None else cache.disk_figures
    return {
        "host_cache_bytes": tier.capacity,
        "host_cache_used_bytes": tier.used,
        "host_cache_blocks": len(tier),
        "host_cache_bytes_per_second": tier.speed or 0.0,
        "host_cache_declined_total": tier.declined,
        "host_cache_evicted_blocks_total": tier.evicted,
        "host_cache_skipped_blocks_total": tier.skipped,
        **{f"host_cache_{name}_total": value for name, value in vars(figures).items()},
        "disk_cache_bytes": disk.capacity,
        "disk_cache_used_bytes": disk.used,
        "disk_cache_blocks": len(disk),
        "disk_cache_bytes_per_second": disk.speed or 0.0,
        "disk_cache_evicted_blocks_total": disk.evicted,
        **{f"disk_cache_{name}_total": value for name, value in vars(of_disk).items()},
    }


def _settle(arrays: list[jax.Array]) -> None:
    """Wait for arrays; who uses them sees their errors."""
    for array in arrays:
        try:
            jax.block_until_ready(array)
        except (jax.errors.JaxRuntimeError, MemoryError):
            continue
