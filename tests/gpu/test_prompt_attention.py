"""The prompt kernel on the device, every feature against the reference, and what it reaches."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.positions import Chunks
from jaxspec.pallas.attention.prompt_attention import prompt_attention, supported
from tests.pallas.attention.test_prompt_attention import blocks, error, expected

pytestmark = pytest.mark.gpu

BF16, FP8 = jnp.bfloat16, jnp.float8_e4m3fn


def case(t, n, m, h, page_size, prompts, layers=2, dtype=BF16, padding=0):
    """Blocks of `prompts`, packed."""
    pages, *_, table, start = blocks(np.random.default_rng(t + n + h), t, page_size, prompts, padding)
    q_key, kv_key = jax.random.split(jax.random.key(0))
    normal = jax.jit(lambda key, shape, dtype: jax.random.normal(key, shape, BF16).astype(dtype), static_argnums=(1, 2))
    q = normal(q_key, (len(table), t, n, h), BF16)
    kv = normal(kv_key, (layers, pages, 2, m, page_size, h), dtype)
    return q, kv, jnp.int32(layers - 1), jnp.asarray(table), jnp.asarray(np.maximum(start, 0))


PROMPTS = [(0, 640), (77, 64), (300, 128), (1000, 192), (63, 64), (127, 64)]


@pytest.mark.parametrize("t,n,m,h,page_size,dtype", [
    (64, 32, 8, 128, 64, BF16),
    (64, 32, 8, 128, 64, FP8),
    (64, 16, 1, 64, 16, BF16),
    (64, 8, 8, 128, 32, BF16),
    (64, 8, 8, 256, 64, FP8),
    (64, 10, 2, 128, 128, BF16),
    (64, 16, 2, 256, 64, BF16),
    (64, 6, 2, 256, 128, BF16),
    (64, 12, 4, 64, 64, FP8),
    (32, 32, 8, 128, 64, BF16),
    (32, 7, 1, 64, 16, BF16),
    (32, 6, 2, 256, 16, BF16),
    (32, 4, 4, 128, 32, FP8),
    (16, 6, 2, 128, 128, BF16),
    (8, 24, 8, 64, 64, BF16),
    (128, 12, 4, 128, 64, BF16),
    (128, 2, 2, 64, 128, BF16),
    (128, 5, 1, 256, 128, FP8),
    (256, 7, 1, 128, 64, BF16),
])  # fmt: skip
def test_equals_the_reference(t, n, m, h, page_size, dtype):
    args = case(t, n, m, h, page_size, PROMPTS, dtype=dtype, padding=3)
    assert supported(args[0].shape, args[1].shape, dtype) is None
    scales = jnp.asarray(np.random.default_rng(0).uniform(0.5, 2, (2, 2, m)), jnp.float32) if dtype == FP8 else None
    assert error(prompt_attention(*args, scales=scales), expected(*args, scales)) < 0.02


@pytest.mark.parametrize("window", [1, 128, 333, 2000, Chunks(256)])
@pytest.mark.parametrize("t,n,m,h,page_size,dtype", [
    (64, 32, 8, 128, 64, BF16),
    (64, 32, 8, 128, 64, FP8),
    (64, 16, 2, 256, 64, BF16),
    (64, 8, 4, 256, 128, FP8),
    (32, 7, 1, 64, 16, BF16),
    (128, 5, 1, 128, 64, BF16),
])  # fmt: skip
def test_a_row_sees_no_further_back_than_its_window(t, n, m, h, page_size, dtype, window):
    args = case(t, n, m, h, page_size, PROMPTS, dtype=dtype, padding=3)
    assert error(prompt_attention(*args, window=window), expected(*args, window=window)) < 0.02


@pytest.mark.parametrize("window", [None, 128])
def test_sinks_take_their_share(window):
    """gpt-oss' heads; one sink far above all scores, one far below."""
    args = case(64, 64, 8, 64, 64, PROMPTS, padding=3)
    sinks = jnp.asarray(np.random.default_rng(0).uniform(-3, 5, 64), jnp.float32).at[:2].set(jnp.array([60.0, -60.0]))
    got, want = prompt_attention(*args, window=window, sinks=sinks), expected(*args, window=window, sinks=sinks)
    assert error(got[..., 1:, :], want[..., 1:, :]) < 0.02 and float(jnp.abs(got[..., 0, :]).max()) < 1e-12


def test_repeats_exactly():
    args = case(64, 32, 8, 128, 64, [(0, 2048), (500, 1024)])
    first, *others = (np.float32(prompt_attention(*args)) for _ in range(5))
    for other in others:
        np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("name,prompts,least", [
    ("8192", [(0, 8192)], 450),  # with other tests on the GPU; alone it is more
    ("2048", [(0, 2048)], 350),
    ("1024", [(0, 1024)], 0),
    ("2048 after 6144", [(6144, 2048)], 450),
    ("16 x 512", [(0, 512)] * 16, 250),
])  # fmt: skip
@pytest.mark.speed
def test_reaches_tflops(name, prompts, least, figures):
    """Causal arithmetic alone counts. Layers differ, so that the cache isn't in L2 already."""
    layers, n, h = 16, 32, 128
    q, kv, _, table, start = case(64, n, 8, h, 64, prompts, layers=layers)

    @jax.jit
    def run(q, kv, table, start):
        for layer in range(layers):
            q = prompt_attention(q, kv, jnp.int32(layer), table, start)
        return q

    args, best = (q, kv, table, start), np.inf
    jax.block_until_ready(run(*args))
    for _ in range(5):
        begin = time.perf_counter()
        jax.block_until_ready([run(*args) for _ in range(10)])
        best = min(best, (time.perf_counter() - begin) / (10 * layers))
    tflops = sum(4 * n * h * (new * prefix + new**2 / 2) for prefix, new in prompts) / best / 1e12
    figures[f"prompt attention, {name}"] = {"us": round(best * 1e6, 1), "TFLOP/s": round(tflops, 1)}
    assert tflops > least
