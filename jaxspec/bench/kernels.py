"""Device kernels by themselves, against plain jax.numpy and the floor.

Each case calls its operation on the data of LAYERS different layers in one compiled program, as a model does, so that
no layer finds its operands in a cache. Short operations go through all layers several times, since a program must run
longer than its dispatch. The time is that of one call: the mean over the program's calls and many runs. `TB/s` counts
the bytes that must be read and written once, `TFLOP/s` the operations that must be done (causal attention at half).
`alone us` is the kernels' own time by the profiler, without the gaps between them. `ran` is the kernel that the
operation chose. `plain` is its reference in jax.numpy on the same data, `error` the largest difference between the two
over the largest value.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxspec.bench import floors, profile
from jaxspec.bench.cases import Case, make_cases
from jaxspec.bench.results import BenchError, Column, Document, Result, Row, Table, device_facts
from jaxspec.config.flags import positive
from jaxspec.pallas import portable
from jaxspec.pallas.hopper import KERNELS, kernels_here, with_requested_kernels

COLUMNS = (
    Column("case", "case", "<47", 47),
    Column("ran", "ran", width=16),
    Column("us", "us", ".1f"),
    Column("alone_us", "alone us", ".1f"),
    Column("tb_per_s", "TB/s", ".2f"),
    Column("tflops", "TFLOP/s", ".1f"),
    Column("floor_us", "floor us", ".1f"),
    Column("ratio", "ratio", ".2f"),
    Column("plain_us", "plain us", ".1f"),
    Column("error", "error", ".1e"),
)
TABLES = (Table("kernels: time of one call", COLUMNS),)
SHORTEST = 2e-3  # seconds of a program: dispatching one takes less
MOST_CALLS = 256  # of a program
PROFILED = 3  # runs of each program under the profiler


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", default="", metavar="TEXT", help="cases whose name holds this")
    add("--repeats", type=positive, default=30, metavar="N", help="runs of each program that are timed (%(default)s)")
    add("--no-plain", action="store_true", help="leave the comparison with plain jax.numpy out")
    add("--profile", action="store_true", help="also by jax's profiler: what the kernels take alone (NVIDIA GPUs)")
    add("--kernels", default="auto", choices=("auto", "portable", "plain"), help="as the engine's (%(default)s)")
    add("--small", action="store_true", help="tiny sizes in float32, to try the command out on a CPU")
    said = "compare the portable kernels, interpreted, with plain jax.numpy, on any machine; implies --small"
    add("--interpret", action="store_true", help=said)
    floors.add_arguments(parser)


@with_requested_kernels
def run(args: argparse.Namespace, result: Result) -> None:
    """Time every case, or interpret it.

    **Raises:** `BenchError` for cases that aren't there, or that this machine would take hours for.
    """
    with portable.interpreted() if args.interpret else nullcontext():
        _run(args, result)


def _run(args: argparse.Namespace, result: Result) -> None:
    args.small = args.small or args.interpret
    if not args.small and jax.default_backend() == "cpu":
        raise BenchError(
            "the kernels' full sizes take hours on a CPU: run this on a GPU, try it out with --small, or compare its "
            "kernels with --interpret"
        )
    result.fact(**device_facts())
    cases = [case for case in make_cases(args.small) if args.only in case.name]
    if not cases:
        names = ", ".join(case.name for case in make_cases(args.small))
        raise BenchError(f"--only {args.only}: no case has this in its name; there are {names}")
    limits, shortest = floors.ceilings(args), 0 if args.small else SHORTEST
    programs = compiled([prepared(case, limits, not args.no_plain, shortest) for case in cases])
    repeats = 1 if args.interpret else args.repeats
    for number, each in enumerate(tqdm(programs, desc="kernels", unit="case", disable=None)):
        result.add(measure(cases[number], each, repeats, limits, number, args.profile))
    if args.interpret:
        result.note("interpreted: errors are the kernels', times are the interpreter's")
    if args.small or (reason := kernels_here()):
        why = "--small" if args.small else reason
        result.note(
            f"layer matmuls and few rows' layers are left out ({why}): these kernels take full sizes, on a Hopper GPU"
        )


class Programs(NamedTuple):
    """Programs of a case, lowered or compiled: one makes its operands, one calls its operation, and if requested, one
    calls the plain operation."""

    build: Any
    kernel: Any
    plain: Any | None
    passes: int  # of the kernel's program through all layers
    ran: str


def prepared(case: Case, limits: floors.Ceilings, plain: bool, shortest: float = 0) -> Programs:
    """A case's programs, lowered. A program goes through the layers so often that it would last for `shortest` seconds
    at its floor."""
    key = jax.random.key(0)
    shapes, before = jax.eval_shape(case.build, key), KERNELS.copy()
    calls = round(shortest / limits.seconds(case.size, case.flops / case.speed))
    passes = max(1, min(calls, MOST_CALLS) // case.layers)
    kernel = lowered(case.op, shapes, case.layers, case.in_place, passes)
    ran = case.kernel or ", ".join(KERNELS - before) or "reference"
    compared = lowered(case.plain, shapes, case.layers, case.in_place) if plain else None
    return Programs(jax.jit(case.build).lower(key), kernel, compared, passes, ran)


def lowered(op: Callable, operands: Any, layers: int, in_place: bool = False, passes: int = 1) -> Any:
    """The program that has `passes` calls on each layer."""

    @partial(jax.jit, donate_argnums=1 if in_place else ())
    def program(shared, own):
        outs = []
        for _ in range(passes):
            # XLA would take the same operation of two passes once.
            shared, own, outs = jax.lax.optimization_barrier((shared, own, outs))
            for layer in range(layers):
                out = op(layer, shared, own)
                out, own = out if in_place else (out, own)
                outs.append(out)
        return outs, own if in_place else None

    return program.lower(*operands)


def compiled(programs: list[Programs]) -> list[Programs]:
    """Compile programs beside one another before any is timed: compiling takes longer than all the rest."""

    def of(each: Programs) -> Programs:
        plain = each.plain and each.plain.compile()
        return each._replace(build=each.build.compile(), kernel=each.kernel.compile(), plain=plain)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(tqdm(pool.map(of, programs), desc="compiling", total=len(programs), unit="case", disable=None))


def measure(
    case: Case, programs: Programs, repeats: int, limits: floors.Ceilings, seed: int, profiled: bool = False
) -> Row:
    """Time one case; with a plain program also its counterpart, and how far the two are apart."""
    operands = jax.block_until_ready(programs.build(jax.random.key(seed)))
    floor, calls = limits.seconds(case.size, case.flops / case.speed), programs.passes * case.layers
    seconds, out, alone = timed(programs.kernel, operands, calls, repeats, case.in_place, profiled)
    row = {
        "case": case.name,
        "group": case.group,
        "ran": programs.ran,
        "layers": case.layers,
        "bytes": case.size,
        "flops": case.flops,
        "us": seconds * 1e6,
        **({"alone_us": alone * 1e6} if profiled else {}),
        "tb_per_s": case.size / seconds / 1e12,
        "tflops": case.flops / seconds / 1e12,
        "floor_us": floor * 1e6,
        "ratio": seconds / floor,
    }
    if programs.plain is not None:
        fewer = max(repeats // 10, 1)
        plain_seconds, expected, _ = timed(programs.plain, operands, case.layers, fewer, case.in_place)
        difference = jnp.max(jnp.abs(out.astype(jnp.float32) - expected.astype(jnp.float32)))
        scale = jnp.max(jnp.abs(expected.astype(jnp.float32)))
        row |= {"plain_us": plain_seconds * 1e6, "error": float(difference / scale)}
    return row


def timed(
    compiled: Any, operands: Any, calls: int, repeats: int, in_place: bool = False, profiled: bool = False
) -> tuple[float, Any, float | None]:
    """Seconds of one of a program's `calls`, what the call on the first layer gave, and if `profiled`, seconds of its
    kernels alone. **Raises:** `BenchError` where the profiler sees no kernels."""
    shared, own = operands
    if in_place:
        own = jax.tree.map(jnp.copy, own)  # the caller's stays
    done = jax.block_until_ready(compiled(shared, own))
    first = done[0][0]

    def run(count):
        nonlocal own, done
        for _ in range(count):
            own, done = done[-1] if in_place else own, None  # elsewhere than these, results would need a new CUDA graph
            done = compiled(shared, own)
        jax.block_until_ready(done)

    run(1)
    began = time.perf_counter()
    run(repeats)
    seconds = (time.perf_counter() - began) / repeats / calls
    kernels = profile.kernels(partial(run, PROFILED), PROFILED * calls) if profiled else None
    return seconds, first, kernels and sum(kernel["us"] for kernel in kernels) / 1e6


def plot(document: Document, figure: Any) -> None:
    """Each case's time over its floor, the kernel's and plain jax.numpy's."""
    rows = document["rows"][::-1]
    axes = figure.subplots()
    figure.set_figheight(1.5 + 0.28 * len(rows))
    y = np.arange(len(rows))
    axes.barh(y, [row["ratio"] for row in rows], 0.6, label="kernel")
    marked = [(i, row["plain_us"] / row["floor_us"]) for i, row in enumerate(rows) if "plain_us" in row]
    if marked:
        axes.plot([x for _, x in marked], [i for i, _ in marked], "k|", markersize=10, label="plain jax.numpy")
    axes.axvline(1, color="k", linestyle="--", label="floor")
    axes.set(xscale="log", xlabel="time over the floor", yticks=y, yticklabels=[row["case"] for row in rows])
    axes.legend()
