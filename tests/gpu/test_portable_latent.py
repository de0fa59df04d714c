"""Latent attention on the device, at the sizes of models, against a dense softmax."""

from __future__ import annotations

import pytest

from jaxspec.pallas.portable import latent
from tests.pallas.portable.test_portable_latent import CASES, Case, check

pytestmark = pytest.mark.gpu

SIZES = dict(latent=512, rest=64, page=64, dtype="bfloat16", parts=None)
LARGE = [
    Case("decode, 16 heads", n=16, lengths=(1000,), **SIZES),
    Case("decode, 128 heads", n=128, lengths=(1, 64, 65, 700), **SIZES),
    Case("verify, 64 heads", n=64, t=4, lengths=(4, 300), **SIZES),
    Case("verify, 16 heads, FP8 pages", n=16, t=4, pages="float8_e4m3fn", lengths=(4, 300, 1000), **SIZES),
    Case("a block of a prompt, 20 heads", n=20, t=64, lengths=(64, 200), **SIZES),
    Case("tree, 16 heads", n=16, t=8, masked_slots=8, lengths=(8, 300), **SIZES),
]


@pytest.mark.parametrize("case", [*(case for case in CASES if case.dtype == "bfloat16"), *LARGE], ids=lambda x: x.name)
def test_equals_dense_softmax(case):
    check(case, latent.latent_attention if case.parts is None else lambda *of: latent.latent_attention(*of, parts=1))
