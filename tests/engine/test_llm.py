"""`LLM` and `AsyncLLM` over one engine: many callers at once, what interrupts them, and logits that aren't finite.

Each test leaves the engine idle, as in `tests.engine.test_engine`.
"""

import dataclasses
import gc
import logging
import math
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, ConfigError, LoadedDrafter, RequestError, SamplingParams
from jaxspec.config.request import LogitsError
from jaxspec.drafters.base import Drafter, Proposal
from jaxspec.text.tokenizer import TokenizerError
from tests.support.engines import OPTIONS, SELF, checkpoint, engine, idle, params, said, tokens, unharmed
from tests.support.faults import damaged
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


@pytest.mark.parametrize("given, where", [([[]], r"messages\[0\]"), ([{"content": "a"}, 3], "messages")])
def test_an_empty_chat_and_what_is_no_message_is_refused_by_its_place(given, where):
    with pytest.raises(RequestError, match=f'^{where} must be a list of at least one {{"role": ..., "content": ...}}'):
        engine("none").chat(given)


def test_an_error_names_its_prompt_where_there_are_several():
    llm = engine("none")
    with pytest.raises(RequestError, match=r"^prompts\[1\]: the prompt is empty; it must have at least one token"):
        llm.generate([[1], []])
    with pytest.raises(RequestError, match=r"^the prompt is empty"):
        llm.generate([[]])


@pytest.mark.parametrize("given, words", [
    ({"model": {"embed": np.zeros(9)}}, "model must be a name, a path, or a Model, which jaxspec.load_model returns"),
    ({"draft": Drafter()}, "draft must be .* a LoadedDrafter, which jaxspec.load_drafter returns, got Drafter"),
    ({"draft": None}, "draft must be a name, a path, or a LoadedDrafter, .* got NoneType"),
])  # fmt: skip
def test_what_is_no_model_or_drafter_is_refused_by_name(given, words):
    with pytest.raises(ConfigError, match=words):
        LLM(**given)


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


@dataclasses.dataclass(frozen=True)
class Slow(Drafter):
    """Prompts take it a while, and rounds fail in a callback."""

    num_draft_tokens: int = 1

    def init_state(self, layout, num_slots):
        return jnp.zeros(1)

    def prefill(self, params, state, batch, features):
        return jax.lax.fori_loop(0, 20_000_000, lambda _, x: jnp.sin(x), state)

    def propose(self, params, state, batch):
        def fail(_):
            raise ValueError("no draft")

        return Proposal(jax.pure_callback(fail, batch.length[:, None], batch.length), batch.length), state


def test_nothing_runs_behind_a_step_that_failed_nor_behind_an_engine(monkeypatch, caplog):
    """jax aborts a process that ends meanwhile, and raises a callback's error once more at exit."""
    caplog.set_level(logging.CRITICAL + 1)  # a record of the callback's error would keep the engine
    llm = LLM(checkpoint(), LoadedDrafter("slow", Slow(), {}), **OPTIONS)
    core = llm.engine
    with pytest.raises(jax.errors.JaxRuntimeError, match="no draft"):
        llm.generate([1, 2], params())
    jax.effects_barrier()

    def prefill(core):
        core.add(core.prepare([1, 2], params()))
        core.runner.prefill(core.scheduler.plan().prefill, core.scheduler.table)
        return core.runner.state.draft

    running = prefill(core)
    assert not running.is_ready()
    monkeypatch.setattr(core, "_dispatch", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        core.step()
    assert running.is_ready()
    core.recover()
    running = prefill(core)
    monkeypatch.undo()
    del llm, core
    gc.collect()
    assert running.is_ready()


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

generate(501)  # compiles
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
while True:  # one may take less than that
    generate(2001)  # four programs, so that one is dispatched while another runs
"""


@pytest.mark.parametrize("name", [rare("LLM"), "AsyncLLM"])
def test_a_script_that_is_interrupted_ends_as_pythons_do(name):
    """With a traceback, while jax aborts a process that ends with a program running: here 500 rounds."""
    path = str(tiny_checkpoint(max_position_embeddings=2048, num_hidden_layers=1))
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED, path, name], capture_output=True, text=True, timeout=300)
    assert ended.stderr.endswith("KeyboardInterrupt\n") and "Traceback" in ended.stderr
    assert ended.returncode == -signal.SIGINT


# -- logits that are NaN or infinite -----------------------------------------------------------------------------------


def served(llm, asked):
    """The tokens and the error of each of these requests (prompt, params), all at once."""
    core = llm.engine
    requests = [core.prepare(*each) for each in asked]
    for request in requests:
        core.add(request)
    found, errors = {request.id: [] for request in requests}, {}
    while core.busy:
        for delta in core.step():
            found[delta.request_id] += delta.token_ids
            errors[delta.request_id] = delta.error
    return [(found[request.id], errors[request.id]) for request in requests]


def alone(text, others):
    """A token of `text` that none of the others has."""
    return next(token for token in text if not any(token in other for other in others))


GREEDY, SEEDED = params(max_tokens=24), params(max_tokens=24, temperature=1.0, seed=7)
SHOWN = params(max_tokens=24, logprobs=2)


@pytest.mark.parametrize("draft, settings", [
    ("ngram", [GREEDY, SHOWN]), rare(SELF, [SEEDED]), rare("ngram", [SEEDED]), rare(SELF, [GREEDY]),
    rare("none", [GREEDY, SEEDED, SHOWN]),
])  # fmt: skip
def test_a_request_without_logits_ends_with_an_error_and_others_go_on(draft, settings):
    llm = engine(draft)
    for each in settings:
        asked = [(tokens(33, 1), each), (tokens(21, 2), each), (tokens(40, 3), each)]
        plain = [text for text, _ in served(llm, asked)]
        late = alone(plain[0], [*plain[1:], *(prompt for prompt, _ in asked)])
        early = alone(asked[1][0], [*plain, asked[0][0], asked[2][0]])
        before = llm.engine.stats()["nonfinite_total"]
        llm.engine.flush_cache()
        with damaged(llm, late, math.inf):
            first, *others = served(llm, asked)
        assert [text for text, _ in others] == plain[1:] and [error for _, error in others] == [None, None]
        until = 33 + plain[0].index(late) + 1
        after = int(re.search(r"logits after (\d+) tokens", str(first[1]))[1])
        # Rows before a draft read its keys and values, at weight zero: so it may end up to 3 tokens earlier.
        assert isinstance(first[1], LogitsError) and until - 3 * (draft != "none") <= after <= until
        assert first[0] == plain[0][: len(first[0])] and len(first[0]) <= after - 33
        llm.engine.flush_cache()
        with damaged(llm, early):  # in a prompt: there is no first token
            found = served(llm, asked)
        assert found[1][0] == [] and "after 21 tokens" in str(found[1][1])
        assert [found[0][0], found[2][0]] == [plain[0], plain[2]]
        assert llm.engine.stats()["nonfinite_total"] == before + 2
        assert [text for text, _ in served(llm, asked)] == plain, "nothing of it is in the prefix tree"
    idle(llm.engine)


def test_a_prompt_that_cannot_be_scored_ends_with_an_error():
    llm = engine("ngram")
    prompt, other = tokens(70, 5), tokens(20, 6)
    token = next(t for t in prompt[:30] if t not in other)
    with damaged(llm, token):
        found = served(llm, [(prompt, params(max_tokens=2, prompt_logprobs=1)), (other, GREEDY)])
    assert isinstance(found[0][1], LogitsError) and found[1][1] is None and len(found[1][0]) == 24
    idle(llm.engine)
