"""The chain of matmuls as one kernel: each stage in interpret mode, the whole by lowering it for CUDA."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.decoder.functions import rms_norm
from jaxspec.models.weights import HALF
from jaxspec.pallas.dense.weight_stream import BLOCKS, chain, stream, stream_part, supported
from jaxspec.pallas.dense.weight_stream.unquantised import TILE
from tests.support import drawn
from tests.support.kernels import assert_close, kernels
from tests.support.sample import rare

EPS = 1e-6


@pytest.fixture
def few_blocks(monkeypatch):
    """Fewer blocks than items, so that each takes several; interpreting a block takes a while, idle or not."""
    monkeypatch.setattr(chain, "BLOCKS", 3)


def inputs(rows: int, d: int, f: int, n: int, seed: int = 0):
    """Residual stream, attention output, weights and scales of a layer and the projection after it."""
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    draw = lambda *shape: drawn.normal(next(keys), shape)  # noqa: E731
    weights = [draw(*shape) * shape[0] ** -0.5 for shape in ((d, d), (d, 2 * f), (f, d), (d, n))]
    x, mixed = draw(rows, d), draw(rows, d)
    scales = [1 + 0.1 * draw(d) for _ in range(2)]
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16), (x, mixed, weights, scales))


def reference(x, mixed, weights, scales):
    """Reference in plain jnp, rounding to bfloat16 where the model's layers do."""
    out, gate_up, down, following = weights
    x = x + mixed @ out
    runs = (rms_norm(x, scales[0], EPS) @ gate_up).reshape(len(x), -1, 2, HALF)
    x = x + (jax.nn.silu(runs[:, :, 0]) * runs[:, :, 1]).reshape(len(x), -1) @ down
    return x, jnp.matmul(rms_norm(x, scales[1], EPS), following, preferred_element_type=jnp.float32)


@pytest.mark.parametrize("rows", [rare(24), 72])  # one warpgroup, two
def test_each_stage_matches_plain_layers(few_blocks, rows):
    x, mixed, weights, scales = inputs(rows, 256, 384, 256)
    got, partials = stream(x, mixed, weights, scales, eps=EPS, interpret=plgpu.InterpretGPUParams())
    expected, logits = reference(x, mixed, weights, scales)
    assert_close(got, expected)
    assert_close(partials.sum(0), logits)


CUTS = ("norm", "matmul"), ("matmul",), ("norm", "gated", "matmul")  # a divided layer's: between its two sums


def parts_of(x, mixed, weights, scales, part=stream_part, **given):
    """The partials of each of `CUTS`, the second of which is given attention's output."""
    out, gate_up, down, following = weights
    return [
        part(x, rows, of, norm, stages=stages, eps=EPS, **given)
        for stages, rows, of, norm in zip(
            CUTS, (None, mixed, None), ([following], [out], [gate_up, down]), (scales[1:], [], scales[:1]), strict=True
        )
    ]


def parts_reference(x, mixed, weights, scales):
    out, gate_up, down, following = weights
    runs = (rms_norm(x, scales[0], EPS) @ gate_up).reshape(len(x), -1, 2, HALF)
    return (
        rms_norm(x, scales[1], EPS) @ following,
        mixed @ out,
        (jax.nn.silu(runs[:, :, 0]) * runs[:, :, 1]).reshape(len(x), -1) @ down,
    )


@pytest.mark.exhaustive  # test_peer_sum.py has layers of them
def test_stages_between_two_sums_match_plain_layers(few_blocks):
    given = inputs(24, 256, 384, 256)
    made = parts_of(*given, interpret=plgpu.InterpretGPUParams())
    for partials, expected in zip(made, parts_reference(*given), strict=True):
        assert_close(partials.sum(0), expected)


def test_stages_between_two_sums_lower_for_cuda():
    shapes = jax.eval_shape(lambda: inputs(16, 512, 1024, 768))
    assert kernels(parts_of, *shapes) == len(CUTS)


@pytest.mark.parametrize("rows", [rare(1), 33, 128])
def test_whole_chain_lowers_for_cuda(rows):
    shapes = jax.eval_shape(lambda: inputs(rows, 512, 1024, 768))
    assert kernels(partial(stream, eps=EPS), *shapes) == 1  # one kernel, whatever the stages


@pytest.mark.parametrize(
    "widths", [(4096, 4096), (4096, 24576), (12288, 4096), (4096, 6144), (4096, 28672), (2048, 3072)]
)
def test_share_out_keeps_every_block_busy(widths):
    """The average block works at least nine tenths of the time that the busiest block takes, at few rows."""
    share = chain.share_out(*widths, 8, False, TILE, item=2)
    assert share.columns * share.tiles == share.outputs and share.columns % TILE == 0
    busiest = -(-share.items // BLOCKS) * -(-share.inputs // TILE // share.splits) * share.columns
    total = share.inputs // TILE * share.outputs
    assert total / BLOCKS >= 0.9 * busiest
    assert chain.share_out(*widths, 8, True, TILE, item=2).splits == 1


def test_what_cannot_run_is_named():
    assert supported(128, jnp.bfloat16, 4096, 6144) is None
    assert "129 rows" in supported(129, jnp.bfloat16, 4096)
    assert "8 rows" in supported(8, jnp.bfloat16, 4096)
    assert "576" in supported(16, jnp.bfloat16, 4096, 576)
    assert "float32" in supported(16, jnp.float32, 4096)
