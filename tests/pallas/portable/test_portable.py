"""Which kernels a device gets, and that `--kernels` is obeyed, told and part of a kept program's key."""

from functools import partial
from types import SimpleNamespace

import jax
import pytest

from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.options import ConfigError
from jaxspec.pallas import hopper, portable
from jaxspec.pallas.portable import attention
from tests.support.portable import outputs
from tests.support.sample import rare

CPU = dict(platform="cpu")
A100, H200 = (dict(platform="gpu", compute_capability=each, core_count=108) for each in ("8.0", "9.0"))


@pytest.mark.parametrize("asked,device,hoppers,portables", [
    ("auto", H200, None, "Hopper's kernels serve"),
    ("auto", A100, "8.0, not 9.0", None),
    ("auto", CPU, "CPU", "CPU"),
    ("auto", dict(platform="gpu", compute_capability="7.5"), "7.5, not 9.0", "8.0 and later are supported"),
    ("auto", dict(platform="gpu", compute_capability="gfx942"), "gfx942", "gfx942"),
    ("portable", H200, "--kernels portable", None),
    ("portable", CPU, "--kernels portable", "CPU"),
    ("plain", H200, "--kernels plain", "--kernels plain"),
])  # fmt: skip
def test_a_device_gets_the_kernels_that_it_runs_and_that_were_asked_for(asked, device, hoppers, portables, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="a card", **device)])
    with hopper.use_kernels(asked):
        for lacks, expected in ((hopper.kernels_here(), hoppers), (portable.kernels_here(), portables)):
            assert lacks is None if expected is None else expected in lacks
        kernel_choice = portable.kernel_choice()
    assert kernel_choice.startswith("hopper" if hoppers is None else "portable" if portables is None else "none")
    assert hopper.requested_kernels() == "auto"


def test_a_jax_without_triton_has_no_portable_kernels(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="a card", **A100)])
    monkeypatch.setattr(portable, "triton", lambda: (_ for _ in ()).throw(ImportError()))
    portable.missing.cache_clear()
    assert "has no Triton backend" in portable.kernels_here()
    portable.missing.cache_clear()


def test_other_names_are_refused():
    with pytest.raises(ConfigError, match="--kernels must be one of auto, portable, plain, got 'triton'"):
        EngineConfig(kernels="triton")


@pytest.mark.parametrize("draft", [rare("none"), rare("ngram")])
def test_an_engine_says_with_portable_kernels_what_it_says_without(draft, monkeypatch):
    """Its programs are traced in threads, at any time: they have the kernels that it was asked for."""
    requested = hopper.requested_kernels
    monkeypatch.setattr(portable, "kernels_here", lambda: None if requested() == "portable" else "not requested")
    monkeypatch.setattr(attention, "attention", partial(attention.attention, interpret=True))
    (_, expected), (llm, got) = (outputs("qwen3", draft, kernels=kernels) for kernels in ("plain", "portable"))
    assert [out.token_ids for out in got] == [out.token_ids for out in expected]
    stats = llm.engine.stats()
    assert stats["kernels"]["portable_attention"] >= 3  # a prompt's, a request's first token, a round's
    assert {line["path"] for line in stats["paths"]} == {"portable"}
