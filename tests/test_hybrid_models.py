"""Qwen3-Next and Qwen3.5 against transformers (tests/golden/hybrid): logits, greedy texts, MTP chains, every layout."""

import functools
from pathlib import Path

import numpy as np
import pytest

import jaxspec
from jaxspec import LLM, SamplingParams

GOLDEN = Path(__file__).parent / "golden" / "hybrid"
VARIANTS = sorted(path.stem for path in GOLDEN.glob("*.npz"))
DENSE = [name for name in VARIANTS if "moe" not in name and "next" not in name]
LENGTHS = (1, 7, 33, 150)
CLOSE = dict(rtol=0, atol=2e-3)  # float32 noise of these models is about 1e-4


@functools.cache
def golden(variant):
    return jaxspec.load_model(str(GOLDEN / variant), dtype="float32", progress=False), np.load(
        GOLDEN / f"{variant}.npz"
    )


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("variant", DENSE)
def test_logits_match_transformers(variant, length):
    model, expected = golden(variant)
    logits = jaxspec.logits(model, expected["ids"][None, :length])
    np.testing.assert_allclose(logits[0], expected["logits"][:length], **CLOSE)


@functools.cache
def served(variant, draft):
    drafts = {} if draft == "none" else {"num_draft_tokens": 3}
    options = {
        "dtype": "float32",
        "context_length": 160,
        "page_size": 8,
        "max_running_requests": 3,
        "skip_warmup": True,
    }
    return LLM(str(GOLDEN / variant), draft, **options, **drafts)


@pytest.mark.parametrize("draft", ["none", "ngram"])
@pytest.mark.parametrize("variant", DENSE)
def test_greedy_texts_are_transformers(variant, draft):
    """Of four requests at once: prompts of one token to more than one program's, states in slots, drafts refused."""
    _, expected = golden(variant)
    prompts = [expected["ids"][:n].tolist() for n in (1, 7, 33, 64)]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    outs = served(variant, draft).generate(prompts, params)
    assert [out.token_ids for out in outs] == expected["greedy"].tolist()
