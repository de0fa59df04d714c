"""Time of a round while N requests decode, and tokens per second, against the floor.

Offline, greedy unless --temperature says otherwise, random weights unless --load-format does, random prompts that
share nothing, no end tokens. For each N: N requests are queued at once, and rounds are timed while all N decode, from
the last first token until just before the first request ends. `ms/round` is the median over them, `mean` their mean,
`tok/s` what they yielded; `run tok/s` is all tokens over the whole run, prefill included. `context` is the mean number
of tokens that a request had, which the floor counts.

With --accept or --accept-rates drafts are accepted at a given rate whatever the model says, so that a round's cost is
measured apart from the drafter's quality. With --overlap both each N runs with overlap off and on, in the same engine.
With --back-to-back the compiled round program is also dispatched by itself, over the same contexts with nothing read:
`program` is its time per round, `engine` what the loop adds to it. With --skip-warmup the programs that these loads
need are compiled, no others. With --profile its kernels are listed by name, per round: how often each is called and
what all its calls take under jax's profiler, which adds a little to each.

With --lora each N runs without adapters, and then with as many random ones of rank --max-lora-rank, which requests
have in turn: `cost` is what a round takes more for them.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxspec.bench import engines, floors, imposed, plots, profile
from jaxspec.bench.results import BenchError, Column, Document, Result, Row, Table, counts, memory_facts
from jaxspec.bench.steady import Load, tell
from jaxspec.checkpoint import peft
from jaxspec.config.flags import natural, positive
from jaxspec.config.request import SamplingParams
from jaxspec.engine.engine import Engine

COLUMNS = (
    Column("concurrency", "requests"),
    Column("overlap", "overlap"),
    Column("adapters", "adapters"),
    Column("ms_per_round", "ms/round", ".3f"),
    Column("mean_ms", "mean", ".3f"),
    Column("tokens_per_s", "tok/s", ".0f"),
    Column("run_tokens_per_s", "run tok/s", ".0f"),
    Column("accept_length", "accept len", ".2f"),
    Column("context", "context", ".0f"),
    Column("floor_ms", "floor ms", ".3f"),
    Column("ratio", "ratio", ".2f"),
    Column("overlap_gain", "gain", "+.1%"),
    Column("adapter_cost", "cost", "+.1%"),
    Column("program_ms", "program", ".3f"),
    Column("engine_overhead", "engine", "+.1%"),
)
TABLES = (
    Table("decode: time per round, ms", COLUMNS),
    profile.table("round", COLUMNS[0]),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--concurrency", type=counts("1,8,32"), default="1,8,32,128", metavar="N,N,...", help="(%(default)s)")
    add("--prompt-len", type=positive, default=1024, metavar="TOKENS", help="of every request (%(default)s)")
    add("--output-len", type=positive, default=256, metavar="TOKENS", help="of every request (%(default)s)")
    add("--temperature", type=float, default=0.0, help="above 0 each token is sampled (%(default)s)")
    add("--overlap", choices=("on", "off", "both"), help="default: as --disable-overlap says")
    add("--lora", type=natural, default=0, metavar="N", help="also with so many adapters (%(default)s)")
    add("--back-to-back", action="store_true", help="also time the round program by itself")
    add("--profile", action="store_true", help="also list its kernels (a GPU only; implies --back-to-back)")
    imposed.add_arguments(parser)
    floors.add_arguments(parser)
    engines.add_arguments(parser)


def run(args: argparse.Namespace, result: Result) -> None:
    """Measure every concurrency, each with every overlap asked for.

    **Raises:** `RequestError` for a temperature that no request may have; `BenchError`; as `engines.start`.
    """
    SamplingParams(temperature=args.temperature)
    if args.profile:
        profile.require_gpu()
    if args.lora:
        if args.overlap == "both":
            raise BenchError("--lora compares rounds with and without adapters; drop --overlap both")
        args.enable_lora, args.max_loras = True, args.max_loras or args.lora
        args.max_lora_rank = args.max_lora_rank or 16
    lengths = args.prompt_len, args.output_len
    engine = engines.start(args, result, max(args.concurrency), imposed.imposed(args), lengths=lengths)
    adapters = random_adapters(engine, args.lora, args.max_lora_rank) if args.lora else []
    result.fact(width=engine.runner.width, kv_dtype=engines.kv_dtype(engine))
    modes = {"both": ("off", "on"), None: ("off" if args.disable_overlap else "on",)}.get(args.overlap, (args.overlap,))
    given = [(None,), adapters] if adapters else [(None,)]
    loads = [(count, mode, names) for count in args.concurrency for mode in modes for names in given]
    back_to_back = args.back_to_back or args.profile
    if engine.config.skip_warmup:
        engines.compile_ahead(engine, args.temperature, max(args.concurrency), args.prompt_len)
    rng = np.random.default_rng(args.seed or 0)
    before: Row = {}
    for count, mode, names in tqdm(loads, desc="decode", unit="load", disable=None):
        engine.config = dataclasses.replace(engine.config, disable_overlap=mode == "off")
        load = Load(engine, rng, count, args.prompt_len, args.temperature, names)
        if engine.config.skip_warmup:
            load.run(args.output_len)  # it may meet a program more
        gc.collect()
        adapted = len(adapters) if names is adapters else None
        row = {"concurrency": count, "overlap": mode, "adapters": adapted}
        row |= load.run(args.output_len, back_to_back, args.profile)
        row |= against_floor(engine, args, row)
        if args.overlap == "both":
            same = before.get("concurrency") == count and before["ms_per_round"] and row["ms_per_round"]
            row["overlap_gain"] = before["mean_ms"] / row["mean_ms"] - 1 if same else None
            before = row
        if args.lora:
            timed = adapted and before["ms_per_round"] and row["ms_per_round"]
            row["adapter_cost"] = row["ms_per_round"] / before["ms_per_round"] - 1 if timed else None
            before = row
        result.add(row)
        tell(result, f"concurrency {count}, overlap {mode}", row, args)
    result.fact(memory=memory_facts())


def random_adapters(engine: Engine, count: int, rank: int) -> list[str]:
    """Load so many adapters with random matrices for all modules that they may change; their names."""
    model, rng = engine.runner.model, np.random.default_rng(0)
    weights = peft.adaptable(model.family.tensors(model.config.decoder))
    shapes = {name: (param.shape[0], param.layout.splits[i]) for name, (param, i) in weights.items()}
    draw = lambda *shape: rng.normal(0, 0.01, shape).astype(np.float32)  # noqa: E731
    for number in range(count):
        matrices = {name: (draw(rank, inputs), draw(outputs, rank)) for name, (inputs, outputs) in shapes.items()}
        engine.adapters.put(peft.Adapter(f"random-{number}", "", rank, matrices))
    return [f"random-{number}" for number in range(count)]


def against_floor(engine: Engine, args: argparse.Namespace, row: Row) -> Row:
    """The floor of a round of this row, of one GPU's even share, and how many times that its median took."""
    cost = floors.ModelCost.of(engine.runner.model, engines.kv_dtype(engine), engine.config.state_dtype)
    if row["ms_per_round"] is None:
        return {"floor_ms": None, "ratio": None}
    size, flops = (
        each / engine.config.tp_size for each in cost.round(row["concurrency"], engine.runner.width, row["context"])
    )
    floor = floors.ceilings(args).seconds(size, flops) * 1e3
    return {"bytes": size, "flops": flops, "floor_ms": floor, "ratio": row["ms_per_round"] / floor}


def plot(document: Document, figure: Any) -> None:
    """Round time and tokens per second against the number of requests, with the floor."""
    time_axes, rate_axes = figure.subplots(1, 2)
    width = document["facts"]["width"]
    for mode in ("off", "on"):
        rows = [row for row in document["rows"] if row["overlap"] == mode and row["ms_per_round"]]
        if not rows:
            continue
        plots.curve(time_axes, rows, "concurrency", "ms_per_round", label=f"round, overlap {mode}")
        plots.curve(rate_axes, rows, "concurrency", "tokens_per_s", label=f"overlap {mode}")
    floor = {row["concurrency"]: row for row in document["rows"] if row["floor_ms"]}
    x = list(floor)
    plots.curve(time_axes, list(floor.values()), "concurrency", "floor_ms", "k--", label="floor")
    at_floor = [row["concurrency"] * row["accept_length"] / row["floor_ms"] * 1e3 for row in floor.values()]
    rate_axes.plot(x, at_floor, "k--", label="floor")
    verified = "1 row" if width == 1 else f"{width} rows"
    plots.against(time_axes, x, "requests", f"ms per round of {verified} a request")
    plots.against(rate_axes, x, "requests", "tokens per second")
