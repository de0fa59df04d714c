"""`bench plan` says what the engine's own plan says, without weights, and divides sizes as tensor parallelism does."""

import dataclasses
import json

import jax
import pytest

from jaxspec.bench import plan
from jaxspec.bench.__main__ import main
from jaxspec.bench.floors import ModelCost
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.options import ConfigError
from jaxspec.engine.defaults import CPU, GPU
from jaxspec.engine.runner import Runner
from scripts.configs import (
    DOMINO_8B,
    EAGLE3_8B,
    GEMMA4_26B,
    LILICORR_8B,
    LLAMA_70B,
    QWEN3_8B,
    QWEN3_30B,
    QWEN3_235B,
    QWEN3_NEXT,
    QWEN35_35B,
    QWEN35_397B,
    QWEN38_27B,
)
from tests.support.picture_prompts import GOLDEN
from tests.support.sample import some
from tests.support.tiny import tiny_checkpoint, tiny_config

H200 = plan.GPUS["h200"].memory, int(plan.POOL * plan.GPUS["h200"].memory)
# ms a round at 1, 8, 32 and 128 requests of 1,152 tokens, as measured: docs/measurements, several-gpus.md among them. A
# draft is the config of an EAGLE-3 drafter, or "mtp". Rows before quantised rows were the default are left out.
MEASURED = {
    "8B bf16": (QWEN3_8B, 1, None, None, (4.16, 4.41, 5.73, 10.3)),
    "8B bf16, EAGLE-3": (QWEN3_8B, 1, None, EAGLE3_8B, (4.85, 5.76, 7.86, 21.1)),
    "8B FP8": (QWEN3_8B, 1, "fp8", None, (2.86, 3.01, 4.71, 8.91)),
    "8B FP8, EAGLE-3": (QWEN3_8B, 1, "fp8", EAGLE3_8B, (3.31, 4.49, 6.02, 15.5)),
    "30B FP8": (QWEN3_30B, 1, "fp8", None, (2.27, 5.25, 9.72, 14.1)),
    "35B FP8": (QWEN35_35B, 1, "fp8", None, (2.28, 4.58, 9.64, 16.9)),
    "35B FP8, MTP": (QWEN35_35B, 1, "fp8", "mtp", (3.84, 9.23, 14.2, 25.3)),
    "35B bf16, MTP": (QWEN35_35B, 1, None, "mtp", (4.94, 14.7, 23.3, 35.7)),
    "27B FP8": (QWEN38_27B, 1, "fp8", None, (8.43, 9.55)),
    "8B bf16 over two": (QWEN3_8B, 2, None, None, (2.86, 3.01, 3.92, 6.56)),
    "8B bf16, EAGLE-3, over two": (QWEN3_8B, 2, None, EAGLE3_8B, (3.45, 3.96, 5.27)),
    "8B FP8 over two": (QWEN3_8B, 2, "fp8", None, (2.27, 2.40, 3.55, 5.90)),
    "35B bf16 over two": (QWEN35_35B, 2, None, None, (2.25, 3.81, 8.62, 13.9)),
    "35B FP8 over two": (QWEN35_35B, 2, "fp8", None, (2.01, 3.49, 6.54)),
    "35B FP8, MTP, over two": (QWEN35_35B, 2, "fp8", "mtp", (3.76, 7.37, 9.73)),
    "80B FP8 over two": (QWEN3_NEXT, 2, "fp8", None, (2.67, 4.51, 9.87)),
    "80B bf16 over two": (QWEN3_NEXT, 2, None, None, (2.72, 5.32, 13.2, 23.9)),
    "70B bf16 over two": (LLAMA_70B, 2, None, None, (17.9, 19.0)),
    "70B FP8 over two": (LLAMA_70B, 2, "fp8", None, (11.3, 11.4, 15.7)),
    "8B bf16 over four": (QWEN3_8B, 4, None, None, (2.15, 2.10, 3.40, 5.91)),
    "70B bf16 over four": (LLAMA_70B, 4, None, None, (10.7, 11.5, 14.0, 21.8)),
    "70B FP8 over four": (LLAMA_70B, 4, "fp8", None, (7.36, 7.51, 11.4, 14.2)),
    "80B bf16 over four": (QWEN3_NEXT, 4, None, None, (2.96, 4.40, 8.93, 15.9)),
    "80B bf16, MTP, over four": (QWEN3_NEXT, 4, None, "mtp", (3.96, 8.77, 14.4, 20.9)),
    "80B FP8 over four": (QWEN3_NEXT, 4, "fp8", None, (2.96, 3.75, 7.28, 13.8)),
    "397B FP8 over four": (QWEN35_397B, 4, "fp8", None, (5.00, 8.70, 20.5, 39.9)),
    "397B FP8, MTP, over four": (QWEN35_397B, 4, "fp8", "mtp", (7.47, 20.8, 39.3, 55.0)),
}


def folder(tmp_path, hf, name="model"):
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(hf))
    return str(tmp_path / name)


def of(model, tp=1, **options):
    options = {"context_length": 8192, "load_format": "dummy", "dtype": "bfloat16"} | options
    return plan.planned(EngineConfig(model=model, **options), tp, GPU, H200)


@pytest.mark.parametrize("family,options", [
    ("llama", {"draft": "ngram"}),
    ("qwen3", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    ("qwen3", {"quantization": "int4"}),
    ("qwen3_moe", {"max_total_tokens": 512}),
    ("qwen3_next", {"draft": "mtp", "load_format": "dummy"}),
    ("qwen4_exp", {"draft": "mtp", "load_format": "dummy"}),  # a module that reads several streams
    ("gemma3", {"context_length": 64, "max_running_requests": 3}),
    ("gemma4", {"draft": "ngram"}),
    ("gpt_oss", {"draft": "suffix"}),
    ("pictures", {"draft": "mtp"}),  # a tower's weights and workspace, and rows for embeddings
    ("llama", {"enable_lora": True, "max_loras": 5, "max_lora_rank": 8}),
])  # fmt: skip
def test_it_is_the_engines_plan(family, options):
    options = {"context_length": 128, "max_total_tokens": 4096, "skip_warmup": True} | options
    model = GOLDEN / "qwen3_5" if family == "pictures" else tiny_checkpoint(family)
    config = EngineConfig(model=str(model), **options)
    real = Runner(config).plan
    made = plan.planned(dataclasses.replace(config, dtype="float32", load_format="dummy"), 1, CPU, None).plan
    assert made == dataclasses.replace(real, host_bytes=0) and real.weight_bytes > 0


def test_what_a_drafter_borrows_counts_once(tmp_path):
    target = folder(tmp_path, LLAMA_70B)
    eagle = LLAMA_70B | dict(architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1, draft_vocab_size=32000)
    made = of(target, 4, draft=f"eagle3:{folder(tmp_path, eagle, 'draft')}")
    layer = 2 * 8192 * 64 * 128 + 64 * 128 * 8192 + 2 * 2 * 8192 * 8 * 128 + 3 * 8192 * 28672
    fused, head = 3 * 8192 * 8192, 8192 * 32000
    expected = 2 * (layer / 4 + fused + head / 4)
    assert made.plan.draft_weight_bytes == pytest.approx(expected, rel=0.02)
    assert made.width == 4


def test_a_block_drafters_tables_are_whole_on_each_device(tmp_path):
    """DSpark's layers, second copies of keys' and values' columns, and what is added to logits are divided."""
    sizes = dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_key_value_heads=8)
    target = tiny_config("qwen3", 151936, num_attention_heads=32, head_dim=128, **sizes)
    block = dict(num_hidden_layers=2, block_size=5, mask_token_id=9, target_layer_ids=[9, 18], markov_rank=256)
    of_model, draft = folder(tmp_path, target), f"dspark:{folder(tmp_path, target | block, 'draft')}"
    made = of(of_model, 4, draft=draft, context_length=128)
    columns = 4096 * 8 * 128
    layers = 2 * (2 * 4096 * 32 * 128 + 2 * 2 * columns + 3 * 4096 * 12288)
    table = 151936 * 256
    expected = 2 * (layers / 4 + 2 * 4096 * 4096 + table + table / 4)
    assert made.plan.draft_weight_bytes == pytest.approx(expected, rel=0.01)
    (tmp_path / "map.json").write_text(json.dumps(list(range(0, 151936, 8))))
    less = of(of_model, 4, draft=draft, context_length=128, draft_token_map=str(tmp_path / "map.json"))
    known = -(-151936 // 8)  # of which heads are copies, beside the whole one for verification
    ids = 4 * (151936 / 4 + known / 4)
    expected += 2 * (4096 + 256) * known / 4 - 2 * table / 4 + ids
    assert less.plan.draft_weight_bytes == pytest.approx(expected, rel=0.01)


def test_lilicorrs_network_and_dominos_gru_are_whole_on_each_device(tmp_path):
    target = folder(tmp_path, QWEN3_8B)
    columns, block = 4096 * 8 * 128, lambda features: 4096 * 4096 * features
    layers = 5 * (2 * 4096 * 32 * 128 + 2 * 2 * columns + 3 * 4096 * 12288)
    gru = 3 * 1024 * (4096 + 1024) + 256 * (4096 + 1024)
    made = of(target, 4, draft=f"domino:{folder(tmp_path, DOMINO_8B, 'gru')}", context_length=128)
    assert made.plan.draft_weight_bytes == pytest.approx(2 * ((layers + 256 * 151936) / 4 + block(5) + gru), rel=0.005)
    network = 3 * 4096 * 1024 + 2 * 8 * 1024**2 + 4 * 1024**2 + 3 * 128 * 1024
    made = of(target, 4, draft=f"lilicorr:{folder(tmp_path, LILICORR_8B, 'network')}", context_length=128)
    assert made.plan.draft_weight_bytes == pytest.approx(2 * (layers / 4 + block(5) + network), rel=0.005)


def test_adapters_and_the_host_s_tokens_are_counted(tmp_path):
    """The host's memory is for all GPUs together, and copies on their way take 2% of each."""
    model = folder(tmp_path, LLAMA_70B)
    base, made = of(model, 4), of(model, 4, enable_lora=True, max_lora_rank=16, host_kv_gb=320, max_loras=1)
    layer = sum(2 * 16 * n for n in (8192 + 8192 // 4,) * 2)  # out and down take whole rows of their share's inputs
    assert made.plan.weight_bytes > base.plan.weight_bytes + 80 * layer
    assert made.plan.workspace_bytes - base.plan.workspace_bytes == int(H200[0] * 0.02)
    row = plan._row(made, plan.GPUS["h200"], 4, 2, 1024, "psum")
    assert row["host_tokens"] == pytest.approx(2**20, rel=1e-3), "of 320 KiB"
    with pytest.raises(ConfigError, match="--max-lora-rank"):
        of(model, 4, lora_modules={"a": "b"})


@pytest.mark.parametrize("hf,numbers", [(LLAMA_70B, 70.55e9), (QWEN3_235B, 235.1e9)])
def test_shares_add_up_to_the_model(tmp_path, hf, numbers):
    model = folder(tmp_path, hf)
    eight = of(model, 8).plan
    repeated = 8 - hf["num_key_value_heads"]
    repeated *= 2 * hf["hidden_size"] * hf["head_dim"] * hf["num_hidden_layers"]
    routers = 7 * hf["hidden_size"] * hf.get("num_experts", 0) * hf["num_hidden_layers"]
    assert eight.weight_bytes * 8 == pytest.approx(2 * (numbers + repeated + routers), rel=0.002)
    heads = max(1, hf["num_key_value_heads"] // 8)
    assert eight.kv_bytes // (eight.tokens + 64) == hf["num_hidden_layers"] * 2 * heads * 128 * 2


def test_a_share_of_gemma4_has_both_kinds_of_heads(tmp_path):
    layers = of(folder(tmp_path, GEMMA4_26B), 4).model.config.decoder.layers
    assert [(layer.mixing.kv_heads, layer.mixing.head_dim) for layer in layers[4:6]] == [(2, 256), (1, 512)]
    assert (layers[0].feed.beside.width, layers[0].feed.width, layers[0].feed.experts) == (528, 176, 128)
    hf = GEMMA4_26B | {"per_layer_config": {"5": {"head_dim": 512, "num_key_value_heads": 2}}}
    assert plan.share(hf, 4)["per_layer_config"] == {"5": {"head_dim": 512, "num_key_value_heads": 1}}
    with pytest.raises(ConfigError, match="num_global_key_value_heads 3 can't be divided"):
        plan.share(hf | {"num_global_key_value_heads": 3}, 4)


def test_a_share_of_a_hybrid_has_some_of_its_states(tmp_path):
    """Granite's one group of state-space heads is on each GPU, of heads and experts a half."""
    model = folder(tmp_path, tiny_config("granitemoehybrid"))
    one, two = (of(model, tp, context_length=128, max_total_tokens=4096) for tp in (1, 2))
    states, own = (made.model.config.decoder.layers[0].mixing for made in (one, two))
    assert (states.heads, own.heads, own.groups) == (8, 4, 1)
    assert 0.5 < two.plan.states.total / one.plan.states.total < 0.6 and two.plan.states.total > 0
    assert 0.5 < two.plan.weight_bytes / one.plan.weight_bytes < 0.52


def test_what_does_not_fit_says_why(tmp_path):
    with pytest.raises(ConfigError, match=r"no memory is left for the KV cache: 140\.40 GiB on the device"):
        of(folder(tmp_path, LLAMA_70B))


@pytest.mark.parametrize("change,n,says", [
    ({"num_attention_heads": 6}, 4, "6 query heads can't be divided among 4"),
    ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "3 KV heads can't be divided"),
    ({"intermediate_size": 63}, 2, "63 columns of an MLP"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, 2, "blocks of 128 share"),
])  # fmt: skip
def test_what_cannot_be_divided_is_named(tmp_path, change, n, says):
    with pytest.raises(ConfigError, match=says):
        of(folder(tmp_path, tiny_config() | change), n, context_length=128)


@pytest.mark.parametrize("change,n,says", [
    ({"num_attention_heads": 6}, 4, "num_attention_heads 6 isn't a multiple of 4"),
    ({"num_key_value_heads": 3}, 2, "num_key_value_heads 3 can't be divided"),
])  # fmt: skip
def test_a_drafter_that_cannot_be_divided_is_named(change, n, says):
    with pytest.raises(ConfigError, match=says):
        plan.share(tiny_config() | change, n)


def test_experts_whose_columns_share_scales_are_divided_themselves(tmp_path):
    model, sizes = folder(tmp_path, QWEN3_235B), lambda made: made.model.config.decoder.mixture
    made = sizes(of(model, 8, quantization="fp8"))
    assert (made.width, made.experts, made.per_token) == (384, 64, 4)
    assert sizes(of(model, 8)).width == 192


def test_requests_divided_among_gpus_take_a_part_of_the_memory_each(tmp_path):
    """At the price of attention weights, of which each GPU has all. The model's own module goes along."""
    sizes = dict(num_attention_heads=8, num_key_value_heads=8, num_nextn_predict_layers=1)
    model, more = folder(tmp_path, tiny_config("deepseek_v3", **sizes)), {"context_length": 256, "draft": "mtp"}
    heads, requests = (of(model, 4, dp_attention=each, **more) for each in (False, True))
    tokens, page = heads.plan.tokens, heads.plan.page_size
    assert (requests.plan.tokens, requests.plan.by_request) == (tokens, 4)
    assert requests.plan.kv_bytes / (tokens + 4 * page) == heads.plan.kv_bytes / (tokens + page) / 4
    assert requests.plan.num_pages == heads.plan.num_pages + 3, "each has a dummy page"
    assert requests.plan.weight_bytes > heads.plan.weight_bytes
    costs = [ModelCost.of(made.model, "bfloat16") for made in (heads, requests)]
    cached = [cost.round(8, 1, 100)[0] - cost.round(8, 1, 50)[0] for cost in costs]
    assert cached[0] == 4 * cached[1] > 0
    with pytest.raises(ConfigError, match="this model has none: its KV heads"):
        of(folder(tmp_path, tiny_config(), "plain"), 2, dp_attention=True, context_length=256)


def test_a_share_of_a_multimodal_drafter_is_of_its_text():
    inner = tiny_config("qwen3_moe")
    made = plan.share({"model_type": "qwen3_vl_moe", "text_config": inner}, 2)["text_config"]
    assert (made["num_attention_heads"], made["moe_intermediate_size"], made["vocab_size"]) == (2, 12, 32)
    assert made["head_dim"] == inner["head_dim"]


@pytest.mark.parametrize("sums", ["psum", "one-shot"])
def test_sums_cost_more_with_size_and_devices(sums):
    assert plan.sum_seconds(2**14, 1, sums) == 0
    times = [plan.sum_seconds(size, 8, sums) for size in (2**12, 2**20, 2**23)]
    assert times == sorted(times) and times[0] > plan.sum_seconds(2**12, 2, sums)


@pytest.mark.parametrize("name", some([("8B FP8 over two",)], MEASURED))
def test_measured_rounds_take_what_is_predicted(tmp_path, name):
    """Within a quarter, on H200s."""
    hf, tp, quantization, draft, measured = MEASURED[name]
    options = {"context_length": 2048, "quantization": quantization}
    if draft is not None:
        eagle3 = draft if draft == "mtp" else f"eagle3:{folder(tmp_path, draft, 'draft')}"
        options |= {"draft": eagle3, "num_draft_tokens": 3, "draft_quantization": quantization if tp == 1 else None}
    config = EngineConfig(model=folder(tmp_path, hf), load_format="dummy", **options)
    made = plan.planned(config, tp, GPU, (2 * H200[0], 2 * H200[1]))
    predicted = [1e3 * made.round_seconds(n, 1152, plan.GPUS["h200"], tp, "one-shot") for n in plan.CONCURRENCY]
    for ms, estimate in zip(measured, predicted, strict=False):
        assert 0.75 < estimate / ms < 1.25, (predicted, measured)


def test_the_table_names_the_best_size(tmp_path, capsys):
    model = folder(tmp_path, LLAMA_70B)
    out = tmp_path / "plan.json"
    assert main(["plan", "--model", model, "--gpus", "4", "--max-model-len", "8192", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "TP 1 doesn't do: no memory is left" in printed and "Best for latency: TP 4" in printed
    rows = json.loads(out.read_text())["rows"]
    assert [(row["tp"], row["replicas"]) for row in rows] == [(2, 2), (4, 1)]
    floor = rows[0]["plan"]["weight_bytes"] / plan.GPUS["h200"].bandwidth * 1e3
    assert floor < rows[0]["ms"][0] < 1.3 * floor
    assert jax.tree.leaves(rows[0]["ms"]) == sorted(rows[0]["ms"])
    with pytest.raises(SystemExit):
        main(["plan", "--model", model, "--gpus", "4", "--max-model-len", "8192", "--context", "8193"])
    assert "--context 8193: a request has at most 8192 tokens" in capsys.readouterr().err


def test_a_27b_in_four_bits_fits_24_gb_with_its_mtp_and_32k_tokens(tmp_path):
    memory = 24 * 2**30
    options = {"quantization": "int4", "draft": "mtp", "draft_quantization": "int4", "max_running_requests": 1}
    options |= {"context_length": 32768, "max_state_snapshots": 1, "load_format": "dummy", "dtype": "bfloat16"}
    model = folder(tmp_path, QWEN38_27B)
    made = plan.planned(EngineConfig(model=model, **options), 1, GPU, (memory, int(plan.POOL * memory))).plan
    assert made.tokens >= 32768 and made.weight_bytes < 18 * 2**30
