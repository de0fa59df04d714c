"""`--logprobs-mode processed_logprobs`: those of the distribution that a token was drawn from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import LLM, StructuredOutput
from jaxspec.compiling.programs import Programs
from jaxspec.rounds import programs
from jaxspec.rounds.programs import LOGPROBS, MODES, PROCESSED
from tests.support.engines import SELF, SMALL, VOCAB, checkpoint, params, tokens
from tests.support.exact import slots_for
from tests.support.heads import random_eagle3

SETTINGS = [
    {"temperature": 0.7, "seed": 1, "top_k": 9},
    {"temperature": 1.3, "seed": 2, "top_p": 0.6, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"temperature": 0.0, "frequency_penalty": 1.1, "logit_bias": {65: 3.0}},
    {"temperature": 0.9, "seed": 3, "min_p": 0.2, "structured": StructuredOutput(choice=["BABABABABABA", "ABBA"])},
]


def drawn_from(logits, text, prompt, settings, allowed=None):
    """Log-probabilities after a text, written down once more: penalties, bias, temperature, filters."""
    row, get = logits.astype(np.float64), settings.get
    for token, value in get("logit_bias", {}).items():
        row[token] += value
    seen = np.unique(text)
    repetition = get("repetition_penalty", 1)
    row[seen] = np.where(row[seen] > 0, row[seen] / repetition, row[seen] * repetition)
    ids, counts = np.unique(text[prompt:], return_counts=True)
    row[ids] -= get("presence_penalty", 0) + get("frequency_penalty", 0) * counts
    p = np.exp((row - row.max()) / (settings["temperature"] or 1))
    if settings["temperature"]:
        p[p < get("min_p", 0) * p.max()] = 0
        p[np.argsort(-p)[get("top_k", len(p)) :]] = 0
        order = np.argsort(-p)
        mass = np.cumsum(p[order]) / p.sum()
        p[order[1:][mass[:-1] >= get("top_p", 2)]] = 0
    with np.errstate(divide="ignore"):
        return np.log(p / p.sum())


def check(llm, settings):
    prompts = [tokens(n) for n in (30, 9, 41, 12)][: len(settings)]
    outs = llm.generate(prompts, [params(logprobs=5, prompt_logprobs=0, **each) for each in settings])
    assert max(out.metrics.accept_length for out in outs) > 1 or llm.engine.config.draft == "none"
    for prompt, out, each in zip(prompts, outs, settings, strict=True):
        text = np.array([*prompt, *out.token_ids])
        logits = np.asarray(jaxspec.logits(llm.engine.runner.model, np.pad(text, (0, 64 - len(text)))[None]))[0]
        for i, entry in enumerate(out.logprobs, len(prompt)):
            if "structured" in each:  # what the grammar allows, this file doesn't know
                assert entry.logprob > -np.inf and sum(np.exp([value for _, value in entry.top])) < 1 + 1e-5
                continue
            wanted = drawn_from(logits[i - 1], text[:i], len(prompt), each)
            np.testing.assert_allclose(entry.logprob, wanted[text[i]], atol=2e-4)
            for token, value in entry.top:
                np.testing.assert_allclose(value, wanted[token], atol=2e-4)
        raw = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        known = [entry.logprob for entry in out.prompt_logprobs[1:]]
        np.testing.assert_allclose(known, raw[np.arange(len(prompt) - 1), prompt[1:]], atol=1e-4)


def engine(draft, **options):
    return LLM(checkpoint(), draft, logprobs_mode="processed_logprobs", max_running_requests=4, **SMALL | options)


processed = jax.jit(programs._processed, static_argnums=4)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_rows_distribution_is_the_one_that_its_settings_make(fixed):
    """Rows of two chains: each knows the prompt, the text and the drafts before it."""
    prompts, texts, drafts = [[3, 5, 3], [7]], [[2, 9], [2, 2, 5]], np.array([[5, 5], [1, 2]])
    asked = [SETTINGS[0] | {"top_k": 5}, SETTINGS[1], SETTINGS[2] | {"logit_bias": {4: 3.0}}]
    logits = np.random.default_rng(0).normal(size=(2, 3, 12)).astype(np.float32) * 3
    for settings in asked:
        slots = slots_for([params(**settings)] * 2, prompts, texts, capacity=16)
        slots = jax.tree.map(lambda x: x[:2], slots)
        found = processed(logits, slots, drafts, None, fixed)
        for i, j in np.ndindex(2, 3):
            known = np.array([*prompts[i], *texts[i], *drafts[i, :j]])
            wanted = drawn_from(logits[i, j], known, len(prompts[i]), settings)
            np.testing.assert_allclose(found[i, j], wanted, atol=1e-5)


def test_plain_settings_change_no_bit_and_a_grammars_tokens_share_what_is_left():
    logits = np.random.default_rng(1).normal(size=(2, 3, 12)).astype(np.float32)
    slots = slots_for([params(temperature=1.0, seed=1)] * 2, [[3], [4]], [[], []], capacity=16)
    of = logits, jax.tree.map(lambda x: x[:2], slots), np.zeros((2, 2), int)
    for fixed in (False, True):
        np.testing.assert_array_equal(processed(*of, None, fixed), programs._log_softmax(jnp.array(logits), fixed))
    allowed = np.broadcast_to(np.arange(12) % 3 == 0, logits.shape)
    wanted = jax.nn.log_softmax(np.where(allowed, logits, -np.inf))
    np.testing.assert_allclose(processed(*of, allowed, False), wanted, atol=1e-6)


def test_an_engines_programs_report_them_where_it_says_so():
    for processed, kind in ((False, LOGPROBS), (True, PROCESSED)):
        own = SimpleNamespace(shapes=SimpleNamespace(processed=processed))
        assert [Programs._reporting(own, mode) for mode in MODES] == [*MODES[:2], kind]


@pytest.mark.exhaustive
@pytest.mark.parametrize("draft", [SELF, "none", "tree"])
def test_they_are_those_of_the_distribution_drawn_from(draft):
    options = {"dtype": "float32", "draft_policy": "fixed"}
    if draft == "tree":
        heads = random_eagle3(Path(checkpoint()), tuple(range(VOCAB)), (0, 0, 0))
        draft, options = f"eagle3:{heads}", options | {"topk": 2, "num_steps": 2, "num_draft_tokens": 4}
    elif draft != "none":
        draft, options = draft.replace("self", checkpoint()), options | {"num_draft_tokens": 2}
    check(engine(draft, **options), SETTINGS[: 3 if draft == SELF else 4])
