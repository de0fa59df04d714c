"""Which programs an engine has, by kind and size; and a batch padded to its kind's next size has the same texts."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from jaxspec import LLM, SamplingParams, StructuredOutput
from jaxspec.compiling.ladder import ladder_of, sizes_of
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.options import ConfigError
from jaxspec.engine import defaults, runner
from jaxspec.engine.defaults import CPU, GPU, seldom_sizes, shapes_of
from jaxspec.rounds.packing import ladder
from jaxspec.rounds.programs import GREEDY, LOGPROBS, SAMPLED
from tests.support.engines import COUNT_UP, CROWDED, OPTIONS, CountUp, checkpoint, params, set_rounds, tokens
from tests.support.sample import rare


@pytest.mark.parametrize(("batches", "least", "sizes"), [
    (ladder(128), 8, (1, 8, 32, 128)),
    (ladder(128)[1:], 8, (8, 32, 128)),  # a small model: no program for one request
    ((1, 8, 16, 32, 64, 100), 8, (1, 8, 32, 100)),
    (ladder(4), 8, (1, 4)),  # the largest stays, however small
    (ladder(4), 1, (1, 4)),
    ((16,), 8, (16,)),  # --few-programs
])  # fmt: skip
def test_rounds_that_few_need_have_every_second_size(batches, least, sizes):
    assert seldom_sizes(batches, least) == sizes
    assert set(sizes) <= set(batches) and sizes[-1] == batches[-1]


def shapes(of: defaults.Defaults, requests: int, **options):
    config = EngineConfig(
        draft="ngram", max_running_requests=requests, context_length=4096, chunked_prefill_size=of.chunked_prefill_size,
        page_size=of.page_size, num_continuous_decode_steps=1, **options,
    )  # fmt: skip
    return shapes_of(config, dataclasses.replace(CountUp(), num_draft_tokens=3), defaults=of)


@pytest.mark.parametrize(("of", "requests", "options", "count"), [
    (GPU, 128, {}, 90),
    (GPU, 128, {"disable_structured_output": True}, 64),
    (GPU, 128, {"few_programs": True}, 21),
    (CPU, 4, {}, 42),
    (GPU, 128, {"batch_sizes": "64,8", "prefill_sizes": "100,512", "disable_structured_output": True}, 33),
])  # fmt: skip
def test_how_many_programs_there_are(of, requests, options, count):
    made = shapes(of, requests, **options)
    programs = ladder_of(made)
    kinds = Counter(kind for kind, _ in programs)
    assert len(set(programs)) == len(programs) == count
    for kind in ("round_logprobs", "forward", "conclude_sampled", "draft_greedy"):
        assert kinds[kind] in (0, len(made.seldom)), kind
    assert kinds["round_greedy"] == kinds["round_sampled"] == len(made.batches)
    for name, mode in (("round", GREEDY), ("round", SAMPLED), ("round", LOGPROBS)):
        assert {n for kind, n in programs if kind == f"{name}_{mode}"} == set(sizes_of(made, name, mode))


def test_listed_sizes_take_the_ladders_place():
    made = shapes(GPU, 128, batch_sizes="64, 8,8", prefill_sizes="100,512")
    assert made.batches == (8, 64, 128) and made.prefills == (2, 8, 32), "of 64 tokens each"
    assert all(sizes == (8, 64, 128) for _, sizes in made.narrower)
    with pytest.raises(ConfigError, match="--batch-sizes has 8, more than --max-running-requests 4"):
        LLM(checkpoint(), "none", **OPTIONS | {"few_programs": False, "max_running_requests": 4, "batch_sizes": "2,8"})


@pytest.mark.parametrize("kind", ["logprobs", rare("grammar")])
def test_padding_to_the_next_size_changes_no_text(kind):
    """Two requests, in rounds of two rows and of four: with log-probabilities or under a grammar."""
    llm = LLM(checkpoint(), COUNT_UP, **CROWDED | {"few_programs": False, "max_running_requests": 4})
    made, texts = llm.engine.runner, {}
    assert made.shapes.batches == (1, 2, 4) and made.shapes.seldom == (1, 4)
    shared = {"max_tokens": 24, "temperature": 0.8}
    grammar = StructuredOutput(regex="[a-c]{2,5}-(north|south)-[0-9]{3}(, [A-Z]+){0,2}")
    more = {"logprobs": 2, "ignore_eos": True} if kind == "logprobs" else {"structured": grammar}
    asked = [SamplingParams(**shared, seed=seed, **more) for seed in (1, 2)]
    for seldom in ((1, 2, 4), made.shapes.seldom):
        made.shapes = made.programs.shapes = dataclasses.replace(made.shapes, seldom=seldom)
        before = set(made.programs._compiled)
        texts[seldom] = llm.generate([tokens(9, 1), tokens(30, 2)], asked)
        new = {size for kind, size in set(made.programs._compiled) - before if kind.startswith(("round", "forward"))}
        assert max(new) == (2 if 2 in seldom else 4)
    for one, other in zip(*texts.values(), strict=True):
        assert one.token_ids == other.token_ids
        for mine, theirs in zip(one.logprobs or (), other.logprobs or (), strict=True):
            np.testing.assert_allclose(mine.logprob, theirs.logprob, atol=1e-5)


def test_several_rounds_for_one_request_are_for_no_other(monkeypatch):
    of = runner.shapes_of
    monkeypatch.setattr(runner, "shapes_of", lambda *given, **more: of(*given, **more | {"rounds_for": 1}))
    llm = LLM(checkpoint(), "none", **OPTIONS | {"few_programs": False, "max_running_requests": 2})
    texts = []
    for rounds in (4, 1):
        set_rounds(llm, rounds)
        outs = llm.generate([tokens(9), tokens(12)], [params(max_tokens=8), params(max_tokens=24)])
        texts.append([out.token_ids for out in outs])
        assert [len(text) for text in texts[-1]] == [8, 24]
    assert texts[0] == texts[1]
    ran = {kind for kind in llm.engine.runner.programs._compiled if kind[0].startswith("round")}
    assert ran == {("round_greedy", 1), ("round_greedy", 2), ("rounds_greedy", 1)}
