"""Requests on their way in: what could never be served is refused before anything runs."""

import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from jaxspec import LLM, RequestError
from tests.support.engines import CONTEXT, OPTIONS, VOCAB, engine, idle, params
from tests.support.tiny import tiny_checkpoint


@pytest.mark.parametrize("prompt,settings,words", [
    ([], {}, "prompt is empty"),
    ([VOCAB], {}, "outside the vocabulary"),
    ([-1], {}, "outside the vocabulary"),
    ([True], {}, "True is no token id, ints from 0"),
    (["a"], {}, "'a' is no token id, ints from 0"),
    ([np.int64(VOCAB)], {}, "outside the vocabulary"),
    (np.array([0.5]), {}, "0.5 is no token id"),
    (b"abc", {}, "must be a string or a list of token ids, got b'abc'"),
    ("a\ud800b", {}, "lone surrogates"),
    ([1] * CONTEXT, {}, "maximum context length"),
    ([1], {"max_tokens": CONTEXT}, "maximum context length"),
    ([1], {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
    ([1], {"stop_token_ids": list(range(40))}, "at most 32"),
])  # fmt: skip
def test_a_bad_request_is_refused_before_anything_runs(prompt, settings, words):
    llm = engine("none")
    before = llm.engine.stats()["dispatches"]
    with pytest.raises(RequestError, match=words):
        llm.generate([[1, 2], prompt], params(**settings))
    assert llm.engine.stats()["dispatches"] == before
    idle(llm.engine)


@pytest.mark.parametrize("priority,words", [
    (1, "priority is 1, but this server goes by order of arrival; .* --schedule-policy priority"),
    (2**31, "priority must be an integer from -2147483648 to 2147483647, got 2147483648"),
    ("1", "priority must be an integer"),
    ([0, 0], "1 prompts but 2 priorities"),
])  # fmt: skip
def test_a_priority_without_the_flag_is_refused(priority, words):
    with pytest.raises(RequestError, match=words) as error:
        engine("none").generate([[1, 2]], params(), priority=priority)
    assert error.value.param == "priority"


def test_text_goes_on_from_the_prompts(tmp_path):
    """Keep the first space of a SentencePiece model's completion, or prompt and text couldn't be put together."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581Hi": 256, "there": 257, "<s>": 258}
    backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    steps = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([*steps])
    backend.add_special_tokens(["<s>"])
    folder = shutil.copytree(tiny_checkpoint("llama", 259, num_hidden_layers=1), tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>").save_pretrained(folder)
    llm = LLM(str(folder), **OPTIONS)
    always = params(max_tokens=2, logit_bias={256: 100.0})
    going_on, fresh = llm.generate([[258, 257], [258]], always)
    assert going_on.text == " Hi Hi" and fresh.text == "Hi Hi"
