"""What goes around the compiling of many programs: garbage, jax's own cache, and how many there were."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections import Counter
from collections.abc import Iterator

import jax


def cores() -> int:
    """How many processors this process may use: fewer than there are in a container that has some to itself."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def compile_counter() -> Counter:
    """Counts this process's compilations under the key "compiles", from the first call on."""
    counter: Counter = Counter()

    def listen(event: str, duration: float, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            counter["compiles"] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    return counter


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Lowering makes millions of objects, most of which stay. Collecting garbage again and again takes an eighth of its
    time.

    It is collected once at the end: half a second that a request would otherwise wait for.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
            gc.collect()


@contextlib.contextmanager
def not_in_jax_cache() -> Iterator[None]:
    """jax's own cache is read but not written. Serialising a program stops all of Python, and jax would do it a second
    time, in the midst of lowering."""
    option = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, option)
    jax.config.update(option, float("inf"))
    try:
        yield
    finally:
        jax.config.update(option, before)
