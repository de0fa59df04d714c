"""Packed arrays arrive on the device unchanged, each in its slot and nowhere else; and the ladder of sizes."""

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.config.request import MAX_LOGIT_BIAS, MAX_STOP_IDS, SamplingParams
from jaxspec.rounds.packing import (
    admission_size,
    admit,
    empty_slots,
    fit,
    ladder,
    pack_admission,
    pack_blocks,
    unpack_blocks,
)

SLOTS, CAPACITY = 3, 20
TOKEN = st.integers(0, 2**31 - 1)

_admit = jax.jit(admit)


@st.composite
def requests(draw):
    number = partial(st.floats, allow_subnormal=False)
    return SamplingParams(
        temperature=draw(number(0, 100)),
        top_k=draw(st.integers(-1, 2**31 - 1)),
        top_p=draw(number(2.0**-99, 1)),
        min_p=draw(number(0, 1)),
        min_tokens=draw(st.integers(0, 100)),
        presence_penalty=draw(number(-2, 2)),
        frequency_penalty=draw(number(-2, 2)),
        repetition_penalty=draw(number(2.0**-99, 100)),
        logit_bias=draw(st.dictionaries(TOKEN, number(-100, 100), max_size=5)),
    )


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    params=requests(),
    slot=st.integers(0, SLOTS - 1),
    tokens=st.lists(TOKEN, min_size=1, max_size=CAPACITY),
    prompt=st.integers(1, CAPACITY),
    drafts=st.integers(0, 16),
    seed=st.integers(-(2**63), 2**64 - 1) | st.sampled_from((-1, 0, 2**32, 2**63, 2**64 - 1)),
    stop_ids=st.lists(TOKEN, max_size=MAX_STOP_IDS, unique=True),
)
def test_admission_arrives(params, slot, tokens, prompt, drafts, seed, stop_ids):
    limit = prompt + 7
    packed = pack_admission(slot, tokens, prompt, limit, drafts, seed, stop_ids, params, CAPACITY)
    assert packed.shape == (admission_size(CAPACITY),) and packed.dtype == np.int32
    before = empty_slots(SLOTS, CAPACITY)
    after = jax.tree.map(np.asarray, _admit(before, packed))
    other = np.arange(SLOTS + 1) != slot
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert old.dtype == new.dtype
        np.testing.assert_array_equal(np.asarray(old)[other], new[other])

    row = jax.tree.map(lambda x: x[slot], after)
    np.testing.assert_array_equal(row.history, tokens + [0] * (CAPACITY - len(tokens)))
    assert (row.length, row.prompt, row.limit, row.drafts) == (len(tokens), prompt, limit, drafts)
    assert not row.done
    got = row.sampling
    assert int(got.seed[0]) << 32 | int(got.seed[1]) == seed % 2**64
    assert got.top_k == max(params.top_k, 0)
    assert got.min_length == (prompt + params.min_tokens if params.min_tokens else 0)
    for name in ("temperature", "top_p", "min_p"):
        assert same_bits(getattr(got, name), getattr(params, name))
    for name in ("repetition", "presence", "frequency"):
        assert same_bits(getattr(got, name), getattr(params, f"{name}_penalty"))
    np.testing.assert_array_equal(got.stop_ids, stop_ids + [-1] * (MAX_STOP_IDS - len(stop_ids)))
    unused = MAX_LOGIT_BIAS - len(params.logit_bias)
    np.testing.assert_array_equal(got.bias_ids, [*params.logit_bias, *[-1] * unused])
    assert same_bits(got.bias, [*params.logit_bias.values(), *[0.0] * unused])


def same_bits(got, want):
    return np.float32(got).tobytes() == np.float32(want).tobytes()


def test_admission_replaces_all_that_was_in_the_slot():
    full = SamplingParams(
        temperature=2, top_k=5, top_p=0.5, min_p=0.5, min_tokens=3, presence_penalty=1, frequency_penalty=1,
        repetition_penalty=2, logit_bias={i: 1.0 for i in range(MAX_LOGIT_BIAS)},
    )  # fmt: skip
    first = pack_admission(1, list(range(CAPACITY)), 9, 9, 4, 2**40 + 1, list(range(MAX_STOP_IDS)), full, CAPACITY)
    second = pack_admission(1, [8], 1, 5, 0, 3, [], SamplingParams(), CAPACITY)
    empty = empty_slots(SLOTS, CAPACITY)
    twice, once = admit(admit(empty, first), second), admit(empty, second)
    jax.tree.map(np.testing.assert_array_equal, twice, once)


def test_a_block_brings_its_tokens_and_the_one_after_them():
    """The first of two blocks of one prompt, the second, which ends with the newest token, and padding."""
    text, tables = [5, 6, 7, 8, 9, 4], np.array([[1, 2], [1, 2], [0, 0]])
    blocks = [(1, 0, 4, -1, 7), (1, 4, 2, 1, -1), (3, 0, 0, -1, -1)]
    numbers, tokens, pages = unpack_blocks(pack_blocks(blocks, [text, text, []], tables, 4), 4)
    assert numbers.T.tolist() == [[*blocks[0], 0], [*blocks[1], 1], [*blocks[2], 0]]
    assert tokens.tolist() == [[5, 6, 7, 8, 9], [9, 4, 0, 0, 0], [0] * 5]
    np.testing.assert_array_equal(pages, tables)


@pytest.mark.parametrize(
    ("limit", "steps"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (9, (1, 2, 4, 8, 9)), (48, (1, 2, 4, 8, 16, 32, 48))],
)
def test_ladder(limit, steps):
    assert ladder(limit) == steps


@given(st.integers(1, 5000), st.data())
def test_every_size_fits_a_step_that_is_less_than_twice_as_large(limit, data):
    size = data.draw(st.integers(1, limit))
    step = fit(size, ladder(limit))
    assert size <= step <= limit
    assert step < 2 * size
