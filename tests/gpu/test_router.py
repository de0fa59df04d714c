"""A mixture's router as one kernel on the device, its inputs divided among the blocks of a cluster."""

from __future__ import annotations

import pytest

from tests.pallas.experts import test_router

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("width,case", [(2048, "qwen3"), (2048, "many"), (2880, "gpt-oss"), (2880, "few experts")])
def test_experts_are_chosen(width, case):
    for _ in range(3):  # a missing wait would show now and then
        test_router.check(width, **test_router.CASES[case])
