"""Few tokens' experts added up, on the device."""

from __future__ import annotations

import pytest

from tests.pallas.experts.test_expert_add import check, check_alone

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("t", [1, 3, 8, 21, 32])
@pytest.mark.parametrize("k,d", [(4, 2880), (9, 2048)])
def test_rows_are_added_up(t, k, d):
    check(t, k, d)


def test_one_tokens_rows_need_no_places():
    check_alone(9, 2048)
