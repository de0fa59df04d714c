"""`LLM` and `AsyncLLM` over one engine: many callers at once, and what interrupts them.

Each test leaves the engine idle, as in `tests.engine.test_engine`.
"""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxspec import RequestError, SamplingParams
from jaxspec.text.tokenizer import TokenizerError
from tests.support.engines import engine, idle, params, said, tokens, unharmed
from tests.support.sample import rare
from tests.support.tiny import tiny_checkpoint


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


def test_chats_are_prompts_of_the_models_template():
    llm = engine("none")
    one, other = ([{"role": "user", "content": text}] for text in ("Hi", "Ho"))
    tokenizer, greedy = llm.engine.tokenizer, params(max_tokens=3)
    ids = [tokenizer.apply_chat_template(chat) for chat in (one, other)]
    assert [out.prompt_token_ids for out in llm.chat([one, other], greedy)] == ids
    ((answer,), (same,)) = llm.chat(one, greedy), llm.generate(ids[0], greedy)
    assert said(answer) == said(same)
    open_ended = dict(add_generation_prompt=False, continue_final_message=True)
    begun = [*one, {"role": "assistant", "content": "Good"}]
    (out,) = llm.chat(begun, greedy, **open_ended)
    assert out.prompt_token_ids == tokenizer.apply_chat_template(begun, **open_ended)
    with pytest.raises(TokenizerError, match="the chat template refused the messages"):
        llm.chat(begun, greedy, continue_final_message=True)  # and a generation prompt behind it


def test_prompts_may_be_arrays_of_token_ids():
    llm, greedy = engine("none"), params(max_tokens=4)
    expected = said(llm.generate([1, 2, 3], greedy)[0])
    for given in (np.array([1, 2, 3]), np.array([[1, 2, 3]]), [np.array([1, 2, 3])], list(np.array([1, 2, 3]))):
        assert [said(out) for out in llm.generate(given, greedy)] == [expected]


@pytest.mark.parametrize("given", [None, 5, {"a": 1}, b"abc", (prompt for prompt in ["a"])])
def test_what_is_no_prompt_or_chat_is_refused_by_name(given):
    llm = engine("none")
    with pytest.raises(RequestError, match="prompts must be a string, a list of token ids, or a list of either, got"):
        llm.generate(given)
    with pytest.raises(RequestError, match=r'messages must be a list of {"role": ..., "content": ...}, or a list of'):
        llm.chat(given)


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
    programs = llm.engine.runner.programs
    handler, run = signal.getsignal(signal.SIGINT), getattr(programs, program)

    def interrupted(*args):
        result = run(*args)
        signal.raise_signal(signal.SIGINT)
        return result

    with unharmed(llm) as again:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(programs, program, interrupted)
            again()
        assert signal.getsignal(signal.SIGINT) is handler


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
llm = getattr(jaxspec, name)(path, max_running_requests=1, num_continuous_decode_steps=500, skip_warmup=True)

async def stream(params):
    async for _ in llm.generate([1, 2], params):
        pass

def generate(max_tokens):
    params = jaxspec.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    asyncio.run(stream(params)) if name == "AsyncLLM" else llm.generate([1, 2], params)

generate(600)  # compiles
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
while True:  # one may take less than that
    generate(2000)  # four programs, so that one is dispatched while another runs
"""


@pytest.mark.parametrize("name", [rare("LLM"), "AsyncLLM"])
def test_a_script_that_is_interrupted_ends_as_pythons_do(name):
    """With a traceback, while jax aborts a process that ends with a program running: here 500 rounds."""
    path = str(tiny_checkpoint(max_position_embeddings=2048, num_hidden_layers=1))
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED, path, name], capture_output=True, text=True, timeout=300)
    assert ended.stderr.endswith("KeyboardInterrupt\n") and "Traceback" in ended.stderr
    assert ended.returncode == -signal.SIGINT
