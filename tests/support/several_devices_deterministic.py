"""`--deterministic` over virtual CPU devices: for one number of devices, a text depends on nothing beside it."""

from __future__ import annotations

import numpy as np
import pytest
from jax import jit
from ml_dtypes import bfloat16

import jaxspec
from jaxspec import SamplingParams
from jaxspec.parallel import sharding
from jaxspec.parallel.peers import summed_in_order
from tests.support import hybrids
from tests.support.several_devices import EIGHT, HYBRID, VOCAB, engine, with_drafter

PROMPTS = [[1, 2, 3, 4, 5, 1, 2, 3], [7], list(range(40)), [5, 6] * 12, [*list(range(40)), 9]]
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logprobs": 1},
]


def said(llm, number: int, **settings) -> list[tuple]:
    """All prompts, `number` at a time: tokens, and bits of log-probabilities."""
    found = []
    for at in range(0, len(PROMPTS), number):
        params = [SamplingParams(max_tokens=40, ignore_eos=True, **each, **settings) for each in SETTINGS]
        outs = llm.generate(PROMPTS[at : at + number], params[at : at + number])
        outs = [out.completions[0] for out in outs]
        found += [(out.token_ids, [each.logprob for each in out.logprobs or ()]) for out in outs]
    return found


@pytest.mark.parametrize("rows", [1, 5])
def test_parts_are_summed_in_the_order_of_ranks(rows):
    rng = np.random.default_rng(rows)
    parts, x = (rng.standard_normal((n * rows, 64)).astype(bfloat16) for n in (4, 1))
    by_rank = sharding.PartitionSpec(sharding.AXIS)
    run = sharding.spread(summed_in_order, sharding.mesh_of(4), (by_rank, sharding.EVERYWHERE), sharding.EVERYWHERE)
    expected = np.zeros((rows, 64), np.float32)
    for part in (*parts.reshape(4, rows, 64), x):
        expected = expected + part.astype(np.float32)
    np.testing.assert_array_equal(jit(run)(parts, x), expected.astype(bfloat16))


def hybrid():
    return hybrids.checkpoint("qwen3_5", VOCAB, 2, **EIGHT | HYBRID)


@pytest.mark.exhaustive
@pytest.mark.parametrize("draft,size", [("eagle", 2), ("mtp", 4), ("dspark/deepspec", 2)])
def test_texts_are_the_same_whatever_happens_to_them(draft, size):
    """One after the other; all at once, which preempts; without drafts; and with another drafter."""
    folder, draft = (hybrid(), draft) if draft == "mtp" else with_drafter(draft)
    llm = engine(folder, draft, size, dtype="bfloat16", deterministic=True)
    alone = said(llm, 1)
    assert said(llm, 5) == alone
    assert llm.engine.scheduler.preemptions
    assert said(llm, 3, speculative=False) == alone
    assert (
        said(engine(folder, "ngram", size, dtype="bfloat16", deterministic=True, chunked_prefill_size=32), 2) == alone
    )


def test_log_probabilities_of_another_number_of_devices_are_refused():
    folder, _ = with_drafter("eagle")
    model = jaxspec.load_model(str(folder), progress=False)
    config = jaxspec.EngineConfig(model=model.name, deterministic=True, tp_size=2)
    with pytest.raises(jaxspec.ConfigError, match=r"tp_size=2.*one device"):
        jaxspec.logprobs(model, [[1, 2, 3]], 1, config=config)
