"""An engine under load, and where its time goes: requests always at hand, or arriving at random, step by step.

Offline: the engine's own loop, random weights unless --load-format says otherwise. For each N of --concurrency,
--num-prompts requests are served, a new one as soon as one of N ends (a closed loop). For each R of --request-rate they
arrive at random times, R a second on average (Poisson). R% is that share of what the last closed loop reached. Lengths
are numbers, or drawn: --prompt-len 64-512:9,8192:1. With --accept or --accept-rates drafts are accepted at a given
rate.

The timeline says what the device did: seconds for prompts, first tokens and rounds; `idle`, the share of time in which
it had nothing to do; `few`, rounds of at most half as many requests as the fullest had; padding. `of parts` of a closed
loop is the run's time over that of its parts: the same prompts by themselves, and as many full rounds as the tokens
need. At 100% nothing is lost between them.
TTFT, ITL and the others are as `serve` has them; `stall` is the longest gap between two outputs of any request.
With --trace a file for ui.perfetto.dev is written for each load, with a track for programs and one for each request.
"""

from __future__ import annotations

import argparse
import gc
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxspec.bench import datasets, engines, imposed, latency, spent, traffic
from jaxspec.bench.client import Reply
from jaxspec.bench.results import BenchError, Column, Document, Result, Row, Table, counts, memory_facts
from jaxspec.bench.traffic import Load
from jaxspec.config.flags import add_value, checked
from jaxspec.config.request import SamplingParams
from jaxspec.engine.engine import Engine
from jaxspec.engine.timeline import Recording, Timeline

COLUMNS = (
    Column("load", "load", "<26", 26),
    Column("completed", "requests"),
    Column("output_tokens_per_s", "tok/s out", ".0f"),
    Column("accept_length", "accept len", ".2f"),
    Column("of_parts", "of parts", ".1%"),
    Column("ttft_p50_ms", "TTFT p50", ".0f"),
    Column("ttft_p99_ms", "TTFT p99", ".0f"),
    Column("itl_p50_ms", "ITL p50", ".1f"),
    Column("itl_p99_ms", "ITL p99", ".1f"),
    Column("stall_ms", "stall", ".0f"),
    Column("compiles", "compiled"),
)
SPENT = (
    Column("load", "load", "<26", 26),
    Column("device_s", "seconds", ".2f"),
    Column("prompt_s", "prompts", ".2f"),
    Column("first_s", "first", ".2f"),
    Column("round_s", "rounds", ".2f"),
    Column("few_s", "of few", ".2f"),
    Column("idle_share", "idle", ".1%"),
    Column("prompts_alone_s", "prompts alone", ".2f"),
    Column("rounds_alone_s", "rounds alone", ".2f"),
    Column("prompt_programs", "prefills"),
    Column("rounds", "rounds"),
    Column("few_rounds", "of few"),
    Column("rows", "rows", ".1f"),
    Column("padded_rows_share", "padded", ".1%"),
    Column("padded_tokens_share", "padded tokens", ".1%"),
    Column("full_round_ms", "full round", ".2f"),
    Column("tokens_per_step", "tok/step", ".1f"),
    Column("host_step_ms", "host ms", ".2f"),
)
TABLES = (
    Table("load: requests under load, ms", COLUMNS),
    Table("where the device's time went, seconds and ms", SPENT),
    latency.TABLE,
)
ALONE = 48  # prompts timed by themselves, at most
REHEARSED = 64  # new tokens of a request before anything is timed, at most
_rates = checked(
    lambda text: text.split(","),
    "takes requests a second or shares, such as 5,10 or 70%,90%",
    lambda parts: all(float(part.removesuffix("%")) > 0 for part in parts),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    value = partial(add_value, parser)
    value("--concurrency", counts("1,8,32"), "128", "N,N,...", "closed loops")
    said = "also random arrivals: requests a second, or 70%% of what the last closed loop reached (none)"
    parser.add_argument("--request-rate", type=_rates, default=[], metavar="R,R,...", help=said)
    value("--trace", Path, None, "FOLDER", "write each load's timeline here, for ui.perfetto.dev")
    datasets.add_arguments(parser)
    imposed.add_arguments(parser)
    engines.add_arguments(parser)


def run(args: argparse.Namespace, result: Result) -> None:
    """Every closed loop, then all arrivals. Without warm-up their programs are compiled first, and met once."""
    datasets.check(args)
    most = max(args.concurrency)
    engine = engines.start(args, result, most, imposed.imposed(args), lengths=datasets.longest(args))
    take = datasets.source(args, engine.model_config.vocab_size)
    params = datasets.params(args)
    if engine.config.skip_warmup:
        alike = args.dataset == "random" and args.prompt_len.isdecimal()
        engines.compile_ahead(engine, args.temperature, most, int(args.prompt_len) if alike else None)
    rng, reached = np.random.default_rng(args.seed or 0), None
    loads = [(n, None) for n in args.concurrency] + [(most, rate) for rate in args.request_rate]
    for concurrency, rate in tqdm(loads, desc="load", unit="load", disable=None):
        count, starts = args.num_prompts or 4 * concurrency, None
        name = f"closed loop of {concurrency}"
        if rate is not None:
            share = rate.endswith("%")
            a_second = float(rate.removesuffix("%")) * (reached / 100 if share else 1)
            name = f"{a_second:.1f}/s" + f", {rate} of the loop" * share
            starts = np.cumsum(rng.exponential(1 / a_second, count)).tolist()
        if engine.config.skip_warmup:  # of what it meets, nothing is compiled when it counts
            prompts = take(min(count, 2 * concurrency))
            short = [min(each.output_len or REHEARSED, REHEARSED) for each in prompts]
            prompts = [datasets.replace(each, output_len=new) for each, new in zip(prompts, short, strict=True)]
            traffic.serve(engine, Load.closed(prompts, concurrency, params))
            alone_seconds(engine, take(min(count, ALONE)), 0, params)  # prompts by themselves need other programs
        at_once = concurrency if rate is None else count
        row, recording = measure(engine, name, Load(take(count), starts or [0.0] * count, at_once, params))
        if rate is None:
            reached = row["completed"] / row["seconds"]
        row |= {"concurrency": concurrency, "request_rate": rate}
        alone = alone_seconds(engine, take(min(count, ALONE)), row["prefilled_tokens"], params)
        parts = row["device_s"] / (alone + row["rounds_alone_s"]) if rate is None else None
        row |= {"prompts_alone_s": alone, "of_parts": parts}
        result.add(row)
        tell(result, row, args)
        if args.trace is not None:
            args.trace.mkdir(parents=True, exist_ok=True)
            file = args.trace / f"{name.replace('/', ' per ')}.json"
            file.write_text(json.dumps(recording.trace()))
    result.fact(memory=memory_facts())


def measure(engine: Engine, name: str, load: Load) -> tuple[Row, Recording]:
    """Serve a load under a timeline.

    **Raises:** `BenchError` for a load in which no round ran.
    """
    before = engine.stats()
    replies, recording = _recorded(engine, load)
    shapes = engine.runner.shapes
    row = {"load": name} | latency.figures(replies) | spent.figures(recording, shapes.block, shapes.rounds)
    if row["full_round_ms"] is None:
        raise BenchError(f"{name}: no round ran, so there is nothing to say; raise --output-len")
    gaps = [gap for reply in replies for gap in np.diff(reply.arrivals)]
    row |= {"stall_ms": float(max(gaps, default=0.0)) * 1e3, **traffic.gained(before, engine.stats())}
    return row | {"truncated": recording.full, "bins": spent.bins(recording)}, recording


def _recorded(engine: Engine, load: Load) -> tuple[list[Reply], Recording]:
    timeline = Timeline(engine)
    gc.collect()
    timeline.start()
    try:
        replies = traffic.serve(engine, load)
    finally:
        recording = timeline.stop()
    return replies, recording


def alone_seconds(engine: Engine, prompts: list[datasets.Prompt], tokens: int, params: SamplingParams) -> float:
    """Seconds that `tokens` prompt tokens take by themselves, from these prompts, all at once, one new token each."""
    prompts = [datasets.replace(prompt, output_len=1) for prompt in prompts]
    compiled = engine.stats()["compiles_total"]
    programs = _recorded(engine, Load.closed(prompts, len(prompts), params))[1].programs
    if engine.stats()["compiles_total"] > compiled:  # its time would count as theirs
        engine.flush_cache()
        programs = _recorded(engine, Load.closed(prompts, len(prompts), params))[1].programs
    return (programs[-1].ended - programs[0].called) / max(sum(p.tokens for p in programs), 1) * tokens


def tell(result: Result, row: Row, args: argparse.Namespace) -> None:
    """Note in `result` why a row may mislead."""
    if row["preemptions"]:
        result.note(f"{row['load']}: {row['preemptions']} preemptions, because there are too few KV pages for it")
    if row["compiles"]:
        result.note(f"{row['load']}: programs compiled meanwhile: {row['compiles']}; its times include that")
    if row["truncated"]:
        result.note(f"{row['load']}: the timeline was full before its end; lower --num-prompts {args.num_prompts}")


def plot(document: Document, figure: Any) -> None:
    """For each load what the device did over time, above its requests and tokens a second."""
    rows = [row for row in document["rows"] if row["bins"]]
    figure.set_size_inches(5.5 * max(len(rows), 2), 6)
    axes = figure.subplots(2, len(rows), squeeze=False)
    for i, row in enumerate(rows):
        spent.draw(row, (axes[0][i], axes[1][i]))
