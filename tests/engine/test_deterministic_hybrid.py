"""`--deterministic` for models with linear attention: a state has the same bits however its tokens came."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from tests.support import hybrids
from tests.support.engines import CROWDED, idle, set_overlap
from tests.support.miniature import make, sequence
from tests.support.sample import rare
from tests.support.tiny import tiny_config

FAMILY = "qwen3_5"


@functools.cache
def tiny(dtype: str, state_dtype: str = "float32"):
    return hybrids.Rounds(tiny_config(FAMILY), dtype, state_dtype, page=8)


@pytest.mark.parametrize(
    "dtype,state", [rare("bfloat16", "float32"), rare("bfloat16", "bfloat16"), rare("float32", "float32")]
)  # a prompt's blocks are below, rounds of attention in test_deterministic.py
def test_a_rows_bits_depend_on_no_other_row_of_a_round(dtype, state):
    """Two rounds of four rows, of which three and two are accepted, beside others, and rows one by one."""
    run, alone = tiny(dtype, state).begun(), tiny(dtype, state).begun()
    for each in (run, alone):  # a prompt's blocks are below
        each.prompts([(0, 0), (1, 0), (2, 0)], 16)
    run.round([(0, 16, 0), (1, 16, 0), (2, 16, 0)], 4)
    got = run.round([(2, 20, 4), (1, 19, 3), (0, 17, 1)], 4)[1, :2]
    run.round([(1, 21, 2)], 1)
    one_by_one = [alone.round([(1, at, int(at > 16))], 1)[0, 0] for at in range(16, 22)]
    assert (got == np.stack(one_by_one[3:5])).all()
    assert (run.state(1) == alone.state(1)).all()
    assert len({row.tobytes() for row in one_by_one}) == 6


@pytest.mark.parametrize("dtype", [rare("float32"), "bfloat16"])
def test_a_prompts_bits_depend_on_no_division_or_other_block(dtype):
    run = tiny(dtype).begun()
    whole = run.prompts([(0, 0), (2, 0), (2, 16), (2, 32)], 16)[1:]
    alone = tiny(dtype).begun()
    parted = [alone.prompts([(2, 0)], 16), alone.prompts([(2, 16), (0, 0)], 16)[:1]]
    snapshot = alone.prompts([(2, 32)], 16, source=2)
    assert (whole == np.concatenate([*parted, snapshot])).all()
    assert (run.state(2) == alone.state(2)).all()
    assert (run.state(run.snapshot) == run.state(2)).all()  # the snapshot of the last block


OPTIONS = CROWDED | {"dtype": "bfloat16", "deterministic": True, "context_length": 128, "num_draft_tokens": 2}
OPTIONS |= {"max_state_snapshots": 10, "state_snapshot_interval": 32}
PROMPTS = [[(i * 7 + j * 5) % 61 for j in range(n)] for i, n in enumerate((5, 60, 40, 33))]
PROMPTS.append([*PROMPTS[1][:40], 9])


def texts(llm, number: int, **settings) -> list[list[int]]:
    """All prompts, `number` at a time, two of five sampled under a seed."""
    found = []
    for at in range(0, len(PROMPTS), number):
        seeds = [{"temperature": 0.9, "seed": i} if i % 2 else {"temperature": 0.0} for i in range(len(PROMPTS))]
        each = [SamplingParams(max_tokens=40, ignore_eos=True, **one, **settings) for one in seeds[at : at + number]]
        found += [out.token_ids for out in llm.generate(PROMPTS[at : at + number], each)]
    return found


@pytest.mark.exhaustive  # rounds and prompts by themselves are above, and an engine in test_deterministic.py
def test_texts_are_the_same_whatever_happens_to_them():
    """With an MTP module whose drafts are refused at times; alone and at once, preempted, cached, without drafts."""
    llm = LLM(str(hybrids.checkpoint(FAMILY)), "mtp", **OPTIONS)
    alone, before = texts(llm, 1), llm.engine.scheduler.preemptions
    assert texts(llm, 5) == alone
    assert llm.engine.scheduler.preemptions > before
    assert texts(llm, 3, speculative=False) == alone
    assert 0 < llm.engine.counts.accepted[0] < llm.engine.counts.drafted[0]
    set_overlap(llm, False)
    assert texts(llm, 2) == alone
    idle(llm.engine)
    assert len({tuple(text) for text in alone}) == 5


def test_snapshots_are_at_ends_of_blocks():
    """Pages of four tokens and blocks of sixteen: wherever another prompt parts from the tree."""
    sizes = dict(num_slots=2, num_pages=60, page_size=4, width=1, chunk_tokens=64, block=16, context_length=100)
    s = make(replays=True, snapshots=range(10, 20), snapshot_interval=16, **sizes)
    first, second = sequence(s, list(range(50)), 1), sequence(s, [*range(39), *range(60, 71)], 1)
    keeps = [chunk.keeps for _ in range(4) for chunk in s.plan().prefill]
    assert keeps and {at % 16 for keep in keeps for at, _ in keep} == {0}
    assert {first.cached, second.cached} <= {0, 32}
