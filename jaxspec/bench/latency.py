"""Latencies of callers: time to first token, time per token, gaps between rounds, whole requests, and their
percentiles.

TTFT runs from sending a request to its first output. TPOT is the rest of its time over the rest of its tokens. ITL are
the gaps between outputs, each of which holds all tokens of a round. E2E is the whole request.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from jaxspec.bench.client import Reply
from jaxspec.bench.results import Column, Row, Table

KINDS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
FIGURES = ("mean", "p50", "p90", "p95", "p99", "max")
TABLE = Table(
    "latencies, ms",
    (
        Column("load", "load", "<26", 26),
        Column("kind", "time"),
        *(Column(figure, figure, ".2f") for figure in FIGURES),
    ),
    lambda row: [
        {"load": row["load"], "kind": title} | {figure: row[f"{kind}_{figure}_ms"] for figure in FIGURES}
        for kind, title in KINDS.items()
    ],
)


def figures(replies: Iterable[Reply], limits: Mapping[str, float] | None = None) -> Row:
    """Tokens, their rate from the first request's start to the last one's end, and latencies in ms, by `KINDS`.

    `limits`, in ms by kind: goodput counts the requests that keep all of them."""
    replies = [reply for reply in replies if reply.error is None]
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for reply in replies:
        for kind, seconds in _of(reply).items():
            times[kind].append(seconds)
        times["itl"] += np.diff(reply.arrivals).tolist()
    row: Row = {
        "completed": len(replies),
        "prompt_tokens": sum(reply.prompt_tokens for reply in replies),
        "output_tokens": sum(reply.output_tokens for reply in replies),
    }
    if replies:
        began = min(reply.sent for reply in replies)
        row["seconds"] = max(reply.ended for reply in replies) - began
        row["requests_per_s"] = len(replies) / row["seconds"]
        row["output_tokens_per_s"] = row["output_tokens"] / row["seconds"]
        row["prompt_tokens_per_s"] = row["prompt_tokens"] / row["seconds"]
        row["total_tokens_per_s"] = row["output_tokens_per_s"] + row["prompt_tokens_per_s"]
        row["peak_output_tokens_per_s"] = _peak(replies, began)
        row["mean_concurrency"] = sum(reply.ended - reply.sent for reply in replies) / row["seconds"]
        row["peak_concurrency"] = _most_at_once(replies)
        row["tokens_per_s_per_user"] = row["output_tokens_per_s"] / row["peak_concurrency"]
        if limits:
            row["good"] = sum(_keeps(reply, limits) for reply in replies)
            row["goodput_per_s"] = row["good"] / row["seconds"]
    for kind, seconds in times.items():
        for figure in FIGURES:
            row[f"{kind}_{figure}_ms"] = _figure(figure, seconds)
    return row


def _of(reply: Reply) -> dict[str, float]:
    """Seconds of one reply, by the kinds that it has."""
    seconds = {"e2e": reply.ended - reply.sent}
    if reply.arrivals:
        seconds["ttft"] = reply.arrivals[0] - reply.sent
        if reply.output_tokens > 1:
            seconds["tpot"] = (reply.arrivals[-1] - reply.arrivals[0]) / (reply.output_tokens - 1)
    return seconds


def _keeps(reply: Reply, limits: Mapping[str, float]) -> bool:
    """Whether a reply keeps all limits. A single token has no time per token; no output keeps no limit of a first."""
    seconds = {"ttft": float("inf"), "tpot": 0.0} | _of(reply)
    return all(seconds[kind] * 1e3 <= most for kind, most in limits.items())


def _peak(replies: list[Reply], began: float) -> float | None:
    """Most output tokens in one second, counted from the first request. A reply's tokens are spread over its outputs,
    since streams don't say how many tokens an output has."""
    tokens: Counter[int] = Counter()
    for reply in replies:
        for arrival in reply.arrivals:
            tokens[int(arrival - began)] += reply.output_tokens / len(reply.arrivals)
    return max(tokens.values(), default=None)


def _most_at_once(replies: list[Reply]) -> int:
    """Most requests that were being served at one time."""
    moves = sorted([(reply.sent, 1) for reply in replies] + [(reply.ended, -1) for reply in replies])
    return max(itertools.accumulate(change for _, change in moves))


def _figure(figure: str, seconds: list[float]) -> float | None:
    if not seconds:
        return None
    share = {"max": 100}.get(figure) or figure[1:]
    return float(np.mean(seconds) if figure == "mean" else np.percentile(seconds, int(share))) * 1e3
