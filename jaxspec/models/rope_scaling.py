"""Descriptions of how rotary positions are scaled, frozen and without arrays, as `description.Rope` has them."""

from __future__ import annotations

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
