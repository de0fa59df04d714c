"""A start in stages: a few programs serve, the others follow, and no text depends on which of them ran."""

import asyncio
import dataclasses
import itertools
import threading
import types

import pytest

from jaxspec import AsyncLLM, EngineConfig, StructuredOutput
from jaxspec.compiling.ladder import ADAPTED, essential, ladder_of, sizes_of, special, stand_in, use
from jaxspec.compiling.programs import Programs, programs_there
from jaxspec.engine.engine import Engine
from jaxspec.rounds.packing import Shapes, admission_size
from jaxspec.rounds.programs import GREEDY, LOGPROBS, MODES, SAMPLED
from tests.server.live import wait_for
from tests.support.engines import OPTIONS, checkpoint, engine, mixed_load, params, uncompiled

SHAPES = Shapes(
    num_slots=8, capacity=100, pages_per_seq=4, block=32, prefills=(1, 2), score=1, firsts=(1, 2), batches=(1, 4, 8),
    seldom=(1, 8), rounds=4, structured=True, narrower=((0, (1, 8)), (1, (1, 4, 8))),
)  # fmt: skip
ALL_SIZES = {**OPTIONS, "skip_warmup": False, "few_programs": False, "num_draft_tokens": 3}


def test_few_programs_serve_any_request():
    ladder, first = ladder_of(SHAPES), essential(SHAPES)
    assert len(set(ladder)) == len(ladder) and first < set(ladder) and len(first) == 5
    assert not first & special(SHAPES) and special(SHAPES, grammars=False) == {("score", 1)}
    first |= special(SHAPES)
    assert first < set(ladder) and len(first) == 10
    for name, mode in itertools.product(("round", "rounds", "structured", "first"), MODES):
        sizes, modes = sizes_of(SHAPES, name, mode), MODES[MODES.index(mode) :]
        for requests in range(1, sizes[-1] + 1):
            assert stand_in(first, SHAPES, name, modes, requests) == (LOGPROBS, sizes[-1])
            exact = mode, min(n for n in sizes if n >= requests)
            assert stand_in(ladder, SHAPES, name, modes, requests) == exact
    assert stand_in(first, SHAPES, "prefill", ("",), 1) == ("", 2)
    assert stand_in(first, SHAPES, "masked_first", ("",), 1) == ("", 2)
    assert ("admit", admission_size(100)) in first and ("score", 1) in first


def test_programs_for_adapters_that_serve_all_requests_are_there_alone():
    shapes = dataclasses.replace(SHAPES, adapters=2, always_adapted=True)
    bare = lambda programs: {(kind.removeprefix(ADAPTED), size) for kind, size in programs}  # noqa: E731
    for found in (ladder_of, essential, special):
        assert bare(found(shapes)) >= set(found(SHAPES)) and len(found(shapes)) == len(bare(found(shapes)))
        assert not {kind for kind, _ in found(shapes)} & {"prefill", "score", "forward", "round_greedy"}


@pytest.mark.parametrize("most,sizes", [(None, {1, 4, 8}), (1, {1}), (4, {1, 4})])
def test_several_rounds_for_few_requests_come_late(most, sizes):
    shapes = dataclasses.replace(SHAPES, rounds_for=most)
    assert {size for kind, size in ladder_of(shapes) if kind.startswith("rounds_")} == sizes
    assert {size for kind, size in essential(shapes) if kind.startswith("rounds_")} == sizes & {8}
    assert sizes_of(shapes, "rounds", GREEDY) == tuple(sorted(sizes))
    assert not dataclasses.replace(shapes, rounds=1).several(shapes.batches)
    rounds = lambda behind: Programs.most_rounds.fget(types.SimpleNamespace(behind=behind, shapes=shapes))  # noqa: E731
    assert rounds(None) == 4 and rounds("a thread") == (4 if 8 in sizes else 1)


def test_a_stand_in_is_the_nearest_that_there_is():
    have = {("round_logprobs", 8), ("round_greedy", 1), ("round_sampled", 4)}
    of = lambda mode, requests: stand_in(have, SHAPES, "round", MODES[MODES.index(mode) :], requests)  # noqa: E731
    assert (of(GREEDY, 1), of(GREEDY, 2), of(GREEDY, 5)) == ((GREEDY, 1), (SAMPLED, 4), (LOGPROBS, 8))
    assert of(SAMPLED, 1) == (SAMPLED, 4)
    have = {("draft_sampled", 8), ("forward", 8), ("forward", 1), ("conclude_logprobs", 8), ("conclude_greedy", 1)}
    assert stand_in(have, SHAPES, "structured", MODES, 1) == (LOGPROBS, 8), "drafts of size 1 are missing"
    assert stand_in(have | {("draft_greedy", 1)}, SHAPES, "structured", MODES, 1) == (GREEDY, 1)


@pytest.mark.parametrize(("ready", "pending", "told"), [(4, 46, "4 of 50 programs. "), (50, 0, "50 programs"),
                                                        (0, 0, "compiled when they are first used")])  # fmt: skip
def test_the_log_says_how_many_of_all_programs_are_there(ready, pending, told):
    programs = types.SimpleNamespace(
        ready=ready, pending=[("admit", 1)] * pending, without_warm_up=Programs.without_warm_up
    )
    assert told in programs_there(programs)


def test_what_most_requests_use_follows_first():
    order = [kind for kind, _ in sorted(ladder_of(SHAPES), key=use)]
    first = [order.index(kind) for kind in ("prefill", "round_sampled", "forward", "round_logprobs", "round_sampled_1")]
    assert first == sorted(first)


@pytest.fixture
def staged(monkeypatch):
    """An engine that starts in stages with programs that aren't compiled, and how the second stage ends."""

    def start(compile_later):
        """`compile_later(kind, size)` is called before each program of the second stage."""

        def before(programs, kind, size):
            if (kind, size) not in essential(programs.shapes):
                compile_later(kind, size)

        made = uncompiled(monkeypatch, before)
        core = Engine(EngineConfig.from_options(model=checkpoint(), draft="ngram", **ALL_SIZES), staged_start=True)
        return core, made

    return start


def ended(core):
    """Once its second stage is over, however it went."""
    wait_for(lambda: (behind := core.runner.programs.behind) is None or not behind.is_alive(), 30)
    return True


def test_drafts_are_chosen_once_all_programs_are_there(staged):
    go = threading.Event()
    core, made = staged(lambda *_: go.wait(30))
    programs = core.runner.programs
    assert set(made) == essential(core.runner.shapes)
    assert set(programs.pending) == set(ladder_of(core.runner.shapes)) - set(made)
    assert len(core.stats()["programs_pending"]) == len(programs.pending) > 10
    core.complete_start()
    assert core.chooser is None and core.runner.starting
    assert core.runner.mode_of_round(GREEDY, [0]) == LOGPROBS
    go.set()
    assert ended(core) and programs.pending == [] and core.runner.mode_of_round(GREEDY, [0]) == GREEDY
    core.requests["one"] = None  # that runs
    core.complete_start()
    assert core.chooser is None, "to time rounds would overwrite its pages"
    core.requests.clear()
    core.complete_start()
    assert core.chooser is not None and not core.runner.starting and core.stats()["programs_pending"] == []
    assert core.stats()["compiles_since_start"] == 0


def test_a_program_that_fails_leaves_those_that_serve(staged, caplog):
    def fail(kind, size):
        if kind == "round_sampled":
            raise RuntimeError("no room for this program")

    core, made = staged(fail)
    assert ended(core) and "others serve in their place" in caplog.text and "round_sampled" in caplog.text
    core.complete_start()
    assert not core.runner.starting and core.chooser is None
    assert core.runner.mode_of_round(SAMPLED, [0, 1]) == LOGPROBS and ("round_logprobs", 3) in made


def test_an_engine_that_is_closed_compiles_nothing_further(staged, caplog):
    go, begun = threading.Event(), threading.Event()
    core, made = staged(lambda *_: begun.set() or go.wait(30))
    assert begun.wait(30)
    core.runner.programs.stop()
    go.set()
    assert ended(core) and len(made) < len(ladder_of(core.runner.shapes)) and "missing" not in caplog.text


def test_text_is_the_same_before_and_after_the_second_stage(monkeypatch):
    """A mixed load with log-probabilities: while nothing else is compiled, and once all is. What grammars and scores of
    prompts need isn't there at first: such requests wait, and can be aborted."""
    load = [each for each in zip(*mixed_load(), strict=True) if each[1].prompt_logprobs is None]
    prompts, settings = map(list, zip(*load, strict=True))
    late = [params(structured=StructuredOutput(choice=["this", "that"])), params(prompt_logprobs=1)]
    expected = engine("ngram").generate([*prompts, *prompts[:2]], [*settings, *late])
    go, later = threading.Event(), Programs._compile_later
    monkeypatch.setattr(Programs, "_compile_later", lambda *given: go.wait(120) and later(*given))
    options = {**OPTIONS, "skip_warmup": False, "num_draft_tokens": 3, "num_continuous_decode_steps": 1}
    llm = AsyncLLM(checkpoint(), "ngram", **options, staged_start=True)
    wanted = [sorted([t for completion in out.completions for t in completion.token_ids]) for out in expected]

    async def text(prompt, setting, name=None):
        deltas = [delta async for delta in llm.generate(prompt, setting, name)]
        return sorted([token for delta in deltas for token in delta.token_ids]), deltas[-1].finish_reason

    async def all_texts():
        return await asyncio.gather(*(text(*each) for each in load))

    async def everything():
        waiting = [asyncio.create_task(text(*each)) for each in zip(prompts[:2], late, strict=True)]
        unwanted = asyncio.create_task(text(prompts[0], late[0], "unwanted"))
        before = await all_texts()
        assert dispatched() == {"round_logprobs", "first_logprobs"}
        assert llm.stats()["compiles_total"] == compiles and llm.engine.runner.starting
        assert not any(task.done() for task in [*waiting, unwanted])
        llm.abort("unwanted")
        assert await asyncio.wait_for(unwanted, 30) == ([], "abort")
        go.set()
        return [*before, *await asyncio.gather(*waiting)]

    def dispatched():
        return {kind for kind in llm.stats()["dispatches"] if kind.startswith(("round", "first", "conclude"))}

    try:
        compiles = llm.stats()["compiles_total"]
        assert [tokens for tokens, _ in asyncio.run(everything())] == wanted
        wait_for(lambda: not llm.engine.runner.starting, 120)
        assert llm.stats()["programs_pending"] == [] and llm.stats()["compiles_since_start"] == 0
        assert [tokens for tokens, _ in asyncio.run(all_texts())] == wanted[: len(prompts)]
        assert {"round_greedy", "round_sampled", "first_greedy", "conclude_logprobs"} <= dispatched()
    finally:
        go.set()
        llm.close()
