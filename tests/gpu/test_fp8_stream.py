"""The chain with FP8 weights on the device: its stages hand over through counters, which interpret mode can't run."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from jaxspec.decoder.weight_stream import FP8_STREAM
from jaxspec.pallas.dense.weight_stream import stream_fp8, stream_part_fp8
from tests.decoder.test_fp8_layers import declared
from tests.decoder.test_fp8_stream import EPS, expected, expected_parts, inputs
from tests.gpu.test_fp8_layers import QWEN3_8B, compare
from tests.pallas.dense.test_weight_stream import parts_of
from tests.support.kernels import assert_close

pytestmark = pytest.mark.gpu

ROWS = 9, 32, 64, 65, 128


@pytest.mark.parametrize("rows", [1, *ROWS])
@pytest.mark.parametrize("widths", [(512, 1024, 768), (2560, 9728, 6144), (4096, 12288, 6144)])
def test_chain_matches_plain_layers(rows, widths):
    """Narrow shapes leave blocks without work and hand over quickly: where a missing wait would show."""
    run = jax.jit(partial(stream_fp8, eps=EPS))
    for seed in range(1 if widths[0] > 512 else 3):
        x, mixed, weights, whole, norms = inputs(rows, *widths, seed=seed)
        got, again = run(x, mixed, weights, norms), run(x, mixed, weights, norms)
        with jax.default_matmul_precision("highest"):
            wanted = jax.jit(expected)(x, mixed, whole, norms)
        for ours, twice, theirs in zip((got[0], got[1].sum(0)), (again[0], again[1].sum(0)), wanted, strict=True):
            assert_close(ours, theirs)
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(twice))  # a missing wait would differ


@pytest.mark.parametrize("rows", [40, 64, 128])
@pytest.mark.parametrize("widths", [(512, 1024, 768), (4096, 6144, 3072), (8192, 7168, 2560)])
def test_stages_between_two_sums_match_plain_layers(rows, widths):
    """The last are a device's of Llama-70B over four."""
    x, mixed, weights, whole, norms = inputs(rows, *widths)
    run = jax.jit(partial(parts_of, part=stream_part_fp8))
    made, again = run(x, mixed, weights, norms), run(x, mixed, weights, norms)
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(expected_parts)(x, mixed, whole, norms)
    for partials, twice, theirs in zip(made, again, wanted, strict=True):
        assert_close(partials.sum(0), theirs)
        np.testing.assert_array_equal(np.asarray(partials), np.asarray(twice))


@pytest.mark.parametrize("requests", [33, 64, 65, 128])
def test_layers_of_qwen3_8b_are_those_of_the_plain_path(monkeypatch, requests):
    compare(monkeypatch, *declared("qwen3", **QWEN3_8B), requests, 1, FP8_STREAM, ["fp8_stream"])
