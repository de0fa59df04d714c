"""A kind of mixing and a weight format that jaxspec has never heard of serve with all that it has.

`running_mean` and `fixed_point` are all there is of them, and `family` is a model with both. It has two shapes of pages
and two of states.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec import LLM, SamplingParams
from jaxspec.checkpoint.params import assemble
from jaxspec.decoder.forward import PATHS
from jaxspec.models.families import MODELS
from jaxspec.models.weights import WHOLE, formats, linear
from jaxspec.scheduling.audit import audit
from tests.proof import family
from tests.proof.fixed_point import FixedPoint
from tests.support import widths
from tests.support.tiny import random_tensors, save_file, tiny_config

ROOT, VOCAB, CAPACITY = Path(__file__).resolve().parents[2], 64, 128
OPTIONS = {
    "dtype": "float32", "page_size": 8, "chunked_prefill_size": 64, "context_length": CAPACITY, "num_draft_tokens": 3,
    "max_running_requests": 2, "max_total_tokens": 208, "max_state_snapshots": 6, "state_snapshot_interval": 32,
    "skip_warmup": True, "few_programs": True, "disable_structured_output": True, "prefill_sizes": "64",
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
_root = tempfile.TemporaryDirectory(prefix="jaxspec-proof-")


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """Know the family here alone: other tests take every family there is."""
    monkeypatch.setitem(MODELS, "proof", family)


@functools.cache
def checkpoint() -> Path:
    folder = Path(tempfile.mkdtemp(dir=_root.name))
    hf = tiny_config(vocab=VOCAB) | {"model_type": "proof", "num_hidden_layers": 4}
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(random_tensors(hf, 0), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@functools.cache
def engine() -> LLM:
    return widths.several(lambda: LLM(str(checkpoint()), "ngram", **OPTIONS))


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [np.tile(rng.integers(0, VOCAB, 5), 20)[:n].tolist() for n in (1, 2, 16, 17, 33, 65, 97)]


def said(llm: LLM) -> list[list[int]]:
    return [out.token_ids for out in llm.generate(prompts(), GREEDY)]


def expected() -> list[list[int]]:
    """Plain decoding by forwards over whole texts: no cache, no drafts."""
    model, texts = engine().engine.runner.model, prompts()
    begun = [len(text) for text in texts]
    for _ in range(GREEDY.max_tokens):
        padded = np.zeros((len(texts), CAPACITY), np.int32)
        for row, text in zip(padded, texts, strict=True):
            row[: len(text)] = text
        logits = np.asarray(jaxspec.logits(model, padded))
        for text, of in zip(texts, logits, strict=True):
            text.append(int(of[len(text) - 1].argmax()))
    return [text[start:] for text, start in zip(texts, begun, strict=True)]


def test_texts_are_plain_decodings_cold_and_from_prefixes_and_snapshots():
    llm = engine()
    assert formats(llm.engine.runner.model.params["layers"]) == (FixedPoint(),)
    cache = llm.engine.runner.state.cache
    assert [pages.shape[2:4] for pages in cache.kv] == [(2, 2), (2, 4)]
    assert [group.delta.state.shape[2:] for group in cache.states] == [(4, 8, 1), (2, 16, 1)]
    first = llm.generate(prompts(), GREEDY)
    assert [out.token_ids for out in first] == expected()
    again = llm.generate(prompts()[::-1], GREEDY)  # the newest first, from what is left of them
    assert [out.token_ids for out in again[::-1]] == [out.token_ids for out in first]
    assert sum(out.metrics.cached_tokens for out in again) >= 64
    assert llm.engine.scheduler.snapshots.owners
    audit(llm.engine.scheduler)
    assert np.mean([out.metrics.accept_length for out in first]) > 1.2, "drafts are accepted"


@pytest.mark.exhaustive  # hybrids' are in test_hybrid.py; what is its own is above
def test_texts_are_the_same_without_overlap_and_however_many_drafts_a_round_has(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(engine().engine, "config", dataclasses.replace(engine().engine.config, disable_overlap=True))
        assert engine().engine.flush_cache() and said(engine()) == expected()
    widths.switch(engine(), monkeypatch)
    assert engine().engine.flush_cache()
    assert said(engine()) == expected()
    assert widths.took_turns(engine())


def test_other_paths_refuse_it():
    (line,) = engine().engine.runner.paths
    assert line["path"] == "plain"
    decoder, layers = engine().engine.runner.model.config.decoder, engine().engine.runner.model.params["layers"]
    lacks = {path.name: path.lacks(decoder, layers) for path in PATHS}
    assert lacks.pop("plain") is None and set(lacks.values()) == {"RunningMean"}


@pytest.mark.exhaustive  # tests/support/several_devices.py divides every family of ours
def test_two_devices_say_the_same():
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", __name__, str(checkpoint())]
    made = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=600)
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout.splitlines()[-1]) == expected()


if __name__ == "__main__":
    assert jax.device_count() == 2
    MODELS["proof"] = family
    print(json.dumps(said(LLM(sys.argv[1], "ngram", tp_size=2, **OPTIONS))))


@dataclasses.dataclass(frozen=True)
class ByOutput(FixedPoint):
    """Bytes with a scale for each output, as compressed-tensors' int8 has them."""

    def dequantise(self, values, scales):
        return values.astype(np.float32) * scales


def test_a_checkpoint_may_hold_a_format_with_scales_by_output():
    param = linear(4, {"q.weight": 6, "k.weight": 2}, split=WHOLE)
    stored = tuple((f"{name}_scale", (rows, 1)) for name, (rows, _) in param.stored_values().items())
    declared = dataclasses.replace(param, format=ByOutput(), scales=stored)
    draw = np.random.default_rng(0)
    found = {name: draw.integers(-9, 9, shape).astype(np.int8) for name, shape in declared.stored_values().items()}
    found |= {name: draw.random(shape, np.float32) for name, shape in stored}
    weight = assemble(declared, found, "float32")
    whole = np.concatenate([found[name] * found[f"{name}_scale"] for name in declared.sources])
    np.testing.assert_array_equal(weight.dequantised(np.float32), whole.T)
