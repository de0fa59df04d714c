"""Files of our trainer are read by SpecForge and dflash; its loss is SpecForge's.

Checkpoints and expectations are those of tests/golden/make_trained.py.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.checkpoint import load_model
from jaxspec.drafters.loading import load_drafter
from jaxspec.train.eagle3 import Eagle3Objective
from jaxspec.train.objective import Batch
from tests.support.sample import rare

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


@pytest.fixture(scope="module")
def target():
    return load_model(str(GOLDEN / "eagle" / "target"), "float32", progress=False)


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
@pytest.mark.parametrize("length", [rare(1), 17])
def test_others_draft_the_same_from_what_we_wrote(target, method, length):
    golden = np.load(GOLDEN / "trained" / f"{method}.npz")
    row = golden["lengths"].tolist().index(length)
    drafter = load_drafter(f"{method}:{GOLDEN / 'trained' / method}", target)
    prop = jaxspec.propose(target, drafter, golden["ids"][:length].tolist(), golden["tokens"].shape[1])
    assert prop.next_token == golden["next"][row]
    assert prop.tokens.tolist() == golden["tokens"][row].tolist()
    np.testing.assert_allclose(prop.logits, golden["logits"][row], atol=5e-4)


def test_the_golden_drafts_tell_prompts_apart():
    for method in ("eagle3", "dflash"):
        golden = np.load(GOLDEN / "trained" / f"{method}.npz")
        assert len(np.unique(golden["tokens"])) > 4 and golden["logits"].std() > 0.3


def test_the_unrolled_loss_is_specforges(target):
    golden = np.load(GOLDEN / "trained" / "eagle3.npz")
    loaded = load_drafter(f"eagle3:{GOLDEN / 'trained' / 'eagle3'}", target)
    trained = {name: loaded.params[name] for name in ("fc", "layer", "norm", "head")}
    frozen = {name: loaded.params[name] for name in ("embed", "target_ids", "draft_ids")}
    ids = jnp.asarray(golden["ids"])[None]
    batch = Batch(ids, jnp.zeros_like(ids), jnp.ones(ids.shape, bool))
    objective = Eagle3Objective(loaded.drafter, target.config, "float32", "soft", steps=4, decay=0.8)
    mean, report = jax.jit(objective.loss)(
        trained, frozen, target.params, batch, jax.random.split(jax.random.key(0), len(batch.tokens))
    )
    weights = 0.8 ** np.arange(4)
    np.testing.assert_allclose(mean * (report.rounds * weights).sum(), (golden["losses"] * weights).sum(), rtol=1e-5)
    assert int(report.accepted[0]) == golden["right"][0]
