"""The command line's engine flags: one per field of `EngineConfig`, for server, benchmarks and trainer.

Invariant: flags are generated from the dataclass; `ENGINE_HELP` adds words only, so the two can't drift.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from jaxspec.config import EngineConfig, flag

# what most people set, which --help shows first
COMMON = ("model", "draft", "dtype", "context_length", "max_running_requests", "mem_fraction_static")

# group -> field -> (metavar, help); None as metavar: on or off
ENGINE_HELP: dict[str, dict[str, tuple[str | None, str]]] = {
    "model": {
        "model": ("M", "hub id, folder, .gguf file, or smollm2-135m-instruct, the demo"),
        "revision": ("REV", "branch, tag or commit of a hub id"),
        "dtype": ("TYPE", "of weights and activations: auto, float32, bfloat16 or float16"),
        "load_format": ("FORMAT", "auto, or dummy for random weights made from the config alone"),
        "context_length": ("TOKENS", "most tokens of prompt and output together"),
        "seed": ("N", "of dummy weights, and of requests that give none"),
    },
    "speculation": {
        "draft": (
            "D",
            "none, auto (the best that fetches nothing), a method (ngram, mtp, standalone, eagle, eagle3, dflash), "
            "method:path_or_id, a path or hub id, or module:Class",
        ),
        "num_steps": ("S", "how deep drafts go; of a chain, the same as --num-draft-tokens"),
        "topk": ("K", "drafts that may follow one token: above 1 they are a tree (eagle and eagle3 draft such)"),
        "num_draft_tokens": ("N", "most tokens drafted per request and round, the whole tree's"),
        "ngram_min": ("N", "shortest match of the last tokens that the ngram drafter takes"),
        "ngram_max": ("N", "longest match that it tries"),
    },
    "memory and batching": {
        "max_running_requests": ("N", "request slots, so also the largest decode batch"),
        "mem_fraction_static": ("SHARE", "share of device memory for weights, caches and states together"),
        "max_total_tokens": ("TOKENS", "tokens in the page pool; overrides what --mem-fraction-static gives"),
        "kv_cache_dtype": ("TYPE", "of keys and values; auto is --dtype's, fp8 holds twice as many tokens"),
        "page_size": ("TOKENS", "tokens per KV page"),
        "chunked_prefill_size": ("TOKENS", "most prompt tokens in one program"),
        "state_dtype": ("TYPE", "of linear attention's states: float32 or bfloat16"),
        "max_state_snapshots": (
            "N",
            "states of linear attention kept after cached prefixes; 0: none, so no prefix hits",
        ),
        "state_snapshot_interval": ("TOKENS", "prompt tokens between two of them, in whole pages"),
        "disable_prefix_cache": (None, "don't share the KV of common prefixes"),
    },
    "running": {
        "num_continuous_decode_steps": ("K", "rounds in one program while none can be taken in; pays for small models"),
        "disable_overlap": (None, "read each round's result before the next is dispatched"),
        "disable_structured_output": (None, "refuse requests with a grammar: fewer programs to compile"),
        "skip_warmup": (None, "compile on first use instead of at start"),
        "few_programs": (None, "compile for one batch size: ready sooner, slower at low load"),
        "decode_log_interval": ("ROUNDS", "rounds between two decode log lines; 0 turns them off"),
    },
}


def add_engine_flags(
    parser: argparse.ArgumentParser,
    defaults: Mapping[str, Any] | None = None,
    common: argparse._ArgumentGroup | None = None,
) -> None:
    """Give `parser` a flag per field of `EngineConfig`; `defaults` take the place of the dataclass's own.

    Those in `COMMON` go to the group `common`, if there is one.
    """
    hints = typing.get_type_hints(EngineConfig)
    settled = {field.name: field.default for field in dataclasses.fields(EngineConfig)} | dict(defaults or {})
    for title, entries in ENGINE_HELP.items():
        titled = parser.add_argument_group(title)
        for name, (metavar, text) in entries.items():
            group = common if common is not None and name in COMMON else titled
            default = settled[name]
            if metavar is None:
                group.add_argument(flag(name), action="store_true", default=default, help=f"{text} (default: off)")
                continue
            shown = "chosen from model and machine" if default is None else default
            shown = "none" if name in ("revision", "seed") else shown
            help_text = f"{text} (default: {shown})"
            group.add_argument(flag(name), type=_plain(hints[name]), default=default, metavar=metavar, help=help_text)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """What of the command line is the engine's: keyword arguments of `LLM` and `AsyncLLM`."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(EngineConfig)}


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    return _at_least(text, 1)


def natural(text: str) -> int:
    """An argparse type: an integer of at least 0."""
    return _at_least(text, 0)


def _at_least(text: str, low: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if value < low:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {low}, got {text!r}")
    return value


def _plain(hint: Any) -> type:
    """`int | None` -> int: None is a default, not something to type."""
    if isinstance(hint, types.UnionType):
        (hint,) = (arm for arm in typing.get_args(hint) if arm is not type(None))
    return hint
