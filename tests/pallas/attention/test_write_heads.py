"""The kernel of rows' heads against the plain form: in interpret mode, lowered for CUDA, and chosen."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.cache.mixers import Cache, PromptBlocks, WholeTexts
from jaxspec.cache.paged import PageLayout, Rows
from jaxspec.checkpoint.params import dummy
from jaxspec.decoder import forward as paths
from jaxspec.decoder.functions import cos_sin, normed, rms_norm, rope
from jaxspec.decoder.mixings import attention
from jaxspec.decoder.weight_stream import WEIGHT_STREAM
from jaxspec.models.description import Attention, Norm
from jaxspec.models.families import llama
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.rope_scaling import Rope
from jaxspec.pallas import hopper
from jaxspec.pallas.attention import write_heads as op
from jaxspec.pallas.attention.kv_write import stored
from jaxspec.pallas.dense import weight_stream
from jaxspec.pallas.hopper import KERNELS, counting
from jaxspec.pallas.operation import ANY
from tests.decoder.test_few_rows_layers import with_biases
from tests.support import drawn
from tests.support.kernels import assert_close, kernels
from tests.support.operations import anywhere
from tests.support.sample import rare
from tests.support.tiny import tiny_config

EPS, LAYERS, WIDTH = 1e-6, 2, op.WIDTH
INTERPRET = {"interpret": plgpu.InterpretGPUParams()}


def normal(key, *shape):
    return drawn.normal(key, shape, jnp.bfloat16)


def check(
    rows: int,
    heads: int,
    kv_heads: int,
    normed: bool,
    page_size: int = 16,
    parts: int = 1,
    fp8: bool = False,
    **options,
):
    """Rows anywhere in the pages, every fifth of them padding, far into a long text; in `parts` to be summed. Some
    scales of FP8 pages are so small that numbers saturate."""
    keys, pages = jax.random.split(jax.random.key(rows + heads), 6), 2 + rows // page_size
    qkv = normal(keys[0], parts, rows, heads + 2 * kv_heads, WIDTH)
    qkv = qkv if parts == 1 else qkv.astype(jnp.float32)
    kv = normal(keys[1], LAYERS, pages, 2, kv_heads, page_size, WIDTH)
    inverse_scales = None
    if fp8:
        kv = kv.astype(jnp.float8_e4m3fn)
        inverse_scales = 1 / jnp.exp(jax.random.uniform(keys[5], (LAYERS, 2, kv_heads), minval=-6, maxval=2))
    norms = list(1 + 0.2 * normal(keys[2], 2, WIDTH)) if normed else []
    position = jax.random.randint(keys[3], (rows,), 0, 100_000)
    rotating = Attention(heads, kv_heads, WIDTH, Rope(1e6))
    kv_slots = (page_size + jax.random.permutation(keys[4], rows)).at[::5].set(-1).astype(jnp.int32)

    @jax.jit
    def plain(qkv, kv, position, kv_slots, norms):
        qkv = qkv.sum(0).astype(jnp.bfloat16)
        turned = list(jnp.split(qkv[None, :, : heads + kv_heads], [heads], axis=2))
        for i, norm in enumerate(norms):
            turned[i] = rms_norm(turned[i], norm, EPS)
        q, k = (rope(x, position[None], rotating)[0] for x in turned)
        page = jnp.where(kv_slots < 0, pages, kv_slots // page_size)
        new = jnp.stack([k, qkv[:, heads + kv_heads :]], axis=1)
        new = stored(new, kv.dtype, None if inverse_scales is None else inverse_scales[1, ..., None])
        return q, kv.at[1, page, :, :, kv_slots % page_size].set(new, mode="drop")

    @jax.jit
    def kernel(qkv, kv, position, kv_slots, norms):
        turns = cos_sin(position, rotating)
        rows_of = qkv.reshape(parts, rows, -1)
        return op.write_heads(rows_of, *turns, kv, jnp.int32(1), kv_slots, norms, inverse_scales, eps=EPS, **options)

    given = qkv, kv, position, kv_slots, norms
    (got, pages_got), (want, pages_want) = kernel(*given), plain(*given)
    assert_rounded_alike(got, want)
    pages_got, pages_want, kv = (x.astype(jnp.float32) for x in (pages_got, pages_want, kv))
    changed = np.asarray(pages_want != kv).any(axis=-1)
    assert changed.sum() == 2 * kv_heads * np.sum(kv_slots >= 0)
    np.testing.assert_array_equal(np.asarray(pages_got)[~changed], np.asarray(kv)[~changed])
    np.testing.assert_array_equal(pages_got[1, :, 1], pages_want[1, :, 1])
    assert_rounded_alike(pages_got, pages_want, **({"rtol": 2**-3} if fp8 else {}))
    assert not fp8 or jnp.abs(pages_got).max() == 448


def check_few(rows: int, heads: int, kv_heads: int, width: int, centred: bool = False, k_is_v: bool = False, **options):
    """Heads of Gemma's widths, as rounds of few rows have them: norms of values, too, and queries that are scaled."""
    keys, pages, scale, norm = (
        jax.random.split(jax.random.key(rows + heads), 4),
        2 + rows // 16,
        3.7,
        Norm(EPS, centred),
    )
    qkv = normal(keys[0], rows, heads + (1 if k_is_v else 2) * kv_heads, width)
    kv, norms = normal(keys[1], LAYERS, pages, 2, kv_heads, 16, width), list(1 + 0.2 * normal(keys[2], 2, width))
    kv_slots = jnp.arange(16, 16 + rows).at[::5].set(-1)
    position, rotating = 1000 + jnp.arange(rows), Attention(heads, kv_heads, width, Rope(1e6))

    @jax.jit
    def plain(qkv, kv):
        q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        v = rms_norm(k if k_is_v else qkv[:, heads + kv_heads :], jnp.ones(width, "bfloat16"), EPS)
        q, k = (
            rope(normed(x, of, norm)[None], position[None], rotating)[0] for x, of in ((q, norms[0]), (k, norms[1]))
        )
        q = (q.astype(jnp.float32) * scale).astype(q.dtype)
        page = jnp.where(kv_slots < 0, pages, kv_slots // 16)
        return q, kv.at[1, page, :, :, kv_slots % 16].set(jnp.stack([k, v], axis=1), mode="drop")

    of = qkv.reshape(1, rows, -1), *cos_sin(position, rotating), kv, jnp.int32(1), kv_slots, norms
    named = dict(eps=EPS, centred=centred, query_scale=scale, normed_values=True, k_is_v=k_is_v)
    for got, want in zip(op.write_heads(*of, **named, **options), plain(qkv, kv), strict=True):
        assert_close(got, want, 4e-3)  # XLA on a CPU leaves out some roundings


FEW = [  # query heads, KV heads, width, centred, whether keys are values: Gemma 3's 1B and 12B, Gemma 4's 26B, 31B, E2B
    rare(4, 1, 256, True, False),
    rare(16, 8, 256, True, False),
    (16, 2, 512, False, True),
    rare(32, 4, 512, False, True),
    rare(8, 1, 512, False, False),
]


@pytest.mark.parametrize("heads,kv_heads,width,centred,k_is_v", [*FEW, rare(32, 8, 128, False, False)])
def test_heads_of_few_rows(heads, kv_heads, width, centred, k_is_v):
    assert op.supported(heads, kv_heads, width, width, "bfloat16", few=True) is None
    check_few(8, heads, kv_heads, width, centred, k_is_v, **INTERPRET)


@pytest.mark.parametrize("heads,kv_heads,width,centred,k_is_v", FEW)
def test_heads_of_few_rows_lower_for_cuda(heads, kv_heads, width, centred, k_is_v):
    shape = lambda *sizes, dtype="bfloat16": jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    columns, half = (heads + (1 if k_is_v else 2) * kv_heads) * width, shape(8, width // 2, dtype="float32")
    pages = shape(2, 4, 2, kv_heads, 16, width), shape(dtype="int32"), shape(8, dtype="int32")
    named = dict(eps=EPS, centred=centred, query_scale=16.0, normed_values=True, k_is_v=k_is_v)
    run = lambda *of: op.write_heads(*of[:-2], of[-2:], **named)  # noqa: E731
    assert kernels(run, shape(1, 8, columns), half, half, *pages, shape(width), shape(width)) == 1


def assert_rounded_alike(got, want, rtol=2**-7):
    """Equal but for a few numbers, which float32 sums in another order round to a neighbour before they rotate."""
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=2**-4)
    assert np.mean(got == want) > 0.99


@pytest.mark.parametrize("heads,kv_heads,normed", [
    (16, 8, True),
    rare(32, 4, True),
    (8, 8, False),
    rare(4, 4, True),
    (20, 4, False),
    rare(16, 2, True),
    (6, 1, True),
])  # fmt: skip
def test_matches_the_plain_form(heads, kv_heads, normed):
    check(20, heads, kv_heads, normed, **INTERPRET)


@pytest.mark.parametrize(
    "heads,kv_heads,normed,fp8", [(16, 8, True, True), (4, 4, False, False), rare(16, 2, True, True)]
)
def test_sums_parts(heads, kv_heads, normed, fp8):
    check(10, heads, kv_heads, normed, parts=4, fp8=fp8, **INTERPRET)


def model(family: str, **overrides):
    given = dict(head_dim=WIDTH, num_attention_heads=8, num_key_value_heads=4, hidden_size=64)
    config = ModelConfig.from_hf(tiny_config(family, **(given | overrides)))
    return config, dummy(llama.tensors(config.decoder), "bfloat16", seed=0)["layers"][0]


def mixed(family: str, pages: str = "bfloat16", blocks: int = 3, t: int = 16, **overrides):
    """`attention.mix` of a prompt's blocks, each of a request of its own, and its operands.

    All but the first begin in the middle of a page, and the last has a row of padding.
    """
    config, layer = model(family, **overrides)
    table = 1 + jnp.arange(2 * blocks, dtype=jnp.int32).reshape(blocks, 2)
    start = (5 * jnp.arange(blocks, dtype=jnp.int32)) % t
    rows = Rows(start, jnp.full((blocks,), t, jnp.int32).at[-1].add(-1), table)
    mixer = PromptBlocks(rows, *3 * [jnp.zeros((blocks,), jnp.int32)])
    kv = jnp.zeros_like(PageLayout(2 * blocks + 1, t, pages).kv(config))
    n = config.num_heads + 2 * config.num_kv_heads
    qkv = normal(jax.random.key(1), 1, blocks, t, n * config.head_dim)

    def mix(layer, qkv, kv):
        positions = rows.marked_positions(t)
        return attention.mix(config.decoder.layers[0], layer, jnp.int32(1), [qkv], positions, mixer, Cache((kv,)))

    return mix, (layer, qkv, kv)


def check_mix(monkeypatch, family: str, **sizes):
    """With the kernel and without, of real rows."""
    written, plain = attention.HEADS
    monkeypatch.setattr(attention, "HEADS", (plain,))
    mix, given = mixed(family, **sizes)
    want, want_cache = jax.jit(mix)(*given)
    monkeypatch.setattr(attention, "HEADS", (dataclasses.replace(written, device=ANY),))
    got, cache = jax.jit(lambda *given: mix(*given))(*given)
    np.testing.assert_allclose(got.astype(jnp.float32)[:, :-1], want.astype(jnp.float32)[:, :-1], rtol=2**-6, atol=2e-2)
    assert_rounded_alike(cache.kv[0][:, 1:], want_cache.kv[0][:, 1:])


@pytest.mark.parametrize("family,bias", [rare("llama", False), ("llama", True), rare("qwen3", False)])
def test_layers_are_those_of_the_model(monkeypatch, family, bias):
    monkeypatch.setattr(op, "write_heads", partial(op.write_heads, **INTERPRET))
    check_mix(monkeypatch, family, attention_bias=bias)


@pytest.mark.parametrize("family,heads,kv_heads", [
    rare("llama", 32, 4), rare("qwen3", 8, 1), rare("qwen3", 40, 40),
    rare("llama", 32, 8), rare("llama", 40, 40), rare("qwen3", 32, 8), rare("qwen3", 32, 4),
])  # fmt: skip
def test_prompts_take_it_where_there_is_one(monkeypatch, family, heads, kv_heads):
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    monkeypatch.setattr(op, "UNEVEN", 16 if kv_heads == 1 else 0)
    for blocks, pages in ((9, "bfloat16"), (1, "float8_e4m3fn")):
        before = KERNELS["write_heads"]
        mix, given = mixed(family, pages, blocks, 64, num_attention_heads=heads, num_key_value_heads=kv_heads)
        assert kernels(mix, *given) == 2  # and `prompt_attention`
        assert KERNELS["write_heads"] == before + 1


def test_rows_in_float32_keep_the_plain_layers(monkeypatch):
    """Whatever the pages are in: the queries would come out rounded."""
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    before = KERNELS["write_heads"]
    mix, (layer, qkv, kv) = mixed("llama")
    layer = jax.tree.map(lambda x: x.astype(jnp.float32), layer)
    out, cache = jax.eval_shape(mix, layer, qkv.astype(jnp.float32), kv)
    assert out.dtype == jnp.float32 and cache.kv[0].dtype == jnp.bfloat16
    assert KERNELS["write_heads"] == before


@pytest.mark.parametrize("family,width", [
    rare("qwen3", WIDTH), rare("qwen2", 64),
    pytest.param("qwen2", WIDTH, marks=pytest.mark.exhaustive),  # heads without norms are in the tests above
])  # fmt: skip
def test_a_rounds_layers_are_three_kernels(monkeypatch, family, width):
    """Parts of a product, a bias and all, where heads are 128 wide; numbers are those of the plain layers."""
    sizes = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=2, head_dim=width)
    config = ModelConfig.from_hf(tiny_config(family, **sizes, num_attention_heads=4, num_key_value_heads=4))
    params = with_biases(dummy(llama.tensors(config.decoder), "bfloat16", seed=0))
    b = 16
    rows = Rows(jnp.arange(b, dtype=jnp.int32), jnp.ones(b, jnp.int32), 1 + jnp.arange(b, dtype=jnp.int32)[:, None])
    kv = 0.5 * normal(jax.random.key(1), *PageLayout(b + 1, 16, "bfloat16").kv(config).shape)
    tokens = jnp.arange(b)[:, None]
    run = jax.jit(lambda params, kv: paths.forward(config.decoder, params, tokens, rows.positions(1), rows, kv))
    plain = run(params, kv)
    monkeypatch.setattr(weight_stream.chain, "BLOCKS", 3)
    monkeypatch.setattr(weight_stream, "stream", partial(weight_stream.stream, **INTERPRET))
    monkeypatch.setattr(op, "write_heads", partial(op.write_heads, **INTERPRET))
    monkeypatch.setattr(attention, "HEADS", anywhere(attention.HEADS))
    monkeypatch.setattr(paths, "PATHS", (dataclasses.replace(WEIGHT_STREAM, processors=0),))
    jax.clear_caches()
    with counting() as took:
        streamed = run(params, kv)
    assert took == {"weight_stream": 1} | ({"write_heads": 2} if width == WIDTH else {})  # the first layer's, of parts
    for got, want in ((streamed.last, plain.last), (streamed.cache[:, 1:], plain.cache[:, 1:])):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert np.linalg.norm(got - want) <= 2e-2 * np.linalg.norm(want)


def test_texts_without_pages_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    config, layer = model("qwen3")
    shape = jax.ShapeDtypeStruct((1, 9, 64, 16 * WIDTH), jnp.bfloat16)
    positions = jnp.broadcast_to(jnp.arange(64), (9, 64))
    before = KERNELS["write_heads"]
    of = config.decoder.layers[0], layer, jnp.int32(0)
    jax.eval_shape(lambda qkv: attention.mix(*of, [qkv], positions, WholeTexts(), None)[0], shape)
    assert KERNELS["write_heads"] == before


@pytest.mark.parametrize("wrong,reason", [
    ((32, 8, 64, 64, jnp.bfloat16), "width 64"),
    ((32, 8, 128, 32, jnp.bfloat16), "32 of 128 columns"),
    ((9, 3, 128, 128, jnp.bfloat16), "9 query and 3 KV heads"),
    ((32, 2, 128, 128, jnp.bfloat16), "2 KV heads"),
    ((32, 8, 128, 128, jnp.bfloat16, jnp.float8_e4m3fn), "float8"),
    ((32, 8, 128, 128, jnp.float32, jnp.bfloat16), "float32"),
])  # fmt: skip
def test_what_cannot_run_is_named(wrong, reason):
    assert op.supported(32, 8, 128, 128, jnp.bfloat16) is None
    assert reason in op.supported(*wrong)


def test_heads_that_warps_share_unevenly_wait_for_a_device_to_time_them(monkeypatch):
    monkeypatch.setattr(op, "UNEVEN", 16)
    assert op.supported(16, 1, 128, 128, jnp.bfloat16) is None
    assert "up to 16 others" in op.supported(33, 3, 128, 128, jnp.bfloat16)
