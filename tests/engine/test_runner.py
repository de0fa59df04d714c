"""Options left to the machine, as they are resolved on a CPU and on a GPU."""

import jax
import pytest

from jaxspec import load_drafter, load_model
from jaxspec.checkpoint import CheckpointError, load_target
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.options import ConfigError
from jaxspec.engine import defaults, runner
from tests.support.tiny import tiny_checkpoint


@pytest.fixture
def resolve(monkeypatch):
    """The resolved config and the shapes of an engine for a tiny model, as if on that backend."""
    model = load_model(str(tiny_checkpoint()), progress=False)
    draft = load_drafter("ngram", model)

    def on(backend, **options):
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        config = defaults.resolve(EngineConfig(draft="ngram", **options), model, draft)
        return config, defaults.shapes_of(config, draft.drafter)

    return on


def test_on_a_cpu_few_programs_are_compiled(resolve):
    config, shapes = resolve("cpu")
    assert (config.page_size, config.chunked_prefill_size, config.num_continuous_decode_steps) == (16, 256, 1)
    assert (shapes.block, shapes.score, shapes.prefills) == (32, 4, (1, 2, 4, 8))
    assert (shapes.firsts, shapes.batches, shapes.rounds) == ((1, 4), (1, 2, 4), 1)


def test_a_longer_context_is_served_with_a_warning_where_it_is_allowed(resolve, caplog):
    with pytest.raises(ConfigError, match=r"exceeds the 1024 .* give 1024 or less, or add --allow-longer-context"):
        resolve("cpu", context_length=9999)
    config, shapes = resolve("cpu", context_length=9999, allow_longer_context=True)
    assert config.context_length == shapes.capacity == 9999
    assert "--context-length 9999 exceeds the 1024 positions that" in caplog.text and "nonsense" in caplog.text
    caplog.clear()
    assert resolve("cpu", allow_longer_context=True)[0].context_length == 1024 and not caplog.text
    options = EngineConfig(model=str(tiny_checkpoint()), context_length=9999, allow_longer_context=True)
    assert load_target(options).config.max_position == 1024


def test_on_a_gpu_programs_are_for_many_rows(resolve):
    config, shapes = resolve("gpu")
    assert (config.page_size, config.chunked_prefill_size, config.max_running_requests) == (64, 2048, 128)
    assert (shapes.block, shapes.score, shapes.prefills) == (64, 2, (1, 2, 4, 8, 16, 32))
    assert (shapes.firsts, shapes.batches) == ((1, 32), (1, 2, 4, 8, 16, 32, 64, 128))


def test_a_mixture_takes_longer_prompts_at_once(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    model = load_model(str(tiny_checkpoint("qwen3_moe")), progress=False)
    of = lambda **options: defaults.resolve(EngineConfig(**options), model, load_drafter("none", model))  # noqa: E731
    assert of().chunked_prefill_size == 8192
    assert of(chunked_prefill_size=1024).chunked_prefill_size == 1024


def test_few_programs_are_for_one_batch(resolve):
    _, shapes = resolve("gpu", few_programs=True)
    assert (shapes.firsts, shapes.batches, shapes.prefills) == ((32,), (128,), (1, 2, 4, 8, 16, 32))


def test_small_models_run_several_rounds_in_a_program(resolve, monkeypatch):
    config, shapes = resolve("gpu", max_running_requests=6)
    assert (config.num_continuous_decode_steps, shapes.rounds) == (8, 8)
    monkeypatch.setattr(defaults, "SMALL_MODEL", 1)
    assert resolve("gpu")[1].rounds == 1
    assert resolve("gpu", num_continuous_decode_steps=3)[1].rounds == 3


def test_a_mixture_with_linear_attention_runs_two_rounds_for_one_request(monkeypatch):
    """Its program has hundreds of arrays, and a round of one request reads little."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(defaults, "SMALL_MODEL", 1)

    def of(family, **options):
        options, model = EngineConfig(draft="none", **options), load_model(str(tiny_checkpoint(family)), progress=False)
        config, few = defaults.resolve(options, model, load_drafter("none", model)), defaults.rounds_for(options, model)
        shapes = defaults.shapes_of(config, load_drafter("none", model).drafter, rounds_for=few)
        return shapes.rounds, shapes.several(shapes.batches)

    assert of("qwen3_5_moe") == (2, (1,))
    assert of("qwen3_5") == of("qwen3_moe") == of("qwen3_5_moe", num_continuous_decode_steps=1) == (1, ())
    assert of("qwen3_5_moe", num_continuous_decode_steps=2, max_running_requests=8) == (2, (1, 8))
    assert of("qwen3_5_moe", few_programs=True) == (1, ())
    assert of("qwen3_5_moe", few_programs=True, max_running_requests=1) == (2, (1,))


@pytest.mark.parametrize("given,used", [(1, 64), (64, 64), (65, 128), (1000, 1024)])
def test_chunks_are_whole_blocks(resolve, given, used):
    config, shapes = resolve("gpu", chunked_prefill_size=given)
    assert config.chunked_prefill_size == shapes.prefills[-1] * shapes.block == used
    assert 1 <= shapes.score <= 2


@pytest.mark.parametrize("draft", ["nonsense", "standalone", "eagle3:/nowhere", "no.module:Class", "ngram:x/y", "/"])
def test_a_drafter_is_checked_before_its_target_loads(monkeypatch, draft):
    """Which may take minutes."""

    def load(*_, **__):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(runner, "load_target", load)
    with pytest.raises((ConfigError, CheckpointError)):
        runner.Runner(EngineConfig(model="some/model", draft=draft))
