"""The chain with FP8 weights: each stage in interpret mode, the whole by lowering it for CUDA, and its path."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.checkpoint import dummy
from jaxspec.decoder import weight_stream as streamed
from jaxspec.decoder.path import Call
from jaxspec.decoder.weight_stream import FP8_STREAM
from jaxspec.models import fp8
from jaxspec.models.families import MODELS
from jaxspec.models.weights import HALF, is_param
from jaxspec.pallas.dense import scaled, weight_stream
from jaxspec.pallas.dense.weight_stream import chain, stream_fp8, stream_part_fp8
from jaxspec.pallas.dense.weight_stream import fp8 as fp8_module
from jaxspec.pallas.dense.weight_stream.chain import GROUP
from jaxspec.pallas.dense.weight_stream.fp8 import BLOCK, Fp8
from tests.decoder.test_fp8_layers import check_layers, declared
from tests.pallas.dense.test_weight_stream import CUTS, EPS, parts_of, parts_reference, reference
from tests.support.kernels import assert_close, kernels
from tests.support.sample import one_in

UNITS = 128, 32, 64, 128  # outputs that share a scale, of each matmul
WIDER = dict(intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
INTERPRET = {"interpret": plgpu.InterpretGPUParams()}


def inputs(rows: int, d: int, f: int, n: int, seed: int = 0):
    """Residual stream, attention output, FP8 weights with scales, the weights themselves, and scales of the norms."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))  # noqa: E731
    quantised, whole = [], []
    for (outputs, width), unit in zip(((d, d), (2 * f, d), (d, f), (n, d)), UNITS, strict=True):
        values, scales = fp8.quantise_blocks(normal(outputs, width) * width**-0.5)
        scales = jnp.repeat(scales, BLOCK // unit, axis=0)[: outputs // unit]
        scales = scales * jnp.exp(0.5 * normal(*scales.shape))  # neighbours' differ, within a block of 128 as well
        scales = scales.at[0, -1].set(0).at[1, 0].set(0)
        quantised.append((values, scales))
        whole.append(fp8.dequantise(values, scales, BLOCK).T)
    x, mixed, *norms = (a.astype(jnp.bfloat16) for a in (normal(rows, d), normal(rows, d), normal(d), normal(d)))
    return x, mixed, quantised, whole, norms


def expected(x, mixed, whole, norms):
    """In float32: rounded weights would be others."""
    return reference(*jax.tree.map(lambda a: a.astype(jnp.float32), (x, mixed, whole, norms)))


@pytest.mark.exhaustive  # layers are below
@pytest.mark.parametrize("rows,width", [(40, 256), (9, 1024)])  # normed by one warpgroup, by two
def test_each_stage_matches_plain_layers(monkeypatch, rows, width):
    monkeypatch.setattr(chain, "BLOCKS", 3 if width > 256 else 1)  # fewer than items, so that each takes several
    x, mixed, weights, whole, norms = inputs(rows, width, 256, 256)
    got, partials = stream_fp8(x, mixed, weights, norms, eps=EPS, **INTERPRET)
    residual, logits = expected(x, mixed, whole, norms)
    assert_close(got, residual)
    assert_close(partials.sum(0), logits)


@pytest.mark.parametrize("rows,width", one_in(2, [8, 128], [512, 1024]))
def test_whole_chain_lowers_for_cuda(rows, width):
    x, mixed, weights, _, norms = jax.eval_shape(lambda: inputs(rows, width, 1024, 768))
    assert kernels(partial(stream_fp8, eps=EPS), x, mixed, weights, norms) == 1  # one kernel, whatever the stages


def expected_parts(x, mixed, whole, norms):
    return parts_reference(*jax.tree.map(lambda a: a.astype(jnp.float32), (x, mixed, whole, norms)))


@pytest.mark.exhaustive  # test_peer_sum.py has layers of them
def test_stages_between_two_sums_match_plain_layers(monkeypatch):
    monkeypatch.setattr(chain, "BLOCKS", 3)
    x, mixed, weights, whole, norms = inputs(40, 256, 256, 256)
    made = parts_of(x, mixed, weights, norms, stream_part_fp8, **INTERPRET)
    for partials, wanted in zip(made, expected_parts(x, mixed, whole, norms), strict=True):
        assert_close(partials.sum(0), wanted)


def test_stages_between_two_sums_lower_for_cuda():
    x, mixed, weights, _, norms = jax.eval_shape(lambda: inputs(40, 512, 1024, 768))
    assert kernels(partial(parts_of, part=stream_part_fp8), x, mixed, weights, norms) == len(CUTS)


@pytest.mark.parametrize("widths", [(4096, 4096), (4096, 24576), (12288, 4096), (4096, 6144), (2560, 2560)])
@pytest.mark.parametrize("rows", [8, 32, 128])
def test_share_out_keeps_every_block_busy(widths, rows):
    """The average block works at least four fifths of the time that the busiest block takes."""
    share = chain.share_out(*widths, rows, False, BLOCK, item=1)
    busiest = -(-share.items // chain.BLOCKS) * -(-share.steps // share.splits) * share.columns
    assert share.steps * share.outputs / chain.BLOCKS >= 0.8 * busiest
    assert Fp8(rows, rows, share.groups, 4096).weight_slots >= 4


def held(layout, shape):
    """Elements of an array that each warp, lane and register holds, by their index in the array."""
    places = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        lead, count = places.ndim - len(tile), range(len(tile))
        split = [n for size, part in zip(places.shape[lead:], tile, strict=True) for n in (size // part, part)]
        order = (*range(lead), *(lead + 2 * i for i in count), *(lead + 2 * i + 1 for i in count))
        places = places.reshape(*places.shape[:lead], *split).transpose(order)
    order = [places.ndim + axis for axis in (*layout.warp_dims, *layout.lane_dims)]
    rest = [axis for axis in range(places.ndim - 1) if axis not in order]
    return places.transpose(*order, *rest, places.ndim - 1).reshape(4, 32, -1, layout.vector_length)


def test_a_lane_has_gate_and_up_of_an_output():
    """Interpret mode doesn't see lanes: the order in which it puts a weight's rows is the one that registers have."""
    columns = 64
    rows = np.asarray(scaled._alternating(jnp.arange(GROUP)[:, None]))[:, 0]  # of the weight, by their place
    together = held(mgpu.WGMMA_LAYOUT, (GROUP, columns)).reshape(4, 32, columns // 8, 2, 2)
    half = mgpu.TiledLayout(Tiling(scaled.HALF_TILES), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
    own = held(half, (HALF, columns))
    for part in range(2):
        here = together[:, :, :, part]
        np.testing.assert_array_equal(rows[here // columns], own // columns + part * HALF)
        np.testing.assert_array_equal(here % columns, own % columns)


@pytest.mark.parametrize("width", [2048, 4096, 5120, 8192])
@pytest.mark.parametrize("rows", [16, 32, 96, 128])
def test_rings_fit(width, rows):
    form = Fp8(rows, rows, chain.MAX_GROUPS, width)
    weights, pieces = form.weight_slots * chain.MAX_GROUPS * GROUP * BLOCK, form.row_slots * rows * BLOCK
    assert form.weight_slots >= 4 and form.row_slots >= 5
    assert weights + pieces + chain.MAX_GROUPS * rows * 2 * HALF + 2 * width + form.sums_bytes <= chain.ROOM


def test_layers_are_those_of_the_plain_path(monkeypatch):
    monkeypatch.setattr(chain, "BLOCKS", 1)
    monkeypatch.setattr(fp8_module, "MIN_ROWS", 9)
    monkeypatch.setattr(weight_stream, "stream_fp8", partial(stream_fp8, **INTERPRET))
    check_layers(monkeypatch, "qwen3", FP8_STREAM, 3, **WIDER)


def test_what_is_not_for_it_is_named(monkeypatch):
    sizes = BLOCK, 4096, 4096, 128
    supported = weight_stream.fp8_supported
    assert supported(128, jnp.bfloat16, [sizes]) is None
    assert "129 rows" in supported(129, jnp.bfloat16, [sizes]) and "32 rows" in supported(32, jnp.bfloat16, [sizes])
    assert supported(33, jnp.bfloat16, [sizes]) is None
    assert "float32" in supported(96, jnp.float32, [sizes])
    assert "128 inputs each" in supported(96, jnp.bfloat16, [(None, *sizes[1:])])
    assert "16 outputs" in supported(96, jnp.bfloat16, [(*sizes[:3], 16)])
    assert "4096 x 192" in supported(96, jnp.bfloat16, [(BLOCK, 192, 4096, 64)])
    config, tensors = declared("qwen3", **WIDER)
    shape = lambda param: jax.eval_shape(lambda: dummy(param, "bfloat16", 0))  # noqa: E731
    layers = jax.tree.map(shape, tensors["layers"], is_leaf=is_param)
    call = Call(96, 1, "bfloat16", processors=132)
    refuses = lambda **other: FP8_STREAM.refuses(config.decoder, layers, dataclasses.replace(call, **other))  # noqa: E731
    assert refuses() is None
    assert refuses(inputs=(512,)) == "a layer by itself"
    assert refuses(processors=78) == "78 Hopper multiprocessors; 132 are needed"
    assert refuses(devices=2) == "96 rows in FP8 over 2 devices, which no GPU has timed"
    monkeypatch.setattr(streamed, "FP8_DEVICES", 2)
    assert refuses(devices=2) is None
    plain = jax.tree.map(shape, MODELS["qwen3"].tensors(config.decoder)["layers"], is_leaf=is_param)
    assert FP8_STREAM.refuses(config.decoder, plain, call) == "weights that aren't FP8"
