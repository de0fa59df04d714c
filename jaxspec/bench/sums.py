"""Time of a sum over the devices of a host, by each way to make it, from 2 KB to 2 MB a device.

A layer whose weights are divided ends in such a sum twice. `psum` is XLA's: NCCL's kernel, or, with XLA_FLAGS set to
--xla_gpu_unsupported_use_all_reduce_one_shot_kernel=true, one of its own. `peers` is `pallas.collectives.peer_sum`,
through peers' memory. "+ norm" adds the residual stream, and makes what the next norm takes. A row is one size and way:
microseconds of one of many in a program, and of its kernels alone by the profiler; the largest difference from the sum
in float64, and whether all devices have the same bits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxspec.bench import plots, profile
from jaxspec.bench.results import Column, Document, Result, Row, Table, counts, device_facts
from jaxspec.config.flags import checked
from jaxspec.pallas.collectives import peer_sum
from jaxspec.parallel import peers, sharding

WIDTH = 4096  # columns, as many as the size has if it has fewer
REPEATS = 64  # sums in a program
RUNS = 20  # of the program; the median counts

TABLES = (
    Table(
        "sums over devices",
        (
            Column("kilobytes", "KB", "g"),
            Column("way", "way", "<16", 16),
            Column("us", "us", ".2f"),
            Column("kernels_us", "kernels us", ".2f"),
            Column("error", "error", ".1e"),
            Column("alike", "same bits"),
        ),
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    several = checked(int, "must be at least 2 devices", lambda count: count >= 2)
    add("--tp-size", type=several, default=2, metavar="N", help="devices (%(default)s)")
    add("--ways", choices=("all", "psum"), default="all", help="psum: that alone (%(default)s)")
    add("--kilobytes", type=counts("2,64,2048"), default="2,8,16,32,64,128,256,512,1024,2048", help="(%(default)s)")


def run(args: argparse.Namespace, result: Result) -> None:
    mesh = sharding.mesh_of(args.tp_size)
    opened, reason = peers.open_peers(mesh) if args.ways == "all" else (None, "not asked for")
    result.fact(**device_facts(), ranks=mesh.size, peers=reason or "each device reads the others' memory")
    if reason:
        result.note(f"no sums through peers' memory: {reason}")
    for size in args.kilobytes:
        for through in (None, opened and opened.peers)[: 1 + (opened is not None)]:
            if through and peer_sum.supported(*_shape(size), jnp.bfloat16):
                continue
            for normed in (False, True):
                way = ("peers" if through else "psum") + " + norm" * normed
                result.add({"kilobytes": size, "way": way} | _measured(mesh, through, normed, _shape(size)))


def _shape(kilobytes: int) -> tuple[int, int]:
    width = min(WIDTH, kilobytes * 512)
    return kilobytes * 512 // width, width


def operands(mesh: Mesh, parts: Array, x: Array, scale: Array) -> tuple[Array, Array, Array]:
    """Parts [n, r, d] one on each device, the residual stream and a norm's scale on all."""
    spread, same = (NamedSharding(mesh, spec) for spec in (PartitionSpec(sharding.AXIS), PartitionSpec()))
    return jax.device_put(parts, spread), jax.device_put(x, same), jax.device_put(scale, same)


def program(mesh: Mesh, through: peers.Peers | None, normed: bool, repeats: int) -> Callable:
    """The program of so many sums, one of the other's result. It takes `operands` and `through`; a result has an axis
    of devices."""
    spread, same = PartitionSpec(sharding.AXIS), PartitionSpec()

    def run(part, x, scale, through):
        part, made = part[0], ()
        with peers.known(through):
            for _ in range(repeats):
                made = peers.summed(part, x, scale) if normed else peers.summed(part)
                part = made[1].rows if normed else made
        return jax.tree.map(lambda y: y[None], made)

    given = spread, same, same, sharding.specs_of(through)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=given, out_specs=spread, check_vma=False))


def _measured(mesh: Mesh, through: peers.Peers | None, normed: bool, shape: tuple[int, int]) -> Row:
    rng = np.random.default_rng(0)
    parts, x, scale = (
        jnp.asarray(rng.standard_normal(of), jnp.bfloat16) for of in ((mesh.size, *shape), shape, shape[1])
    )
    given = operands(mesh, parts, x, scale)
    made = jax.tree.map(np.asarray, program(mesh, through, normed, 1)(*given, through))
    alike = all((each == each[:1]).all() for each in jax.tree.leaves(made))
    want = np.asarray(parts, np.float64).sum(0) + (np.asarray(x, np.float64) if normed else 0)
    error = float(np.abs((made[0] if normed else made).astype(np.float64) - want).max())
    small = jax.tree.map(lambda x: x * jnp.bfloat16(0), given)  # so that many sums don't overflow
    run = partial(program(mesh, through, normed, REPEATS), *small, through)
    row = {"us": _time(run) / REPEATS * 1e6, "error": error, "alike": bool(alike)}
    if jax.default_backend() == "gpu":
        found = profile.kernels(lambda: jax.block_until_ready([run() for _ in range(5)]), 5 * REPEATS)
        row["kernels_us"] = sum(kernel["us"] for kernel in found)
    return row


def _time(run: Callable) -> float:
    jax.block_until_ready(run())
    taken = []
    for _ in range(RUNS):
        began = time.perf_counter()
        outs = [run() for _ in range(5)]
        jax.block_until_ready(outs)
        taken.append((time.perf_counter() - began) / 5)
    return float(np.median(taken))


def plot(document: Document, figure: Any) -> None:
    axes = figure.subplots()
    for way in dict.fromkeys(row["way"] for row in document["rows"]):
        rows = [row for row in document["rows"] if row["way"] == way]
        plots.curve(axes, rows, "kilobytes", "us", label=way)
    plots.against(axes, [row["kilobytes"] for row in document["rows"]], "KB of a device", "us a sum")
