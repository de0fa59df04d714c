"""The prompt kernel, interpreted, against the reference; and its lowering for CUDA, which needs no GPU."""

import itertools
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.models.positions import Chunks
from jaxspec.pallas.attention.paged_attention import paged_attention
from jaxspec.pallas.attention.prompt_attention import prompt_attention, supported
from tests.support.kernels import kernels, lowered
from tests.support.sample import rare

BF16, FP8 = jnp.bfloat16, jnp.float8_e4m3fn
LAYERS, LAYER = 2, 1


def blocks(rng, t, page_size, prompts, padding):
    """Divide `prompts`, pairs (cached prefix, new tokens), into blocks over shuffled pages. Returns how many pages,
    each prompt's pages and end, and each block's pages and start."""
    ends = [prefix + -(-new // t) * t for prefix, new in prompts]
    used = [-(-end // page_size) for end in ends]
    pages = 1 + sum(used)
    ids = np.split(rng.permutation(np.arange(1, pages)), np.cumsum(used)[:-1])
    rows = [np.pad(mine, (0, max(used) + 1 - len(mine))) for mine in ids]
    starts = [range(prefix, end, t) for (prefix, _), end in zip(prompts, ends, strict=True)]
    table = np.repeat(rows, [len(each) for each in starts], axis=0)
    table = np.pad(table, ((0, padding), (0, 0))).astype(np.int32)
    start = np.array([*itertools.chain(*starts), *[-100] * padding], np.int32)
    return pages, rows, ends, table, start


def case(t, n, m, h, page_size, prompts, dtype=BF16, padding=0):
    """Blocks of `prompts`, packed; what is nobody's is huge."""
    rng = np.random.default_rng(t + n + h)
    pages, rows, ends, table, start = blocks(rng, t, page_size, prompts, padding)
    kv = rng.standard_normal((LAYERS, pages, 2, m, page_size, h), np.float32)
    kv[1 - LAYER] = 400
    for row, end in zip(rows, ends, strict=True):
        kv[LAYER, row[end // page_size], :, :, end % page_size :] = 400
    q = rng.standard_normal((len(table), t, n, h), np.float32)
    return jnp.asarray(q, BF16), jnp.asarray(kv).astype(dtype), jnp.int32(LAYER), table, start


def expected(q, kv, layer, table, start, scales=None, **named):
    """The reference in float32, over a cache that has been scaled beforehand."""
    kv = kv.astype(jnp.float32)
    if scales is not None:
        kv = kv * scales[:, None, :, :, None, None]
    return paged_attention(q.astype(jnp.float32), kv, layer, table, start, **named)


def error(out, want):
    """The largest difference of a row, relative to the row's largest value."""
    out, want = np.asarray(out, np.float32), np.asarray(want, np.float32)
    return (np.abs(out - want).max(-1) / np.abs(want).max(-1)).max()


@pytest.mark.parametrize("t,n,m,h,page_size,prompts,sms", [
    (64, 4, 1, 64, 64, [(0, 192), (77, 64)], 3),  # several tiles a CTA, an odd number of rounds, a prefix off the grid
    rare(64, 3, 1, 64, 128, [(300, 64)], 132),  # an odd group: the last unit repeats a head
    rare(64, 1, 1, 128, 32, [(65, 128)], 1),  # a lone consumer, and a prefix whose last key is a tile's first
    rare(32, 5, 1, 64, 16, [(0, 32), (127, 32)], 2),  # units of two heads, of which the last has one
    rare(128, 2, 2, 64, 64, [(100, 128)], 132),  # units of one head at several positions
    (64, 2, 1, 256, 128, [(70, 64)], 1),  # one query slot, and steps of half a page
])  # fmt: skip
def test_equals_the_reference(t, n, m, h, page_size, prompts, sms):
    args = case(t, n, m, h, page_size, prompts, padding=1)
    out = prompt_attention(*args, interpret=plgpu.InterpretGPUParams(), sms=sms)
    assert out.dtype == BF16 and np.isfinite(np.float32(out)).all()
    assert error(out[:-1], expected(*args)[:-1]) < 0.02  # the last block is padding: finite is enough


@pytest.mark.parametrize("t,n,m,h,page_size,prompts,sms,window", [
    (64, 4, 1, 64, 64, [(0, 192), (300, 64)], 3, 100),  # begins within a step, and before the text
    (64, 4, 1, 64, 64, [(0, 192), (350, 64)], 3, Chunks(128)),  # a block of two chunks
    rare(64, 5, 1, 128, 32, [(300, 128)], 2, Chunks(32)),  # shorter than a step
    rare(64, 3, 1, 64, 128, [(300, 64)], 132, 256),  # whole steps between both ends
    rare(64, 1, 1, 128, 32, [(65, 128)], 1, 1),  # a lone consumer, and rows that see themselves alone
    rare(32, 5, 1, 64, 16, [(0, 32), (447, 32)], 2, 130),  # a prefix that is skipped
    rare(64, 2, 1, 256, 128, [(270, 64)], 1, 64),  # as long as a step, and as a block
    rare(128, 2, 2, 64, 64, [(0, 128)], 2, 500),  # longer than the text
])  # fmt: skip
def test_a_row_sees_no_further_back_than_its_window(t, n, m, h, page_size, prompts, sms, window):
    args = case(t, n, m, h, page_size, prompts, padding=1)
    out = prompt_attention(*args, window=window, interpret=plgpu.InterpretGPUParams(), sms=sms)
    assert np.isfinite(np.float32(out)).all()
    assert error(out[:-1], expected(*args, window=window)[:-1]) < 0.02


@pytest.mark.parametrize("t,n,m,h,prompts,sms,window", [
    (64, 8, 1, 64, [(0, 64), (300, 64)], 3, 100),
    rare(32, 5, 1, 64, [(0, 32), (127, 32)], 2, None),  # units of two heads, of which the last has one
    rare(64, 1, 1, 128, [(65, 128)], 1, None),
])  # fmt: skip
def test_sinks_take_their_share(t, n, m, h, prompts, sms, window):
    args = case(t, n, m, h, 64, prompts)
    sinks = jnp.asarray(np.random.default_rng(n).uniform(-3, 5, n), jnp.float32).at[0].set(-300.0)
    out = prompt_attention(*args, window=window, sinks=sinks, interpret=plgpu.InterpretGPUParams(), sms=sms)
    assert error(out, expected(*args, window=window, sinks=sinks)) < 0.02


def test_pages_before_the_window_are_not_read():
    """They hold what no sum would survive. Keys are read in steps of 128, and the window begins in the second."""
    q, kv, layer, table, start = case(64, 2, 1, 64, 64, [(300, 64)])
    kv = kv.at[:, table[0, :2]].set(jnp.nan)
    for window, finite in ((100, True), (Chunks(256), True), (None, False)):
        out = prompt_attention(q, kv, layer, table, start, window=window, interpret=plgpu.InterpretGPUParams())
        assert np.isfinite(np.float32(out)).all() == finite


def test_an_fp8_cache_is_scaled_per_head():
    args = case(64, 2, 2, 64, 64, [(64, 64)], FP8)
    scales = jnp.asarray(np.random.default_rng(0).uniform(0.5, 2, (LAYERS, 2, 2)), jnp.float32)
    out = prompt_attention(*args, scales=scales, interpret=plgpu.InterpretGPUParams())
    assert error(out, expected(*args, scales)) < 0.02


@pytest.mark.parametrize("window", [None, rare(1024), rare(Chunks(8192))])
@pytest.mark.parametrize("t,n,m,h,page_size,dtype", [
    (64, 64, 8, 64, 64, BF16),  # gpt-oss', with sinks
    rare(64, 32, 8, 128, 64, BF16),
    (64, 32, 8, 128, 64, FP8),
    rare(64, 16, 1, 64, 16, BF16),
    rare(64, 8, 8, 256, 128, FP8),
    rare(32, 14, 2, 64, 32, FP8),
    rare(32, 6, 2, 256, 16, BF16),
    rare(8, 32, 8, 128, 64, BF16),
    rare(16, 5, 1, 128, 128, BF16),
    rare(128, 7, 1, 128, 64, BF16),
    rare(256, 4, 4, 64, 64, BF16),
])  # fmt: skip
def test_lowers_for_cuda(t, n, m, h, page_size, dtype, window):
    q, start = jnp.zeros((3, t, n, h), BF16), jnp.zeros(3, jnp.int32)
    kv, table = jnp.zeros((1, 2, 2, m, page_size, h), dtype), jnp.zeros((3, 1), jnp.int32)
    assert supported(q.shape, kv.shape, kv.dtype) is None
    run = partial(prompt_attention, window=window, sinks=jnp.ones(n) if n == 64 else None)
    lowered(run, q, kv, jnp.int32(0), table, start)


def test_layers_share_one_lowering():
    args = case(64, 2, 1, 64, 64, [(0, 64)])

    def layers(q, kv, layer, table, start):
        return [prompt_attention(q, kv, layer - i, table, start) for i in range(3)]

    assert kernels(layers, *args) == 1


@pytest.mark.parametrize("change,reason", [
    ({"h": 96}, "96 and 96 wide"),
    ({"n": 5}, "5 query heads are not a multiple of 2"),
    ({"t": 96}, "blocks are 96 tokens"),
    ({"page_size": 8}, "pages are 8 tokens"),
    ({"dtype": jnp.float32}, "the cache is float32"),
])  # fmt: skip
def test_says_what_it_does_not_support(change, reason):
    s = {"t": 64, "n": 4, "m": 2, "h": 64, "page_size": 64, "dtype": BF16} | change
    q, kv = (1, s["t"], s["n"], s["h"]), (1, 2, 2, s["m"], s["page_size"], s["h"])
    assert reason in supported(q, kv, s["dtype"])
    with pytest.raises(ValueError, match=reason):
        prompt_attention(
            jnp.zeros(q, BF16), jnp.zeros(kv, s["dtype"]), jnp.int32(0), jnp.zeros((1, 1), int), jnp.zeros(1, int)
        )


def test_queries_are_bfloat16():
    q, *rest = case(64, 2, 1, 64, 64, [(0, 64)])
    with pytest.raises(ValueError, match="queries are float32"):
        prompt_attention(q.astype(jnp.float32), *rest)
