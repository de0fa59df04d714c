"""Which kernels a device gets, and that `--kernels` is obeyed, told and part of a kept program's key."""

from types import SimpleNamespace

import jax
import pytest

import jaxspec
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.pallas import hopper, portable

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
    with hopper.using(asked):
        for lacks, expected in ((hopper.kernels_here(), hoppers), (portable.kernels_here(), portables)):
            assert lacks is None if expected is None else expected in lacks
        assert hopper.chosen(None) == (hoppers is None) and portable.chosen(None) == (portables is None)
        assert not portable.chosen("its shapes")
        told = portable.told()
    assert told.startswith("hopper" if hoppers is None else "portable" if portables is None else "none")
    assert hopper.asked() == "auto"


def test_a_jax_without_triton_has_no_portable_kernels(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="a card", **A100)])
    monkeypatch.setattr(portable, "triton", lambda: (_ for _ in ()).throw(ImportError()))
    portable.missing.cache_clear()
    assert "has no Triton backend" in portable.kernels_here()
    portable.missing.cache_clear()


def test_other_names_are_refused():
    with pytest.raises(ConfigError, match="--kernels must be one of auto, portable, plain, got 'triton'"):
        EngineConfig(kernels="triton")


def test_programs_of_an_engine_are_traced_for_its_kernels(monkeypatch):
    """In whichever thread, and at any time; and they aren't another's kept ones."""
    asked = []
    real = hopper.kernels_here
    monkeypatch.setattr(hopper, "kernels_here", lambda: (asked.append(hopper.asked()), real())[1])
    model = "smollm2-135m-instruct"
    options = dict(load_format="dummy", max_running_requests=2, context_length=64, disable_structured_output=True)
    llm = jaxspec.LLM(model=model, kernels="portable", skip_warmup=True, **options)
    llm.generate(["a"], jaxspec.SamplingParams(max_tokens=2, temperature=0))
    assert set(asked) == {"portable"}
