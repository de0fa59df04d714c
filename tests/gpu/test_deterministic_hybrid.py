"""On the device: the states and logits of a hybrid have the same bits however the tokens came."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from jaxspec.pallas.hopper import KERNELS
from tests.support import hybrids
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.gpu

BLOCK = 64
SIZES = dict(
    vocab_size=1024, hidden_size=1536, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2, head_dim=256, full_attention_interval=2, linear_num_key_heads=4, linear_num_value_heads=12,
    linear_key_head_dim=128, linear_value_head_dim=128,
)  # fmt: skip


@functools.cache
def model(state_dtype: str = "float32") -> hybrids.Rounds:
    return hybrids.Rounds(tiny_config("qwen3_5", **SIZES), "bfloat16", state_dtype, BLOCK, requests=132, pages=4)


def others(count: int) -> list[tuple[int, int, int]]:
    return [(i + 2, 64, 0) for i in range(count)]


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_a_rows_bits_depend_on_no_other_row_of_a_round(state_dtype):
    """Rounds of four rows, of which some are accepted, beside up to 127 others, and rows one by one."""
    one = model(state_dtype).begun()
    one.prompts([(1, 0)], BLOCK)
    one_by_one = np.stack([one.round([(1, at, int(at > 64))], 1)[0, 0] for at in range(64, 72)])
    assert np.isfinite(one_by_one).all() and len({row.tobytes() for row in one_by_one}) == 8
    assert KERNELS["delta_step"] and KERNELS["conv_step"] and KERNELS["weight_stream_fixed"]
    sizes = ((0, 4), (7, 4), (40, 4), (127, 1))  # up to 128 rows, and more
    for count, t in sizes if state_dtype == "float32" else sizes[1:2]:
        run = model(state_dtype).begun()
        run.prompts([(1, 0)], BLOCK)
        at, replay, said = 64, 0, []
        for accepted in (3, 4, 1) if t > 1 else (1,) * 8:
            where = count // 2
            got = run.round([*others(count)[:where], (1, at, replay), *others(count)[where:]], t)[where]
            said.append(got[:accepted])
            at, replay = at + accepted, accepted
        assert (np.concatenate(said) == one_by_one).all(), f"{count} others, {t} rows"
        run.round([(1, 72, replay)], 1)
        after = one.begun()
        after.round([(1, 72, 1)], 1)
        assert (run.state(1) == after.state(1)).all(), f"{count} others, {t} rows"


def test_a_prompts_bits_depend_on_no_division_or_other_block():
    run = model().begun()
    whole = run.prompts([(2, 0), (2, 64), (2, 128)], BLOCK)
    beside = model().begun()
    got = beside.prompts([(3, 0), (4, 0), (2, 0), (2, 64), *[(i + 10, 0) for i in range(12)]], BLOCK)[2:4]
    last = beside.prompts([(2, 128)], BLOCK)
    assert (whole == np.concatenate([got, last])).all()
    assert (run.state(2) == beside.state(2)).all()
    parted = model().begun()
    parted.prompts([(2, 0), (2, 64)], BLOCK)
    assert (parted.prompts([(5, 0), (2, 128)], BLOCK)[1] == whole[2]).all()
    fresh = model().begun()  # another request goes on from the snapshot of the first one's blocks
    fresh.prompts([(2, 0), (2, 64)], BLOCK)
    assert (fresh.prompts([(2, 128)], BLOCK, source=fresh.snapshot)[0] == whole[2]).all()
    assert (fresh.state(2) == run.state(2)).all()
