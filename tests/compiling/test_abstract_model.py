"""Shapes without weights are those of the weights, and a start compiles with them while weights load."""

import dataclasses
import threading
from pathlib import Path

import pytest

from jaxspec import EngineConfig
from jaxspec.checkpoint import CheckpointError, load_target, outlined
from jaxspec.compiling import abstract_model
from jaxspec.compiling.abstract_model import Loading, alike, drafter_of
from jaxspec.compiling.ladder import ladder_of
from jaxspec.compiling.programs import Programs
from jaxspec.drafters.dflash import DFlash
from jaxspec.engine.runner import Runner
from tests.checkpoint.test_quantisation import LAYOUTS, source
from tests.support import engines, hybrids
from tests.support.blocks import write_drafter
from tests.support.engines import OPTIONS, checkpoint
from tests.support.heads import random_eagle3
from tests.support.quantised import write
from tests.support.sample import one_in
from tests.support.tiny import tiny_checkpoint

WARM = {**OPTIONS, "skip_warmup": False, "num_draft_tokens": 3}


uncompiled = pytest.fixture(engines.uncompiled, name="uncompiled")


@pytest.mark.parametrize("family,quantization", one_in(
    2, ["llama", "gemma3", "gpt_oss", "qwen3_moe", "qwen3_next", "qwen3_5_moe"], [None, "fp8"]
))  # fmt: skip
def test_a_models_shapes_are_those_of_its_weights(family, quantization):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128} if quantization else {}
    options = EngineConfig(model=str(tiny_checkpoint(family, **sizes)), quantization=quantization)
    shapes, model = outlined(options), load_target(options)
    assert alike(shapes.params, model.params) and (shapes.config, shapes.dtype) == (model.config, model.dtype)
    assert (shapes.name, shapes.path, shapes.quantization) == (model.name, model.path, model.quantization)
    assert not alike(shapes.params, load_target(dataclasses.replace(options, dtype="bfloat16")).params)


@pytest.mark.parametrize("family,layout,same", [
    ("qwen3_moe", "fp8", True), ("llama", "compressed channels", True), ("llama", "only the MLP", False),
])  # fmt: skip
def test_a_quantised_checkpoints_shapes_are_those_its_config_names(tmp_path, family, layout, same):
    folder, _ = write(source(family), tmp_path, **LAYOUTS[layout])
    options = EngineConfig(model=str(folder), dtype="bfloat16")
    assert alike(outlined(options).params, load_target(options).params) == same


@pytest.mark.parametrize("draft", ["none", "ngram", "eagle3", "dflash", "mtp"])
def test_a_drafters_shapes_are_those_of_its_weights(draft, tmp_path):
    options = EngineConfig(model=str(hybrids.checkpoint("qwen3_next")), draft=draft)
    if draft == "eagle3":
        folder = random_eagle3(Path(checkpoint()), tuple(range(40)), (0, 0, 0))
        options = EngineConfig(model=checkpoint(), draft=f"eagle3:{folder}")
    elif draft == "dflash":
        write_drafter(DFlash, tmp_path, Path(checkpoint()))
        options = EngineConfig(model=checkpoint(), draft=f"dflash:{tmp_path}")
    shapes, model = outlined(options), load_target(options)
    found, loaded = drafter_of(options, shapes), load_drafter(options.draft, model, options)
    assert alike(found.params, loaded.params) and found.drafter == loaded.drafter and found.name == loaded.name
    lent = {id(leaf) for leaf in (shapes.params["embed"],)}
    borrows = draft in ("eagle3", "dflash", "mtp")
    assert any(id(leaf) in lent for leaf in found.params.values()) == borrows, "what is borrowed counts once"


def test_programs_compile_while_weights_load(uncompiled, monkeypatch):
    compiled, load = threading.Event(), abstract_model.load_target

    def wait(options):
        assert compiled.wait(30), "nothing was compiled before weights were there"
        return load(options)

    monkeypatch.setattr(Programs, "_compile_later", lambda *_: None)
    monkeypatch.setattr(abstract_model, "load_target", wait)
    warm_up = Programs.warm_up_in_stages
    monkeypatch.setattr(Programs, "warm_up_in_stages", lambda *given: (warm_up(*given), compiled.set()))
    runner = Runner(EngineConfig(model=checkpoint(), draft="ngram", **WARM), staged_start=True)
    assert runner.model.tokenizer is not None and runner.grammars is not None and len(uncompiled) == 5
    assert runner.programs._params == (runner.model.params, runner.draft.params)


def test_a_start_whose_weights_differ_compiles_again(uncompiled, monkeypatch, caplog):
    """Differ like a checkpoint that is quantised in another way than its config says."""
    other = lambda options: outlined(dataclasses.replace(options, dtype="bfloat16"))  # noqa: E731
    monkeypatch.setattr(abstract_model, "outlined", other)
    runner = Runner(EngineConfig(model=checkpoint(), draft="ngram", **WARM))
    ladder = ladder_of(runner.shapes)
    assert sorted(uncompiled) == sorted(2 * ladder) and "compiled again" in caplog.text
    assert runner.programs._params == (runner.model.params, runner.draft.params)
    assert runner.config.dtype == "float32"


def test_weights_that_do_not_load_end_the_start_at_once(uncompiled, monkeypatch):
    def fail(options):
        raise CheckpointError("model.safetensors is cut off")

    lowered, failed = [], threading.Event()
    monkeypatch.setattr(abstract_model, "load_target", fail)
    told = Loading.when_failed
    monkeypatch.setattr(Loading, "when_failed", lambda *given: (told(*given), failed.set()))
    monkeypatch.setattr(Programs, "_lower", lambda *one: (failed.wait(30) and lowered.append(one)) or (None, None))
    with pytest.raises(CheckpointError, match="cut off"):
        Runner(EngineConfig(model=checkpoint(), draft="ngram", **WARM), staged_start=True)
    assert len(lowered) < 6


@pytest.mark.parametrize("options", [
    {"skip_warmup": True}, {"draft": f"standalone:{checkpoint()}"}, {"draft": "tests.support.engines:CountUp"},
    {"draft": f"ngram+standalone:{checkpoint()}"}, {"deterministic": True},
])  # fmt: skip
def test_other_starts_load_weights_first(options):
    assert Loading.of(EngineConfig(**{"model": checkpoint(), "draft": "ngram"} | WARM | options)) is None
