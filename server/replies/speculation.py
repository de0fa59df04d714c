"""Figures of speculation for one request, as vLLM reports them in `metrics.speculative_decoding`.

Invariant: the figures are sums over the request's completions, so a mean weighs every draft alike. A request for which
nothing was drafted has none. The version of the weights that made the text is beside them.
"""

from __future__ import annotations

from typing import Any

from jaxspec.config.request import RequestMetrics


class Speculation:
    """The drafts of a request so far: how many tokens they had, and how many of each were accepted."""

    def __init__(self):
        self.drafted = 0
        self.histogram: list[int] = []  # [j]: drafts of which exactly j tokens were accepted
        self.version: str | None = None  # until a completion has ended

    def add(self, metrics: RequestMetrics) -> None:
        """Count a completion that has ended."""
        self.version = metrics.weight_version
        if not metrics.drafted_tokens:
            return
        self.drafted += metrics.drafted_tokens
        before = self.histogram or [0] * len(metrics.acceptance_histogram)
        self.histogram = [a + b for a, b in zip(before, metrics.acceptance_histogram, strict=True)]

    @property
    def drafts(self) -> int:
        return sum(self.histogram)

    @property
    def accepted(self) -> int:
        """Draft tokens accepted."""
        return sum(tokens * count for tokens, count in enumerate(self.histogram))

    def fields(self) -> dict[str, Any]:
        """The fields `metrics` and `weight_version` of a response, where it has them."""
        version = {} if self.version is None else {"weight_version": self.version}
        if not self.drafted:
            return version
        figures = {
            "mean_acceptance_length": 1 + self.accepted / self.drafts,
            "draft_acceptance_rate": self.accepted / self.drafted,
            "acceptance_histogram": self.histogram,
            "num_spec_steps": self.drafts,
            "num_accepted_draft_tokens": self.accepted,
            "num_draft_tokens": self.drafted,
            "num_spec_tokens": len(self.histogram) - 1,
        }
        return {"metrics": {"speculative_decoding": figures}} | version
