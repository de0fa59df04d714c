"""Rows to experts and back, on the device."""

from __future__ import annotations

import pytest

from tests.pallas.experts.test_expert_rows import check, check_taking

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("t,k,d", [(600, 8, 2048), (8192, 9, 2048), (1000, 10, 4096), (700, 3, 384), (900, 4, 2880)])
def test_rows_are_added_up(t, k, d):
    check(t, k, d)


@pytest.mark.parametrize("t,rows,d", [(600, 11136, 2048), (8192, 74240, 2048), (700, 4096, 384), (900, 4096, 2880)])
def test_rows_are_taken(t, rows, d):
    check_taking(t, rows, d)
