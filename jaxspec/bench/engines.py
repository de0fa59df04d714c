"""Engines to measure: the server's flags, with defaults that suit a benchmark, and forced acceptance on top."""

from __future__ import annotations

import argparse
import time

from jaxspec.bench import forced
from jaxspec.bench.results import BenchError, Result, device_facts, memory_facts, numbers
from jaxspec.cache import claim_device
from jaxspec.checkpoint import load_model
from jaxspec.config import EngineConfig
from jaxspec.drafters import load_drafter
from jaxspec.engine import Engine
from jaxspec.flags import add_engine_flags, engine_options

DEFAULTS = {"load_format": "dummy"}  # speed doesn't depend on what the weights are


def add_accept_rates(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--accept-rates",
        type=numbers(float, 0.0, 1.0, "0.75,0.5,0.25"),
        metavar="P,P,...",
        help="accept the drafts at each position with this probability, given that those before it were accepted, "
        "whatever the model says; as many drafts as there are rates",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser, DEFAULTS)


def start(args: argparse.Namespace, result: Result, requests: int, rates: list[float] | None = None) -> Engine:
    """The engine of the command line, with slots for `requests` at once unless it says otherwise.

    Notes in `result` what the device is, how long the start took and what memory it left.
    """
    options = engine_options(args)
    options["max_running_requests"] = options["max_running_requests"] or requests
    if options["max_running_requests"] < requests:
        raise BenchError(f"--max-running-requests {options['max_running_requests']} is less than {requests} at once")
    if rates is not None:
        if args.draft == "none":
            raise BenchError("--accept-rates needs a drafter; --draft is none. Name one, for example --draft ngram")
        options["num_draft_tokens"] = options["num_draft_tokens"] or len(rates)
    config = EngineConfig(**options)
    started = time.perf_counter()
    claim_device()  # before the weights are made: it can't be done later
    model = load_model(
        config.model, config.dtype, load_format=config.load_format, revision=config.revision, seed=config.seed or 0
    )
    draft = load_drafter(config.draft, model, config)
    engine = Engine(config, model, draft if rates is None else forced.force(draft, rates))
    result.fact(ready_s=time.perf_counter() - started, **device_facts())
    result.fact(memory_plan=engine.stats()["memory_plan"], memory=memory_facts())
    return engine


def kv_dtype(engine: Engine) -> str:
    """What the cache holds, `auto` resolved."""
    config = engine.config
    return config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
