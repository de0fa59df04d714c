"""The kernel that scores experts one by one on the device."""

from __future__ import annotations

import pytest

from tests.pallas.experts import test_scored_experts as cpu

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", cpu.ROUTINGS)
@pytest.mark.parametrize("t,e,k", [*cpu.CASES, (2048, 128, 8), (3000, 384, 8), (5000, 512, 10)])
def test_matches_the_reference(t, e, k, name):
    cpu.check(t, e, k, name)
