"""The router's kernel on the device."""

from __future__ import annotations

import pytest

from tests.pallas.experts import test_top_experts

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("renormalised,width", [(True, 0), (False, 0), (True, 2048), (True, 4096)])
@pytest.mark.parametrize("t,e,k", [*test_top_experts.CASES, (2048, 256, 8), (3000, 512, 10), (5000, 128, 8)])
def test_matches_the_reference(t, e, k, renormalised, width):
    test_top_experts.check(t, e, k, renormalised, width)
