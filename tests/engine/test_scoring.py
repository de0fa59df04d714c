"""`jaxspec.logprobs`: the bits that an engine with `--deterministic` reports, for any batch, draft and cache hit."""

from __future__ import annotations

import functools
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import LLM, ConfigError, RequestError, SamplingParams
from tests.support.engines import CROWDED, SELF, VOCAB, checkpoint, tokens
from tests.support.heads import random_eagle3
from tests.support.sample import rare
from tests.support.tiny import tiny_checkpoint

PROMPTS = [tokens(n) for n in (5, 64, 40)] + [[*tokens(64)[:40], 9]]
SETTINGS = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}, {"temperature": 0.8, "seed": 6, "top_p": 0.9}]
SETTINGS.append({"temperature": 0.0, "repetition_penalty": 1.2})


@functools.cache
def model(dtype):
    return jaxspec.load_model(checkpoint(), dtype=dtype, progress=False)


def mismatches(llm, prompts, settings, speculative=True, prompt_logprobs=None) -> int:
    """How many log-probabilities of a batch have other bits than those of `logprobs` over all texts at once."""
    asked = {"max_tokens": 40, "ignore_eos": True, "logprobs": 0, "speculative": speculative}
    each = [SamplingParams(**asked, prompt_logprobs=prompt_logprobs, **one) for one in settings]
    outs = llm.generate(prompts, each)
    texts = [prompt + out.token_ids for prompt, out in zip(prompts, outs, strict=True)]
    padded = [text + [0] * (104 - len(text)) for text in texts]  # of one length, so that few programs are compiled
    lengths = [len(prompt) for prompt in prompts]
    rows = np.asarray(jaxspec.logprobs(llm.engine.runner.model, padded, lengths, config=llm.engine.config))
    found = 0
    for out, row, n in zip(outs, rows, lengths, strict=True):
        found += sum(np.float32(mine.logprob) != value for mine, value in zip(out.logprobs, row[n - 1 :], strict=False))
        known = out.prompt_logprobs[1:] if prompt_logprobs is not None else []
        found += sum(np.float32(mine.logprob) != value for mine, value in zip(known, row, strict=False))
    return found


def heads_of(folder) -> str:
    return f"eagle3:{random_eagle3(Path(folder), tuple(range(VOCAB)), (0, 0, 0))}"


def all_mismatches(draft, dtype) -> list[int]:
    """Count those of four texts at once, which preempts; of one alone, its prompt cached; and without drafts."""
    folder = checkpoint()
    draft = heads_of(folder) if draft == "eagle3" else draft
    llm = LLM(folder, draft, **CROWDED | {"dtype": dtype, "deterministic": True, "num_draft_tokens": 3})
    found = [mismatches(llm, PROMPTS, SETTINGS)]
    assert llm.engine.scheduler.preemptions > 0
    found += [mismatches(llm, PROMPTS[i : i + 1], SETTINGS[i : i + 1]) for i in (1,)]
    assert llm.engine.stats()["cached_tokens_total"] > 0
    assert llm.engine.counts.drafted[0] > 0
    found += [mismatches(llm, PROMPTS, SETTINGS, speculative=False), mismatches(llm, PROMPTS, SETTINGS, True, 0)]
    return found


# With EAGLE-3, `make test` has the example of ../train/test_following.py, whose texts are scored.
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("draft", ["ngram", SELF, "eagle3"])
def test_an_engine_reports_the_same_bits_with_any_drafter(draft, dtype):
    assert all_mismatches(draft.replace(":self", f":{checkpoint()}"), dtype) == [0] * 4


@pytest.mark.parametrize("dtype", ["float32", rare("bfloat16")])
def test_a_texts_bits_depend_on_no_other_text(dtype):
    texts = np.array([tokens(64), tokens(64)[::-1], [*tokens(64)[7:], *tokens(64)[:7]]])
    whole = jaxspec.logprobs(model(dtype), texts, [5, 40, 20])
    assert whole.shape == (3, 63) and whole.dtype == jnp.float32
    alone = np.pad(texts[1:2], ((0, 0), (0, 9)))  # and longer
    assert (jaxspec.logprobs(model(dtype), alone, 40)[0, :63] == whole[1]).all()
    plain = jax.nn.log_softmax(jaxspec.logits(model(dtype), texts))[:, :-1]
    near = jnp.take_along_axis(plain, texts[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(whole, near, atol=1e-5 if dtype == "float32" else 0.1)


def test_they_have_the_gradient_of_logits():
    text, own = np.array([tokens(24)]), model("float32")
    exact = jaxspec.logprobs(own, text, 5)

    def plain(params):
        rows = jax.nn.log_softmax(jaxspec.logits(own, text, params=params))[:, :-1]
        return jnp.take_along_axis(rows, text[:, 1:, None], axis=-1)[..., 0]

    def trained(params):
        return jaxspec.logprobs(own, text, 5, params=params)

    value, slope = jax.jit(jax.value_and_grad(lambda params: (trained(params) * exact).sum()))(own.params)
    assert value == (exact * exact).sum() and (plain(own.params) != exact).any()
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, slope, jax.grad(lambda params: (plain(params) * exact).sum())(own.params))


@pytest.mark.parametrize("prompt", [0, 6, [1, 2], 1.5, "all"])
def test_a_prompt_is_a_number_of_the_texts_tokens(prompt):
    with pytest.raises(RequestError, match="prompt must be from 1 to 5 tokens"):
        jaxspec.logprobs(model("float32"), [tokens(5)], prompt)
    with pytest.raises(ConfigError, match=r"config must be an engine's, such as llm.engine.config, got 3"):
        jaxspec.logprobs(model("float32"), [tokens(5)], 2, config=3)


def test_a_model_without_a_fixed_order_is_refused():
    mixture = jaxspec.load_model(str(tiny_checkpoint("qwen3_moe", 272, 0)), progress=False)
    with pytest.raises(ConfigError, match="has no kernels for Mixture"):
        jaxspec.logprobs(mixture, [tokens(5)], 2)
