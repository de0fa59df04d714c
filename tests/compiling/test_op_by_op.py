"""Programs run operation by operation: a drafter's Python sees arrays, and the text is that of compiled programs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.compiling.op_by_op import OpByOp
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.options import ConfigError
from jaxspec.pallas import portable
from tests.support import engines
from tests.support.engines import OPTIONS, checkpoint, engine

PROMPTS = [[5, 6, 7], [9]]
seen = []


@dataclasses.dataclass(frozen=True)
class Watched(engines.CountUp):
    """Reads lengths as numbers, which takes arrays, and makes a NaN if all texts have one token."""

    def propose(self, params, state, batch):
        seen.append(int(batch.length.max()))
        with jax.debug_nans(True):
            jnp.float32(0) / (seen[-1] - 1)
        return super().propose(params, state, batch)


def llm():
    return LLM(checkpoint(), f"{__name__}:Watched", disable_jit=True, num_draft_tokens=3, **OPTIONS)


def test_a_drafter_sees_arrays_and_the_line_of_its_nan():
    runner = llm().engine.runner
    *_, packed = runner.programs._arguments("draft_greedy", 1, runner.state)
    with pytest.raises(FloatingPointError, match=r"nan.* encountered in div"):
        runner.programs.draft(runner.state, packed, "greedy")
    assert seen == [1] and runner.programs.ready == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_that_of_compiled_programs(temperature):
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=6, ignore_eos=True)
    outs, compiled = llm().generate(PROMPTS, params), engine("none").generate(PROMPTS, params)
    assert [out.token_ids for out in outs] == [out.token_ids for out in compiled]


def test_options_that_need_programs(monkeypatch):
    assert EngineConfig(disable_jit=True).skip_warmup
    with pytest.raises(ConfigError, match="--disable-jit runs on one device, got --tp-size 2"):
        EngineConfig(disable_jit=True, tp_size=2)
    monkeypatch.setattr(portable, "kernels_here", lambda: None)
    with pytest.raises(ConfigError, match="--disable-jit runs no kernels, got --kernels auto"):
        OpByOp(*engine("none").engine.runner.programs.made_of())
