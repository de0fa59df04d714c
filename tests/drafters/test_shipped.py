"""The drafters that ship with the demo model: found by name, made for it, small enough.

What the engine makes of them is tests/gpu/test_smollm2.py's; how often they are right, docs/measurements/training.md's.
"""

import pytest

from jaxspec import load_drafter, load_model
from jaxspec.checkpoint import CheckpointError, ModelFolder, demo
from jaxspec.config.engine_config import EngineConfig
from jaxspec.drafters.registry import SHIPPED


@pytest.fixture(scope="module")
def model():
    try:
        demo.fetch()
    except CheckpointError as error:
        pytest.skip(f"the demo model can't be fetched: {error}")
    return load_model(demo.NAME, dtype="float32", progress=False)


@pytest.mark.parametrize("draft, method, drafts", [
    ("eagle3", "eagle3", 3), ("dflash", "dflash", 7), ("dspark", "dspark", 7),
])  # fmt: skip
def test_a_shipped_drafter_is_found_and_fits(model, draft, method, drafts):
    loaded = load_drafter(draft, model)
    assert (loaded.name, loaded.drafter.num_draft_tokens) == (method, drafts)


def test_auto_takes_the_better_one(model):
    """But not for made-up weights, which it knows nothing of."""
    assert load_drafter("auto", model).name == "eagle3"
    assert load_drafter("auto", model, EngineConfig(draft="auto", load_format="dummy")).name == "ngram"


@pytest.mark.parametrize("method,most", [("eagle3", 12e6), ("dflash", 12e6), ("dspark", 14e6)])
def test_it_is_small(method, most):
    files = list((SHIPPED / f"smollm2-135m-instruct-{method}").iterdir())
    assert {file.name for file in files} == {"config.json", "model.safetensors"}
    assert sum(file.stat().st_size for file in files) < most


def test_dsparks_block_is_dflashs():
    """Its two heads were trained alone, so its first draft is as good as DFlash's."""
    dflash, dspark = (ModelFolder(each, each / "config.json") for each in (
        SHIPPED / f"smollm2-135m-instruct-{method}" for method in ("dflash", "dspark")
    ))  # fmt: skip
    heads = set(dspark.tensors()) - set(dflash.tensors())
    assert {name.partition(".")[0] for name in heads} == {"markov_head", "confidence_head"}
    for name in dflash.tensors():
        assert (dspark.tensor(name) == dflash.tensor(name)).all(), name
    assert all(dspark.tensor(name).any() for name in heads)
