"""Attention of vision towers on the device, at the sizes of models, against a dense softmax."""

from __future__ import annotations

import pytest

from jaxspec.pallas.portable.pictures import picture_attention
from tests.pallas.portable.test_portable_pictures import CASES, Case, check

pytestmark = pytest.mark.gpu

LARGE = [
    Case("1,024 x 1,024 pixels", patches=1024, pictures=(1024,), n=16, dtype="bfloat16"),
    Case("three pictures, heads of 72", patches=1024, pictures=(400, 4, 600), n=16, dtype="bfloat16"),
]


@pytest.mark.parametrize("case", [*(case for case in CASES if case.dtype == "bfloat16"), *LARGE], ids=lambda x: x.name)
def test_equals_dense_softmax(case):
    check(case, picture_attention)
