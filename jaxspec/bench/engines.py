"""Engines to measure: the server's flags, with defaults that suit a benchmark, and forced acceptance on top."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Container
from typing import Any

from jaxspec.bench import forced
from jaxspec.bench.imposed import Imposed
from jaxspec.bench.results import BenchError, Result, device_facts, memory_facts
from jaxspec.cache.paged import page_dtype
from jaxspec.checkpoint import Model, load_target, resolve
from jaxspec.compiling.ladder import ADAPTED, One
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.flags import add_engine_flags, engine_options
from jaxspec.drafters.loading import check_drafter, load_drafter
from jaxspec.engine.engine import Engine
from jaxspec.models.memory import PagedRows, Recurrence
from jaxspec.rounds.packing import fit
from jaxspec.rounds.programs import GREEDY, SAMPLED

# Speed doesn't depend on what the weights are; and a round that is measured has as many drafts as it was given
DEFAULTS = {"load_format": "dummy", "draft_policy": "fixed"}


def add_arguments(parser: argparse.ArgumentParser, without: Container[str] = (), **defaults: Any) -> None:
    """The engine's flags, but for the options in `without`; `defaults` take the place of a benchmark's."""
    add_engine_flags(parser, DEFAULTS | defaults, without=without)


def with_drafter(args: argparse.Namespace, draft: str, tp_size: int | None = None) -> argparse.Namespace:
    """The command line with this drafter in it, and over so many devices, if that is said; plain decoding, "none", has
    no numbers of drafts."""
    other = argparse.Namespace(**vars(args) | {"draft": draft} | ({"tp_size": tp_size} if tp_size else {}))
    if draft == "none":
        other.num_draft_tokens, other.num_steps, other.topk = None, None, 1
    return other


def start(
    args: argparse.Namespace, result: Result, requests: int, imposed: Imposed | None = None, **how: Any
) -> Engine:
    """The engine of the command line, as `make` makes it.

    Notes in `result` what the device is, how long the start took and what memory it left.
    """
    started = time.perf_counter()
    engine = make(args, requests, imposed, **how)
    result.fact(ready_s=time.perf_counter() - started, dtype=engine.runner.model.dtype, **device_facts())
    if imposed is not None:
        rates = imposed.of(engine.runner.draft.drafter.longest)
        result.fact(imposed=imposed.said, expected_accept_length=forced.expected_length(rates))
    stats = engine.stats()
    result.fact(memory_plan=stats["memory_plan"], paths=stats["paths"], memory=memory_facts())
    if stats["sums"] is not None:
        result.note(f"sums over the devices are made {stats['sums']}")
    return engine


def check(args: argparse.Namespace) -> None:
    """**Raises:** `ConfigError` or `CheckpointError` for options of the command line, or a drafter, that can't work,
    as far as no model has to be loaded to see it."""
    check_drafter(EngineConfig(**engine_options(args)))


def check_room(args: argparse.Namespace, prompt_len: int, output_len: int) -> None:
    """**Raises:** `BenchError` for requests that are longer than the context, before the engine starts."""
    found = resolve(args.model, args.revision, load_format=args.load_format)
    context = args.context_length or found.config.max_position
    if prompt_len + output_len > context:
        raise BenchError(
            f"prompts of {prompt_len} tokens and {output_len} new ones exceed the context of {context}; make them "
            "shorter, or raise --context-length"
        )


def make(
    args: argparse.Namespace,
    requests: int,
    imposed: Imposed | None = None,
    alter: Callable[[Model], Model] = lambda model: model,
    lengths: tuple[int, int] = (0, 0),
) -> Engine:
    """The engine of the command line, with slots for `requests` at once unless it says otherwise; `alter` is done to
    its model first. `lengths`: the most tokens of a prompt, and of its answer."""
    options = engine_options(args)
    options["max_running_requests"] = options["max_running_requests"] or requests
    if options["max_running_requests"] < requests:
        most = options["max_running_requests"]
        raise BenchError(f"--max-running-requests {most} is less than {requests} at once; raise it or leave it out")
    if imposed is not None:
        if args.draft == "none":
            raise BenchError(f"{imposed.said} needs a drafter; --draft is none. Name one, for example --draft ngram")
        options["num_draft_tokens"] = options["num_draft_tokens"] or imposed.drafts
    config = EngineConfig(**options)
    check_room(args, *lengths)
    model = alter(load_target(config))
    draft = load_drafter(config.draft, model, config)
    if imposed is not None:
        draft = forced.force(draft, imposed.of(draft.drafter.longest))
    return Engine(config, model, draft)


def compile_ahead(engine: Engine, temperature: float, concurrency: int, prompt_len: int | None = None) -> None:
    """Compile side by side what loads of at most so many requests need; `prompt_len` None: prompts of any lengths.

    A load would compile one program after the other: those of one request took Qwen3.5-397B 90 s over four H200s.
    """
    shapes, mode = engine.runner.shapes, SAMPLED if temperature else GREEDY
    requests = fit(concurrency, shapes.batches)  # and fewer, while prompts are served and as requests end
    least, largest = shapes.prefills[0], shapes.prefills[-1]
    if prompt_len is not None:
        blocks = -(-prompt_len // shapes.block)
        least, largest = (fit(min(blocks * count, largest), shapes.prefills) for count in (1, concurrency))

    def needed(one: One) -> bool:
        kind, size = one[0].removeprefix(ADAPTED), one[1]
        if kind == "prefill":
            return least <= size <= largest
        if kind in (f"round_{mode}", f"rounds_{mode}"):
            return size <= requests
        return kind in ("admit", f"first_{mode}")

    engine.runner.programs.warm_up(engine.runner.state, needed)


def attention_only(model: Model) -> Model:
    """A hybrid with full attention in place of its linear layers' mixing, with the weights of its first full layer.

    All else stays: embedding, MLPs or experts, head. What it says is meaningless.
    """
    decoder, weights = model.config.decoder, model.params["layers"]
    at = next(i for i, layer in enumerate(decoder.layers) if isinstance(layer.mixing.memory, PagedRows))
    alter = lambda layer: dataclasses.replace(layer, mixing=decoder.layers[at].mixing)  # noqa: E731
    decoder = dataclasses.replace(decoder, layers=tuple(map(alter, decoder.layers)))
    mixing = {"qkv", "qkvz", "ba", "conv", "decay_log", "decay_bias", "read_norm", "out", "q_norm", "k_norm"}
    attention = {name: weight for name, weight in weights[at].items() if name in mixing}
    apart = lambda layer: {name: weight for name, weight in layer.items() if name not in mixing}  # noqa: E731
    recurs = [isinstance(layer.mixing.memory, Recurrence) for layer in model.config.decoder.layers]
    weights = [apart(layer) | attention if each else layer for each, layer in zip(recurs, weights, strict=True)]
    config = dataclasses.replace(model.config, decoder=decoder)
    return dataclasses.replace(model, config=config, params={**model.params, "layers": weights})


def kv_dtype(engine: Engine) -> str:
    """The dtype of an engine's pages."""
    return page_dtype(engine.config.kv_cache_dtype, engine.config.dtype)
