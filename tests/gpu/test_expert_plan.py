"""The kernel that plans a mixture's work, on the device."""

from __future__ import annotations

import pytest

from tests.pallas.experts.test_expert_plan import CASES, check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", [
    *CASES,
    *((t, 128, 8, skew, False) for t in (9, 16, 17, 32, 64, 100, 128) for skew in (0, 0.3, 5)),
    *((t, 256, 8, skew, True) for t in (9, 32, 33, 127, 128) for skew in (0, 0.3, 5)),
    *((t, 512, 10, 0, True) for t in (32, 128)),
    (128, 1024, 16, 0, False),
])  # fmt: skip
def test_matches_the_plain_plan(case):
    """Several times: what threads tell one another would be missed now and then."""
    for _ in range(3):
        check(*case, d=2048, wide=128 - case[2] - case[4])


@pytest.mark.parametrize("nobody", ["end", "all"])
def test_padding_has_no_place(nobody):
    check(100, 128, 8, 0, False, nobody=nobody, wide=120)


@pytest.mark.parametrize("d", [128, 384, 2880, 4096, 5120])
def test_rows_may_be_of_any_width(d):
    check(32, 60, 4, 0, False, d=d)
