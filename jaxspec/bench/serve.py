"""A server or an engine under load: callers' latencies, throughput, accept length, and programs compiled.

The server is a running one (--base-url), of jaxspec or any other with OpenAI's API, or `python -m server` started here
with the engine flags below and stopped at the end. The time from its start to the first answer of /health is `ready_s`
in the JSON. For each N of --concurrency, the dataset's prompts are sent as streams, at most N at a time: as soon as one
may (--request-rate inf), or at random times, that many a second on average (Poisson). Random prompts run to their full
length; questions end where the model ends them.

TTFT is the time to a request's first output, TPOT the rest of its time over the rest of its tokens, ITL the gaps
between outputs (a round's tokens come together), E2E the whole request. Means and percentiles are printed at the end.
With --via offline the prompts go through an engine in this process instead, at the same concurrency and times. With
--via both they go through a server first, and `of offline` is the share of the engine's throughput that HTTP reached.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from typing import Any

import numpy as np

from jaxspec.bench import datasets, engines, latency, plots, traffic
from jaxspec.bench.client import Client, Reply
from jaxspec.bench.results import BenchError, Column, Document, Result, Row, Table, counts, device_facts
from jaxspec.bench.spawn import running_server
from jaxspec.bench.traffic import Load
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.flags import add_engine_flags, checked, engine_options, positive
from jaxspec.config.options import flag, options_of
from jaxspec.engine.engine import Engine

COLUMNS = (
    Column("load", "load", "<26", 26),
    Column("completed", "requests"),
    Column("requests_per_s", "req/s", ".2f"),
    Column("goodput_per_s", "goodput/s", ".2f"),
    Column("output_tokens_per_s", "tok/s out", ".0f"),
    Column("peak_output_tokens_per_s", "peak", ".0f"),
    Column("total_tokens_per_s", "tok/s total", ".0f"),
    Column("tokens_per_s_per_user", "tok/s/user", ".1f"),
    Column("peak_concurrency", "most at once"),
    Column("accept_length", "accept len", ".2f"),
    Column("ttft_p50_ms", "TTFT p50", ".1f"),
    Column("ttft_p99_ms", "TTFT p99", ".1f"),
    Column("tpot_p50_ms", "TPOT p50", ".2f"),
    Column("tpot_p99_ms", "TPOT p99", ".2f"),
    Column("itl_p99_ms", "ITL p99", ".2f"),
    Column("e2e_p50_ms", "E2E p50", ".0f"),
    Column("compiles", "compiled"),
    Column("of_offline", "of offline", ".1%"),
)
TABLES = (Table("serve: requests under load, ms", COLUMNS), latency.TABLE)
WARM_UP = 4  # requests before the first load
VIA = "http", "offline", "both"
_rate = checked(float, "takes inf, or requests a second greater than 0", lambda rate: rate > 0)
_limits = checked(
    lambda text: {kind: float(most) for kind, _, most in (part.partition(":") for part in text.split(","))},
    "takes limits in ms greater than 0 of ttft, tpot or e2e, such as ttft:500,tpot:50",
    lambda limits: limits.keys() <= {"ttft", "tpot", "e2e"} and all(most > 0 for most in limits.values()),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    said = "of a running server (http://HOST:PORT, sent $JAXSPEC_API_KEY), whose first model or --model is asked"
    said += "; without it one is started"
    add("--base-url", "--url", dest="url", metavar="URL", help=said)
    said = "random prompts' token ids are below this; needed by a server that isn't jaxspec"
    add("--vocab-size", type=positive, metavar="N", help=said)
    said = "count requests within these limits too, each in ms, such as ttft:500,tpot:50,e2e:5000"
    add("--goodput", type=_limits, default={}, metavar="KIND:MS,...", help=said)
    add("--concurrency", type=counts("1,8,32"), default="128", metavar="N,N,...", help="most at once (%(default)s)")
    add("--request-rate", type=_rate, default=float("inf"), metavar="R", help="requests a second (%(default)s)")
    add("--via", choices=VIA, default="http", help="a server, an engine in this process, or both in turn (%(default)s)")
    datasets.add_arguments(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace, result: Result) -> None:
    """Every load over HTTP, then every load offline, as far as asked for."""
    if args.url and args.via != "http":
        raise BenchError(
            f"--via {args.via} needs the engine's flags: let the benchmark start the server, without --base-url"
        )
    options = engine_options(args)
    defaults = {name: default for name, (_, default, _) in options_of(EngineConfig).items()}
    given = [flag(name) for name in options.keys() - {"model", "seed"} if options[name] != defaults[name]]
    if args.url and given:
        raise BenchError(f"{min(given)} is an engine's flag, and the server of --base-url has its own: leave one out")
    options["max_running_requests"] = options["max_running_requests"] or max(args.concurrency)
    config = EngineConfig(**options)  # errors come before a server is started
    datasets.check(args)
    if not args.url:
        engines.check_room(args, *datasets.longest(args))
    loads = None
    if args.url:
        asyncio.run(over_http(args.url, args, result))
    elif args.via != "offline":
        with running_server(options) as (url, ready_s):
            result.fact(ready_s=ready_s)
            loads = asyncio.run(over_http(url, args, result))
    if args.via != "http":
        started = time.perf_counter()
        engine = Engine(config)
        if args.via == "offline":
            result.fact(ready_s=time.perf_counter() - started)
        offline(engine, args, loads or make_loads(args, engine.model_config.vocab_size), result)


async def over_http(url: str, args: argparse.Namespace, result: Result) -> list[Load]:
    """Send every load, the warm-up first; the loads, for whoever wants to compare.

    **Raises:** `BenchError` if the server can't be reached, or fails every request.
    """
    client = Client(url, os.environ.get("JAXSPEC_API_KEY"))
    try:
        models = await client.get("/v1/models")
        try:
            names = [each["id"] for each in models["data"]]
            first = names[0]
        except (KeyError, IndexError, TypeError) as error:
            raise BenchError(f"GET /v1/models names no model: {str(models)[:300]}") from error
        model = first if args.model == EngineConfig.model and args.model not in names else args.model
        if model not in names:
            raise BenchError(f"--model {model} isn't served at {url}; it has {', '.join(map(str, names))}")
        info = await _info(client)
        result.fact(url=url, served_model=model)
        if info is not None:
            result.fact(**{key: info[key] for key in ("devices", "versions", "engine", "draft")})
        vocab = args.vocab_size or (info and info["model_config"]["vocab_size"])
        if vocab is None and args.dataset in datasets.SYNTHETIC:
            raise BenchError(
                f"--dataset {args.dataset} draws token ids, and this server doesn't say how many there are: give "
                "--vocab-size"
            )
        loads = make_loads(args, vocab or 0)
        _check(await traffic.send(client, loads[0], model), result)
        for load in loads[1:]:
            before = info and (await client.get("/server_info"))["stats"]
            replies = await traffic.send(client, load, model)
            _check(replies, result)
            after = info and (await client.get("/server_info"))["stats"]
            row = _row("http", load, replies, args, before, after)
            result.add(row | ({"of_offline": None} if args.via == "both" else {}))
        if info is None:
            result.note("the server is not jaxspec's: its accept length and compiled programs are not known")
            return loads
        compiles = info["stats"]["compiles_total"]
        still = result.rows[-1]["compiles_total"]
        moved = f"MOVED from {compiles} to {still}" if still != compiles else f"stayed at {still}"
        result.note(f"the server's compile counter {moved} while it was under load")
        return loads
    finally:
        await client.close()


async def _info(client: Client) -> Row | None:
    """A jaxspec server's facts; None of any other server, which may have other facts under this path or none."""
    try:
        info = await client.get("/server_info")
    except BenchError:
        return None
    ours = isinstance(info.get("stats"), dict) and "compiles_total" in info["stats"] and "model_config" in info
    return info if ours else None


def make_loads(args: argparse.Namespace, vocab: int) -> list[Load]:
    """A warm-up, then a load for each concurrency."""
    take = datasets.source(args, vocab)
    params = datasets.params(args)
    loads = [Load.closed(take(WARM_UP), WARM_UP, params)]
    for concurrency in args.concurrency:
        prompts = take(args.num_prompts or 4 * concurrency)
        gaps = np.random.default_rng(args.seed or 0).exponential(1 / args.request_rate, len(prompts))
        loads.append(Load(prompts, np.cumsum(gaps).tolist(), concurrency, params))
    return loads


def offline(engine: Engine, args: argparse.Namespace, loads: list[Load], result: Result) -> None:
    """Run the loads through an engine of this process; if they went over HTTP, say what of its throughput that reached.

    **Raises:** `RequestError` for a prompt that doesn't fit the engine.
    """
    http = {row["concurrency"]: row for row in result.rows}
    result.fact(**device_facts())
    traffic.serve(engine, loads[0])
    for load in loads[1:]:
        before = engine.stats()
        replies = traffic.serve(engine, load)
        row = _row("offline", load, replies, args, before, engine.stats())
        if load.concurrency in http:
            row["of_offline"] = http[load.concurrency]["output_tokens_per_s"] / row["output_tokens_per_s"]
        result.add(row)


def _row(
    via: str, load: Load, replies: list[Reply], args: argparse.Namespace, before: Row | None, after: Row | None
) -> Row:
    """A load's figures; `before` and `after` are the engine's statistics around it, if the server gives any."""
    rate = args.request_rate
    finite = rate < float("inf")
    counted = {} if before is None else {"compiles_total": after["compiles_total"], **traffic.gained(before, after)}
    return {
        "load": f"{via} {load.concurrency}" + (f", {rate:g}/s" if finite else ""),
        "via": via,
        "concurrency": load.concurrency,
        "request_rate": rate if finite else None,
        "failed": sum(reply.error is not None for reply in replies),
        **counted,
        **latency.figures(replies, args.goodput),
    }


def _check(replies: list[Reply], result: Result) -> None:
    """Note failures. **Raises:** `BenchError` if nothing succeeded."""
    errors = [reply.error for reply in replies if reply.error is not None]
    if len(errors) == len(replies):
        raise BenchError(f"every request failed; the first: {errors[0]}")
    if errors:
        result.note(f"{len(errors)} of {len(replies)} requests failed and are in no figure; the first: {errors[0]}")
    silent = sum(reply.output_tokens > 1 and len(reply.arrivals) < 2 for reply in replies)
    if 2 * silent > len(replies):
        result.note(
            "most streams brought all their text at once, so TTFT, TPOT and ITL say nothing: a model without a "
            "tokenizer, or whose tokens have no text, sends none before the end"
        )


def plot(document: Document, figure: Any) -> None:
    """Throughput, time to first token and time per token against concurrency."""
    rate_axes, first_axes, token_axes = figure.subplots(1, 3)
    for via in ("http", "offline"):
        rows = [row for row in document["rows"] if row["via"] == via]
        if not rows:
            continue
        x = [row["concurrency"] for row in rows]
        plots.curve(rate_axes, rows, "concurrency", "output_tokens_per_s", label=via)
        for axes, kind in ((first_axes, "ttft"), (token_axes, "tpot")):
            colour = plots.curve(axes, rows, "concurrency", f"{kind}_p50_ms", label=f"{via}, median").get_color()
            label = f"{via}, 99th percentile"
            plots.curve(axes, rows, "concurrency", f"{kind}_p99_ms", "o:", color=colour, label=label)
    titles = ("output tokens per second", "ms to first token", "ms per output token")
    for axes, what in zip((rate_axes, first_axes, token_axes), titles, strict=True):
        plots.against(axes, x, "concurrency", what)
