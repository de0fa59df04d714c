"""Helpers of the kernels' tests: lowering for a Hopper GPU, closeness by norm, plain layers to compare with, times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.pallas import hopper

QWEN3_8B = dict(hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
PRODUCTS = {  # of a layer of Qwen3-8B: inputs, outputs, outputs that share an FP8 scale, kind
    "qkv": (4096, 6144, 128, "plain"),
    "out": (4096, 4096, 128, "added"),
    "gate, up": (4096, 24576, 32, "gated"),
    "down": (12288, 4096, 128, "added"),
}


def lowered(function: Callable, *given: Any, **named: Any) -> str:
    """The text of a function's program for CUDA; arguments may be shapes."""
    function = function if hasattr(function, "trace") else jax.jit(function)
    return function.trace(*given, **named).lower(lowering_platforms=("cuda",)).as_text()


def kernels(function: Callable, *given: Any, **named: Any) -> int:
    """How many kernels a function's program for CUDA calls."""
    return lowered(function, *given, **named).count("custom_call @mosaic_gpu")


def assert_close(got: Any, expected: Any, tolerance: float = 8e-3) -> None:
    """By norm: both round to eight bits at every stage, in different orders."""
    got, expected = (np.asarray(a, np.float64) for a in (got, expected))
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - expected) <= tolerance * np.linalg.norm(expected)


def switch_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace programs anew from here on, without kernels."""
    monkeypatch.setattr(hopper, "kernels_here", lambda: "switched off for the comparison")
    jax.clear_caches()


def seconds(function: Callable, *given: Any, rounds: int) -> float:
    """Time one of `rounds` calls in a row, once the first has compiled."""
    jax.block_until_ready(function(*given))
    begin = time.perf_counter()
    for _ in range(rounds):
        outs = function(*given)
    jax.block_until_ready(outs)
    return (time.perf_counter() - begin) / rounds
