"""The kernel of a round's convolution, on the device."""

from __future__ import annotations

import dataclasses

import pytest

from tests.pallas.recurrence import test_conv_step

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows,replay", [(1, (0,)), (1, (1, 0) * 64), (4, (4, 0, 2)), (8, tuple(range(9)) * 7)])
def test_matches_the_plain_form(rows, replay):
    test_conv_step.check(rows, replay, dataclasses.replace(test_conv_step.MIX, key_heads=16, value_heads=32))


@pytest.mark.parametrize("rows,replay", [(1, (0,)), (1, (1, 0) * 64), (4, (4, 0, 2)), (8, tuple(range(9)) * 7)])
def test_channels_of_a_state_space_match_the_plain_form(rows, replay):
    """Nemotron 3 Nano's: 4,096 of its heads, and keys and queries of 8 groups."""
    test_conv_step.check_channels(rows, replay, widths=(4096, 1024, 1024))
