"""A model divided among all GPUs here says what one GPU says, with every kind of drafter, cached or not."""

from __future__ import annotations

import functools
import json

import jax
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.pallas.hopper import KERNELS, kernels_here
from tests import hybrids, several_devices
from tests.several_devices import BATCHES, HYBRID, PROMPTS, VOCAB
from tests.tiny import tiny_config

GPUS = jax.local_device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="one GPU")]

EIGHT = several_devices.EIGHT
# Sizes that the kernels of few rows take, wide enough that sums come with the next norm's scale.
WIDE = dict(hidden_size=2048, intermediate_size=4096, num_attention_heads=16, num_key_value_heads=8)


@pytest.fixture(autouse=True)
def _float32_products():
    with jax.default_matmul_precision("highest"):
        yield


def folder_of(family: str, draft: str):
    if draft == "mtp":
        return hybrids.checkpoint(family, VOCAB, 2, **EIGHT | HYBRID)
    return several_devices.checkpoint(family)


@pytest.mark.parametrize(
    "family,draft", [("llama", "eagle3"), ("qwen3_moe", "ngram"), ("qwen3_5_moe", "mtp"), ("qwen3", "none")]
)
def test_texts_are_one_gpus_and_cached_ones_are_cold_ones(family, draft, figures):
    folder = folder_of(family, draft)
    draft = f"eagle3:{several_devices.eagle3(folder)}" if draft == "eagle3" else draft
    one, llm = (several_devices.engine(folder, draft, size) for size in (1, GPUS))
    for name, batch in BATCHES.items():
        expected, cold = several_devices.said(one, batch), several_devices.said(llm, batch)
        cached = several_devices.said(llm, batch)
        assert cold[0] == expected[0], name
        np.testing.assert_allclose(cold[1], expected[1], atol=1e-3)
        if name == "greedy":
            assert cached[0] == cold[0], name
    assert llm.engine.stats()["cached_tokens_total"]
    plain = several_devices.engine(folder, "none", GPUS)
    assert several_devices.said(plain, BATCHES["greedy"])[0] == several_devices.said(llm, BATCHES["greedy"])[0]


@functools.cache
def decoded(folder: str, size: int, draft: str, requests: int) -> tuple[list[list[int]], list[np.ndarray], dict]:
    """Greedy texts, their tokens' log-probabilities, and which kernels the programs called."""
    before = KERNELS.copy()
    llm = LLM(folder, draft, tp_size=size, load_format="dummy", dtype="bfloat16", context_length=256, skip_warmup=True,
              max_running_requests=requests, max_total_tokens=8192, few_programs=True)  # fmt: skip
    prompts = [[(i + j) % VOCAB for j in prompt] for i in range(requests // 4) for prompt in PROMPTS[:4]]
    outs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16, logprobs=0, ignore_eos=True))
    outs = [out.completions[0] for out in outs]
    scores = [np.array([each.logprob for each in out.logprobs]) for out in outs]
    return [out.token_ids for out in outs], scores, KERNELS - before


# By the path that runs their layers: what is asked of them, and kernels that must have been called.
PATHS = {
    "few_rows": ("none", 4, ("few_rows_product", "few_rows_heads")),
    "few_rows, drafts": ("ngram", 4, ("few_rows_product",)),
    "weight_stream": ("none", 16, ("weight_stream",)),
}


@pytest.mark.skipif(kernels_here() is not None, reason="no kernels here")
@pytest.mark.parametrize("name", PATHS)
def test_fast_paths_compute_what_one_gpu_does(name, tmp_path_factory, figures):
    """In bfloat16 two sums may round apart, and then a near-tie another way: log-probabilities are near until then."""
    draft, requests, called = PATHS[name]
    folder = tmp_path_factory.getbasetemp() / "wide"
    folder.mkdir(exist_ok=True)
    config = tiny_config("qwen3", VOCAB, head_dim=128, num_hidden_layers=4, **WIDE)
    (folder / "config.json").write_text(json.dumps(config))
    (texts, scores, _), (own, same, kernels) = (decoded(str(folder), size, draft, requests) for size in (1, GPUS))
    assert all(kernels[each] for each in ("peer_sum", *called)), kernels
    agree, apart = [], []
    for a, b, x, y in zip(texts, own, scores, same, strict=True):
        alike = next((i for i, (s, t) in enumerate(zip(a, b, strict=True)) if s != t), len(a))
        agree.append(alike)
        apart.append(float(np.abs(x[: alike + 1] - y[: alike + 1]).max()))
    figures[name] = {"tokens alike": agree, "log-probabilities apart": apart}
    print(name, agree, apart, dict(kernels))
    assert max(apart) < 0.1
