"""Whether what an engine's options ask for fits the memory there is, said in a line before it is allocated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from jaxspec.cache.memory_plan import MemoryPlan, device_memory, gib
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.options import ConfigError

# A container's limit, by version of control groups; "max" or no file: there is none.
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def host_memory() -> int:
    """Bytes of the host's memory, or of it what a container may have."""
    has = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in LIMITS:
        try:
            has.append(int(file.read_text()))
        except (OSError, ValueError):
            continue
    return min(has)


def check_room(plan: MemoryPlan, config: EngineConfig) -> None:
    """Check that the plan fits the memory that XLA may use of each device, or if devices have the host's, that.

    **Raises:** `ConfigError` with what was requested, what there is, and what to lower.
    """
    found = device_memory(plan.devices)
    memory, of = (host_memory() // plan.devices, "this machine") if found is None else (found[1], "the device")
    if plan.total <= memory:
        return
    together = plan.page_size * plan.by_request
    bytes_per_token = plan.kv_bytes // (plan.tokens + together)
    most = (memory - (plan.total - plan.kv_bytes)) // bytes_per_token // together * together
    if (most := most - together) > 0:
        given = f"--max-total-tokens {config.max_total_tokens}" if config.max_total_tokens else "the KV cache"
        raise ConfigError(f"{given} {_beside(plan, memory, of)}. Set --max-total-tokens to {most} or less")
    raise ConfigError(
        f"--max-running-requests {config.max_running_requests} with --context-length {config.context_length} "
        f"{_beside(plan, memory, of)}. {_lower(config)}, or use a smaller model"
    )


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that a device or the host has no memory left."""
    return isinstance(error, MemoryError) or (
        isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    )


@contextmanager
def explain_out_of_memory(plan: MemoryPlan, config: EngineConfig) -> Iterator[None]:
    """Start an engine in here. **Raises:** `ConfigError` in place of an allocation's error."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise ConfigError(
            f"memory ran out while the engine started: it needs {gib(plan.total)}, {_parts(plan)}, with "
            f"--max-running-requests {config.max_running_requests} and --context-length {config.context_length}. "
            f"{_lower(config)}, --max-total-tokens (now {plan.tokens}) or --mem-fraction-static"
        ) from error


def _beside(plan: MemoryPlan, memory: int, of: str) -> str:
    return f"does not fit: it makes {gib(plan.total)} in all, {_parts(plan)}, and {of} has {gib(memory)}"


def _parts(plan: MemoryPlan) -> str:
    parts = (
        ("weights", plan.weight_bytes + plan.draft_weight_bytes),
        ("KV cache", plan.kv_bytes),
        ("request slots", plan.slot_bytes + plan.states.total),
        ("workspace", plan.workspace_bytes),
        *([("other arrays", plan.other_bytes)] if plan.other_bytes else []),
    )
    return ", ".join(f"{name} {gib(size)}" for name, size in parts)


def _lower(config: EngineConfig) -> str:
    drafts = f", --num-draft-tokens (now {config.num_draft_tokens})" if config.num_draft_tokens else ""
    return f"Lower --max-running-requests, --context-length{drafts}"
