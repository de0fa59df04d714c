"""Rows that requests ask for beside their text: final hidden states, and the experts that mixtures chose."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import LLM, ConfigError, RequestError, SamplingParams
from jaxspec.cache.mixers import WholeTexts
from jaxspec.decoder.forward import forward
from tests.support.engines import CROWDED, VOCAB, tokens
from tests.support.heads import random_eagle3
from tests.support.tiny import tiny_checkpoint

PROMPTS = [tokens(n) for n in (5, 64, 40)] + [[*tokens(64)[:40], 9]]
LONGEST = 104
KEPT = {"max_total_tokens": 176, "enable_return_hidden_states": True, "enable_return_routed_experts": True}
ASKED = {"return_hidden_states": True, "return_routed_experts": True}


def folder(kind):
    return str(tiny_checkpoint(kind, VOCAB, 2, tokenizer=True))


@partial(jax.jit, static_argnums=0)
def rows_of(config, params, texts):
    positions = jnp.broadcast_to(jnp.arange(LONGEST), texts.shape)
    hidden = forward(dataclasses.replace(config, reports_experts=True), params, texts, positions, WholeTexts())
    return hidden.last, hidden.experts


def check(outs, model):
    """Compare rows with those of a forward over whole texts, without cache or drafts."""
    texts = [out.prompt_token_ids + out.token_ids for out in outs]
    padded = np.array([text + [0] * (LONGEST - len(text)) for text in texts])
    for out, text, *rows in zip(outs, texts, *rows_of(model.config.decoder, model.params, padded), strict=True):
        states, experts = (np.asarray(each[: len(text) - 1]) for each in rows)
        done = out.completions[0]
        assert done.hidden_states.shape == states.shape and done.hidden_states.dtype == np.float32
        np.testing.assert_allclose(done.hidden_states, states, atol=2e-4)
        assert done.routed_experts.dtype == np.int32
        np.testing.assert_array_equal(np.sort(done.routed_experts), np.sort(experts))


def run(kind, draft, **options):
    """Crowded, so that requests are preempted; then prompts from the cache."""
    model = jaxspec.load_model(folder(kind), dtype="float32", progress=False)
    drafts = {} if draft == "none" else {"num_draft_tokens": 3}
    llm = LLM(folder(kind), draft, dtype="float32", **CROWDED | drafts | KEPT | options)
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **ASKED)
    check(llm.generate(PROMPTS, greedy), model)
    assert llm.engine.scheduler.preemptions > 0
    before = llm.engine.stats()["cached_tokens_total"]
    check(llm.generate(PROMPTS, dataclasses.replace(greedy, max_tokens=4)), model)
    assert llm.engine.stats()["cached_tokens_total"] > before
    return llm


@pytest.fixture(scope="module")
def llm():
    return run("qwen3_moe", "ngram")


def test_rows_are_those_of_the_text(llm):
    stopped = SamplingParams(temperature=0, max_tokens=1, **ASKED)
    (out,) = llm.generate([tokens(5)], stopped)
    assert out.completions[0].hidden_states.shape[0] == out.completions[0].routed_experts.shape[0] == 5
    (out,) = llm.generate([tokens(5)], SamplingParams(temperature=0, max_tokens=2, return_routed_experts=True))
    assert out.completions[0].hidden_states is None and out.completions[0].routed_experts.shape == (6, 2, 2)
    (out,) = llm.generate([tokens(5)], SamplingParams(temperature=0, max_tokens=2))
    assert out.completions[0].routed_experts is None


def test_an_aborted_request_has_its_rows(llm):
    engine = llm.engine
    request = engine.prepare(tokens(20), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **ASKED))
    engine.add(request)
    shown = 0
    while shown < 6:
        shown += sum(len(delta.token_ids) for delta in engine.step())
    (last,) = engine.abort(request.id)
    assert last.hidden_states.shape[0] == last.routed_experts.shape[0] == 20 + shown - 1
    engine.add(waiting := engine.prepare(tokens(20), SamplingParams(**ASKED)))
    (last,) = engine.abort(waiting.id)
    assert last.hidden_states.shape[0] == 0
    llm.generate([tokens(3)], SamplingParams(temperature=0, max_tokens=1))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kind, draft, options",
    [
        ("qwen3_moe", "eagle3", {"topk": 2, "num_steps": 3, "num_draft_tokens": 5}),
        ("qwen3_moe", "none", {"disable_overlap": True}),
        ("qwen3_5_moe", "ngram", {}),
        ("glm4_moe", "suffix", {}),
    ],
)
def test_rows_are_those_of_the_text_with(kind, draft, options):
    if draft == "eagle3":
        draft = f"eagle3:{random_eagle3(Path(folder(kind)), tuple(range(VOCAB)), (0, 0, 1))}"
    run(kind, draft, **options)


def test_an_engine_that_keeps_no_rows_refuses():
    llm = LLM(folder("qwen3"), "none", **CROWDED)
    with pytest.raises(RequestError, match="start it with --enable-return-hidden-states") as raised:
        llm.generate([tokens(3)], SamplingParams(return_hidden_states=True))
    assert raised.value.param == "return_hidden_states"
    with pytest.raises(ConfigError, match="has no mixture of experts"):
        LLM(folder("qwen3"), "none", **CROWDED, enable_return_routed_experts=True)
