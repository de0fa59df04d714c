"""`LLM` and `AsyncLLM` over one engine: many callers at once, and what interrupts them.

Each test leaves the engine idle, as in `tests.test_engine`.
"""

import asyncio
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from jaxspec import AsyncLLM, EngineDead, RequestError, SamplingParams
from tests.test_engine import VOCAB, engine, idle, mixed_load, params, said, tokens
from tests.tiny import tiny_checkpoint


def test_as_many_params_as_prompts():
    with pytest.raises(RequestError, match="2 prompts but 1 sampling params"):
        engine("ngram").generate([[1], [2]], [params()])
    with pytest.raises(RequestError, match=r"params must be SamplingParams.*got {'temperature': 0}"):
        engine("ngram").generate([[1], [2]], {"temperature": 0})


def test_without_params_a_prompt_is_sampled_as_the_checkpoint_says(monkeypatch):
    llm = engine("ngram")
    monkeypatch.setattr(llm.engine, "sampling", {"temperature": 0.0})
    expected = llm.generate([tokens(9)], SamplingParams(temperature=0.0))
    assert said(llm.generate([tokens(9)])[0]) == said(expected[0])


def test_threads_that_generate_at_once_take_turns():
    llm, prompts = engine("ngram"), [tokens(n) for n in (20, 30)]
    expected = [said(out) for out in llm.generate(prompts, params())]
    with ThreadPoolExecutor(3) as pool:
        for outs in pool.map(lambda _: llm.generate(prompts, params()), range(3)):
            assert [said(out) for out in outs] == expected
    idle(llm.engine)


# -- interrupted -------------------------------------------------------------------------------------------------------


@pytest.fixture
def interruptible():
    """Python's own handler of Ctrl-C, which it lacks where it was started with the signal ignored, as in background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("program", ["prefill", "first", "round", "admit"])
def test_ctrl_c_leaves_the_engine_clean(interruptible, monkeypatch, program):
    """Pressed when a program has consumed the state, and its successor isn't kept yet."""
    llm = engine("ngram")
    prompts, settings = [tokens(90), tokens(30)], params()
    expected = [said(out) for out in llm.generate(prompts, settings)]
    llm.engine.flush_cache()
    handler, run = signal.getsignal(signal.SIGINT), getattr(llm.engine.runner.programs, program)

    def interrupted(*args):
        result = run(*args)
        signal.raise_signal(signal.SIGINT)
        return result

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine.runner.programs, program, interrupted)
        llm.generate(prompts, settings)
    assert signal.getsignal(signal.SIGINT) is handler
    assert [said(out) for out in llm.generate(prompts, settings)] == expected
    idle(llm.engine)


def test_a_second_ctrl_c_does_not_wait_for_the_step(interruptible, monkeypatch):
    llm, reached = engine("ngram"), []

    def stuck(*_):
        signal.raise_signal(signal.SIGINT)
        reached.append("the first")
        signal.raise_signal(signal.SIGINT)
        reached.append("the second")

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine.runner, "prefill", stuck)
        llm.generate([tokens(30)], params())
    assert reached == ["the first"]
    idle(llm.engine)


INTERRUPTED = """
import asyncio, os, signal, sys, threading, jaxspec

path, name = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background process may lack
llm = getattr(jaxspec, name)(path, max_running_requests=1, num_continuous_decode_steps=1000, skip_warmup=True)
params = jaxspec.SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)

async def stream():
    async for _ in llm.generate([1, 2], params):
        pass

def generate():
    asyncio.run(stream()) if name == "AsyncLLM" else llm.generate([1, 2], params)

generate()
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
while True:  # one may take less than that
    generate()
"""


@pytest.mark.parametrize("name", ["LLM", "AsyncLLM"])
def test_a_script_that_is_interrupted_ends_as_pythons_do(name):
    """With a traceback, while jax aborts a process that ends with a program running: here a thousand rounds."""
    path = str(tiny_checkpoint(max_position_embeddings=4096))
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED, path, name], capture_output=True, text=True, timeout=300)
    assert ended.stderr.endswith("KeyboardInterrupt\n") and "Traceback" in ended.stderr
    assert ended.returncode == -signal.SIGINT


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def serve(monkeypatch):
    """Run a coroutine function on an `AsyncLLM` over the shared engine, and leave that idle whatever happened."""
    core = engine("ngram").engine
    monkeypatch.setattr("jaxspec.llm.Engine", lambda options: core)

    def run(scenario):
        llm = AsyncLLM()
        try:
            asyncio.run(asyncio.wait_for(scenario(llm), 60))
        finally:
            llm.close()

    yield run
    while core.busy:  # what a dead engine leaves
        for name in list(core.requests):
            core.abort(name)
        core.step()
    core.flush_cache()
    idle(core)


async def gather(llm, prompt, settings, name=None):
    return [delta async for delta in llm.generate(prompt, settings, name)]


def test_streams_add_up_to_what_a_whole_call_returns(serve):
    prompts, settings = mixed_load()
    whole = engine("ngram").generate(prompts, settings)

    async def scenario(llm):
        streams = await asyncio.gather(*(gather(llm, *each) for each in zip(prompts, settings, strict=True)))
        for deltas, out in zip(streams, whole, strict=True):
            for completion in out.completions:
                mine = [delta for delta in deltas if delta.index == completion.index]
                assert [t for delta in mine for t in delta.token_ids] == completion.token_ids
                assert "".join(delta.text for delta in mine) == completion.text
                assert [delta.finish_reason for delta in mine] == [None] * (len(mine) - 1) + [completion.finish_reason]
            assert len(deltas) > 1 or len(out.token_ids) <= 4
            assert (deltas[0].prompt_logprobs is None) == (out.prompt_logprobs is None)

    serve(scenario)


def test_closing_the_iterator_aborts(serve):
    async def scenario(llm):
        stream = llm.generate(tokens(20), params(max_tokens=150))
        assert (await anext(stream)).token_ids
        await stream.aclose()
        assert await llm.flush_cache(), "the request is still running"  # asked after the abort, so answered after it
        assert llm.stats()["requests_total"]["abort"] == before + 1

    before = engine("ngram").engine.stats()["requests_total"].get("abort", 0)
    serve(scenario)


def test_an_id_that_is_used_again_gets_nothing_of_its_last_request(serve, monkeypatch):
    """Closed while the engine is in a step, whose tokens come after the id has another owner."""
    core, closing, closed = engine("ngram").engine, threading.Event(), threading.Event()
    dispatch = core.runner.round

    def slow(*args):
        if not closing.is_set():
            closing.set()
            closed.wait(30)
        return dispatch(*args)

    async def scenario(llm):
        stream = llm.generate(tokens(20), params(max_tokens=150), "mine")
        await anext(stream)
        monkeypatch.setattr(core.runner, "round", slow)
        await asyncio.to_thread(closing.wait, 30)
        await stream.aclose()
        again = asyncio.create_task(gather(llm, tokens(33), params(), "mine"))
        await asyncio.sleep(0.1)
        closed.set()
        assert [t for delta in await again for t in delta.token_ids] == expected.token_ids

    (expected,) = engine("ngram").generate([tokens(33)], params())
    serve(scenario)
    monkeypatch.undo()


def test_bad_requests_disturb_nobody(serve):
    async def scenario(llm):
        async def bad(prompt, settings, name=None):
            with pytest.raises(RequestError):
                await anext(llm.generate(prompt, settings, name))

        stream = llm.generate(tokens(33), params(max_tokens=40), "mine")
        deltas = [await anext(stream)]
        await asyncio.gather(bad([], params()), bad([VOCAB], params()), bad([1], params(), "mine"))
        deltas += [delta async for delta in stream]
        assert [t for delta in deltas for t in delta.token_ids] == expected.token_ids
        assert (await gather(llm, tokens(33), params(max_tokens=40)))[-1].finish_reason == "length"

    (expected,) = engine("ngram").generate([tokens(33)], params(max_tokens=40))
    serve(scenario)


def test_when_the_engine_dies_every_caller_hears_of_it(serve, monkeypatch):
    core, asked = engine("ngram").engine, threading.Event()

    def fail(*_):
        asked.wait(30)
        raise RuntimeError("the device is gone")

    async def scenario(llm):
        monkeypatch.setattr(core.runner, "round", fail)
        callers = [gather(llm, tokens(n), params()) for n in (5, 20, 60, 9, 30)]
        waiting = asyncio.gather(*callers, return_exceptions=True)
        await asyncio.sleep(0.2)  # the engine is in the round that will fail, so nobody answers this one:
        flush = asyncio.create_task(llm.flush_cache())
        await asyncio.sleep(0)
        asked.set()
        errors = [*await waiting, *await asyncio.gather(flush, return_exceptions=True)]
        assert [type(error) for error in errors] == [EngineDead] * 6
        assert all("the device is gone" in str(error.__cause__) for error in errors)
        with pytest.raises(EngineDead):
            await gather(llm, [1], params())
        with pytest.raises(EngineDead):
            await llm.flush_cache()
        assert not llm.stats()["ready"]

    serve(scenario)
    monkeypatch.undo()


def test_closing_the_engine_ends_its_streams(serve):
    async def scenario(llm):
        stream = llm.generate(tokens(20), params(max_tokens=150))
        await anext(stream)
        await asyncio.to_thread(llm.close)
        with pytest.raises(EngineDead):
            async for _ in stream:
                pass
        assert not llm.stats()["ready"]
        state = jax.tree.leaves(llm.engine.runner.state)
        assert all(each.is_ready() for each in state), "a process that ends while a program runs is aborted"

    serve(scenario)
