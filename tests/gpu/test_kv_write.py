"""The kernel that writes prompts' keys and values, on the device."""

from __future__ import annotations

import pytest

from tests.pallas.attention.test_kv_write import check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("blocks,t,heads,width", [(16, 64, 8, 128), (128, 64, 2, 256), (9, 64, 4, 128)])
def test_matches_the_scatter(blocks, t, heads, width):
    check(blocks, t, heads, width)
