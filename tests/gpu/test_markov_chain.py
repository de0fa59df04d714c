"""The chain of drafts as one kernel, at the sizes of DSpark for Qwen3-8B. On a GPU its blocks wait for one another."""

import pytest

from tests.pallas.dense.test_markov_chain import check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [1, 8, 32, 100, 128])
def test_tokens_equal_those_of_plain_steps(rows):
    for _ in range(3):  # with its counters at zero again
        check(rows, 7, 151936, 256)


def test_a_short_chain_of_a_small_vocabulary():
    check(8, 2, 64 * 131, 128)
