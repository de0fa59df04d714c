"""`AsyncLLM`: every caller hears from the engine, whatever fails, stops or never reads."""

import asyncio
import threading
import time

import jax
import pytest

from jaxspec import AsyncLLM, EngineDead, RequestError
from jaxspec.engine.async_llm import Overloaded, RequestFailed, RequestTimeout
from tests.support.engines import VOCAB, engine, idle, mixed_load, params, tokens, unharmed
from tests.support.faults import damaged, out_of_memory


@pytest.fixture
def serve(monkeypatch):
    """Make an `AsyncLLM` over the shared engine, which is left idle whatever happened."""
    core, made = engine("ngram").engine, []
    monkeypatch.setattr("jaxspec.engine.async_llm.Engine", lambda options, **_: core)

    def make(**options):
        made.append(AsyncLLM(**options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()
    monkeypatch.undo()
    while core.busy:  # what a dead engine leaves
        for name in list(core.requests):
            core.abort(name)
        core.step()
    core.flush_cache()
    idle(core)


async def gather(llm, prompt, settings, name=None):
    return [delta async for delta in llm.generate(prompt, settings, name)]


async def test_streams_add_up_to_what_a_whole_call_returns(serve):
    prompts, settings = mixed_load()
    whole = engine("ngram").generate(prompts, settings)
    llm = serve()
    streams = await asyncio.gather(*(gather(llm, *each) for each in zip(prompts, settings, strict=True)))
    for deltas, out in zip(streams, whole, strict=True):
        for completion in out.completions:
            mine = [delta for delta in deltas if delta.index == completion.index]
            assert [t for delta in mine for t in delta.token_ids] == completion.token_ids
            assert "".join(delta.text for delta in mine) == completion.text
            assert [delta.finish_reason for delta in mine] == [None] * (len(mine) - 1) + [completion.finish_reason]
        assert len(deltas) > 1 or len(out.token_ids) <= 4
        assert (deltas[0].prompt_logprobs is None) == (out.prompt_logprobs is None)


async def test_a_caller_is_told_of_logits_that_are_not_finite(serve):
    llm, (prompt, other) = serve(), (tokens(20), tokens(31, 9))
    token = next(token for token in prompt if token not in other)
    with damaged(engine("ngram"), token):
        bad, good = await asyncio.gather(
            gather(llm, prompt, params(), "mine"), gather(llm, other, params(max_tokens=2)), return_exceptions=True
        )
    assert isinstance(bad, RequestFailed) and good[-1].finish_reason == "length"
    assert str(bad).startswith(
        "request mine failed: the model's logits after 20 tokens, the prompt's included, are NaN"
    )


async def test_closing_the_iterator_aborts(serve):
    before = engine("ngram").engine.stats()["requests_total"].get("abort", 0)
    llm = serve()
    stream = llm.generate(tokens(20), params(max_tokens=150))
    assert (await anext(stream)).token_ids
    await stream.aclose()
    assert await llm.flush_cache(), "the request is still running"  # asked after the abort, so answered after it
    assert llm.stats()["requests_total"]["abort"] == before + 1


@pytest.mark.parametrize("everything", [False, True])
async def test_an_aborted_request_ends_with_what_it_has(serve, everything):
    llm = serve()
    first, second = (llm.generate(tokens(20), params(max_tokens=150, n=2), name) for name in ("a", "b"))
    begun = [await anext(first), await anext(second)]
    llm.abort("nobody")
    llm.abort(None if everything else "a")
    aborted = [begun[0]] + [delta async for delta in first]
    kept = [begun[1]] + [delta async for delta in second]
    ends = [[d.finish_reason for d in deltas if d.finish_reason] for deltas in (aborted, kept)]
    assert ends == [["abort"] * 2, ["abort" if everything else "length"] * 2]
    assert all(d.metrics is not None for d in aborted if d.finish_reason)


async def test_an_id_that_is_used_again_gets_nothing_of_its_last_request(serve, monkeypatch):
    """Closed while the engine is in a step, whose tokens come after the id has another owner."""
    core, closing, closed = engine("ngram").engine, threading.Event(), threading.Event()
    dispatch = core.runner.round

    def slow(*args):
        if not closing.is_set():
            closing.set()
            closed.wait(30)
        return dispatch(*args)

    (expected,) = engine("ngram").generate([tokens(33)], params())
    llm = serve()
    stream = llm.generate(tokens(20), params(max_tokens=150), "mine")
    await anext(stream)
    monkeypatch.setattr(core.runner, "round", slow)
    await asyncio.to_thread(closing.wait, 30)
    await stream.aclose()
    again = asyncio.create_task(gather(llm, tokens(33), params(), "mine"))
    await asyncio.sleep(0.1)
    closed.set()
    assert [t for delta in await again for t in delta.token_ids] == expected.token_ids


async def test_bad_requests_disturb_nobody(serve):
    (expected,) = engine("ngram").generate([tokens(33)], params(max_tokens=40))
    llm = serve()

    async def bad(prompt, settings, name=None):
        with pytest.raises(RequestError):
            await anext(llm.generate(prompt, settings, name))

    stream = llm.generate(tokens(33), params(max_tokens=40), "mine")
    deltas = [await anext(stream)]
    await asyncio.gather(bad([], params()), bad([VOCAB], params()), bad([1], params(), "mine"), bad([1], {"n": 1}))
    deltas += [delta async for delta in stream]
    assert [t for delta in deltas for t in delta.token_ids] == expected.token_ids
    assert (await gather(llm, tokens(33), params(max_tokens=40)))[-1].finish_reason == "length"


@pytest.mark.parametrize("recovers", [True, False])
async def test_when_a_step_fails_every_caller_hears_of_it(serve, monkeypatch, recovers):
    """And those who come after are served, unless the device is of no more use."""
    core, asked, all_there = engine("ngram").engine, threading.Event(), threading.Event()

    def fail(*_):
        asked.wait(30)
        raise RuntimeError("the device is gone")

    (expected,) = engine("ngram").generate([tokens(33)], params())
    engine("ngram").engine.flush_cache()
    llm = serve()
    monkeypatch.setattr(core.runner, "round", fail)
    if not recovers:
        monkeypatch.setattr(core.runner, "reset", fail)
    llm._calls.put(lambda: all_there.wait(30))  # so that one step has them all
    callers = [gather(llm, tokens(n), params()) for n in (5, 20, 60, 9, 30)]
    waiting = asyncio.gather(*callers, return_exceptions=True)
    while llm._calls.qsize() < len(callers):
        await asyncio.sleep(0.01)
    all_there.set()
    await asyncio.sleep(0.2)  # the engine is in the round that will fail
    flush = asyncio.create_task(llm.flush_cache())
    await asyncio.sleep(0)
    asked.set()
    errors = await waiting
    assert [type(error) for error in errors] == [RequestFailed if recovers else EngineDead] * 5
    assert all("the device is gone" in str(error.__cause__) for error in errors)
    monkeypatch.undo()
    if recovers:
        assert await flush, "nobody is left to hold a page"
        assert [t for delta in await gather(llm, tokens(33), params()) for t in delta.token_ids] == expected.token_ids
        assert llm.stats()["ready"] and llm.stats()["engine_failures_total"] == 1
        return
    for call in (flush, gather(llm, [1], params()), llm.flush_cache()):
        with pytest.raises(EngineDead):
            await call
    assert not llm.stats()["ready"]


async def test_a_step_that_fails_after_a_recovery_ends_the_engine(serve, monkeypatch):
    """Before any request has finished: then the fault isn't one request's."""
    core = engine("ngram").engine

    def fail(*_):
        raise RuntimeError("the device is gone")

    llm = serve()
    monkeypatch.setattr(core.runner, "prefill", fail)
    for expected in (RequestFailed, EngineDead, EngineDead):
        with pytest.raises(expected):
            await gather(llm, tokens(20), params())
    assert isinstance(llm.error, RuntimeError)
    monkeypatch.undo()


@pytest.mark.parametrize("program", ["prefill", "admit", "first", "round"])
@pytest.mark.parametrize("behind", [False, True])
def test_a_program_that_runs_out_of_memory_leaves_the_engine_as_new(monkeypatch, program, behind):
    """In the call: its operands are gone, and its results never come. Or behind it: the program was dispatched, and so
    were others after it, before its results turned out to be an error."""
    llm = engine("ngram")
    programs = llm.engine.runner.programs
    run, words = getattr(programs, program), "Out of memory" if behind else "RESOURCE_EXHAUSTED"

    def exhausted(state, *args):
        results = run(state, *args)
        if behind:
            return out_of_memory(results)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory while trying to allocate 12345 bytes")

    with unharmed(llm) as again:
        with monkeypatch.context() as patch, pytest.raises(jax.errors.JaxRuntimeError, match=words):
            patch.setattr(programs, program, exhausted)
            again()
        idle(llm.engine)


async def test_a_text_that_cant_be_made_fails_its_request_alone(serve, monkeypatch):
    class Broken:
        def push(self, tokens):
            raise ZeroDivisionError("a bug")

    core = engine("ngram").engine
    add = core.add

    def add_broken(request):
        add(request)
        if request.id == "mine":
            request.choices[-1].detokenizer = Broken()

    (expected,) = engine("ngram").generate([tokens(33)], params())
    llm = serve()
    monkeypatch.setattr(core, "add", add_broken)
    mine, other = gather(llm, tokens(20), params(n=2), "mine"), gather(llm, tokens(33), params())
    error, deltas = await asyncio.gather(mine, other, return_exceptions=True)
    assert isinstance(error, RequestFailed) and isinstance(error.__cause__, ZeroDivisionError)
    assert [t for delta in deltas for t in delta.token_ids] == expected.token_ids
    assert llm.stats()["engine_failures_total"] == 0


async def test_a_step_that_never_returns_ends_nothing_but_its_engine(serve, monkeypatch):
    core, asked, free = engine("ngram").engine, threading.Event(), threading.Event()
    dispatch = core.runner.round

    def stuck(*args):
        asked.set()
        free.wait(60)
        return dispatch(*args)

    llm = serve(watchdog_timeout=0.05)
    monkeypatch.setattr(core.runner, "round", stuck)
    waiting = asyncio.create_task(gather(llm, tokens(20), params()))
    await asyncio.to_thread(asked.wait, 30)
    await asyncio.sleep(0.1)
    assert llm.stuck and not llm.stats()["ready"] and llm.step_seconds > 0.05
    core.runner.programs.compiling += 1
    assert not llm.stuck, "a program is being compiled"
    core.runner.programs.compiling -= 1
    assert not llm.close(timeout=0.05)
    with pytest.raises(EngineDead):
        await waiting
    free.set()
    assert llm.close(), "the step ended after all"


async def test_an_id_is_free_only_once_its_abort_is_on_its_way(serve):
    """Many streams of one id on two event loops: whoever has it is aborted before the next one begins."""
    outcomes = []

    async def again_and_again(llm):
        for _ in range(40):
            stream = llm.generate(tokens(20), params(max_tokens=150), "mine")
            try:
                await anext(stream)
                outcomes.append("served")
            except RequestError:
                outcomes.append("refused")
                await asyncio.sleep(0.001)
            finally:
                await stream.aclose()

    llm = serve()
    await asyncio.gather(again_and_again(llm), asyncio.to_thread(asyncio.run, again_and_again(llm)))
    assert llm.error is None and llm.stats()["ready"]
    assert outcomes.count("served") > 20


async def test_one_more_than_the_queue_holds_is_refused(serve):
    llm = serve(max_queued_requests=2)
    settings = params(max_tokens=100)
    callers = [gather(llm, tokens(20 + i), settings) for i in range(6)]
    results = await asyncio.gather(*callers, return_exceptions=True)
    refused = [result for result in results if isinstance(result, Overloaded)]
    assert len(refused) == 1 and llm.stats()["refused_total"] == 1
    assert "--max-queued-requests" in str(refused[0])
    assert len(await gather(llm, tokens(20), params(n=9))) > 9, "nobody else waits, so they may"


async def test_a_request_that_takes_too_long_ends(serve, monkeypatch):
    core = engine("ngram").engine
    dispatch = core.runner.round
    llm = serve(request_timeout=0.2)
    monkeypatch.setattr(core.runner, "round", lambda *args: (time.sleep(0.05), dispatch(*args))[1])
    with pytest.raises(RequestTimeout, match=r"longer than the 0\.2 seconds"):
        await gather(llm, tokens(20), params(max_tokens=150))
    assert await llm.flush_cache(), "the request is still running"


async def test_a_caller_that_never_reads_is_given_up(serve, monkeypatch):
    monkeypatch.setattr("jaxspec.engine.async_llm.MAX_UNREAD", 5)
    before = engine("ngram").engine.stats()["requests_total"].get("abort", 0)
    llm = serve()
    stream = llm.generate(tokens(20), params(max_tokens=150))
    await anext(stream)
    for _ in range(1000):
        if not llm.engine.requests:
            break
        await asyncio.sleep(0.01)
    assert len([delta async for delta in until_failed(stream)]) <= 6
    assert llm.stats()["requests_total"]["abort"] == before + 1


async def until_failed(stream):
    with pytest.raises(RequestFailed, match="are unread"):
        async for delta in stream:
            yield delta


async def test_closing_the_engine_ends_its_streams(serve):
    llm = serve()
    stream = llm.generate(tokens(20), params(max_tokens=150))
    await anext(stream)
    await asyncio.to_thread(llm.close)
    with pytest.raises(EngineDead):
        async for _ in stream:
            pass
    assert not llm.stats()["ready"]
    state = jax.tree.leaves(llm.engine.runner.state)
    assert all(each.is_ready() for each in state), "a process that ends while a program runs is aborted"


async def test_a_check_of_several_prompts_names_the_one_at_fault(serve):
    llm = serve()
    await llm.check([([1, 2], params()), ([3], params())])
    with pytest.raises(RequestError, match="empty") as refused:
        await llm.check([([1, 2], params()), ([], params())])
    assert refused.value.param == "prompt[1]"
