"""How much of the device's memory goes where: the memory plan, which sizes the page pool and the states' snapshots."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, replace

import jax
from jax._src import xla_bridge  # there is no public way to ask whether a device has been used

from jaxspec.config.options import ConfigError

log = logging.getLogger("jaxspec")

# Of snapshots of recurrent states, unless the user says how many: so many for each request, within this share
# of what weights leave on the device, or so many bytes of a host's memory.
SNAPSHOTS_PER_REQUEST = 8
SNAPSHOT_SHARE = 0.25
SNAPSHOT_BYTES = 2**28

HOST_STAGING = 0.02  # share of a device for copies of pages on their way to the host's memory and back

POOL_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # XLA's own option: what it takes of a GPU, when first used
POOL_SHARES = (POOL_SHARE, "XLA_CLIENT_MEM_FRACTION")  # its names, of which XLA refuses to have both
CLAIMED_SHARE = 0.95  # what an engine lets it take
DEFAULT_SHARE = 0.75  # XLA's own
PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # XLA's own option: what it may lock of the host's memory
STUCK = "--xla_gpu_nccl_termination_timeout_seconds"  # XLA's own flag: how long a device may keep NCCL's others waiting
STUCK_SECONDS = 30


def claim_device(host_gb: float = 0.0) -> None:
    """Let XLA take nearly all of the GPU, unless the user set its share. Once jax has used one, that is too late: then
    the log says what is missing and why.

    And let it end a process whose devices wait for one that never comes, unless XLA_FLAGS say how long they may. Not on
    several hosts, where a node may come late because it compiles, and the others watch it.

    `host_gb`: GiB of the host's memory that the cache there locks, beside what XLA locks for itself.
    """
    if host_gb and not xla_bridge.backends_are_initialized():
        os.environ.setdefault(PINNED_LIMIT, str(max(64, math.ceil(host_gb) + 16)))
    flags = os.environ.get("XLA_FLAGS", "")
    if not (STUCK in flags or xla_bridge.backends_are_initialized() or jax.distributed.is_initialized()):
        os.environ["XLA_FLAGS"] = f"{flags} {STUCK}={STUCK_SECONDS}".strip()
    if _pool_share() is not None:
        return
    if not xla_bridge.backends_are_initialized():
        os.environ[POOL_SHARE] = str(CLAIMED_SHARE)
    elif memory := device_memory():
        log.warning(
            "jax had used the device before the engine was made, so XLA keeps its default share, %s of %s. For more, "
            "make the LLM before anything else uses jax, or set %s=%s in the environment",
            *(gib(size) for size in reversed(memory)),
            *(POOL_SHARE, CLAIMED_SHARE),
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


def memory_in_use(devices: int = 1) -> int:
    """Bytes of a device's memory that this process' arrays take now; 0 where the device doesn't say. Of several
    devices, the most."""
    return max((device.memory_stats() or {}).get("bytes_in_use", 0) for device in jax.local_devices()[:devices])


def _pool_share() -> float | None:
    """XLA's share of a GPU's memory by the environment; None if it doesn't say."""
    return next((float(share) for name in POOL_SHARES if (share := os.environ.get(name))), None)


@dataclass(frozen=True)
class StateSlots:
    """The slots of recurrent states, `bytes` each, for so many requests and snapshots, and for the dummy.

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
    other_bytes: int = 0  # of arrays that were there before the engine
    draft_window: int = 0  # newest tokens of which a drafter keeps keys and values by request, in `slot_bytes`
    by_request: int = 1  # devices that requests are divided among; `tokens` and pages are those of all
    host_bytes: int = 0  # resident in this process once it is ready; on a CPU, all of the above is part of it

    @property
    def num_pages(self) -> int:
        """Pages of the pool, a dummy page of each part included."""
        return self.tokens // self.page_size + self.by_request

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        static = self.weight_bytes + self.draft_weight_bytes + self.kv_bytes + self.slot_bytes + self.states.total
        return static + self.workspace_bytes + self.other_bytes

    def cut(self, tokens: int, snapshots: int) -> MemoryPlan:
        """Shrink to so many tokens and snapshots, what every node has room for."""
        states = replace(self.states, snapshots=snapshots)
        return replace(self, tokens=tokens, kv_bytes=self.kv_bytes * tokens // self.tokens, states=states)

    def __str__(self) -> str:
        window = f", the drafter's newest {self.draft_window} tokens" if self.draft_window else ""
        parts = f", {self.tokens // self.by_request} on each device" if self.by_request > 1 else ""
        rows = [
            ("weights", self.weight_bytes, ""),
            ("draft weights", self.draft_weight_bytes, ""),
            ("KV cache", self.kv_bytes, f"{self.tokens} tokens in pages of {self.page_size}{parts}"),
            ("request slots", self.slot_bytes, f"histories, sampling settings{window}"),
            ("workspace", self.workspace_bytes, "activations and logits of the largest program"),
        ]
        if self.states.requests:
            states, per_slot = self.states, gib(self.states.bytes)
            note = f"{states.requests} requests, {states.snapshots} snapshots, {per_slot} each"
            rows.insert(
                -1, ("state slots", states.total, f"{note}; a copy for each verified row: {gib(states.copies)} more")
            )
        if self.other_bytes:
            rows.append(("other arrays", self.other_bytes, "that were on the device before"))
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
    other_bytes: int = 0,
    draft_window: int = 0,
    by_request: int = 1,
) -> MemoryPlan:
    """Plan the page pool: `mem_fraction` of the device's memory, less weights, slots and states. Of several `devices`,
    all sizes are one's. Where they have each a part of the pool (`by_request`), `bytes_per_token` is their mean.

    Of `states`, the number of snapshots is settled here: `max_snapshots`, or if that is None, some for each request and
    no more than a share of what weights leave.

    Programs keep `workspace_bytes` of what XLA may use, and XLA some more to try kernels out. The pool never exceeds
    `most_useful_tokens`, what all slots together could ever hold; on a CPU it is at most 2 GiB unless
    `max_total_tokens` says otherwise, since host memory is everyone's.

    Where jax was used before the engine, XLA has less of the device than an engine claims, and arrays of others may
    take `other_bytes` of that. The pool then shrinks with what is left of XLA's share.

    `memory`: of a device that isn't here, as `device_memory` tells it; None: of the one that is.

    **Raises:** `ConfigError` with the arithmetic when nothing is left for a single page.
    """
    together = page_size * by_request  # tokens of a page of each part
    device, budget = _budget(mem_fraction, workspace_bytes, other_bytes, devices, memory)
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
        if free < 2 * together * bytes_per_token:
            slots = f"request slots {gib(slot_bytes)}"
            if states.total:
                slots += f", state slots {gib(states.total)} (--max-state-snapshots {states.snapshots})"
            raise ConfigError(
                f"no memory is left for the KV cache: {gib(device)} on the device x --mem-fraction-static "
                f"{mem_fraction} leaves {gib(budget)}; weights take {gib(weights)}, "
                f"{slots}, and one page {gib(together * bytes_per_token)}. Raise "
                "--mem-fraction-static, lower --max-running-requests or --context-length, or use a smaller model"
            )
        tokens = min(free // bytes_per_token - together, most_useful_tokens)
    tokens = max(-(-tokens // together), 1) * together
    return MemoryPlan(
        device_bytes=device,
        weight_bytes=weight_bytes,
        draft_weight_bytes=draft_weight_bytes,
        kv_bytes=(tokens + together) * bytes_per_token,
        slot_bytes=slot_bytes,
        workspace_bytes=workspace_bytes,
        tokens=tokens,
        page_size=page_size,
        states=states,
        devices=devices,
        other_bytes=other_bytes,
        draft_window=draft_window,
        by_request=by_request,
    )


def _budget(
    mem_fraction: float, workspace_bytes: int, other_bytes: int, devices: int, memory: tuple[int, int] | None
) -> tuple[int | None, int | None]:
    """The device's bytes, and those for weights, slots and pages; None where the device doesn't say."""
    device, usable = memory or device_memory(devices) or (None, None)
    if not device:
        return device, None
    free = usable - other_bytes
    budget = min(int(device * mem_fraction), free - workspace_bytes - _trials(usable))
    if memory is None and _pool_share() is None:
        budget = min(budget, int(free * mem_fraction / CLAIMED_SHARE))
    return device, budget
