"""Descriptions of rotary positions and of how they are scaled, frozen and without arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's rope frequency scaling (config.json `rope_scaling` / `rope_parameters`, rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (rope_type "linear")."""

    factor: float


@dataclass(frozen=True)
class Yarn:
    """YaRN (https://arxiv.org/abs/2309.00071, rope_type "yarn"): slow frequencies are divided by `factor`.

    Pairs that turn more than `beta_fast` times within the original context stay, those that turn fewer than `beta_slow`
    times are divided, and a ramp lies between, its ends rounded to whole pairs if `truncate`. Cosines and sines are
    multiplied by `attention_factor`.
    """

    factor: float
    original_max_position: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (https://arxiv.org/abs/2402.13753, rope_type "longrope"): each pair's frequency has a divisor.

    `short`: divisors of contexts up to `original_max_position`. `long`: of longer ones. `extended`: whether the context
    is longer, which `rope.of_context` decides. Cosines and sines are multiplied by `attention_factor`.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    attention_factor: float
    extended: bool

    @property
    def divisors(self) -> tuple[float, ...]:
        return self.long if self.extended else self.short


@dataclass(frozen=True)
class NoRotation:
    """No rotation at any position (NoPE, https://arxiv.org/abs/2305.19466): SmolLM3's and EXAONE 4's in some layers."""


@dataclass(frozen=True)
class Proportional:
    """Rotation of a head's first `pairs` of halves alone, by frequencies that count all pairs (Gemma 4's, rope_type
    "proportional"). Positions are divided by `factor`."""

    pairs: int
    factor: float = 1.0


@dataclass(frozen=True)
class Rope:
    """Rotary positions of base `theta`.

    `columns`: how many of each head's first columns rotate; None: all. `interleaved`: neighbours among them are a pair
    (GLM's), not the first half with the second. `sections`: how many pairs turn by a picture's frame, row and column,
    interleaved as in Qwen3-VL; None: all turn by the place in the text.
    """

    theta: float
    scaling: RopeScaling | LinearScaling | Yarn | LongRope | NoRotation | Proportional | None = None
    columns: int | None = None
    interleaved: bool = False
    sections: tuple[int, int, int] | None = None


# Rope tables are made outside of kernels: who implements one scaling implements all.
ROPE_SCALINGS: Mapping[type, frozenset[str]] = {
    RopeScaling: frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position"}),
    LinearScaling: frozenset({"factor"}),
    Yarn: frozenset({"factor", "original_max_position", "attention_factor", "beta_fast", "beta_slow", "truncate"}),
    LongRope: frozenset({"short", "long", "original_max_position", "attention_factor", "extended"}),
    NoRotation: frozenset(),
    Proportional: frozenset({"pairs", "factor"}),
}
