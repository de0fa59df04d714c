"""Models whose layers see a window, in the engine: chains and trees leave the text as it is, cached or cold.

What windows compute is held to transformers in test_models.py. Here every token must be the argmax of a forward over
the whole text, which knows no cache, no page and no draft. Windows are shorter than the prompts, and for trees shorter
than some branches are deep.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import LLM, SamplingParams, load_model
from jaxspec.drafters.base import NoDrafter
from tests.support.engines import PAGE, SMALL, check_greedy
from tests.support.sample import rare
from tests.support.tiny import tiny_checkpoint
from tests.support.trees import Session, Wild, padded

VOCAB, LONGEST, NEW = 64, 150, 24
PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (1, 7, 33, LONGEST)]
WINDOWS = {"gemma3": {}, "mistral": {"sliding_window": 21}}
OPTIONS = SMALL | {"dtype": "float32", "max_running_requests": 4}


def choices(model, texts):
    """Argmax after every token of each text, i32[n, t]."""
    return np.asarray(jnp.argmax(jaxspec.logits(model, padded(texts, 0)), axis=-1))


@pytest.mark.exhaustive  # olmo3, with a layer that sees a window, is in test_families.py
@pytest.mark.parametrize("family,draft", [("gemma3", "ngram"), ("mistral", "standalone")])
def test_greedy_texts_are_the_models_own_cached_or_cold(family, draft):
    target = tiny_checkpoint(family, VOCAB, 2, **WINDOWS[family])
    other = tiny_checkpoint(family, VOCAB, 2, **WINDOWS[family] | {"sliding_window": 15})  # agrees now and then
    llm = LLM(str(target), f"standalone:{other}" if draft == "standalone" else draft, num_draft_tokens=3, **OPTIONS)
    settings = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    cached = check_greedy(llm, PROMPTS, settings)
    assert cached[-1].metrics.cached_tokens >= LONGEST - 1 - PAGE
    stats = llm.engine.stats()
    drafted, accepted = sum(stats["drafted_per_position"]), sum(stats["accepted_per_position"])
    assert 0 < accepted < drafted


@pytest.mark.parametrize(
    "family,window", [rare("gemma2", 2), rare("gemma3", 2), rare("gpt_oss", 2), rare("gemma3", 20)]
)
def test_trees_leave_the_text_as_it_is(family, window):
    model = load_model(str(tiny_checkpoint(family, VOCAB, 2, sliding_window=window)), progress=False)
    prompts = [prompt[:40] for prompt in PROMPTS]
    plain = Session(model, NoDrafter(), {}, prompts, new_tokens=NEW)
    for text, prompt, chosen in zip(plain.texts, prompts, choices(model, plain.texts), strict=True):
        assert text[len(prompt) :] == chosen[len(prompt) - 1 : len(text) - 1].tolist()
    wild = Session(model, Wild(), {"texts": padded(plain.texts)}, prompts, new_tokens=NEW)
    assert wild.texts == plain.texts
    for i in range(len(prompts)):
        np.testing.assert_allclose(wild.kv(i), plain.kv(i), atol=1e-4)
    accepted = np.concatenate(wild.accepted)
    assert accepted.max() > window or window > Wild.deep
    assert 1 < accepted.mean() < Wild.deep


def test_a_window_hides_what_is_before_it():
    """Two texts that differ before the window alone end alike in a model of one layer; in two layers they needn't."""
    one = np.array([PROMPTS[2]] * 2)
    one[1, :12] = (one[1, :12] + 1) % VOCAB
    for layers, alike in ((1, True), (2, False)):
        model = load_model(
            str(tiny_checkpoint("mistral", VOCAB, 2, num_hidden_layers=layers, sliding_window=21)), progress=False
        )
        logits = np.asarray(jaxspec.logits(model, one))
        assert (abs(logits[0, -1] - logits[1, -1]).max() < 1e-5) == alike
        assert abs(logits[0, -2] - logits[1, -2]).max() > 1e-3
