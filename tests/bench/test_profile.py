"""Kernels are counted by name; without a GPU there are none to count."""

import jax.numpy as jnp
import pytest

from jaxspec.bench import profile
from jaxspec.bench.results import BenchError


def test_calls_of_one_kernel_are_counted_together():
    events = [("fusion_1", 2.0), ("weight_stream_mosaic_gpu_kernel", 50.0), ("fusion.23", 4.0), ("12", 1.0)]
    assert profile.by_name(events, times=2) == [
        {"kernel": "weight_stream", "us": 25.0, "calls": 0.5},
        {"kernel": "fusion", "us": 3.0, "calls": 1.0},
        {"kernel": "12", "us": 0.5, "calls": 0.5},
    ]


def test_a_round_s_kernels_are_lines_that_add_up():
    kernels = [
        {"kernel": name, "us": us, "calls": 2.0} for name, us in (("a", 90.0), ("b", 6.0), ("c", 3.0), ("d", 1.0))
    ]
    lines = profile.lines({"concurrency": 8, "kernels": kernels}, "concurrency")
    assert [line["kernel"] for line in lines] == ["a", "b", "2 others, each less than 5 us", "all"]
    assert lines[-1] == {"concurrency": 8, "kernel": "all", "us": 100.0, "calls": 8.0, "share": 1.0, "each": 12.5}
    assert sum(line["us"] for line in lines[:-1]) == 100.0 and lines[0]["share"] == 0.9
    assert profile.lines({"concurrency": 8}, "concurrency") == []


def test_no_kernels_without_a_gpu():
    with pytest.raises(BenchError, match="saw no GPU kernels on cpu"):
        profile.kernels(lambda: jnp.arange(3).block_until_ready(), 1)
    with pytest.raises(BenchError, match="--profile lists GPU kernels, and this is a cpu"):
        profile.require_gpu()
