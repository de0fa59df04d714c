"""The kernels of a piece of work on a GPU by name and time, from jax's profiler, and the table of them.

The profiler adds about a microsecond to a short kernel, so the sum can exceed the time of the work by itself.
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import jax

from jaxspec.bench.results import BenchError, Column, Row, Table

SMALL_US = 5.0  # kernels that take less are counted together
SUFFIX = re.compile(r"(_mosaic_gpu_kernel|[._]?\d+)+$")  # what tells one call of a kernel from another


def require_gpu() -> None:
    """**Raises:** `BenchError` where there are no GPU kernels to list."""
    if jax.default_backend() != "gpu":
        raise BenchError(f"--profile lists GPU kernels, and this is a {jax.default_backend()}; leave it out here")


def table(unit: str, of: Column) -> Table:
    """Table of each row's `kernels`, with their time for one `unit`. `of` is the column that tells rows apart."""
    columns = (
        of,
        Column("us", f"us/{unit}", ".1f"),
        Column("share", "share", ".1%"),
        Column("calls", "calls", ".0f"),
        Column("each", "us each", ".2f"),
        Column("kernel", "kernel", "<60", 60),
    )
    return Table(f"kernels of a {unit}, by the profiler", columns, lambda row: lines(row, of.key))


def lines(row: Row, key: str) -> list[Row]:
    """A line for each of the row's kernels, one for all the small ones, and one for their sum."""
    each = row.get("kernels") or []
    total = sum(kernel["us"] for kernel in each)
    small = [kernel for kernel in each if kernel["us"] < SMALL_US]
    found = [kernel for kernel in each if kernel["us"] >= SMALL_US]
    for name, some in ((f"{len(small)} others, each less than {SMALL_US:g} us", small), ("all", each)):
        if some:
            found.append({"kernel": name} | {figure: sum(k[figure] for k in some) for figure in ("us", "calls")})
    derived = lambda line: {"share": line["us"] / total, "each": line["us"] / line["calls"]}  # noqa: E731
    return [{key: row[key]} | line | derived(line) for line in found]


def kernels(work: Callable[[], object], times: int) -> list[Row]:
    """Run `work` under the profiler; its kernels, each with `us` and `calls` for each of the `times` that it repeats.

    The one that takes longest comes first. **Raises:** `BenchError` where the profiler sees no kernels.
    """
    options = jax.profiler.ProfileOptions()
    options.enable_hlo_proto = False  # the texts of all programs, which nobody reads here; a file holds 2 GB at most
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            work()
        traces = list(Path(folder).rglob("*.xplane.pb"))
        data = [jax.profiler.ProfileData.from_file(str(trace)) for trace in traces]
        gpus = sorted((plane for trace in data for plane in trace.planes if "GPU" in plane.name), key=lambda p: p.name)
        events = [
            (event.name, event.duration_ns / 1e3)
            for plane in gpus[:1]  # all of a program's have the same kernels
            for line in (line for line in plane.lines if "Stream" in line.name)
            for event in line.events
        ]
    if not events:
        raise BenchError(f"--profile: jax's profiler saw no GPU kernels on {jax.devices()[0].device_kind}")
    return by_name(events, times)


def by_name(events: Iterable[tuple[str, float]], times: int) -> list[Row]:
    """Events of (name, microseconds), gathered by name without its numbers at the end."""
    spent, calls = defaultdict(float), defaultdict(int)
    for name, us in events:
        name = SUFFIX.sub("", name) or name
        spent[name] += us
        calls[name] += 1
    order = sorted(spent, key=spent.__getitem__, reverse=True)
    return [{"kernel": name, "us": spent[name] / times, "calls": calls[name] / times} for name in order]
