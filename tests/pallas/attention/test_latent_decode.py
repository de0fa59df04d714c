"""Hopper's kernel of latent attention against a dense softmax in float64, in Pallas's GPU interpreter; and that it
lowers for CUDA, and serves where it should.

The interpreter has no counters between blocks: parts are combined by a second call of the kernel there.
`tests/gpu/test_latent_decode.py` runs the same cases and larger ones on the device.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas import hopper
from jaxspec.pallas.attention import latent_decode as op
from jaxspec.pallas.attention.latent_attention import LATENT_ATTENTION
from jaxspec.pallas.attention.latent_decode.plan import HALF, Plan
from jaxspec.pallas.operation import choose
from tests.pallas.portable.test_portable_latent import Case, dense
from tests.support.kernels import lowered
from tests.support.sample import one_in

served = partial(Case, latent=512, rest=64, dtype="bfloat16")
fp8 = partial(served, pages="float8_e4m3fn")
CASES = [  # `parts` of a case: blocks that divide a request's tokens
    served("decode, 4 heads", n=4, lengths=(1, 70, -3), page=64),
    # The second tile sees a pair of steps more than its neighbour, which is copied for both.
    served("two tiles of 80 rows, two parts", n=10, t=8, lengths=(257,), page=128, parts=2),
    served("rows that aren't a multiple of eight", n=5, t=2, lengths=(130,), page=16),
    served("more parts than pairs of steps", n=4, lengths=(3, 150), page=64, parts=3),
    served("short, parts", n=20, t=4, lengths=(4, 150), parts=2),
    served("tree", n=3, t=6, masked_slots=6, lengths=(40,)),
    served("a step of a tree, all bits, parts", n=3, t=2, masked_slots=32, lengths=(20, 190), parts=2),
    served("a block of a prompt", n=20, t=8, lengths=(8, 100), page=64),
    served("35 rows", n=35, lengths=(1, 200)),
    fp8("FP8, two tiles of 40 rows, two parts", n=20, t=2, lengths=(300, -3), parts=2),
    fp8("FP8, tree, four parts", n=3, t=6, masked_slots=6, lengths=(140,), page=64, parts=4),
    fp8("FP8, a block of a prompt, pages of 16", n=20, t=8, lengths=(8, 100), page=16),
]
OFTEN = {"two tiles of 80 rows, two parts", "FP8, tree, four parts"}  # the others have less that differs


def check(case: Case, interpret=False) -> None:
    """The kernel's result is bfloat16's rounding away from the dense one, and rows that see nothing are zero."""
    *operands, latent, scale, mask = case.inputs()
    scale /= 4  # so that many tokens count
    out = op.latent_decode(*operands, mask, scale=scale, splits=case.parts, interpret=interpret)
    expected = dense(*operands, latent, scale, mask)
    assert out.dtype == jnp.bfloat16
    out = np.float64(out)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(out[(expected == 0).all(-1)], 0)
    error = np.abs(out - expected).max(axis=(1, 2, 3))
    size = np.maximum(np.abs(expected).max(axis=(1, 2, 3)), 1e-3)
    assert (error / size < 0.01).all(), (error / size).max()


@pytest.mark.parametrize("case", [
    pytest.param(case, id=case.name, marks=() if case.name in OFTEN else pytest.mark.exhaustive) for case in CASES
])  # fmt: skip
def test_equals_dense_softmax(case):
    check(case, plgpu.InterpretGPUParams())


def shapes(b: int, t: int, n: int, page: int = 64, masked_slots: int = 0, pages: str = "bfloat16") -> tuple:
    of, context = jax.ShapeDtypeStruct, 4096
    kv = of((2, 1 + b * context // page, 1, 1, page, 576), jnp.dtype(pages))
    rest = of((), jnp.int32), of((b, context // page), jnp.int32), of((b,), jnp.int32)
    mask = (of((b, t, masked_slots), bool),) if masked_slots else ()
    return of((b, t, n, 576), jnp.bfloat16), kv, *rest, *mask


@pytest.mark.parametrize("given", one_in(8, [
    dict(b=4, t=6, n=3, masked_slots=6, page=32, pages="float8_e4m3fn"),
    dict(b=4, t=8, n=16, masked_slots=8, page=32),
    dict(b=8, t=1, n=16),
    dict(b=1, t=4, n=20, page=16),
    dict(b=128, t=1, n=128),
    dict(b=2, t=1, n=64, page=128),
    dict(b=2, t=64, n=40),
    dict(b=32, t=4, n=16, pages="float8_e4m3fn"),
]))  # fmt: skip
def test_lowers_for_cuda(given):
    """With one counter for each tile whose parts wait for one another, as its last operand."""
    text = lowered(partial(op.latent_decode, scale=0.1), *shapes(**given))
    assert text.count("custom_call @mosaic_gpu") == 1
    tiles = given["b"] * -(-given["t"] * given["n"] // (32 if "pages" in given else 64))
    (counters,) = re.findall(r"tensor<(\d+)xi32>\) ->", "".join(re.findall(r"@mosaic_gpu.*", text)))
    assert int(counters) == (tiles if op.division(tiles, 4096, 1) > 1 else 1)


@pytest.mark.parametrize("change,reason", [
    ({}, None),
    ({"latent": 256}, "latents of 256 + 64 columns; 512 + 64"),
    ({"rest": 32}, "latents of 512 + 32 columns"),
    ({"page": 8}, "pages of 8 tokens; 16, 32, 64, 128"),
    ({"dtype": "float32"}, "queries in float32"),
    ({"pages": "float8_e4m3fn"}, None),
    ({"pages": "float16"}, "latents in float16; bfloat16 and float8_e4m3fn"),
    ({"t": 33, "masked_slots": 33, "lengths": (33,)}, "a mask over 33 KV slots; up to 32"),
])  # fmt: skip
def test_it_serves_what_it_supports(change, reason, monkeypatch):
    """And another kernel the rest."""
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    call = served("", **{"n": 1, "lengths": (9,)} | change).inputs()
    refused = LATENT_ATTENTION[0].refuses(*call)
    assert refused is None if reason is None else reason in refused
    assert (choose("latent attention", LATENT_ATTENTION, *call).name == "latent_decode") == (reason is None)


@pytest.mark.parametrize("tiles,context,splits", [
    (1, 4096, 32), (1, 65536, 132), (8, 4096, 16), (32, 4096, 4), (70, 4096, 7), (100, 4096, 5), (128, 4096, 1),
    (160, 4096, 4), (160, 128, 1), (256, 4096, 1), (2048, 4096, 1),
])  # fmt: skip
def test_division_fills_the_processors(tiles, context, splits):
    assert op.division(tiles, context // 64, 64) == splits


@pytest.mark.parametrize("heads", [4, 16, 24, 128])
def test_parts_combine_what_is_contiguous(heads):
    """Packs of more than eight rows have all columns, and as many parts as possible have a pack."""
    for splits in range(1, 133):
        plan = Plan(1, 1, heads, 64, 64, 0.1, 0, splits, False, False)
        packs = plan.rows // plan.pack * (HALF // plan.combined)
        assert plan.rows % plan.pack == 0 == HALF % plan.combined
        assert plan.combined == HALF or plan.pack == 8
        assert packs >= splits or (plan.pack, plan.combined) == (8, 64)


def test_an_unsupported_call_is_refused():
    *operands, _latent, scale, _mask = served("", n=1, page=8, lengths=(9,)).inputs()
    with pytest.raises(ValueError, match="pages of 8 tokens"):
        op.latent_decode(*operands, scale=scale)
