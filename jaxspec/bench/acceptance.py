"""Tokens a round and acceptance by position of many prompts, with intervals by bootstrap over the prompts.

Rounds of one text resemble one another, so prompts are drawn, not rounds: the interval says how much another sample of
as many prompts of the same kind might differ. A figure is a ratio of sums, as papers and engines compute it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxspec.bench.results import Column, Row
from jaxspec.config.request import RequestMetrics

RESAMPLES = 2000
LEVEL = 0.95
SPEEDUP = (
    Column("speedup", "speed-up", ".2f"),
    Column("speedup_low", "low", ".2f", 5),
    Column("speedup_high", "high", ".2f", 5),
)
COLUMNS = (
    Column("tokens_per_round", "tokens/round", ".2f"),
    Column("low", "low", ".2f", 5),
    Column("high", "high", ".2f", 5),
)


@dataclass(frozen=True)
class Counts:
    """Counts of one prompt, over all its turns: verify rounds, the tokens they yielded, and `stood[i]`, the rounds in
    which draft i and all before it were accepted."""

    rounds: int
    tokens: int
    stood: tuple[int, ...]

    @classmethod
    def of(cls, *turns: RequestMetrics) -> Counts:
        histogram = np.sum([each.acceptance_histogram for each in turns], axis=0)
        stood = tuple(int(histogram[i:].sum()) for i in range(1, len(histogram)))
        return cls(sum(each.verify_rounds for each in turns), sum(each.verified_tokens for each in turns), stood)


def figures(prompts: Iterable[Counts], seed: int = 0) -> Row:
    """`tokens_per_round` and `positions` (of all rounds, the share in which draft i and all before it stood), each with
    its `LEVEL` interval; None without a round. One prompt alone has no interval."""
    prompts = [counts for counts in prompts if counts.rounds]
    row: Row = {"prompts": len(prompts), "rounds": sum(counts.rounds for counts in prompts)}
    if not prompts:
        return row | {"tokens_per_round": None, "low": None, "high": None, "positions": [], "position_intervals": []}
    held = np.array([[counts.rounds, counts.tokens, *counts.stood] for counts in prompts], np.float64)
    total = held.sum(axis=0)
    shares = total[1:] / total[0]
    low, high = intervals(held, seed) if len(prompts) > 1 else (np.full_like(shares, np.nan),) * 2
    number = lambda value: None if np.isnan(value) else float(value)  # noqa: E731 - JSON has no NaN
    pairs = list(zip(map(number, low), map(number, high), strict=True))
    return row | {
        "tokens_per_round": float(shares[0]),
        "low": pairs[0][0],
        "high": pairs[0][1],
        "positions": shares[1:].tolist(),
        "position_intervals": pairs[1:],
    }


def speedup(plain: Row, mine: Row, seed: int = 0) -> Row:
    """How many times plain decoding's tokens a second: `speedup`, with its `LEVEL` interval.

    Both rows have `tokens_per_s` and `each`, the (tokens, seconds) of the same prompts, which are drawn in pairs. With
    N requests always running, tokens a second are N times the tokens over the sum of all requests' seconds.
    """
    ratio = mine["tokens_per_s"] / plain["tokens_per_s"]
    if len(plain["each"]) < 2:
        return {"speedup": ratio, "speedup_low": None, "speedup_high": None}
    held = np.concatenate([np.array(plain["each"], np.float64), np.array(mine["each"], np.float64)], axis=1)
    ratios = lambda sums: sums[..., 2] / sums[..., 3] * sums[..., 1] / sums[..., 0]  # noqa: E731
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(ratios(_resampled(held, seed)), [tail, 100 - tail]) / ratios(held.sum(axis=0)) * ratio
    return {"speedup": ratio, "speedup_low": float(low), "speedup_high": float(high)}


def _resampled(held: np.ndarray, seed: int) -> np.ndarray:
    """Sums of f64[prompts, figures] over as many prompts, drawn with replacement, `RESAMPLES` times."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(len(held), np.full(len(held), 1 / len(held)), RESAMPLES) @ held


def intervals(held: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Low and high ends of the columns of f64[prompts, 1 + figures] over the first, by the percentile bootstrap."""
    sums = _resampled(held, seed)
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(sums[:, 1:] / sums[:, :1], [tail, 100 - tail], axis=0)
    return low, high
