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
from jaxspec.compiling import lowering
from jaxspec.decoder import few_rows, padding, weight_stream
from jaxspec.pallas.attention import write_heads
from jaxspec.pallas.dense.few_rows import FP8_ROWS
from jaxspec.pallas.hopper import KERNELS, kernels_here
from tests.support import hybrids, several_devices, several_devices_by_request
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
    monkeypatch.setattr(few_rows, "ALONE_DEVICES", GPUS)
    monkeypatch.setattr(padding, "TIMED_ROWS", FP8_ROWS)
    monkeypatch.setattr(weight_stream, "FP8_DEVICES", GPUS)
    monkeypatch.setattr(write_heads, "UNEVEN", 16)
    monkeypatch.setattr(lowering, "MOST", 0)  # other processes have limits of their own


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


@pytest.mark.parametrize("draft", ["none", "mtp"])
def test_requests_divided_among_gpus_have_one_gpus_texts(draft):
    """Latents of each request on one GPU (`--dp-attention`): cold, and from cached prefixes."""
    with in_float32():
        one, llm = several_devices_by_request.engines("deepseek_v3", draft, GPUS)
        for name, batch in BATCHES.items():
            expected = several_devices.said(one, batch)
            for _ in range(2):
                texts, logprobs = several_devices.said(llm, batch)
                assert texts == expected[0], name
                np.testing.assert_allclose(logprobs, expected[1], atol=1e-3)
    assert llm.engine.stats()["cached_tokens_total"]


# Drafters of more than layers: by name of `with_drafter`, and options.
DRAFTERS = {
    "tree": ("eagle", several_devices.tree_of(3, 2, 6)),
    "tree, EAGLE-3": ("eagle3", several_devices.tree_of(2, 4, 7)),
    "tree, DFlash": ("dflash/full", several_devices.tree_of(2, 4, 6)),
    "dspark": ("dspark/specforge", {}),
    "dflash2": ("dflash2/sliding", {}),
    "side by side": ("suffix+eagle", {}),
    "some tokens": ("dspark/deepspec", {"draft_token_map": list(range(1, 40, 2))}),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_with_each_drafter_are_one_gpus_without(name, tmp_path, figures):
    """Greedy texts are plain decoding's, and sampled ones are one GPU's with these drafts; of trees, plain decoding's
    too."""
    draft, more = DRAFTERS[name]
    (folder, draft), more = several_devices.with_drafter(draft), dict(more)
    if "draft_token_map" in more:
        (tmp_path / "map.json").write_text(json.dumps(more["draft_token_map"]))
        more["draft_token_map"] = str(tmp_path / "map.json")
    with in_float32():
        plain, llm = several_devices.engine(folder, "none", 1), several_devices.engine(folder, draft, GPUS, **more)
        one = plain if "topk" in more else several_devices.engine(folder, draft, 1, **more)
        assert several_devices.said(llm, BATCHES["greedy"])[0] == several_devices.said(plain, BATCHES["greedy"])[0]
        stats = llm.engine.stats()
        assert several_devices.said(llm, BATCHES["sampled"])[0] == several_devices.said(one, BATCHES["sampled"])[0]
    figures[name] = {key: stats[key] for key in ("sums", "drafted_per_position", "accepted_per_position")}
    print(name, figures[name])
    assert sum(stats["drafted_per_position"])


def test_sampled_texts_and_log_probabilities_are_one_gpus():
    folder = several_devices.checkpoint("qwen3")
    with in_float32():
        one, several = (
            several_devices.said(several_devices.engine(folder, "none", size), SAMPLE["logprobs"]) for size in (1, GPUS)
        )
    assert several[0] == one[0]
    np.testing.assert_allclose(several[1], one[1], atol=1e-3)


def decoded(
    folder: str, size: int, requests: int, draft: str = "none", **more
) -> tuple[list[list[int]], list[np.ndarray], dict]:
    """Greedy texts, their tokens' log-probabilities, and which kernels the programs called."""
    before = KERNELS.copy()
    llm = LLM(folder, draft, tp_size=size, load_format="dummy", dtype="bfloat16", context_length=256, skip_warmup=True,
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
    "fused_norms-fp8, 32 rows": ("qwen3_5_moe", EXPERTS | SHARED | LINEAR, 32, ("few_rows_normed", "delta_step")),
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
    kernels = alike(name, figures, *(decoded(str(tmp_path), size, requests, **more) for size in (1, GPUS)))
    assert all(kernels[each] for each in ("peer_sum", *called)), kernels


def alike(name: str, figures, one: tuple, several: tuple) -> dict:
    """Check what one GPU and several `decoded`. Returns the several's kernels."""
    (texts, scores, _), (own, same, kernels) = one, several
    agree, apart = [], []
    for a, b, x, y in zip(texts, own, scores, same, strict=True):
        until = next((i for i, (s, t) in enumerate(zip(a, b, strict=True)) if s != t), len(a))
        agree.append(until)
        apart.append(float(np.abs(x[: until + 1] - y[: until + 1]).max()))
    figures[name] = {"tokens alike": agree, "log-probabilities apart": apart}
    print(name, agree, apart, dict(kernels))
    assert max(apart) < 0.1
    return kernels


@pytest.mark.skipif(kernels_here() is not None, reason="no kernels here")
@pytest.mark.parametrize("draft", ["dspark", "dflash2", "eagle3"])
def test_kernels_draft_as_on_one_gpu_with_each_drafter(draft, tmp_path, figures):
    """In bfloat16, at a model's sizes: rows of trees, block drafters' layers and their contexts."""
    config = tiny_config("qwen3", VOCAB, **{"num_hidden_layers": 4} | WIDE)
    block = {"block_size": 6, "mask_token_id": 2, "target_layer_ids": [1, 3]}
    own, more = {
        "dspark": (block | {"markov_rank": 64, "enable_confidence_head": True}, {}),
        "dflash2": (
            block | {"selector_rank": 64, "selector_top_k": 8, "conv_group_size": 16, "conv_kernel_size": 2},
            {},
        ),
        "eagle3": ({"draft_vocab_size": 101, "num_hidden_layers": 1}, several_devices.tree_of(3, 4, 7)),
    }[draft]
    for name, keys in (
        ("target", {}),
        ("drafter", own | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | keys))
    of = str(tmp_path / "target"), f"{draft}:{tmp_path / 'drafter'}"
    kernels = alike(draft, figures, *(decoded(of[0], size, 4, of[1], **more) for size in (1, GPUS)))
    assert kernels["peer_sum"], kernels


@pytest.mark.skipif(kernels_here() is not None, reason="no kernels here")
def test_deterministic_texts_are_the_same_whatever_happens_to_them(tmp_path):
    """Prompts and rounds of any number of rows, more than the sums through peers' memory take among them."""
    own = {"num_hidden_layers": 4, "max_position_embeddings": 1024}
    config = tiny_config("qwen3", 256 * GPUS, **own | WIDE)  # the head's kernel takes multiples of 64 tokens a GPU
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompts = [[(7 * i + j) % VOCAB for j in range(3 + 37 * i)] for i in range(16)]
    settings = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}, {"temperature": 0.8, "seed": 6, "logprobs": 1}]
    params = [SamplingParams(max_tokens=40, ignore_eos=True, **settings[i % 3]) for i in range(16)]
    texts = []
    for chunk, draft in ((512, "ngram"), (2048, "none")):
        llm = LLM(str(tmp_path), draft, tp_size=GPUS, load_format="dummy", dtype="bfloat16", deterministic=True,
                  context_length=1024, chunked_prefill_size=chunk, max_running_requests=16, max_total_tokens=4096,
                  skip_warmup=True)  # fmt: skip
        for number in (16, 1, 5):
            outs = [llm.generate(prompts[at : at + number], params[at : at + number]) for at in range(0, 16, number)]
            outs = [out.completions[0] for some in outs for out in some]
            texts.append([(out.token_ids, [each.logprob for each in out.logprobs or ()]) for out in outs])
    assert all(each == texts[0] for each in texts)
