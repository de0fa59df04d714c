"""A model divided among all GPUs here says what one GPU says, with every kind of drafter, cached or not.

Each test takes a minute or more, nearly all of it to compile. `scripts/gpu/parallel.sh` runs each in a process of its
own, all at once.
"""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.pallas import hopper
from jaxspec.pallas.hopper import KERNELS, kernels_here
from tests.support import hybrids, several_devices
from tests.support.several_devices import BATCHES, HYBRID, PROMPTS, SAMPLE, VOCAB
from tests.support.tiny import tiny_config

GPUS = jax.local_device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="one GPU")]

EIGHT = several_devices.EIGHT
# Sizes that the kernels of few rows take, wide enough that sums come with the next norm's scale.
WIDE = dict(hidden_size=2048, intermediate_size=4096, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
# Each token has all of these experts: with a choice, the nearest logits would pick others on one GPU than on several.
EXPERTS = dict(num_experts=8, num_experts_per_tok=8, moe_intermediate_size=256 * GPUS)
SHARED = dict(shared_expert_intermediate_size=256 * GPUS)
LINEAR = dict(linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128)


@pytest.fixture(autouse=True)
def _all_kernels(monkeypatch):
    """Enable kernels that no GPU has timed, too: these tests come first."""
    monkeypatch.setattr(hopper, "UNTIMED", True)


def in_float32():
    return jax.default_matmul_precision("highest")


def folder_of(family: str, draft: str):
    if draft == "mtp":
        return hybrids.checkpoint(family, VOCAB, 2, **EIGHT | HYBRID)
    return several_devices.checkpoint(family)


@pytest.mark.parametrize("family,draft", [("llama", "eagle3"), ("qwen3_moe", "ngram"), ("qwen3_5_moe", "mtp")])
def test_texts_are_one_gpus_without_drafts_and_cached_ones_are_cold_ones(family, draft):
    folder, batch = folder_of(family, draft), BATCHES["greedy"]
    draft = f"eagle3:{several_devices.eagle3(folder)}" if draft == "eagle3" else draft
    with in_float32():
        expected = several_devices.said(several_devices.engine(folder, "none", 1), batch)
        llm = several_devices.engine(folder, draft, GPUS)
        for _ in range(2):
            assert several_devices.said(llm, batch)[0] == expected[0]
    stats = llm.engine.stats()
    assert stats["cached_tokens_total"] and sum(stats["drafted_per_position"])


def test_sampled_texts_and_log_probabilities_are_one_gpus():
    folder = several_devices.checkpoint("qwen3")
    with in_float32():
        one, several = (
            several_devices.said(several_devices.engine(folder, "none", size), SAMPLE["logprobs"]) for size in (1, GPUS)
        )
    assert several[0] == one[0]
    np.testing.assert_allclose(several[1], one[1], atol=1e-3)


def decoded(folder: str, size: int, requests: int, **more) -> tuple[list[list[int]], list[np.ndarray], dict]:
    """Greedy texts, their tokens' log-probabilities, and which kernels the programs called."""
    before = KERNELS.copy()
    llm = LLM(folder, "none", tp_size=size, load_format="dummy", dtype="bfloat16", context_length=256, skip_warmup=True,
              max_running_requests=requests, max_total_tokens=8192, few_programs=True, **more)  # fmt: skip
    prompts = [[(i + j) % VOCAB for j in prompt] for i in range(requests // 4) for prompt in PROMPTS[:4]]
    outs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16, logprobs=0, ignore_eos=True))
    outs = [out.completions[0] for out in outs]
    scores = [np.array([each.logprob for each in out.logprobs]) for out in outs]
    return [out.token_ids for out in outs], scores, KERNELS - before


# By the path that runs their layers: what is asked of whom, and kernels that must have been called.
PATHS = {
    "few_rows": ("qwen3", {}, 4, ("few_rows_product", "few_rows_heads")),
    "few_rows-fp8, 16 rows": ("qwen3", {}, 16, ("few_rows_product", "few_rows_heads", "few_rows_gated")),
    "few_rows-fp8, 32 rows": ("qwen3", {}, 32, ("few_rows_product", "few_rows_heads", "few_rows_gated")),
    "fp8_stream-fp8": ("qwen3", {}, 40, ("fp8_stream",)),
    "few_rows-mixture": ("qwen3_moe", EXPERTS, 4, ("few_rows_product", "expert_few", "router")),
    "fused_norms": ("qwen3_5_moe", EXPERTS | SHARED | LINEAR, 4, ("few_rows_normed", "expert_few", "delta_step")),
    "weight_stream": ("qwen3", {"num_key_value_heads": GPUS}, 16, ("weight_stream", "write_heads")),
}  # fmt: skip


@pytest.mark.skipif(kernels_here() is not None, reason="no kernels here")
@pytest.mark.parametrize("name", PATHS)
def test_fast_paths_compute_what_one_gpu_does(name, tmp_path, figures):
    """In bfloat16 two sums may round apart, and then a near-tie another way: log-probabilities are near until then."""
    family, sizes, requests, called = PATHS[name]
    config = tiny_config(family, VOCAB, **{"num_hidden_layers": 4} | WIDE | sizes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    more = {"quantization": "fp8"} if "fp8" in name else {}
    (texts, scores, _), (own, same, kernels) = (decoded(str(tmp_path), size, requests, **more) for size in (1, GPUS))
    assert all(kernels[each] for each in ("peer_sum", *called)), kernels
    agree, apart = [], []
    for a, b, x, y in zip(texts, own, scores, same, strict=True):
        alike = next((i for i, (s, t) in enumerate(zip(a, b, strict=True)) if s != t), len(a))
        agree.append(alike)
        apart.append(float(np.abs(x[: alike + 1] - y[: alike + 1]).max()))
    figures[name] = {"tokens alike": agree, "log-probabilities apart": apart}
    print(name, agree, apart, dict(kernels))
    assert max(apart) < 0.1
