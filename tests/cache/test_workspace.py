"""The planned workspace is never below what XLA reports of programs, and not far above."""

import dataclasses
import json
from functools import partial

import jax
import pytest

from jaxspec.bench import plan
from jaxspec.cache.workspace import Demand, workspace_estimate
from jaxspec.checkpoint.params import dummy
from jaxspec.config.engine_config import EngineConfig
from jaxspec.decoder import plain
from jaxspec.engine.defaults import GPU, demand_of
from jaxspec.models.declaring import layer_tensors
from jaxspec.models.description import Mixture
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import Fp8, Int4, Weight
from scripts import configs
from tests.support.sample import some
from tests.support.tiny import tiny_config

MIB = 2**20
MEMORY = (2**40, 2**40)
FP8 = {"quantization": "fp8"}
TREES = {"topk": 4, "num_steps": 5, "num_draft_tokens": 8}
# MiB that XLA reports of programs cut to a few layers (docs/measurements/memory.md): a model, its draft and options;
# an H200's largest program of rounds, what it is handed included; a prompt's chunk there, and on a GPU without
# Hopper's kernels. None: not compiled.
XLA = {
    "8B": ("qwen3-8b", None, {}, 538, 81, 176),
    "8B FP8": ("qwen3-8b", None, FP8, 538, 90, 634),
    "8B INT4": ("qwen3-8b", None, {"quantization": "int4"}, 538, None, 614),
    "8B, EAGLE-3": ("qwen3-8b", ("eagle3", "EAGLE3_8B"), {}, 1431, 122, None),
    "8B, DFlash": ("qwen3-8b", ("dflash", "DFLASH_8B"), {}, 6392, 117, None),
    "8B, EAGLE-3, trees": ("qwen3-8b", ("eagle3", "EAGLE3_8B"), TREES, 2886, None, None),
    "8B, ngram": ("qwen3-8b", "ngram", {}, 1651, None, None),
    "8B, ngram of 16": ("qwen3-8b", "ngram", {"num_draft_tokens": 16}, 5435, None, None),
    "30B": ("qwen3-30b-a3b", None, {}, None, 654, 617),
    "35B, MTP": ("qwen3.5-35b-a3b", "mtp", {}, 2548, 767, 1968),
    "35B FP8, MTP": ("qwen3.5-35b-a3b", "mtp", FP8 | {"draft_quantization": "fp8"}, 2548, 677, None),
    "20B MXFP4": ("gpt-oss-20b", None, {}, None, 459, None),
    "Air FP8": ("glm-4.5-air-fp8", None, {}, None, 851, None),
    "Nemotron": ("nemotron-3-nano-30b-a3b", None, {}, None, 1280, None),
    "Kimi Linear": ("kimi-linear-48b-a3b", None, {}, None, 1425, None),
    "Gemma 4 26B": ("gemma-4-26b-a4b", None, {}, None, 962, None),
    "Gemma 4 31B, ngram": ("gemma-4-31b", "ngram", {}, 4131, 300, None),
    "DeepSeek-V3 FP8": ("deepseek-v3", None, {}, None, 2801, None),
}


def planned(tmp_path, name):
    """The plan of a case of `XLA`."""
    of, draft, options, *_ = XLA[name]
    folders = [tmp_path / each for each in ("model", "draft")]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "config.json").write_text(json.dumps(configs.FOLDERS[of]))
    if isinstance(draft, tuple):
        (folders[1] / "config.json").write_text(json.dumps(getattr(configs, draft[1])))
        draft = f"{draft[0]}:{folders[1]}"
    options = {"draft": draft or "none", "context_length": 4096, "dtype": "bfloat16"} | options
    return plan.planned(EngineConfig(model=str(folders[0]), load_format="dummy", **options), 1, GPU, MEMORY)


def estimate(made, demand):
    return workspace_estimate(made.model.config, made.model.params, demand)


@pytest.mark.parametrize("name", some([("8B, DFlash",), ("8B FP8",), ("30B",), ("35B, MTP",), ("Nemotron",)], XLA))
def test_a_plan_holds_what_xla_reports(tmp_path, name):
    made, (*_, rounds, prompt, elsewhere) = planned(tmp_path, name), XLA[name]
    demand = demand_of(made.config, made.shapes, made.draft.drafter, None, MEMORY)
    mib = lambda **changed: estimate(made, dataclasses.replace(demand, **changed)) / MIB  # noqa: E731
    of_rounds, of_prompt = mib(tokens=0), mib(requests=0, scored=0)
    assert made.plan.workspace_bytes == int(max(of_rounds, of_prompt) * MIB)
    assert (prompt or 0) <= of_prompt and (rounds is None or rounds <= of_rounds < 1.31 * rounds)
    assert max(of_rounds, of_prompt) < 1.31 * max(rounds or of_rounds, prompt or 0)
    assert elsewhere is None or elsewhere <= mib(requests=0, scored=0, kernels=False) < 1.31 * elsewhere


@pytest.mark.parametrize("tokens", [128, 512])
@pytest.mark.parametrize("dtype,fp8", [("float32", False), ("bfloat16", True)])
def test_a_workspace_holds_a_prompts_rows_of_all_experts(tokens, dtype, fp8):
    """In plain jnp: at few rows an expert, many of them only fill up others' eights. A CPU converts whole stacks."""
    own = dict(hidden_size=512, num_experts=64, num_experts_per_tok=4, moe_intermediate_size=64)
    config = ModelConfig.from_hf(tiny_config("qwen3_moe", **own))
    layer = next(each for each in config.decoder.layers if isinstance(each.feed, Mixture))
    decoder = dataclasses.replace(config.decoder, layers=(layer,))

    def quantised(weight):
        if not (fp8 and isinstance(weight, Weight) and weight.values.ndim == 3):
            return weight
        values, scales = jax.vmap(Fp8(128).quantise)(weight.values)
        return Weight(values, Fp8(128), weight.layout, scales)

    made = lambda: jax.tree.map(  # noqa: E731
        quantised, dummy(layer_tensors(layer, 512, ""), dtype, 0), is_leaf=lambda leaf: isinstance(leaf, Weight)
    )
    weights = jax.eval_shape(made)
    rows, positions = jax.ShapeDtypeStruct((1, tokens, 512), dtype), jax.ShapeDtypeStruct((1, tokens), "int32")
    compiled = jax.jit(partial(plain.feed, layer)).lower(weights, rows, positions).compile()
    taken = compiled.memory_analysis().temp_size_in_bytes
    itemsize = rows.dtype.itemsize
    demand = Demand(0, 1, 0, tokens, 32, 0, itemsize, 1, kernels=False, whole_stacks=True)
    config = dataclasses.replace(config, decoder=decoder)
    assert 0.5 < taken / workspace_estimate(config, {"layers": [weights]}, demand) < 1


@pytest.mark.parametrize("requests,converted", [(128, False), (129, True)])
def test_a_workspace_holds_a_head_that_xla_converts(requests, converted):
    """XLA reports 302 MiB at 512 rows of an H200, 297 of them the head in bfloat16, and 9 at 64."""
    vocab, width, fmt = 38016, 4096, Int4(128)
    values, scales = jax.ShapeDtypeStruct((vocab, width // 2), "uint8"), jax.ShapeDtypeStruct((32, vocab), "bfloat16")
    config = ModelConfig.from_hf(tiny_config("llama", vocab, hidden_size=width))
    params = {"layers": [{}] * config.num_layers, "head": Weight(values, fmt, scales=scales)}
    demand = Demand(requests, 1, 0, 0, 64, 0, 2, 1, kernels=True, whole_stacks=False)
    assert (workspace_estimate(config, params, demand) > 297 * MIB) == converted
