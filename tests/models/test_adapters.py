"""Adapters against PEFT (tests/golden/adapters): logits of each, beside rows without one."""

from pathlib import Path

import numpy as np
import pytest

import jaxspec
from jaxspec import EngineConfig
from jaxspec.engine.adapters import Adapters, with_adapters
from tests.support.lora import logits
from tests.support.sample import rare

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
MODELS = {
    "llama": "checkpoints/llama-untied",
    "qwen3": "checkpoints/qwen3-untied",
    "gemma3": "checkpoints/gemma3-tied",
    "qwen3_next": "hybrid/qwen3_next",
}
CLOSE = dict(rtol=0, atol=5e-4)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_next", *(rare(name) for name in ("llama", "gemma3"))])
def test_logits_are_peft_s_and_rows_without_an_adapter_keep_theirs(name):
    """Ranks and scales by pattern, and rslora's, are in "qwen3"; "qwen3_next" has linear attention's projections, which
    are fused by head."""
    expected = np.load(GOLDEN / "adapters" / f"{name}.npz")
    model = jaxspec.load_model(str(GOLDEN / MODELS[name]), dtype="float32", progress=False)
    config = EngineConfig(lora_modules={"own": str(GOLDEN / "adapters" / name)}, max_loras=3)
    adapters = Adapters(config, model, 4)
    for slot, adapter in enumerate(("first", "second")):  # so that its own place isn't the first
        adapters.places.hold(adapter, slot)
    adapters.places.due.clear()
    adapters.places.hold(adapters.find("own"), 2)
    assert adapters.written() and adapters.places.of_slot.tolist() == [0, 1, 2, -1, -1]
    tokens = np.stack([expected["ids"]] * 2)
    params = with_adapters(model.params, adapters)
    own, without = np.asarray(logits(model.config, params, tokens, np.array([2, -1], np.int32)))
    np.testing.assert_allclose(own, expected["logits"], **CLOSE)
    np.testing.assert_allclose(without, expected["plain"], **CLOSE)
