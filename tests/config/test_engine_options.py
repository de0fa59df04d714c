"""Engine options: what is refused, by its flag, and other servers' names."""

from __future__ import annotations

import pytest

from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.foreign_flags import ELSEWHERE, METHODS, NEEDLESS, SEVERAL_GPUS, SWITCHES, UNSUPPORTED
from jaxspec.config.options import ConfigError, flag
from jaxspec.drafters.registry import DRAFTERS


@pytest.mark.parametrize("options,words", [
    (dict(dtype="fp8"), ["--dtype", "float32, bfloat16, float16", "'fp8'"]),
    (dict(kv_cache_dtype="int8"), ["--kv-cache-dtype", "auto", "'int8'"]),
    (dict(kv_cache_dtype=None), ["--kv-cache-dtype", "None"]),
    (dict(load_format="pt"), ["--load-format", "auto, dummy"]),
    (dict(draft="ngram", num_draft_tokens=0), ["--num-draft-tokens", "at least 1", "0"]),
    (dict(context_length=1), ["--context-length", "at least 2"]),
    (dict(max_running_requests=0), ["--max-running-requests"]),
    (dict(max_running_requests=2.0), ["--max-running-requests", "integer", "2.0"]),
    (dict(max_total_tokens=-1), ["--max-total-tokens"]),
    (dict(page_size=0), ["--page-size"]),
    (dict(num_continuous_decode_steps=0), ["--num-continuous-decode-steps", "at least 1"]),
    (dict(page_size=True), ["--page-size", "True"]),
    (dict(chunked_prefill_size=0), ["--chunked-prefill-size"]),
    (dict(decode_log_interval=-1), ["--decode-log-interval", "at least 0"]),
    (dict(mem_fraction_static=0), ["--mem-fraction-static", "between 0 and 1"]),
    (dict(mem_fraction_static=1.0), ["--mem-fraction-static"]),
    (dict(mem_fraction_static=float("nan")), ["--mem-fraction-static", "nan"]),
    (dict(mem_fraction_static="0.5"), ["--mem-fraction-static", "'0.5'"]),
    (dict(num_draft_tokens=3), ["--num-draft-tokens 3", "--draft is none", "--draft ngram"]),
    (dict(num_steps=3), ["--num-steps 3", "--draft is none"]),
    (dict(topk=2), ["--topk 2", "--draft is none"]),
    (dict(draft="eagle", num_steps=0), ["--num-steps", "at least 1", "0"]),
    (dict(draft="eagle", topk=0), ["--topk", "at least 1", "0"]),
    (dict(draft="eagle", topk=None), ["--topk", "integer", "None"]),
    (dict(batch_sizes="1,x"), ["--batch-sizes must be integers of at least 1 with commas between", "'1,x'"]),
    (dict(prefill_sizes="0"), ["--prefill-sizes must be integers", "'0'"]),
    (dict(batch_sizes="1,2", few_programs=True), ["--batch-sizes lists sizes and --few-programs compiles one"]),
    (dict(draft="eagle", num_steps=3, num_draft_tokens=4), ["--num-steps 3", "--num-draft-tokens 4", "--topk"]),
])  # fmt: skip
def test_an_engine_option_is_refused_by_its_flag(options, words):
    with pytest.raises(ConfigError) as error:
        EngineConfig(**options)
    for word in words:
        assert word in str(error.value)


def test_another_servers_option_has_one_answer():
    tables = ELSEWHERE, SEVERAL_GPUS, NEEDLESS, UNSUPPORTED
    assert sum(map(len, tables)) == len(set().union(*tables)) and set().union(*tables) > SWITCHES


def test_engine_options_at_their_limits():
    EngineConfig()
    EngineConfig(draft="ngram", num_draft_tokens=1, context_length=2, max_running_requests=1, page_size=1)
    EngineConfig(dtype="bfloat16", kv_cache_dtype="float16", load_format="dummy", decode_log_interval=0)
    EngineConfig(mem_fraction_static=0.01)


def test_of_a_chain_steps_and_drafts_are_one_number():
    for given in (dict(num_steps=5), dict(num_draft_tokens=5), dict(num_steps=5, num_draft_tokens=5)):
        assert EngineConfig(draft="ngram", **given).num_draft_tokens == 5
    tree = EngineConfig(draft="eagle", topk=2, num_steps=5)
    assert (tree.num_steps, tree.num_draft_tokens) == (5, None)
    assert EngineConfig(draft="eagle", topk=2, num_steps=5, num_draft_tokens=7).num_draft_tokens == 7


def test_an_unknown_option_gets_the_nearest_name():
    assert EngineConfig.from_options(page_size=32) == EngineConfig(page_size=32)
    with pytest.raises(ConfigError, match="'pagesize'; did you mean page_size"):
        EngineConfig.from_options(pagesize=32)
    with pytest.raises(ConfigError, match="'zzz'; options: model, draft"):
        EngineConfig.from_options(zzz=1)
    with pytest.raises(ConfigError, match="'gpu_memory_utilization'; here it is mem_fraction_static"):
        EngineConfig.from_options(gpu_memory_utilization=0.9)
    with pytest.raises(ConfigError, match="'tensor_parallel_size'; here it is tp_size"):
        EngineConfig.from_options(tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="'generation_config'; options: "):
        EngineConfig.from_options(generation_config="auto")  # the server knows what is meant
    known = {*(fields := EngineConfig.__dataclass_fields__), "sampling_defaults", "dist_init_addr"}
    known |= {"allowed_media_path", "limit_images_per_prompt", "enable_rollout_routes", "api_key"}
    assert set(ELSEWHERE.values()) <= known
    assert not set(fields) & {*ELSEWHERE, *SEVERAL_GPUS}


def test_flag_spelling():
    assert flag("max_running_requests") == "--max-running-requests"


@pytest.mark.parametrize("option,value", [
    ("model", ""),
    ("model", 5),
    ("draft", None),
    ("seed", "x"),
    ("seed", -1),
    ("disable_overlap", "yes"),
    ("few_programs", 1),
    ("decode_log_interval", None),
    ("topk", None),
])  # fmt: skip
def test_an_engine_option_of_the_wrong_kind_is_named(option, value):
    with pytest.raises(ConfigError, match="--" + option.replace("_", "-")):
        EngineConfig(**{option: value})


@pytest.mark.parametrize("option,given,taken", [
    ("dtype", "auto", None),
    ("dtype", "half", "float16"),
    ("dtype", "float", "float32"),
    ("kv_cache_dtype", "fp8", "float8_e4m3fn"),
    ("kv_cache_dtype", "fp8_e4m3", "float8_e4m3fn"),
    ("draft", "EAGLE3", "eagle3"),
    ("draft", "Eagle3:Some/Model", "eagle3:Some/Model"),
    ("draft", "NEXTN", "mtp"),
    ("draft", "NGRAM", "ngram"),
    ("draft", "None", "none"),
    ("draft", "EAGLE3/x", "EAGLE3/x"),
    ("draft", "my.module:Class", "my.module:Class"),
])  # fmt: skip
def test_values_under_other_servers_names_are_taken(option, given, taken):
    assert getattr(EngineConfig(**{option: given}), option) == taken


@pytest.mark.parametrize("option,allowed", [
    ("dtype", "auto, float32, bfloat16, float16, got 'int8'"),
    ("draft_dtype", "auto, float32, bfloat16, float16, got 'int8'"),
    ("quantization", "none, fp8, int4, nvfp4, got 'int8'; a checkpoint that is quantised"),
    ("kv_cache_dtype", "auto, float32, bfloat16, float16, float8_e4m3fn, got 'int8'"),
])  # fmt: skip
def test_all_that_is_allowed_is_told(option, allowed):
    with pytest.raises(ConfigError, match=f"^{flag(option)} must be one of {allowed}"):
        EngineConfig(draft="ngram", **{option: "int8"})


def test_methods_that_are_taken_are_those_there_are():
    assert set(METHODS.values()) == set(DRAFTERS)
