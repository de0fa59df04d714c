"""Qwen3-Next and Qwen3.5 against transformers (tests/golden/hybrid): logits, greedy texts, MTP chains, every layout."""

import functools
from pathlib import Path

import numpy as np
import pytest

import jaxspec
from jaxspec import LLM, SamplingParams

GOLDEN = Path(__file__).parent / "golden" / "hybrid"
VARIANTS = sorted(path.stem for path in GOLDEN.glob("*.npz"))
LENGTHS = (1, 7, 33, 150)
PROMPTS = (1, 7, 33, 64)  # whose continuations the goldens have
CLOSE = dict(rtol=0, atol=2e-3)  # float32 noise of these models is about 1e-4


@functools.cache
def golden(variant):
    return jaxspec.load_model(str(GOLDEN / variant), dtype="float32", progress=False), np.load(
        GOLDEN / f"{variant}.npz"
    )


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant, length):
    model, expected = golden(variant)
    logits = jaxspec.logits(model, expected["ids"][None, :length])
    np.testing.assert_allclose(logits[0], expected["logits"][:length], **CLOSE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_texts_are_transformers(variant):
    """One forward over the prompts and their expected continuations gives every greedy choice at once."""
    model, expected = golden(variant)
    width = max(PROMPTS) + expected["greedy"].shape[1]
    texts = [np.append(expected["ids"][:n], text) for n, text in zip(PROMPTS, expected["greedy"], strict=True)]
    padded = np.stack([np.pad(text, (0, width - len(text))) for text in texts])
    choices = np.argmax(jaxspec.logits(model, padded), axis=-1)
    for n, text, chosen in zip(PROMPTS, expected["greedy"], choices, strict=True):
        assert chosen[n - 1 : n - 1 + len(text)].tolist() == text.tolist()


@pytest.mark.parametrize("variant,draft", [("qwen3_next", "none"), ("qwen3_5_moe-text", "ngram")])
def test_the_engines_greedy_texts_are_transformers(variant, draft):
    """Of four requests at once: prompts of one token to more than one program's, states in slots, drafts refused."""
    _, expected = golden(variant)
    drafts = {} if draft == "none" else {"num_draft_tokens": 3}
    options = {"context_length": 128, "page_size": 8, "chunked_prefill_size": 32, "max_running_requests": 2}
    llm = LLM(str(GOLDEN / variant), draft, dtype="float32", skip_warmup=True, **options, **drafts)
    prompts = [expected["ids"][:n].tolist() for n in PROMPTS]
    outs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True))
    assert [out.token_ids for out in outs] == expected["greedy"].tolist()
