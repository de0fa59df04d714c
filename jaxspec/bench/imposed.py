"""Acceptance to impose on drafts, under jaxspec's names and those of vLLM and SGLang.

    --accept-rates 0.75,0.5                  of each draft, given that those before it were accepted
    --accept 3.24                            a mean of tokens a round, the bonus included
    --accept golden:qwen3.5-397b[:off]       the mean that InferenceX holds a model to, with thinking or without
    --synthetic-acceptance-length 3.24       vLLM's, the same mean
    --synthetic-acceptance-rates 0.75,0.375  vLLM's: of each draft and all before it
    SGLANG_SIMULATE_ACC_LEN=3.24             SGLang's, the same mean, in the environment

A mean of L tokens accepts floor(L) - 1 drafts in every round, and one more with the probability that is left, as vLLM's
schedule and SGLang's `match-expected` do.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jaxspec.bench.results import BenchError, numbers
from jaxspec.config.flags import add_value, checked

GOLDEN = "golden:"
LENGTH, METHOD = "SGLANG_SIMULATE_ACC_LEN", "SGLANG_SIMULATE_ACC_METHOD"


@dataclass(frozen=True)
class Imposed:
    """`said`: what asked for it. `of` gives each draft's rate, given those before it, by the number of drafts."""

    said: str
    of: Callable[[int], Sequence[float]]
    drafts: int | None = None  # that it is for

    @classmethod
    def mean(cls, said: str, length: float) -> Imposed:
        return cls(said, lambda drafts: schedule(said, length, drafts))


def schedule(said: str, length: float, drafts: int) -> list[float]:
    """Rates of so many drafts whose rounds have `length` tokens on average, and differ by one token at most.

    **Raises:** `BenchError` for a length that they can't have.
    """
    if not 1 <= length <= drafts + 1:
        raise BenchError(
            f"{said}: a round of {drafts} drafts has 1 to {drafts + 1} tokens; --num-draft-tokens sets them"
        )
    return [min(max(length - 1 - draft, 0.0), 1.0) for draft in range(drafts)]


@cache
def golden() -> dict[str, dict[str, Any]]:
    """The golden curves, by name."""
    return tomllib.loads(Path(__file__).with_name("golden.toml").read_text(encoding="utf-8"))


def _preset(said: str, name: str, thinking: str) -> Imposed:
    curve = golden()[name][thinking]

    def rates(drafts: int) -> Sequence[float]:
        if not 1 <= drafts <= len(curve) or not curve[drafts - 1]:
            known = ", ".join(str(i) for i, length in enumerate(curve, 1) if length)
            raise BenchError(f"{said} is measured with {known} drafts, not {drafts}; --num-draft-tokens sets them")
        return schedule(said, curve[drafts - 1], drafts)

    return Imposed(said, rates)


def accept(text: str) -> Imposed:
    """Read the value of `--accept`.

    **Raises:** `argparse.ArgumentTypeError` for one that isn't known.
    """
    if not text.startswith(GOLDEN):
        return Imposed.mean(f"--accept {text}", _length(text))
    name, _, thinking = text.removeprefix(GOLDEN).partition(":")
    if name not in golden():
        raise argparse.ArgumentTypeError(f"{text!r} is no golden curve; there are {', '.join(golden())}")
    modes = [mode for mode in golden()[name] if mode != "file"]
    if (thinking or "on") not in modes:
        raise argparse.ArgumentTypeError(f"{text!r}: {name} is measured with thinking {', '.join(modes)}")
    return _preset(f"--accept {text}", name, thinking or "on")


_length = checked(float, "takes golden:NAME or mean tokens a round of at least 1", lambda value: 1 <= value < 1e6)
_falling = checked(
    numbers(float, 0.0, 1.0, "0.75,0.5"),
    "takes rates from 0 to 1 that don't rise, each of a draft and all before it, such as 0.75,0.5",
    lambda rates: rates == sorted(rates, reverse=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("imposed acceptance, at most one").add_mutually_exclusive_group()
    rates = numbers(float, 0.0, 1.0, "0.75,0.5,0.25")
    said = "the probability of each draft, given that those before it were accepted; one rate a draft"
    add_value(group, "--accept-rates", rates, None, "P,P,...", said)
    said = "mean tokens a round; or golden:NAME, InferenceX's for a model, golden:NAME:off without thinking"
    add_value(group, "--accept", accept, None, "L|golden:NAME", said)
    add_value(group, "--synthetic-acceptance-length", _length, None, "L", "vLLM's name for --accept")
    said = "vLLM's: the probability of each draft and all before it"
    add_value(group, "--synthetic-acceptance-rates", _falling, None, "P,P,...", said)


def imposed(args: argparse.Namespace) -> Imposed | None:
    """Acceptance that the command line imposes, or else the environment.

    **Raises:** `BenchError` for a value or a method of SGLang's that isn't known.
    """
    if args.accept_rates is not None:
        return Imposed("--accept-rates", lambda drafts: args.accept_rates, len(args.accept_rates))
    if args.synthetic_acceptance_rates is not None:
        rates = args.synthetic_acceptance_rates
        given = [rate / before if before else 0.0 for rate, before in zip(rates, [1.0, *rates], strict=False)]
        return Imposed("--synthetic-acceptance-rates", lambda drafts: given, len(rates))
    if args.synthetic_acceptance_length is not None:
        length = args.synthetic_acceptance_length
        return Imposed.mean(f"--synthetic-acceptance-length {length:g}", length)
    if args.accept is not None:
        return args.accept
    if not (text := os.environ.get(LENGTH)):
        return None
    try:
        length = float(text)
    except ValueError as error:
        raise BenchError(f"{LENGTH}={text} must be a number: tokens a round, the bonus included") from error
    if (method := os.environ.get(METHOD, "match-expected")) != "match-expected":
        raise BenchError(f"{METHOD}={method} isn't known here; leave it out, or set it to match-expected")
    return Imposed.mean(f"{LENGTH}={text}", length) if length >= 0 else None  # below 0 it is off, as in SGLang
