"""Hopper's kernel of latent attention on the device, at the sizes of models, against a dense softmax."""

from __future__ import annotations

from functools import partial

import pytest

from tests.pallas.attention.test_latent_decode import CASES, check, served

pytestmark = pytest.mark.gpu

model = partial(served, page=64, parts=None)
LARGE = [
    model("decode, 16 heads, alone", n=16, lengths=(1000,)),
    model("decode, 16 heads, alone and long", n=16, lengths=(30000,)),
    model("decode, 16 heads, many of many lengths", n=16, lengths=(*range(1, 1290, 10), -3)),
    model("decode, 32 heads, few of many lengths", n=32, lengths=(1, 64, 65, 127, 128, 129, 2000)),
    model("decode, 64 heads", n=64, lengths=(4096, 100, 5)),
    model("decode, 128 heads", n=128, lengths=(1, 64, 65, 700)),
    model("decode, 128 heads, alone and long", n=128, lengths=(30000,)),
    model("decode, 128 heads, more tiles than processors", n=128, lengths=tuple(range(1, 1000, 12))),
    model("verify, 64 heads", n=64, t=4, lengths=(4, 131, 300)),
    model("verify, 20 heads, pages of 16", n=20, t=4, page=16, lengths=(4, 300, 515)),
    model("verify, 128 heads", n=128, t=4, lengths=(300, 1000)),
    model("a block of a prompt, 20 heads", n=20, t=64, lengths=(64, 200, 1111)),
    model("tree, 16 heads", n=16, t=8, masked_slots=8, lengths=(8, 300, 2000)),
    model("tree, 128 heads, a step", n=128, t=4, masked_slots=16, lengths=(16, 300, 2000)),
    model("decode, 8 heads, few of many lengths", n=8, lengths=(1, 64, 65, 127, 128, 129, 2000)),
    model("FP8, decode, 16 heads, alone and long", n=16, pages="float8_e4m3fn", lengths=(30000,)),
    model(
        "FP8, decode, 16 heads, many of many lengths", n=16, pages="float8_e4m3fn", lengths=(*range(1, 1290, 10), -3)
    ),
    model("FP8, decode, 128 heads", n=128, pages="float8_e4m3fn", lengths=(1, 64, 65, 700)),
    model("FP8, verify, 20 heads, pages of 16", n=20, t=4, page=16, pages="float8_e4m3fn", lengths=(4, 300, 515)),
    model("FP8, tree, 16 heads", n=16, t=8, masked_slots=8, pages="float8_e4m3fn", lengths=(8, 300, 2000)),
]


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=lambda case: case.name)
def test_equals_dense_softmax(case):
    check(case)
