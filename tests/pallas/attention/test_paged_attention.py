"""Attention over pages against a dense softmax in float64, at the edges of pages and of the reference's blocks."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxspec.cache.paged import Rows
from jaxspec.models.positions import Chunks
from jaxspec.pallas import hopper, operation
from jaxspec.pallas.attention.paged_attention import (
    PAGED_ATTENTION,
    PROMPT_ATTENTION,
    paged_attention,
    reference,
    span_attention,
)
from jaxspec.pallas.hopper import export
from tests.support.sample import one_in, rare

LAYERS, LAYER, H = 2, 1, 8


def dense(q, k, v, sinks=None, cap=None):
    """Attention of one row q f[n, h] over keys and values f[s, m, h]; `sinks` f[n] beside each head's scores, which are
    below a `cap`."""
    n, h = q.shape
    k, v = (np.repeat(x.astype(np.float64), n // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("nh,snh->ns", q.astype(np.float64), k) * h**-0.5
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    total = weights.sum(1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None] - scores.max(1, keepdims=True))
    return np.einsum("ns,snh->nh", weights / total, v)


def paged(rng, lengths, kv_heads, page_size, entries):
    """Keys and values of sequences scattered over shuffled pages; what is not theirs is huge, and would show."""
    pages = 1 + len(lengths) * entries
    kv = np.full((LAYERS, pages, 2, kv_heads, page_size, H), 1e4, np.float32)
    table = rng.permutation(np.arange(1, pages)).reshape(len(lengths), entries).astype(np.int32)
    sequences = []
    for row, length in zip(table, lengths, strict=True):
        k, v = rng.standard_normal((2, length, kv_heads, H), np.float32)
        for i in range(length):
            kv[LAYER, row[i // page_size], :, :, i % page_size] = k[i], v[i]
        row[-(-length // page_size) :] = 0  # the scheduler's tables end in the dummy page
        sequences.append((k, v))
    return kv, table, sequences


LENGTHS = [
    (1, (1, 2, 7, 8, 9)),
    (1, (15, 16, 17, 31, 32)),
    (1, (33, 63, 64, 65, 72)),
    (4, (4, 5, 8, 35, 68)),
    (32, (32, 33, 40, 64, 70)),
]


@pytest.mark.parametrize(
    "heads,kv_heads,t,lengths,block_tokens", one_in(3, [(2, 2), (4, 2), (6, 1)], LENGTHS, [8, 32, 1024])
)
def test_equals_dense_softmax(heads, kv_heads, t, lengths, block_tokens):
    rng = np.random.default_rng(t * heads)
    kv, table, sequences = paged(rng, lengths, kv_heads, page_size=8, entries=9)
    q = rng.standard_normal((len(lengths), t, heads, H), np.float32)
    start = np.array(lengths, np.int32) - t
    out = reference(q, jnp.asarray(kv), jnp.int32(LAYER), table, start, block_tokens=block_tokens)
    assert out.dtype == q.dtype
    for b, (k, v) in enumerate(sequences):
        for i in range(t):
            end = start[b] + i + 1
            np.testing.assert_allclose(out[b, i], dense(q[b, i], k[:end], v[:end]), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("t,lengths,window,block_tokens", one_in(
    3, [(1, (1, 9, 70)), (4, (4, 17, 68)), (32, (33, 70))], [1, 5, 8, 30, 100], [8, 32]
))  # fmt: skip
def test_a_row_sees_no_further_back_than_its_window(t, lengths, window, block_tokens):
    rng = np.random.default_rng(window)
    kv, table, sequences = paged(rng, lengths, 2, page_size=8, entries=9)
    q = rng.standard_normal((len(lengths), t, 4, H), np.float32)
    start = np.array(lengths, np.int32) - t
    out = reference(q, jnp.asarray(kv), jnp.int32(LAYER), table, start, window=window, block_tokens=block_tokens)
    for b, (k, v) in enumerate(sequences):
        for i in range(t):
            end = start[b] + i + 1
            begin = max(end - window, 0)
            np.testing.assert_allclose(out[b, i], dense(q[b, i], k[begin:end], v[begin:end]), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("t,size,lengths", [(1, 8, (1, 9, 72)), (4, 16, (18, 64)), (32, 8, (33, 70))])
def test_a_row_sees_its_chunk_alone(t, size, lengths):
    rng = np.random.default_rng(size)
    kv, table, sequences = paged(rng, lengths, 2, page_size=8, entries=9)
    q = rng.standard_normal((len(lengths), t, 4, H), np.float32)
    start = np.array(lengths, np.int32) - t
    out = reference(q, jnp.asarray(kv), jnp.int32(LAYER), table, start, window=Chunks(size), block_tokens=8)
    for b, (k, v) in enumerate(sequences):
        for i in range(t):
            seen = slice((start[b] + i) // size * size, start[b] + i + 1)
            np.testing.assert_allclose(out[b, i], dense(q[b, i], k[seen], v[seen]), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("t,window", [(1, None), (1, 8), (4, 5), (33, None)])
def test_a_sink_takes_its_share_of_each_head(t, window):
    """Even where it is far above all scores, or far below; a row that sees nothing stays zero."""
    rng = np.random.default_rng(t)
    kv, table, sequences = paged(rng, (t, 70), 2, page_size=8, entries=9)
    q, sinks = rng.standard_normal((2, t, 4, H), np.float32), np.array([-200, 0.5, 3, 200], np.float32)
    start = np.array([-1, 70 - t], np.int32)
    given = q, jnp.asarray(kv), jnp.int32(LAYER), table, start
    out = np.asarray(paged_attention(*given, window=window, sinks=sinks))
    assert not out[0, 0].any()
    for b, (k, v) in enumerate(sequences):
        for i in range(-min(start[b], 0), t):
            end = start[b] + i + 1
            seen = slice(max(end - window, 0) if window else 0, end)
            np.testing.assert_allclose(out[b, i], dense(q[b, i], k[seen], v[seen], sinks), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("tree", [False, True])
def test_scores_stay_below_a_cap(tree):
    """Rows of a chain, and of a tree that is one. With a window, within it."""
    rng = np.random.default_rng(3)
    kv, table, ((k, v),) = paged(rng, (70,), 2, page_size=8, entries=9)
    q = 4 * rng.standard_normal((1, 5, 4, H), np.float32)
    more = {"mask": jnp.tril(jnp.ones((1, 5, 5), bool)), "depth": jnp.arange(5)[None]} if tree else {}
    given = q, jnp.asarray(kv), jnp.int32(LAYER), table, np.array([65], np.int32)
    out = np.asarray(paged_attention(*given, **more, window=30, cap=0.7))
    for i in range(5):
        seen = slice(65 + i + 1 - 30, 65 + i + 1)
        np.testing.assert_allclose(out[0, i], dense(q[0, i], k[seen], v[seen], cap=0.7), atol=2e-6, rtol=1e-5)
    assert np.abs(out - np.asarray(paged_attention(*given, **more, window=30))).max() > 0.1


@pytest.mark.parametrize("tree", [False, True])
def test_pages_in_fp8_hold_what_their_scales_divide(tree):
    """And attention multiplies by them again, by layer and head. Some of it saturates."""
    rng = np.random.default_rng(7)
    known, new = 20, 5
    kv, table, _ = paged(rng, (known + new,), 2, page_size=8, entries=4)
    kv, scales = jnp.zeros_like(kv, jnp.float8_e4m3fn), rng.uniform(0.001, 0.006, (LAYERS, 2, 2)).astype(np.float32)
    k, v = rng.standard_normal((2, 1, known + new, 2, H), np.float32)
    rows = [Rows(np.array([start], np.int32), np.array([count], np.int32), table)
            for start, count in ((0, known), (known, new))]  # fmt: skip
    if tree:
        mask = np.tril(np.ones((1, new, new), bool))
        rows[1] = rows[1].replace(mask=jnp.asarray(mask), depth=jnp.arange(new)[None])
    q = rng.standard_normal((1, new, 4, H), np.float32)
    kv = rows[0].write(kv, jnp.int32(LAYER), k[:, :known], v[:, :known], scales)
    out, kv = rows[1].attend(kv, jnp.int32(LAYER), q, k[:, known:], v[:, known:], scales=scales)
    each = scales[LAYER][:, None, None, :, None]
    held = np.clip(np.stack([k, v]) / each, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert (np.abs(held) == 448).sum() > 10
    k, v = (held * each)[:, 0]
    for i in range(new):
        seen = slice(known + i + 1)
        np.testing.assert_allclose(out[0, i], dense(q[0, i], k[seen], v[seen]), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [1, rare(2), 3, rare(7), 30, Chunks(2), rare(Chunks(16))])
def test_rows_of_a_tree_keep_to_the_window_by_their_position_and_not_their_place(window):
    """Two chains after one row, and a row that is padding; with sinks, too."""
    rng = np.random.default_rng(5)
    sinks = rng.standard_normal(4).astype(np.float32) if window in (1, 3, 7) else None
    parents, known, size = [-1, 0, 0, 1, 2, 3], 20, 6
    path = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5]]
    assert all(mine[-2:-1] == [parent] for mine, parent in zip(path[1:], parents[1:], strict=True))
    kv, table, ((k, v),) = paged(rng, (known + size,), 2, page_size=4, entries=7)
    mask = np.array([[[j in mine for j in range(size)] for mine in path]])
    depth = np.array([[len(mine) - 1 for mine in path]], np.int32)
    rows = Rows(np.array([known], np.int32), np.array([size], np.int32), table, jnp.asarray(depth), jnp.asarray(mask))
    q = rng.standard_normal((1, size + 1, 4, H), np.float32)
    new = (x[None, known:] for x in (k, v))
    out, _ = rows.attend(jnp.asarray(kv), jnp.int32(LAYER), q[:, :size], *new, window, sinks)
    padded, _ = rows.look_back(jnp.asarray(kv), jnp.int32(LAYER), jnp.asarray(q), window, sinks)
    np.testing.assert_array_equal(padded[:, :size], out)
    for i, mine in enumerate(path):
        seen = [*range(known), *(known + j for j in mine)]
        last = len(seen) - 1
        seen = seen[last // window.size * window.size :] if isinstance(window, Chunks) else seen[-window:]
        np.testing.assert_allclose(out[0, i], dense(q[0, i], k[seen], v[seen], sinks), atol=2e-6, rtol=1e-5)


def test_a_tree_made_in_steps_needs_a_window_that_holds_it():
    table, ones = np.ones((1, 4), np.int32), np.ones(1, np.int32)
    rows = Rows(ones, ones, table, jnp.ones((1, 2), jnp.int32), jnp.ones((1, 2, 6), bool))
    q, kv = jnp.zeros((1, 2, 4, H)), jnp.zeros((LAYERS, 3, 2, 2, 4, H))
    rows.look_back(kv, jnp.int32(0), q, 6)
    with pytest.raises(NotImplementedError, match="a window of 5 positions, and a mask over 6 KV slots"):
        rows.look_back(kv, jnp.int32(0), q, 5)


def test_rows_before_the_start_are_zero_and_disturb_nobody():
    rng = np.random.default_rng(0)
    kv, table, ((k, v), _) = paged(rng, (2, 5), 2, page_size=4, entries=3)
    q = rng.standard_normal((2, 3, 4, H), np.float32)
    out = np.asarray(reference(q, jnp.asarray(kv), jnp.int32(LAYER), table, np.array([-1, -3], np.int32)))
    assert not out[0, 0].any() and not out[1].any()
    for i in (1, 2):
        np.testing.assert_allclose(out[0, i], dense(q[0, i], k[:i], v[:i]), atol=2e-6)


def test_bfloat16_caches_keep_float32_sums():
    rng = np.random.default_rng(1)
    kv, table, ((k, v),) = paged(rng, (70,), 1, page_size=8, entries=9)
    q = rng.standard_normal((1, 1, 2, H), np.float32)
    out = reference(jnp.bfloat16(q), jnp.bfloat16(kv), jnp.int32(LAYER), table, np.array([69], np.int32))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(out[0, 0]), dense(q[0, 0], k, v), atol=0.03)


@pytest.mark.parametrize(
    "start,count,t", [(0, 3, 3), (6, 4, 4), (7, 1, 4), (-1, 2, 2), (-2, 2, 2), (3, 0, 4), (10, 4, 4)]
)
def test_a_write_touches_its_rows_and_page_zero_alone(start, count, t):
    """Two requests; the second has other rows. Past the table (12 positions here) and before 0 is padding, too."""
    rng = np.random.default_rng(2)
    table = np.array([[3, 1, 5], [2, 6, 4]], np.int32)
    starts, counts = np.array([start, 2], np.int32), np.array([count, 2], np.int32)
    before = rng.standard_normal((LAYERS, 7, 2, 2, 4, H), np.float32)
    k, v = rng.standard_normal((2, 2, t, 2, H), np.float32)
    after = np.asarray(Rows(starts, counts, table).write(jnp.asarray(before), jnp.int32(LAYER), k, v))
    expected = before.copy()
    for b in range(2):
        for i in range(counts[b]):
            at = starts[b] + i
            if i < t and 0 <= at < 12:
                expected[LAYER, table[b, at // 4], :, :, at % 4] = k[b, i], v[b, i]
    np.testing.assert_array_equal(after[:, 1:], expected[:, 1:])
    np.testing.assert_array_equal(after[0], before[0])


def test_what_nobody_asks_for_is_written_and_not_attended():
    rng = np.random.default_rng(4)
    kv, table, _ = paged(rng, (9, 7, 5), 2, page_size=4, entries=3)
    q, (k, v) = rng.standard_normal((3, 2, 4, H), np.float32), rng.standard_normal((2, 3, 2, 2, H), np.float32)
    rows = Rows(np.array([7, 5, 3], np.int32), np.array([2, 2, 2], np.int32), table)
    asked = np.array([True, False, True])
    given = jnp.asarray(kv), jnp.int32(LAYER), q, k, v
    (every, expected), (out, cache) = rows.attend(*given), rows.only(asked).attend(*given)
    np.testing.assert_array_equal(cache, expected)
    np.testing.assert_array_equal(out[asked], every[asked])
    assert not out[~asked].any() and every[~asked].any()


def test_attend_sees_what_it_has_just_written():
    rng = np.random.default_rng(3)
    kv, table, ((k, v),) = paged(rng, (6,), 2, page_size=4, entries=3)
    q, new_k, new_v = rng.standard_normal((3, 1, 3, 2, H), np.float32)
    (spare,) = {1, 2, 3} - {*table[0, :2].tolist()}
    table[0, 2] = spare
    rows = Rows(np.array([6], np.int32), np.array([3], np.int32), table)
    out, _ = rows.attend(jnp.asarray(kv), jnp.int32(LAYER), q, new_k, new_v)
    k, v = np.concatenate([k, new_k[0]]), np.concatenate([v, new_v[0]])
    for i in range(3):
        np.testing.assert_allclose(out[0, i], dense(q[0, i], k[: 7 + i], v[: 7 + i]), atol=2e-6)


@pytest.mark.parametrize("block_tokens", [8, 32, 1024])
def test_rows_see_their_span_and_nothing_else(block_tokens):
    rng = np.random.default_rng(1)
    t, lengths = 5, (5, 8, 31, 70)
    kv, table, sequences = paged(rng, lengths, kv_heads=2, page_size=8, entries=9)
    q = rng.standard_normal((len(lengths), t, 4, H), np.float32)
    first = np.array([[rng.integers(-3, n) for _ in range(t)] for n in lengths], np.int32)
    last = np.array([[rng.integers(max(f, 0) - 1, n) for f in row] for row, n in zip(first, lengths, strict=True)])
    first[2], last[2] = 0, 30  # a block that sees all of itself
    first[0, 0], last[0, 0] = -4, -1
    out = span_attention(q, jnp.asarray(kv), jnp.int32(LAYER), table, first, last, block_tokens)
    for b, (k, v) in enumerate(sequences):
        for i in range(t):
            begin, end = max(first[b, i], 0), last[b, i] + 1
            expected = dense(q[b, i], k[begin:end], v[begin:end]) if end > begin else 0
            np.testing.assert_allclose(out[b, i], expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("t,w,kernel,window", one_in(3, [
    (16, 0, "decode_attention"),
    (32, 0, "prompt_attention"),
    (17, 17, "decode_attention"),  # which alone has masks
    (4, 32, "decode_attention"),
    (4, 33, "a mask over 33 KV slots"),
    (33, 33, "33 rows a request"),
], [None, 30]))  # fmt: skip
def test_masks_are_the_decode_kernels_up_to_a_word(t, w, kernel, window, monkeypatch, caplog):
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    monkeypatch.setattr(hopper, "KERNELS", hopper.Counter())
    operation.warn.cache_clear()
    q, kv = jnp.zeros((1, t, 4, 64), jnp.bfloat16), jnp.zeros((1, 3, 2, 2, 64, 64), jnp.bfloat16)
    mask = jnp.ones((1, t, w), bool) if w else None
    where = jnp.int32(0), jnp.array([[1, 2]]), jnp.array([9])
    monkeypatch.setattr(export._Lowered, "function", lambda self, name, call: call.run)  # traced, but not lowered
    jax.eval_shape(lambda q, kv: paged_attention(q, kv, *where, mask, window), q, kv)
    told = [record.getMessage() for record in caplog.records]
    if " " in kernel:
        assert not hopper.KERNELS
        assert len(told) == 1 and kernel in told[0]
    else:
        assert dict(hopper.KERNELS) == {kernel: 1} and not told


@pytest.mark.parametrize("h,decode,prompt", [
    (256, "decode_attention", "prompt_attention"),
    (512, "portable_on_hopper", "portable_on_hopper"),
    (1024, "reference", "reference"),
])  # fmt: skip
def test_heads_wider_than_hoppers_kernels_take_the_portable_one(h, decode, prompt, monkeypatch):
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    for table, t, name in ((PAGED_ATTENTION, 4, decode), (PROMPT_ATTENTION, 64, prompt)):
        q, kv = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, t, 8, h), (1, 3, 2, 1, 64, h)))
        assert operation.choose("attention", table, q, kv, *[None] * 10, 0).name == name
        capped = "reference" if h == 1024 else "portable_on_hopper"
        assert operation.choose("attention", table, q, kv, *[None] * 9, 50.0, 0).name == capped


def test_rows_of_fixed_bits_need_a_kernel_on_a_gpu():
    q, kv = jnp.zeros((1, 4, 4, 64), jnp.bfloat16), jnp.zeros((1, 3, 2, 2, 8, 64), jnp.bfloat16)
    hopper.lower_for(132)
    try:
        with pytest.raises(NotImplementedError, match="--deterministic has no kernel for attention with pages of 8"):
            paged_attention(q, kv, jnp.int32(0), jnp.array([[1, 2]]), jnp.array([9]), fixed=1024)
    finally:
        hopper.lower_for(None)
