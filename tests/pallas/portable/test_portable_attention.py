"""The portable attention kernel against a dense softmax in float64, in Pallas's interpreter; and that it lowers for
several generations of GPUs.

`tests/gpu/test_portable.py` runs the same cases and larger ones on the device.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas import operation
from jaxspec.pallas.attention.paged_attention import paged_attention, reference
from jaxspec.pallas.hopper import counting
from jaxspec.pallas.portable import attention as op
from tests.pallas.attention.test_decode_attention import CASES, RARE, Case, check_kernel, dense
from tests.support.portable import KINDS, lowered
from tests.support.sample import one_in

PROMPTS = [
    Case("prompt", t=64, lengths=(64, 70, 10), group=2),
    Case("prompt, two tiles, window", t=64, group=4, kv_heads=1, lengths=(64, 200), window=30),
    Case("prompt, odd group, sinks", t=48, group=3, kv_heads=1, h=64, lengths=(48, 150), sinks=True),
    Case("prompt, fp8", t=33, group=4, kv_heads=1, fp8=True, scaled=True, lengths=(33, 150)),
    Case("prompt, width 256", t=32, group=4, kv_heads=1, h=256, lengths=(32, 90)),
    Case("tree, width 512", t=5, group=8, kv_heads=1, h=512, masked_slots=5, lengths=(5, 60), window=40),
    Case("tree beyond a word", t=40, masked_slots=40, kv_heads=1, group=2, lengths=(40, 200), window=80),
]
# What they have the other cases have together with something else.
ALONE = {
    *("all rows", "fp8, width 256, no scales", "window", "segments", "prompt, two tiles, window", "prompt, width 256"),
    *("block that sees ahead", "sinks", "prompt", "fp8, pair", "segments, three tiles, blocks"),
}


def check(case: Case, interpret: bool = False) -> None:
    check_kernel(case, partial(op.attention, parts=case.division[0] * case.division[1], interpret=interpret))


@pytest.mark.parametrize("case", [
    pytest.param(case, id=case.name, marks=pytest.mark.exhaustive if case.name in RARE | ALONE else ())
    for case in [*CASES, *PROMPTS]
])  # fmt: skip
def test_equals_dense_softmax(case):
    check(case, interpret=True)


@pytest.mark.parametrize("window", [None, 40])
def test_rows_may_see_later_ones(window):
    """Rows see as a picture's do: of every sixteen, the last one's KV slot."""
    case = Case("", t=64, group=2, lengths=(64, 200), window=window)
    args, named = case.inputs()
    last = (args["start"][:, None] + np.arange(64)) // 16 * 16 + 15
    last = np.minimum(last, np.array(case.lengths)[:, None] - 1)
    given = {**args, **named, "last": jnp.asarray(last, jnp.int32)}
    given["kv"] = jnp.nan_to_num(given["kv"])  # of what no row sees, which the reference multiplies by zero
    expected = np.float32(reference(**given))
    np.testing.assert_allclose(np.float32(op.attention(**given, interpret=True)), expected, atol=0.02)
    assert np.abs(expected - np.float32(reference(**given | {"last": None}))).max() > 0.1


@pytest.mark.parametrize("sizes", [dict(t=4, fp8=True, scaled=True), dict(t=5, masked_slots=5, window=40, sinks=True)])
@pytest.mark.parametrize("parts", [1, 4])
def test_scores_stay_below_a_cap(sizes, parts):
    args, named = Case("", **sizes).inputs()
    given = args | named | {"kv": args["kv"] if "fp8" in sizes else jnp.nan_to_num(args["kv"])}
    expected = np.float32(reference(**given, cap=0.8))
    out = np.float32(op.attention(**given, cap=0.8, parts=parts, interpret=True))
    np.testing.assert_allclose(out, expected, atol=0.02)
    assert np.abs(expected - np.float32(reference(**given))).max() > 0.1


@pytest.mark.parametrize("capability,sizes", one_in(len(KINDS), KINDS, [
    dict(),
    dict(t=4, fp8=True, scaled=True),
    dict(t=8, masked_slots=8, window=40),
    dict(t=64, group=8, h=64, window=128, sinks=True),
    dict(t=64, fp8=True),
    dict(t=64, h=256, page=16),
    dict(t=64, h=512, group=8),
    dict(t=40, masked_slots=40, group=7),
    dict(t=64, h=256, cap=50.0),
]))  # fmt: skip
def test_lowers_for_each_generation(capability, sizes):
    cap, sizes = sizes.get("cap"), {name: size for name, size in sizes.items() if name != "cap"}
    args, named = Case("", entries=4, lengths=(90,), **sizes).inputs()
    window = named.pop("window", None)
    for parts in (1, 4):
        run = partial(op.attention, window=window, parts=parts, cap=cap)
        text = lowered(lambda args, named, run=run: run(**args, **named), args, named, capability=capability)
        assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == min(parts, 2)


@pytest.mark.parametrize("q,kv,dtype,reason", [
    ((1, 1, 8, 128), (2, 3, 2, 2, 64, 128), "bfloat16", None),
    ((1, 64, 9, 64), (2, 3, 2, 3, 16, 64), "float8_e4m3fn", None),
    ((1, 64, 9, 64), (2, 3, 2, 3, 16, 64), "float16", "a cache in float16; that of the queries and float8_e4m3fn are"),
    ((1, 1, 8, 80), (2, 3, 2, 2, 64, 80), "bfloat16", "width 80; 16, 32, 64, 128, 256, 512 are supported"),
    ((1, 1, 8, 128), (2, 3, 2, 2, 8, 128), "bfloat16", "pages of 8 tokens"),
    ((1, 1, 8, 128), (2, 3, 2, 2, 48, 128), "bfloat16", "pages of 48 tokens"),
    ((1, 1, 256, 128), (2, 3, 2, 1, 64, 128), "bfloat16", "256 query heads for each KV head; up to 128"),
    ((1, 1, 8, 128), (2, 2**15, 2, 4, 64, 128), "float8_e4m3fn", "2 to 4 GiB"),
])  # fmt: skip
def test_supported_says_why_not(q, kv, dtype, reason):
    answer = op.supported(q, jax.ShapeDtypeStruct(kv, dtype), jnp.bfloat16)
    assert answer is None if reason is None else reason in answer


def test_float32_and_float16_are_as_exact_as_they_can_be():
    for dtype, error in (("float32", 2e-6), ("float16", 2e-3)):
        args, named = Case("", t=4, lengths=(4, 90)).inputs()
        args |= {name: args[name].astype(dtype) for name in ("q", "kv")}
        out = op.attention(**args, **named, parts=2, interpret=True)
        assert out.dtype == dtype
        np.testing.assert_allclose(np.float64(out), dense(**args, **named), atol=error * 8)


@pytest.mark.parametrize("b,t,window,processors,parts", [
    (1, 1, None, 132, 16),
    (8, 1, None, 132, 4),
    (128, 1, None, 132, 1),
    (1, 1, None, 20, 4),
    (1, 1, 128, 132, 4),
    (32, 64, None, 132, 1),
])  # fmt: skip
def test_few_requests_are_divided_so_that_processors_are_busy(b, t, window, processors, parts, monkeypatch):
    monkeypatch.setattr(op.portable, "multiprocessors", lambda: processors)
    assert op.division(op.Plan(b, t, 32, 8, 128, 1000, 64, 64, 0, window, 2)) == parts


def test_the_operation_takes_it_on_a_gpu_that_is_not_hopper(monkeypatch, caplog):
    """And tells of shapes that it can't take."""
    monkeypatch.setattr(op.portable, "kernels_here", lambda: None)
    operation.warn.cache_clear()
    args, _ = Case("", lengths=(90,)).inputs()
    run = jax.jit(lambda q, kv, *rest: paged_attention(q, kv, *rest))
    with counting() as kernels:
        assert "gpu.triton" in lowered(run, *args.values(), capability="8.0")
        assert kernels == {"portable_attention": 1}
        odd, _ = Case("", lengths=(9,), page=8).inputs()
        assert "gpu.triton" not in lowered(run, *odd.values(), capability="8.0")
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "paged attention runs in plain jax.numpy, which is slow "
        "(portable: pages of 8 tokens; powers of two from 16 on are supported)"
    ]
