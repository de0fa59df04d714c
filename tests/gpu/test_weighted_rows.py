"""The sum of rows from all over an array, on the device."""

from __future__ import annotations

import pytest

from tests.test_weighted_rows import check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("t,k,d", [(600, 8, 2048), (8192, 9, 2048), (1000, 10, 4096), (700, 3, 384)])
def test_matches_the_definition(t, k, d):
    check(t, k, d)
