"""Latencies of callers: time to first token, time per token, gaps between rounds, whole requests, and their
percentiles.

TTFT runs from sending a request to its first output. TPOT is the rest of its time over the rest of its tokens. ITL are
the gaps between outputs, each of which holds all tokens of a round. E2E is the whole request.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxspec.bench.client import Reply
from jaxspec.bench.results import Column, Row, Table

KINDS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
FIGURES = ("mean", "p50", "p90", "p99")
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


def figures(replies: Iterable[Reply]) -> Row:
    """Tokens, their rate from the first request's start to the last one's end, and latencies in ms, by `KINDS`."""
    replies = [reply for reply in replies if reply.error is None]
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for reply in replies:
        times["e2e"].append(reply.ended - reply.sent)
        if reply.arrivals:
            times["ttft"].append(reply.arrivals[0] - reply.sent)
            times["itl"] += np.diff(reply.arrivals).tolist()
            if reply.output_tokens > 1:
                times["tpot"].append((reply.arrivals[-1] - reply.arrivals[0]) / (reply.output_tokens - 1))
    row: Row = {
        "completed": len(replies),
        "prompt_tokens": sum(reply.prompt_tokens for reply in replies),
        "output_tokens": sum(reply.output_tokens for reply in replies),
    }
    if replies:
        row["seconds"] = max(reply.ended for reply in replies) - min(reply.sent for reply in replies)
        row["output_tokens_per_s"] = row["output_tokens"] / row["seconds"]
        row["prompt_tokens_per_s"] = row["prompt_tokens"] / row["seconds"]
    for kind, seconds in times.items():
        for figure in FIGURES:
            row[f"{kind}_{figure}_ms"] = _figure(figure, seconds)
    return row


def _figure(figure: str, seconds: list[float]) -> float | None:
    if not seconds:
        return None
    return float(np.mean(seconds) if figure == "mean" else np.percentile(seconds, int(figure[1:]))) * 1e3
