"""Engines that several test files share, one for each drafter, what they are asked, and what they must leave behind."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types

import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec import LLM, SamplingParams
from jaxspec.compiling.programs import Programs
from jaxspec.drafters.base import Drafter, Proposal
from jaxspec.scheduling.audit import audit
from tests.support.tiny import tiny_checkpoint

VOCAB, PAGE, CONTEXT = 272, 8, 192
SMALL = {
    "page_size": PAGE,
    "chunked_prefill_size": 64,
    "context_length": CONTEXT,
    "skip_warmup": True,
    "few_programs": True,  # compiling is most of what tests do
    "prefill_sizes": "64",
}
CROWDED = SMALL | {"max_running_requests": 3, "max_total_tokens": 208}  # so that three long requests preempt each other
OPTIONS = CROWDED | {"num_continuous_decode_steps": 4}  # which `set_rounds` turns on
SHARED = OPTIONS | {"prefill_sizes": None}  # prefills of one block too, for rounds that wait for no more


def checkpoint():
    return str(tiny_checkpoint("qwen3", VOCAB, 2, tokenizer=True, num_hidden_layers=1))


@dataclasses.dataclass(frozen=True)
class CountUp(Drafter):
    """Drafts the ids after the newest token's, which is right where `MEANINGS` makes the target count."""

    num_draft_tokens: int = 3

    def propose(self, params, state, batch):
        tokens = batch.tokens(-1, 1) + 1 + jnp.arange(self.num_draft_tokens)
        return Proposal(tokens % VOCAB, jnp.full(batch.length.shape, self.num_draft_tokens)), state


@functools.cache
def engine(draft, warm=False):
    """`warm`: with all programs compiled, for tests that ask whether anything compiles later."""
    drafts = {} if draft == "none" else {"num_draft_tokens": 3}
    options = OPTIONS if draft in ("none", COUNT_UP) else SHARED
    llm = LLM(checkpoint(), draft.replace("self", checkpoint()), **options | drafts | {"skip_warmup": not warm})
    set_rounds(llm, 1)
    return llm


class Nothing:
    """In place of a compiled program."""

    def __call__(self, *arguments):
        return arguments[0] if len(arguments) == 2 else (arguments[2], jnp.zeros((), jnp.int32))  # 2: of `admit`

    def memory_analysis(self):
        return types.SimpleNamespace(temp_size_in_bytes=0)


def uncompiled(monkeypatch, before=lambda programs, kind, size: None):
    """Compile no program from here on. Returns the list of those asked for; each is added once `before` returns."""
    called = []

    def compile_(self, kind, size, lowered):
        before(self, kind, size)
        called.append((kind, size))
        return self._compiled.setdefault((kind, size), Nothing())

    monkeypatch.setattr(Programs, "_lower", lambda *_: (None, None))
    monkeypatch.setattr(Programs, "_compile", compile_)
    return called


SELF = "standalone:self"
COUNT_UP = f"{__name__}:CountUp"
DRAFTERS = ["ngram", SELF]


def idle(core):
    """No request, and every page is free or in the prefix tree."""
    audit(core.scheduler)
    stats = core.stats()
    assert not core.busy and not core.requests
    assert stats["num_running"] == stats["num_waiting"] == 0
    assert stats["free_pages"] + stats["cached_pages"] == stats["total_pages"]
    assert core.flush_cache() and core.stats()["free_pages"] == stats["total_pages"]


def tokens(n, seed=0):
    return np.random.default_rng([n, seed]).integers(0, 256, n).tolist()


def params(**settings):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "ignore_eos": True} | settings)


def assert_own(model, outs):
    """Each token is the argmax after those before it, by a forward over whole texts without cache, drafts or slots."""
    texts = [[*out.prompt_token_ids, *out.token_ids] for out in outs]
    padded = [text + [0] * (max(map(len, texts)) - len(text)) for text in texts]
    for out, chosen in zip(outs, np.asarray(jaxspec.logits(model, padded)).argmax(-1), strict=True):
        start = len(out.prompt_token_ids) - 1
        assert list(out.token_ids) == chosen[start : start + len(out.token_ids)].tolist(), f"after {start + 1} tokens"


def check_greedy(llm, prompts, settings):
    """Check that greedy texts are the model's own, cold and from cached prefixes. Returns the cached outputs."""
    cold = llm.generate(prompts, settings)
    assert_own(llm.engine.runner.model, cold)
    cached = llm.generate(prompts, settings)
    assert [out.token_ids for out in cached] == [out.token_ids for out in cold]
    audit(llm.engine.scheduler)
    return cached


@contextlib.contextmanager
def unharmed(llm):
    """Yields a call of the engine, which after the block says what it said before, and is idle then."""
    again = lambda: [said(out) for out in llm.generate([tokens(90), tokens(30)], params())]  # noqa: E731
    expected = again()
    llm.engine.flush_cache()
    yield again
    assert again() == expected
    idle(llm.engine)


def mixed_load():
    """Every feature that changes what a round does, in one batch that doesn't fit the pool at once."""
    settings = [
        {"max_tokens": 64},
        {"logit_bias": {65: 20.0, 66: 20.0}, "temperature": 1.5, "seed": 1, "max_tokens": 60},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3, "max_tokens": 40},
        {},
        {"temperature": 1.0, "seed": 11},
        {"temperature": 0.7, "seed": -3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"logprobs": 3},
        {"temperature": 1.0, "seed": 5, "n": 3, "max_tokens": 9},
        {"speculative": False, "max_tokens": 12},
        {"prompt_logprobs": 2, "max_tokens": 2},
        {"stop": ["BA"], "logit_bias": {65: 50.0, 66: 50.0}, "min_tokens": 4, "temperature": 2.0, "seed": 2},
        {"ignore_eos": False, "logit_bias": {258: 10.0}, "min_tokens": 3},
        {"max_tokens": 1},
    ]
    lengths = (50, 41, 30, 1, 9, 33, 40, 17, 65, 130, 8, 12, 128)
    return [tokens(n) for n in lengths], [params(**s) for s in settings]


MEANINGS = [  # settings that must mean the same with drafts and without
    # Only if a row sees the drafts before it does it count up instead of saying the likeliest again:
    {"repetition_penalty": 2.0, "logit_bias": {65 + i: 100.0 - 5 * i for i in range(9)}},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5, "logit_bias": {65: 6.0, 66: 5.5, 67: 5.0}},
    {"frequency_penalty": 0.8, "logit_bias": {65: 8.0, 66: 7.5}},
    {"logit_bias": {65: 100.0}},
    {"logit_bias": {65: 4.0, 70: -100.0}, "repetition_penalty": 0.8},
    {"min_tokens": 6, "stop_token_ids": [9], "logit_bias": {9: 100.0, 10: 50.0}},
    {"min_tokens": 5, "stop": ["A"], "logit_bias": {65: 100.0}},
    {"stop": ["AAAAAA"], "logit_bias": {65: 100.0}},
    {"stop_token_ids": list(range(0, 256, 9))},
    {"ignore_eos": False, "logit_bias": {258: 4.0}},
    {"stop": ["AAAAAA"], "include_stop_str_in_output": True, "logit_bias": {65: 100.0}},
    {"stop_token_ids": [66], "include_stop_str_in_output": True, "min_tokens": 4, "logit_bias": {66: 100.0, 67: 90.0}},
    {"skip_special_tokens": False, "logit_bias": {256: 100.0}, "max_tokens": 3},
]


@functools.cache
def expected_meanings():
    settings = [params(**{"logprobs": 4, "max_tokens": 36, **meaning}) for meaning in MEANINGS]
    return settings, engine("none").generate([tokens(35, 8)] * len(settings), settings)


def said(out):
    """Fields by which a caller can tell two outputs apart, except times and the last bits of log-probabilities."""
    return [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in out.completions]


def set_overlap(llm, on):
    llm.engine.config = dataclasses.replace(llm.engine.config, disable_overlap=not on)


def set_rounds(llm, rounds):
    """How many rounds a program runs when nobody waits: 1, or 4 as in `OPTIONS`."""
    llm.engine.scheduler.rounds = rounds
