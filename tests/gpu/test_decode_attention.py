"""The decode kernel on the device: the cases of the CPU's tests, sizes that are served, and how fast it reads."""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.attention import decode_attention as op
from tests.pallas.attention.test_decode_attention import CASES, Case, check

pytestmark = pytest.mark.gpu

served = partial(Case, division=None)
SERVED = [
    served("alone", kv_heads=8, entries=640, lengths=(1000,)),
    served("alone, long", t=4, kv_heads=8, entries=300, lengths=(18001,)),
    served("few, of many lengths", t=4, kv_heads=8, entries=20, lengths=(4, 63, 1000, 1280)),
    served("many, of many lengths", t=4, kv_heads=8, entries=20, lengths=tuple(range(5, 1280, 35))),
    served("tree", t=16, masked_slots=16, kv_heads=8, entries=20, lengths=(900, 17)),
    served("a step of a tree", t=4, masked_slots=16, kv_heads=8, entries=20, lengths=(1000, 17, 64)),
    served("a step of a tree, all bits", t=8, masked_slots=32, kv_heads=8, entries=20, lengths=(1000, 40)),
    served("block that sees ahead", t=16, masked_slots=16, whole=True, kv_heads=8, entries=20,
           lengths=(1000, 16, 71)),
    served("width 64", t=4, group=3, kv_heads=3, h=64, page=16, entries=80, lengths=(1000, 7)),
    served("width 256", t=4, group=8, kv_heads=2, h=256, entries=20, lengths=(1000, 7)),
    served("fp8", t=4, kv_heads=8, fp8=True, scaled=True, entries=20, lengths=(1000, 7)),
    served("fp8, alone, long", kv_heads=8, fp8=True, entries=300, lengths=(18001,)),
    served("fp8, many of many lengths", t=4, kv_heads=8, fp8=True, scaled=True, entries=20,
           lengths=tuple(range(5, 1280, 35))),
    served("fp8, 32 rows a head", t=8, kv_heads=8, fp8=True, scaled=True, entries=20, lengths=(1000, 7, 64)),
    served("fp8, block that sees ahead", t=16, masked_slots=16, whole=True, kv_heads=8, fp8=True, scaled=True,
           entries=20, lengths=(1000, 16, 71)),
    served("fp8, tree of two tiles", t=32, masked_slots=32, group=8, kv_heads=4, fp8=True, entries=20,
           lengths=(1000, 40)),
    served("fp8, width 64, sinks", t=4, group=8, kv_heads=8, h=64, page=16, fp8=True, scaled=True, entries=80,
           lengths=(1000, 7), sinks=True),
    served("fp8, width 256", t=4, group=8, kv_heads=2, h=256, fp8=True, scaled=True, entries=20, lengths=(1000, 7)),
    served("window, alone, long", t=4, kv_heads=8, entries=300, lengths=(18001,), window=1024),
    served("window, short", t=1, kv_heads=8, entries=300, lengths=(18001, 70), window=128),
    served("window, many of many lengths", t=4, kv_heads=8, entries=20, lengths=tuple(range(5, 1280, 35)), window=200),
    served("window, tree", t=16, masked_slots=16, kv_heads=8, entries=20, lengths=(900, 17), window=100),
    served("window, width 256", t=4, group=8, kv_heads=2, h=256, entries=20, lengths=(1000, 7), window=512),
    served("window, fp8", t=4, kv_heads=8, fp8=True, scaled=True, entries=20, lengths=(1000, 7), window=333),
]  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *SERVED], ids=lambda case: case.name)
def test_equals_dense_softmax(case):
    check(case)


@pytest.mark.parametrize("group,page,h", [(1, 16, 64), (2, 32, 128), (5, 64, 64), (6, 128, 256), (7, 16, 128),
                                          (12, 32, 64), (16, 128, 128)])  # fmt: skip
def test_groups_and_page_sizes(group, page, h):
    entries = 640 // page
    check(served("", t=3, group=group, page=page, h=h, entries=entries, lengths=(3, 350, 639)))


LAYERS, KV_HEADS, WIDTH, PAGE, NEW = 4, 8, 128, 64, 4  # four of Qwen3-8B's


def seconds(b, tokens, window=None, dtype=jnp.bfloat16):
    """Seconds of one layer's attention. The best of three: kernels are compiled in threads of their own
    (`pallas.hopper.export`), and the first may meet one."""
    entries = tokens // PAGE
    table = 1 + np.random.default_rng(0).permutation(b * entries).reshape(b, entries)
    args = dict(table=jnp.asarray(table, jnp.int32), start=jnp.full(b, tokens - NEW, jnp.int32), window=window)
    kv = jnp.full((LAYERS, 1 + b * entries, 2, KV_HEADS, PAGE, WIDTH), 0.5, dtype)

    @jax.jit
    def run(q, kv):
        for layer in range(LAYERS):
            q = op.decode_attention(q, kv, jnp.int32(layer), **args)
        return q

    q = jax.block_until_ready(run(jnp.ones((b, NEW, 32, WIDTH), jnp.bfloat16), kv))
    taken, rounds = [], 30
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(rounds):
            q = run(q, kv)
        q.block_until_ready()
        taken.append((time.perf_counter() - begin) / rounds / LAYERS)
    return min(taken)


@pytest.mark.parametrize("b,tokens,least,dtype", [
    (128, 1152, 3.6, jnp.bfloat16), (32, 4096, 3.7, jnp.bfloat16), (1, 16384, 2.5, jnp.bfloat16),
    (128, 1152, 3.0, op.FP8), (32, 4096, 3.0, op.FP8), (1, 16384, 1.2, op.FP8),
])  # fmt: skip
@pytest.mark.speed
def test_memory_bandwidth(b, tokens, least, dtype, figures):
    """TB/s of keys and values read; `least` leaves room for a busy device."""
    taken, item = seconds(b, tokens, dtype=dtype), jnp.dtype(dtype).itemsize
    rate = b * tokens * 2 * KV_HEADS * WIDTH * item / taken / 1e12
    figures[f"decode attention, {b} x {tokens}, {jnp.dtype(dtype).name}"] = {"us": taken * 1e6, "TB/s": rate}
    assert rate >= least


@pytest.mark.parametrize("b,window", [(1, 1024), (8, 1024), (32, 128), (32, 1024)])
@pytest.mark.speed
def test_a_window_costs_the_same_however_long_the_text(b, window, figures):
    """The closest text has little more than the window."""
    close, far = (seconds(b, tokens, window) for tokens in (window + 128, 16384))
    figures[f"decode attention, {b} x 16384, window {window}"] = {"us": far * 1e6, "us at the window": close * 1e6}
    assert far < 1.25 * close + 1e-6
