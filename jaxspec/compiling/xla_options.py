"""XLA options, garbage collection, jax's own cache and a compile counter, for compiling many programs."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

from jaxspec.cache.memory_check import out_of_memory

# XLA counts every in-place update of the cache as a cache of its own, finds that too many don't fit, and would compute
# small arrays again and again to hold fewer at once: a seventh of the kernels of a round of a mixture's.
#
# On a CPU it begins what it can as soon as it can, so all layers' quantised weights would be converted at the start of
# a program and held. This order needs the memory of one weight, and isn't slower.
OPTIONS = {
    "xla_disable_hlo_passes": "rematerialization",
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}
# XLA chooses how to compute a product or a fusion: it compiles candidates and times them on the device. Programs that
# compile at once wait for one another there. Beside our kernels its own emitters are as fast as Triton's for fusions,
# and so are cuBLAS's products from `MANY_ROWS` on (docs/measurements/starting.md). At level 1 it doesn't compare the
# candidates' results.
FEWER_CANDIDATES = {"xla_gpu_autotune_level": 1, "xla_gpu_experimental_enable_fusion_autotuner": False}
NO_TRITON = {"xla_gpu_enable_triton_gemm": False}
# Nothing is chosen by running it: cuBLAS's first algorithm for a product, XLA's own emitters for a fusion.
NOTHING_TIMED = FEWER_CANDIDATES | NO_TRITON | {"xla_gpu_autotune_level": 0}
# Of devices that read each other's memory. Two sums must not run at once, nor in another order on another device. And
# no candidate may run on one device while others wait for it in a kernel: a start over two H200s hung.
WITH_PEERS = NOTHING_TIMED | {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}
MANY_ROWS = 8

log = logging.getLogger("jaxspec")
_in_turn = threading.Lock()


def autotuning(weights: Any, rows: int) -> dict[str, int | bool]:
    """Compiler options that limit what XLA tries in programs whose layers are our kernels; none for
    quantised weights, with which they weren't timed. What `XLA_FLAGS` names is left as it says. `rows`: of products."""
    if any(x.dtype.itemsize < 2 for x in jax.tree.leaves(weights)):
        return {}
    options = FEWER_CANDIDATES | (NO_TRITON if rows >= MANY_ROWS else {})
    return {name: value for name, value in options.items() if name not in os.environ.get("XLA_FLAGS", "")}


def compiled(lowered: jax.stages.Lowered, options: dict[str, Any], name: str) -> jax.stages.Compiled:
    """Compile a program. XLA copies operands to try candidates on them, in many threads at once: those for which the
    device has no room are compiled one after the other, and if that doesn't help, without trying any."""
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
    with _in_turn:
        try:
            return lowered.compile(options)
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
        log.warning(
            "the device has no memory left to try kernels for %s, which may be slower for it; a lower "
            "--mem-fraction-static or --max-total-tokens leaves some",
            name,
        )
        return lowered.compile(options | NOTHING_TIMED)


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
