"""Adaptive drafting beside every fixed number of drafts and plain decoding, at one load after the other.

Offline, greedy, random weights unless --load-format says otherwise, random prompts. At each number of requests all of
them decode at once, and the settings take turns, there and back: plain, each number of drafts that the drafter's rounds
are compiled for, plain again, and adaptive. Each begins a turn at the same prompts, whose pages are cached, and ends it
after --output-len tokens a request. So all have the same contexts. Plain rounds are those of an engine without a
drafter, in the same state. Only programs that this needs are compiled; rounds are timed as at a server's start.

--accept-rates imposes acceptance: the probability of each draft, given that those before it were accepted. It may be
repeated, and each is measured. Rates with a slash between are mixed within a batch: requests have them by turns.
`tok/s` is what the rounds yield on average at those rates, so no luck is in it, only time: the median of a setting's
turns. `vs plain` and `vs best` are adaptive's over plain decoding's, and over those of the best fixed number. `again`
is plain decoding's over its own, and `spread` how far apart its fastest and slowest turn are.

The columns from `by choice` on compare what was chosen, apart from what held single rounds up: each of adaptive's
rounds counts as the median round of that number among the fixed settings', so all its tries are in it. Whatever else it
did, such as prompts that are computed anew, counts as it was.

With --rise-and-fall the number of requests then grows from the least to the most and shrinks again, so prompts are
among the rounds. Every setting runs through the same. Adaptive drafting has run through it once before, to learn, as it
does for --learn seconds before it is measured at a steady load.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxspec.bench import engines, forced, plots, traffic
from jaxspec.bench.forced import expected_length
from jaxspec.bench.meter import Meter
from jaxspec.bench.results import BenchError, Column, Document, Result, Row, Table, counts, device_facts, memory_facts
from jaxspec.checkpoint import load_target
from jaxspec.compiling.round_timing import time_rounds
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.flags import above_zero, add_value, checked, engine_options, from_zero, positive
from jaxspec.config.request import SamplingParams
from jaxspec.drafters.base import SkippedDrafter
from jaxspec.drafters.loading import load_drafter
from jaxspec.engine.engine import Engine
from jaxspec.rounds.packing import fit
from jaxspec.rounds.programs import GREEDY
from jaxspec.scheduling.draft_count import SKIP_DRAFTER, Chooser

AUTO = "auto"
AGAIN = "plain again"
SETTLING_STEPS = 3  # of a turn, after its prompts
SLICES = 4  # of a load's time in the rise and fall, and as many points in the chart

COLUMNS = (
    Column("rates", "acceptance", "<28", 28),
    Column("concurrency", "requests"),
    Column("plain", "plain", ".0f"),
    Column("fixed", "by drafts: tok/s", "<40", 40),
    Column("auto", "auto", ".0f"),
    Column("against_plain", "vs plain", "+.1%"),
    Column("against_best", "vs best", "+.1%"),
    Column("again", "again", "+.1%"),
    Column("spread", "spread", ".1%"),
    Column("choice_plain", "by choice: vs plain", "+.1%"),
    Column("choice_best", "vs best", "+.1%"),
    Column("drafts", "drafts", ".2f"),
    Column("ms", "ms/round", ".2f"),
)


STEADY, MOVING = "steady", "rise and fall"  # kinds of rows
TABLES = tuple(
    Table(title, COLUMNS, lambda row, kind=kind: [row] if row["kind"] == kind else [])
    for title, kind in (
        ("adaptive: tokens a second at the imposed acceptance", STEADY),
        ("while requests become more and fewer", MOVING),
    )
)
rates = checked(
    lambda text: [[float(rate) for rate in part.split(",")] for part in text.split("/")],
    "takes rates from 0 to 1 like 0.75,0.5,0.25, or several with slashes between",
    lambda lists: all(0 <= rate <= 1 for rates in lists for rate in rates),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, value = parser.add_argument, partial(add_value, parser)
    several = "1,2,4,8,16,32,64,128,256"
    add("--concurrency", type=counts("1,8,32"), default=several, metavar="N,N,...", help="(%(default)s)")
    value("--prompt-len", positive, 256, "TOKENS", "of every request")
    said = "impose acceptance: a rate a draft; with slashes, mixed within a batch; may be repeated"
    add("--accept-rates", type=rates, action="append", required=True, metavar="P,P,...[/P,P,...]", help=said)
    value("--output-len", positive, 128, "TOKENS", "of every request in a turn")
    value("--turns", positive, 4, "N", "of all settings, at each load")
    value("--learn", from_zero, 4.0, "S", "of adaptive drafting before the turns")
    value("--rise-and-fall", above_zero, None, "S", "and hold each load for so long, up and down again")
    defaults = {"draft_policy": "auto", "disable_structured_output": True}
    engines.add_arguments(parser, without=("skip_warmup", "few_programs"), **defaults)


def run(args: argparse.Namespace, result: Result) -> None:
    """Measure every load at every acceptance."""
    engine = _start(args, result)
    loads = [(mixed, count) for mixed in args.accept_rates for count in args.concurrency]
    for mixed, count in tqdm(loads, desc="adaptive", unit="load", disable=None):
        result.add(_steady(args, engine, mixed, count))
    for mixed in args.accept_rates if args.rise_and_fall else ():
        result.add(_rise_and_fall(args, engine, mixed))
    if args.rise_and_fall and len(set(args.concurrency)) == 1:
        only = args.concurrency[0]
        result.note(f"the load neither rose nor fell from {only} requests; --rise-and-fall needs more of --concurrency")
    if ended := sum(row.get("ended", 0) for row in result.rows):
        result.note(f"{ended} requests ended while others were measured; lower --output-len or raise --context-length")
    if later := engine.runner.compiles["compiles"] - engine.programs_before:
        result.note(f"programs compiled during the run: {later}; its times include that")
    if preempted := engine.stats()["preemptions_total"]:
        result.note(f"{preempted} preemptions: requests that had rested, if drafts paid again, or pages ran out")
    result.fact(memory=memory_facts())


class Setting(Chooser):
    """A chooser that keeps to one number of drafts, if `always` names it; as others do, it learns."""

    def __init__(self, longest, times, always: int | None = None, shared=()):
        super().__init__(longest, times, shared)
        self._always = always

    def choose(self, group, share, able=None):
        return super().choose(group, share, able) if self._always is None else self._always


def _start(args: argparse.Namespace, result: Result) -> Engine:
    """An engine with the programs for these loads alone, and those of plain decoding as rounds of `SKIP_DRAFTER`."""
    if args.draft == "none":
        raise BenchError("--draft none: adaptive drafting needs a drafter. Name one, for example --draft ngram")
    args.skip_warmup, args.few_programs = True, False
    began, options, most = time.perf_counter(), engine_options(args), max(args.concurrency)
    options["max_running_requests"] = options["max_running_requests"] or most
    first = args.accept_rates[0]
    options["num_draft_tokens"] = options["num_draft_tokens"] or len(first[0])
    config = EngineConfig(**options)
    engines.check_room(args, args.prompt_len, args.output_len)
    model = load_target(config)
    lists = math.lcm(*map(len, args.accept_rates))
    engine = Engine(
        config, model, forced.force_mixed(load_drafter(config.draft, model, config), lists // len(first) * first)
    )
    _prepare(engine, args.concurrency)
    engine.programs_before = engine.runner.compiles["compiles"]
    times = {f"{kind} {size}": times for (kind, size), times in engine.runner.round_times.items()}
    result.fact(ready_s=time.perf_counter() - began, round_times=times, **device_facts())
    gc.collect()
    gc.freeze()  # as a server does: looking through what was loaded takes half a second
    return engine


def _prepare(engine: Engine, requests: Sequence[int]) -> None:
    """Compile an engine's greedy programs for batches of so many requests, and time its rounds."""
    runner, programs = engine.runner, engine.runner.programs
    fewer = lambda sizes: tuple(sorted({fit(count, sizes) for count in requests} | {sizes[-1]}))  # noqa: E731
    narrower = tuple((drafts, fewer(sizes)) for drafts, sizes in runner.shapes.narrower)
    sizes = {"prefills": runner.shapes.prefills[-1:], "firsts": runner.shapes.firsts[-1:]}
    sizes |= {"batches": fewer(runner.shapes.batches), "seldom": fewer(runner.shapes.seldom)}
    shapes = dataclasses.replace(runner.shapes, narrower=narrower, **sizes)
    with_plain = narrower
    if SKIP_DRAFTER not in dict(narrower):
        with_plain = (SKIP_DRAFTER, narrower[0][1]), *narrower
        programs.add_rounds(SKIP_DRAFTER, SkippedDrafter())
    runner.shapes = programs.shapes = dataclasses.replace(shapes, narrower=with_plain)
    runner.narrower = dict(with_plain)
    programs.warm_up(runner.state, lambda one: GREEDY in one[0] or one[0] in ("admit", "prefill"))
    of = runner.plan.num_pages, engine.config.page_size, (GREEDY,), runner.by_request
    programs.shapes = shapes  # an engine that keeps drafts up has no plain rounds to choose from
    runner.state, runner.round_times = time_rounds(programs, runner.state, *of)
    programs.shapes = runner.shapes
    runner.reset()


def _lengths(engine: Engine, mixed: list[list[float]]) -> dict[int, float]:
    """Tokens that a round yields a request that runs, on average, by its drafts."""
    slots = [choice.seq.slot for request in engine.requests.values() for choice in request.choices]
    parts = [mixed[slot % len(mixed)] for slot in slots if slot >= 0] or mixed
    mean = lambda depth: sum(expected_length(part[:depth]) for part in parts) / len(parts)  # noqa: E731
    runner = engine.runner
    return {n: mean(runner.yields_of(n) - 1) for n in runner.drafts if n not in dict(runner.shapes.ragged)}


def _settings(engine: Engine, mixed: list[list[float]]) -> dict[str, tuple[Chooser, Meter]]:
    """By name, how drafts are chosen, and a meter. Plain decoding first, adaptive last."""
    runner = engine.runner
    longest = {n: runner.yields_of(n) - 1 for n in runner.drafts}
    of = lambda always=None: Setting(longest, runner.round_times, always, dict(runner.shapes.ragged))  # noqa: E731
    how = {
        "plain": of(SKIP_DRAFTER),
        **{str(n): of(n) for n in runner.drafts if n != SKIP_DRAFTER},
        AGAIN: of(SKIP_DRAFTER),
        AUTO: of(),
    }
    return {name: (each, Meter(engine, _lengths(engine, mixed))) for name, each in how.items()}


def _queue(engine: Engine, rng: np.random.Generator, count: int, prompt_len: int) -> list[str]:
    """Add requests that end no sooner than their context; their ids."""
    params = SamplingParams(temperature=0.0, max_tokens=engine.config.context_length - prompt_len, ignore_eos=True)
    return traffic.queue(engine, rng, count, prompt_len, params)


def _steady(args: argparse.Namespace, engine: Engine, mixed: list[list[float]], count: int) -> Row:
    """All settings by turns, there and back, while `count` requests decode."""
    forced.impose(engine, mixed)
    settings = _settings(engine, mixed)
    engine.chooser, learning = settings[AUTO][0], Meter(engine, {})
    ended = 0
    while learning.seconds < args.learn:
        ended += _begin_and_end(args, engine, mixed, count, learning)
    learned = _expected(engine, count)
    for turn in range(args.turns):
        for how, meter in _turn(list(settings.values()), turn):
            engine.chooser = how
            ended += _begin_and_end(args, engine, mixed, count, meter)
    engine.chooser = settings[AUTO][0]
    expected = {"expected_ms": {"learned": learned, "last": _expected(engine, count)}}
    return _row(STEADY, args, mixed, count, settings) | _by_choice(settings) | {"ended": ended} | expected


def _begin_and_end(args: argparse.Namespace, engine: Engine, mixed: list[list[float]], count: int, meter: Meter) -> int:
    """One turn of `count` requests, from their prompts on; how many ended before it did."""
    waiting = set(_queue(engine, np.random.default_rng(args.seed or 0), count, args.prompt_len))
    while waiting:  # for a first token
        waiting -= {delta.request_id for delta in engine.step()}
    for _ in range(SETTLING_STEPS):
        engine.step()
    meter.lengths = _lengths(engine, mixed)
    meter.turn(args.output_len)
    ended = count - len(engine.requests)
    traffic.end(engine)
    return ended


def _expected(engine: Engine, count: int) -> dict[str, dict[int, float]]:
    """Expected ms of rounds with `count` requests, by number of drafts, for each kind of program."""
    size = fit(count, engine.runner.shapes.batches)
    times = {kind: engine.chooser.times((kind, of)) for kind, of in engine.runner.round_times if of == size}
    return {kind: {n: seconds * 1e3 for n, seconds in each.items()} for kind, each in times.items()}


def _by_choice(settings: dict[str, tuple[Chooser, Meter]]) -> Row:
    """Adaptive drafting beside plain decoding and the best number, were each round the median of its number's."""
    meters = {name: meter for name, (_, meter) in settings.items()}
    took: dict[int, list[float]] = defaultdict(list)
    for name, meter in meters.items():
        for n, seconds in meter.took.items() if name != AUTO else ():
            took[n] += seconds
    each = {n: median(seconds) for n, seconds in took.items()}
    speed = {}
    for name, meter in meters.items():
        rested = Counter({SKIP_DRAFTER: meter.rested, 0: -meter.rested})
        rounds = {n: meter.rounds[n] + rested[n] for n in (SKIP_DRAFTER, *meter.rounds)}
        speed[name] = meter.tokens / (sum(each[n] * count for n, count in rounds.items() if count) + meter.other)
    best = max(rate for name, rate in speed.items() if name != AUTO)
    return {"choice_plain": speed[AUTO] / speed["plain"] - 1, "choice_best": speed[AUTO] / best - 1}


def _turn(settings: list, turn: int) -> list:
    """The order of a turn: there, back, and then from another one on. What ran before leaves the device hot or not."""
    start = turn // 2 * 2 % len(settings)
    order = settings[start:] + settings[:start]
    return order[::-1] if turn % 2 else order


def _rise_and_fall(args: argparse.Namespace, engine: Engine, mixed: list[list[float]]) -> Row:
    """Every setting by itself, from few requests to many and back; with its tokens over time."""
    forced.impose(engine, mixed)
    settings, course = _settings(engine, mixed), {}
    levels = [*sorted(args.concurrency), *sorted(args.concurrency)[-2::-1]]
    for name, (how, meter) in settings.items():
        engine.chooser = how
        if name == AUTO:
            _up_and_down(args, engine, mixed, levels, Meter(engine, {}))
        course[name] = list(_bins(_up_and_down(args, engine, mixed, levels, meter), args.rise_and_fall / SLICES))
    return _row(MOVING, args, mixed, max(levels), settings) | {"levels": levels, "course": course}


def _up_and_down(
    args: argparse.Namespace, engine: Engine, mixed: list[list[float]], levels: Sequence[int], meter: Meter
) -> list[tuple[float, float, int]]:
    """Hold each number of requests for `--rise-and-fall` seconds: the steps' ends, in seconds, tokens and drafts."""
    rng, running, began, steps = np.random.default_rng(args.seed or 0), [], time.perf_counter(), []
    note = lambda tokens, n: steps.append((time.perf_counter() - began, tokens, n))  # noqa: E731
    for level in levels:
        running += _queue(engine, rng, max(level - len(running), 0), args.prompt_len)
        for each in running[level:]:
            engine.abort(each)
        running = running[:level]
        for _ in range(SLICES):
            meter.lengths = _lengths(engine, mixed)
            meter.run(args.rise_and_fall / SLICES, note)
    traffic.end(engine)
    return steps


def _bins(steps: list[tuple[float, float, int]], seconds: float) -> Iterator[dict[str, float]]:
    """Tokens a second and mean drafts of a round, in bins of so many seconds."""
    for number, group in itertools.groupby(steps, key=lambda step: int(step[0] / seconds)):
        some = list(group)
        drafts = sum(n for _, _, n in some) / len(some)
        yield {"s": number * seconds, "tokens_per_s": sum(tokens for _, tokens, _ in some) / seconds, "drafts": drafts}


def _row(kind: str, args: argparse.Namespace, mixed: list[list[float]], count: int, settings: dict) -> Row:
    figures = {name: meter.figures() for name, (_, meter) in settings.items()}
    speed = {name: each["tokens_per_s"] for name, each in figures.items()}
    turns = figures["plain"]["turns"] + figures[AGAIN]["turns"]
    plain = median(turns or (speed["plain"], speed[AGAIN]))
    fixed = {name: rate for name, rate in speed.items() if name not in (AUTO, AGAIN, "plain")}
    return {
        "kind": kind,
        "rates": " / ".join(",".join(f"{rate:g}" for rate in _short(part)) for part in mixed),
        "concurrency": count,
        "plain": plain,
        "fixed": ", ".join(f"{name}: {rate:.0f}" for name, rate in fixed.items()),
        "auto": speed[AUTO],
        "against_plain": speed[AUTO] / plain - 1,
        "against_best": speed[AUTO] / max(plain, *fixed.values()) - 1,
        "again": speed[AGAIN] / speed["plain"] - 1,
        **({"spread": (max(turns) - min(turns)) / plain} if turns else {}),
        "drafts": figures[AUTO]["drafts"],
        "ms": figures[AUTO]["ms_per_round"],
        "settings": figures,
    }


def _short(part: list[float]) -> list[float]:
    """Rates without those at the end that repeat the one before."""
    return [rate for i, rate in enumerate(part) if i == 0 or part[i:] != [part[i - 1]] * (len(part) - i)]


def plot(document: Document, figure: Any) -> None:
    """For each acceptance: tokens a second against plain decoding's by requests, and below the rise and fall."""
    rows = [row for row in document["rows"] if row["kind"] == STEADY]
    moving = [row for row in document["rows"] if row["kind"] == MOVING]
    kinds = list(dict.fromkeys(row["rates"] for row in rows))
    grid = figure.subplots(2 if moving else 1, len(kinds), squeeze=False)
    for axes, kind in zip(grid[0], kinds, strict=True):
        some = sorted((row for row in rows if row["rates"] == kind), key=lambda row: row["concurrency"])
        x = [row["concurrency"] for row in some]
        for name in some[0]["settings"]:
            y = [row["settings"][name]["tokens_per_s"] / row["plain"] for row in some]
            axes.plot(x, y, "ko-" if name == AUTO else "--", label=f"{name} drafts" if name.isdigit() else name)
        plots.against(axes, x, "requests", "tokens a second / plain")
        axes.set_title(kind, fontsize="small")
    for axes, row in zip(grid[-1], moving, strict=False):
        for name, course in row["course"].items():
            plots.curve(axes, course, "s", "tokens_per_s", "k-" if name == AUTO else "--", label=name)
        axes.set(xlabel="seconds", ylabel="tokens a second")
        plots.from_zero(axes)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
