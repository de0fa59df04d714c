"""The portable kernels on the device, at the sizes of models, against what they must equal."""

import dataclasses

import pytest

from tests.test_decode_attention import CASES, Case
from tests.test_portable_attention import PROMPTS, check

pytestmark = pytest.mark.gpu

LARGE = [
    Case("32 heads, 16 parts", lengths=(1000,), group=4, kv_heads=8, entries=16, division=(16, 1)),
    Case("many requests", lengths=tuple(range(1, 257, 2)), kv_heads=8),
    Case("verify, 8 x 4", t=4, lengths=(4, 3, 200, 100, 250, 64, 65, 7), kv_heads=8, division=(4, 1)),
    Case("blocks of a prompt", t=64, lengths=(64, 128, 192, 256, 30), kv_heads=8),
    Case("blocks, width 256", t=64, lengths=(64, 128, 192, 256, 30), h=256, group=8),
    Case("blocks, width 64, window, sinks", t=64, lengths=(64, 256), h=64, group=8, window=128, sinks=True),
]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in [*CASES, *PROMPTS, *LARGE]])
def test_attention_equals_dense_softmax(case):
    parts = case.division[0] * case.division[1]
    check(dataclasses.replace(case, division=(1 << (parts - 1).bit_length(), 1)))  # on a GPU a power of two
