"""Whole programs as a Hopper GPU gets them, lowered for one here: sizes that nobody rounded."""

from __future__ import annotations

import functools
import json

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxspec.config.engine_config import EngineConfig
from jaxspec.engine import defaults, runner
from jaxspec.pallas import hopper
from jaxspec.pallas.hopper import counting
from tests.support.tiny import tiny_config

WIDE = dict(hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=4, head_dim=128)
WIDE |= dict(moe_intermediate_size=128, shared_expert_intermediate_size=128)  # of families that have them
WIDE |= dict(linear_key_head_dim=128, linear_value_head_dim=128, mamba_head_dim=64, ssm_state_size=128)
WIDE |= dict(kv_lora_rank=512, qk_rope_head_dim=64, linear_head_dim=128, indexer_head_dim=128)
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
FEW, DRAFTED = ("none", 27), ("ngram", 45)  # what drafts, and how many requests: 27 rows of a round, or 45 x 4


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """Make runners with random weights of a family, with a GPU's defaults and kernels."""
    monkeypatch.setattr(defaults, "here", lambda: defaults.GPU)
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)

    def of(family: str, draft: str, requests: int, width: int = WIDE["hidden_size"], **options) -> runner.Runner:
        (tmp_path / "config.json").write_text(json.dumps(tiny_config(family, **WIDE | {"hidden_size": width})))
        sizes = dict(max_running_requests=requests, max_total_tokens=2048, num_continuous_decode_steps=1)
        given = dict(load_format="dummy", dtype="bfloat16", skip_warmup=True)
        return runner.Runner(EngineConfig(model=str(tmp_path), draft=draft, **given, **sizes, **options))

    return of


def kernels_of(made: runner.Runner, kind: str, size: int) -> set[str]:
    """Kernels of a program, lowered for CUDA."""
    programs = made.programs
    arguments = *programs._arguments(kind, size, made.state), *programs._handed(kind, size, made.state)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")  # Triton's kernels ask for it
    with counting() as chosen, jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        made.programs._jits[kind].trace(*arguments).lower(lowering_platforms=("cuda",))
    return set(chosen)


rarely = functools.partial(pytest.param, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("family,drafts,expected", [
    rarely("qwen3", FEW, {"weight_stream", "write_heads", "decode_attention"}),
    rarely("qwen3", DRAFTED, {"tile_matmul", "write_heads", "decode_attention"}),
    rarely("qwen3_moe", FEW, {"top_experts", "expert_plan", "expert_stream", "write_heads", "decode_attention"}),
    rarely("qwen3_moe", DRAFTED, {"top_experts", "expert_stream", "tile_matmul", "write_heads", "decode_attention"}),
    rarely("qwen3_next", FEW, {
        "delta_step", "conv_step", "top_experts", "expert_plan", "expert_stream", "decode_attention",
    }),
    ("qwen3_next", DRAFTED, {"delta_step", "conv_step", "top_experts", "expert_stream", "decode_attention"}),
    rarely("nemotron_h", DRAFTED, {"portable_delta_step", "decode_attention"}),
    rarely("deepseek_v3", DRAFTED, {"latent_decode"}),
    rarely("kimi_linear", DRAFTED, {"portable_delta_step", "conv_step", "latent_decode"}),
    rarely("kimi_linear", ("none", 8), {"delta_step", "conv_step", "latent_decode"}),
    rarely("qwen4_exp", DRAFTED, {"delta_step", "conv_step", "top_experts", "expert_stream"}),
    rarely("mistral", FEW, {"weight_stream", "write_heads", "decode_attention"}),  # each layer sees a window
    rarely("gemma3", DRAFTED, {"tile_matmul", "decode_attention"}),
])  # fmt: skip
def test_rounds_of_odd_sizes(programs, family, drafts, expected):
    assert expected <= kernels_of(programs(family, *drafts), "round_greedy", drafts[1])


@pytest.mark.parametrize("requests", [8, rarely(16)])
def test_a_round_of_requests_with_adapters(programs, requests):
    made = programs("qwen3", "none", requests, width=1536, enable_lora=True, max_loras=6, max_lora_rank=16)
    few = {f"few_rows_{name}" for name in ("shrink", "heads", "gated", "add")}
    assert few <= kernels_of(made, "adapted_round_greedy", requests)


@pytest.mark.exhaustive  # whose kernels other rounds' programs have
def test_a_round_without_adapters_has_none(programs):
    made = programs("qwen3", "none", 8, width=1536, enable_lora=True, max_loras=6, max_lora_rank=16)
    assert "few_rows_shrink" not in kernels_of(made, "round_greedy", 8)


@pytest.mark.parametrize("activations,expected", [
    rarely("off", {"fp8_stream", "fp8_rows"}), rarely("on", {"fp8_quantise", "fp8_tiles"}),
])  # fmt: skip
def test_a_round_of_an_fp8_model(programs, activations, expected):
    made = programs("qwen3", "none", 90, quantization="fp8", fp8_activations=activations)
    assert expected | {"write_heads", "decode_attention"} <= kernels_of(made, "round_greedy", 90)


@pytest.mark.exhaustive  # another process lowers one for a GPU in test_lowering.py
@pytest.mark.parametrize("kind,size", [
    ("forward", 45), ("conclude_logprobs", 45), ("draft_sampled", 45), ("masked_first", 1), ("conclude_greedy", 45),
])  # fmt: skip
def test_programs_of_structured_output(programs, kind, size):
    expected = {"tile_matmul", "write_heads", "decode_attention"} if kind == "forward" else set()
    assert expected <= kernels_of(programs("qwen3", *DRAFTED), kind, size)


def test_a_prompts_last_layer_goes_on_with_an_odd_number_of_rows(programs):
    made = programs("qwen3", "none", 8, chunked_prefill_size=64 * 133)
    assert {"tile_matmul", "prompt_attention", "write_heads"} <= kernels_of(made, "prefill", 133)
