"""The demo model on the device: it answers, and says what transformers says.

Its GGUF file is $JAXSPEC_TEST_GGUF, or else the demo's own, fetched if it isn't in the cache.
"""

import functools
import json
import os
from pathlib import Path

import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.checkpoint import demo
from jaxspec.drafters.registry import find

pytestmark = pytest.mark.gpu

NEAR_TIE = 0.01  # between the two largest logits of the expected text: the rest of that prompt is excused
GOLDEN = Path(__file__).parent.parent / "golden" / "smollm2_greedy.json"


@functools.cache
def smollm2(draft):
    path = os.environ.get("JAXSPEC_TEST_GGUF") or str(demo.fetch())
    known = find(draft, demo.NAME)
    draft = known.source if known else draft  # a shipped one is found by the demo's name, not by its file's
    return LLM(path, draft, dtype="float32", context_length=512, max_running_requests=8, skip_warmup=True)


@pytest.mark.parametrize("draft", ["none", "ngram", "eagle3", "dflash", "dspark"])
def test_it_knows_the_capital_of_france(draft):
    llm = smollm2(draft)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = llm.engine.tokenizer.apply_chat_template(chat)
    out = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=32))[0]
    assert "Paris" in out.text
    assert out.finish_reason == "stop"


@pytest.mark.parametrize("draft", ["none", "ngram", "eagle3", "dflash", "dspark"])
def test_greedy_text_is_that_of_transformers(draft, figures):
    cases = json.loads(GOLDEN.read_text())
    params = SamplingParams(temperature=0.0, max_tokens=len(cases[0]["expected"]), ignore_eos=True)
    outs = smollm2(draft).generate([case["prompt_ids"] for case in cases], params)
    compared = []
    for out, case in zip(outs, cases, strict=True):
        tie = next((i for i, margin in enumerate(case["margins"]) if margin < NEAR_TIE), len(case["margins"]))
        assert out.token_ids[:tie] == case["expected"][:tie]
        compared.append(tie)
    assert len(cases) >= 6 and sum(compared) >= 64 * 4
    figures[f"smollm2 {draft}"] = {
        "tokens equal per prompt": compared,
        "accept len": sum(o.metrics.verified_tokens for o in outs) / sum(o.metrics.verify_rounds for o in outs),
    }
