"""Time to the first token of single prompts, and tokens per second of many at once, against the floor.

Offline, random weights unless --load-format says otherwise, random prompts that share nothing. For each length, prompts
are first served one after the other: the figure is the median time from a request's arrival to its first token. Then
prompts of that length are queued all at once, one new token each: the figure is their tokens over the time until the
last is done. The floor counts the model's arithmetic (causal attention at half, one row unembedded) and its bytes.

Memory is planned at the start, so no prompt should change the memory in use. A row has the growth over that row, and
the growth of the peak: the first row of a length can add the workspace of programs that had not run before, which the
plan includes. A note compares the peak with the plan.

With --profile the kernels of a single prompt are listed by name, each with the time that all its calls take.

With --attention-only a hybrid's prompts run once more, on the same shapes with full attention in every layer. That is
their cost without linear attention, all else being equal. Attention's share of the arithmetic says little of its time,
so it is measured.
"""

from __future__ import annotations

import argparse
import gc
from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxspec.bench import engines, floors, plots, profile, traffic
from jaxspec.bench.results import (
    BenchError,
    Column,
    Document,
    Result,
    Row,
    Table,
    counts,
    memory_facts,
    memory_growth,
)
from jaxspec.config.flags import add_value, natural, positive
from jaxspec.config.request import SamplingParams
from jaxspec.engine.engine import Engine

COLUMNS = (
    Column("length", "prompt"),
    Column("layers", "layers", width=14),
    Column("ttft_ms", "TTFT ms", ".2f"),
    Column("ttft_min_ms", "least", ".2f"),
    Column("ttft_max_ms", "most", ".2f"),
    Column("floor_ms", "floor ms", ".2f"),
    Column("ratio", "ratio", ".2f"),
    Column("tflops", "TFLOP/s", ".0f"),
    Column("batch", "at once"),
    Column("batch_tokens_per_s", "tok/s", ".0f"),
    Column("batch_floor_tokens_per_s", "floor tok/s", ".0f"),
    Column("batch_ratio", "ratio", ".2f"),
    Column("in_use_growth_mb", "in use + MB", ".1f"),
    Column("peak_growth_mb", "peak + MB", ".1f"),
)
TABLES = (
    Table("prefill: time to first token, and throughput of many prompts", COLUMNS),
    profile.table("prompt", COLUMNS[0]),
)
WARM_UPS = 2
PROFILED = 3  # prompts under the profiler
OWN, ATTENTION_ONLY = "own", "attention only"  # of a hybrid: its layers, or full attention in all of them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, value = parser.add_argument, partial(add_value, parser)
    add("--lengths", type=counts("1024,8192"), default="1024,8192", metavar="TOKENS,...", help="(%(default)s)")
    value("--repeats", positive, 7, "N", "single prompts timed for each length")
    said = "of all prompts queued at once together; 0 leaves that part out"
    value("--batched-tokens", natural, 65536, "TOKENS", said)
    add("--profile", action="store_true", help="also list the kernels of a single prompt (a GPU only)")
    said = "of a hybrid, time the same shapes with full attention in every layer as well, in a second engine"
    add("--attention-only", action="store_true", help=said)
    floors.add_arguments(parser)
    engines.add_arguments(parser)


def run(args: argparse.Namespace, result: Result) -> None:
    """Measure every length."""
    if args.profile:
        profile.require_gpu()
    requests = min(max(_batch(args, length) for length in args.lengths), 128)
    engine = engines.start(args, result, requests, lengths=(max(args.lengths), 1))
    if args.attention_only and not engine.model_config.recurrent:
        raise BenchError(f"--attention-only: {args.model} has no linear attention to compare with. Drop it")
    _lengths(args, result, engine, OWN if args.attention_only else None)
    _compare_with_plan(result, engine.runner.plan.total)
    if not args.attention_only:
        return
    del engine  # whose pages take most of the memory
    gc.collect()
    own = {row["length"]: row for row in result.rows}
    _lengths(args, result, engines.make(args, requests, alter=engines.attention_only), ATTENTION_ONLY)
    for row in result.rows[len(own) :]:
        times = row["ttft_ms"] / own[row["length"]]["ttft_ms"]
        said = f"prompts of {row['length']}: attention only takes {times:.2f} times as long as the model's own layers"
        if "batch" in row:
            rates = (each["batch_tokens_per_s"] for each in (row, own[row["length"]]))
            said += ", at once {:.0f} tokens/s against {:.0f}".format(*rates)
        result.note(said)


def _compare_with_plan(result: Result, planned: int) -> None:
    memory = memory_facts()
    result.fact(memory=memory)
    if "peak_bytes_in_use" in memory:
        most = memory["peak_bytes_in_use"] / 1e9
        result.note(f"at most {most:.2f} GB were in use, of {planned / 1e9:.2f} planned")


def _lengths(args: argparse.Namespace, result: Result, engine: Engine, layers: str | None) -> None:
    """A row for every length; `layers` says what the model is if there are two."""
    cost = floors.ModelCost.of(engine.runner.model, engines.kv_dtype(engine), engine.config.state_dtype)
    limits = floors.ceilings(args)
    prompts = Prompts(engine, np.random.default_rng(args.seed or 0))
    for length in tqdm(args.lengths, desc="prefill", unit="length", disable=None):
        size, flops = cost.prefill(length)
        floor = limits.seconds(size, flops)
        memory = memory_facts()
        row = {"length": length, "bytes": size, "flops": flops} | ({"layers": layers} if layers else {})
        row |= single(prompts, length, args.repeats)
        if args.profile:
            one_by_one = lambda: [prompts.serve(1, length) for _ in range(PROFILED)]  # noqa: B023, E731
            row["kernels"] = profile.kernels(one_by_one, PROFILED)
        row |= {"floor_ms": floor * 1e3, "ratio": row["ttft_ms"] / floor / 1e3, "tflops": flops / row["ttft_ms"] / 1e9}
        if count := _batch(args, length) if args.batched_tokens else 0:
            row |= batched(prompts, length, count)
            least = limits.seconds(cost.weight_bytes + count * length * cost.kv_bytes, count * flops)
            row["batch_floor_tokens_per_s"] = count * length / least
            row["batch_ratio"] = row["batch_floor_tokens_per_s"] / row["batch_tokens_per_s"]
        result.add(row | memory_growth(memory))
        if compiles := row["compiles"] + row.get("batch_compiles", 0):
            result.note(f"prompts of {length}: programs compiled while they were timed: {compiles}")


def _batch(args: argparse.Namespace, length: int) -> int:
    return max(args.batched_tokens // length, 1)


class Prompts:
    """Random prompts through an engine, for one new token each."""

    def __init__(self, engine: Engine, rng: np.random.Generator):
        self.engine, self._rng = engine, rng

    def serve(self, count: int, length: int) -> list[float]:
        """Queue `count` prompts at once and serve them; seconds to each one's first token.

        **Raises:** `RequestError` for a length that doesn't fit the engine.
        """
        engine = self.engine
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        gc.collect()
        ids, first = traffic.queue(engine, self._rng, count, length, params), {}
        while engine.busy:
            for delta in engine.step():
                if delta.metrics is not None:
                    first[delta.request_id] = delta.metrics.ttft
        return [first[each] for each in ids]


def single(prompts: Prompts, length: int, repeats: int) -> Row:
    """Figures of prompts served one after the other."""
    for _ in range(WARM_UPS):
        prompts.serve(1, length)
    before = prompts.engine.stats()["compiles_total"]
    times = [prompts.serve(1, length)[0] * 1e3 for _ in range(repeats)]
    return {
        "ttft_ms": float(np.median(times)),
        "ttft_min_ms": min(times),
        "ttft_max_ms": max(times),
        "ttft_each_ms": times,
        "compiles": prompts.engine.stats()["compiles_total"] - before,
    }


def batched(prompts: Prompts, length: int, count: int) -> Row:
    """Figures of `count` prompts queued at once."""
    if prompts.engine.config.skip_warmup:
        prompts.serve(count, length)
    before = prompts.engine.stats()["compiles_total"]
    times = prompts.serve(count, length)
    compiles = prompts.engine.stats()["compiles_total"] - before
    return {"batch": count, "batch_tokens_per_s": count * length / max(times), "batch_compiles": compiles}


def plot(document: Document, figure: Any) -> None:
    """Time to first token and batched throughput of the model itself against the prompt's length, with the floors."""
    own = [row for row in document["rows"] if row.get("layers") in (None, OWN)]
    rows = sorted(own, key=lambda row: row["length"])
    batched_rows = [row for row in rows if "batch" in row]
    time_axes, rate_axes = figure.subplots(1, 2)
    for axes, lines, keys, what in (
        (time_axes, rows, ("ttft_ms", "floor_ms"), "ms to first token"),
        (rate_axes, batched_rows, ("batch_tokens_per_s", "batch_floor_tokens_per_s"), "prompt tokens per second"),
    ):
        plots.curve(axes, lines, "length", keys[0], label="measured")
        plots.curve(axes, lines, "length", keys[1], "k--", label="floor")
        plots.against(axes, [row["length"] for row in lines], "prompt tokens", what)
