"""A replay of the round program runs through the contexts asked for, and the requests never notice."""

import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.bench.replay import Replay
from tests.support.sample import rare

PROMPTS = [list(range(1, 21)), list(range(40, 61))]
PARAMS = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)


@pytest.fixture(scope="module", params=[rare("1"), "4"])  # four rounds a program, and one where one is left
def llm(request, tiny):
    options = {"context_length": 256, "chunked_prefill_size": 32, "max_running_requests": 3, "skip_warmup": True}
    options |= {"few_programs": True, "disable_prefix_cache": True}
    return LLM(tiny[1], num_continuous_decode_steps=int(request.param), **options)


def interrupted(llm, at, context):
    """Generate for `PROMPTS`, with a replay once `at` tokens are there; the tokens, what it gave, lengths it saw."""
    engine = llm.engine
    requests = [engine.prepare(prompt, PARAMS) for prompt in PROMPTS]
    gained = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    replay, figures, seen = Replay(engine.runner), None, []
    for name, program in replay._programs.items():
        replay._programs[name] = lambda state, *rest, program=program: (
            seen.append(np.asarray(state.slots.length)[:2].mean()),
            program(state, *rest),
        )[1]
    while engine.busy:
        for delta in engine.step():
            gained[delta.request_id] += delta.token_ids
        if figures is None and min(map(len, gained.values())) >= at:
            seen.clear()
            figures = replay.figures(context, 1.0, profiled=False)
            dispatched, seen = seen, []
    replay.close()
    return list(gained.values()), figures, dispatched


def test_requests_are_wound_back_and_never_notice(llm):
    expected = [out.token_ids for out in llm.generate(PROMPTS, PARAMS)]
    tokens, figures, seen = interrupted(llm, at=60, context=50.0)
    assert tokens == expected
    assert figures.keys() == {"program_ms"} and figures["program_ms"] > 0
    timed = np.array(seen[3:])  # after those that settle
    step = llm.engine.config.num_continuous_decode_steps
    assert len(timed) >= 4 and (np.diff(timed) == step).all()  # nobody ended, every round gained a token
    assert (timed[0] + timed[-1] + step) / 2 == pytest.approx(50, abs=1.5)


def test_there_must_be_something_to_wind_back_to(llm):
    tokens, figures, seen = interrupted(llm, at=20, context=1000.0)
    assert figures is None and not seen
    assert [len(each) for each in tokens] == [80, 80]
