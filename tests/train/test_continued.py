"""Training on from a drafter that exists: in any public layout, and what can't be."""

import json

import jax
import numpy as np
import pytest

from jaxspec.checkpoint import ModelFolder, load_model
from jaxspec.drafters.loading import load_drafter
from jaxspec.engine.functional import propose
from jaxspec.train.__main__ import main
from jaxspec.train.continued import continued
from jaxspec.train.data import Text, TrainError
from jaxspec.train.promoted import promote
from tests.support.blocks import GOLDEN, golden
from tests.support.quantised import write

DRAFTERS = {
    "specforge": ("eagle3", GOLDEN / "eagle" / "specforge-eagle3"),
    "safeailab": ("eagle3", GOLDEN / "eagle" / "safeailab-eagle3"),
    "speculators": ("eagle3", GOLDEN / "eagle" / "speculators-eagle3"),
    "dflash": ("dflash", GOLDEN / "dflash" / "full"),
    "dspark": ("dspark", GOLDEN / "dspark" / "deepspec"),
}


@pytest.fixture(scope="module")
def targets():
    folders = {"eagle3": GOLDEN / "eagle" / "target", "dflash": GOLDEN / "dflash" / "target"}
    models = {name: load_model(str(folder), "float32", progress=False) for name, folder in folders.items()}
    return models | {"dspark": models["dflash"]}


@pytest.mark.parametrize("layout", DRAFTERS)
def test_what_is_trained_further_keeps_its_layout(layout, targets, tmp_path):
    """Saved with half its weights, it is the drafter with half its weights, by the names that it had."""
    method, source = DRAFTERS[layout]
    target = targets[method]
    before = load_drafter(f"{method}:{source}", target)
    fresh = continued(tmp_path / "new", method, str(source), target)
    fresh.save(jax.tree.map(lambda x: x / 2, fresh.trained))
    after = load_drafter(f"{method}:{tmp_path / 'new'}", target)
    assert after.drafter == before.drafter
    for key, tree in before.params.items():
        scale = 0.5 if key in fresh.declared else 1.0
        if not key.startswith("context"):  # which are made of others
            compare = lambda x, y, scale=scale: np.testing.assert_allclose(x, y * scale, rtol=1e-2)  # noqa: E731
            jax.tree.map(compare, after.params[key], tree)
    assert {"fc", "norm", "layer" if method == "eagle3" else "layers"} <= set(fresh.trained)


def test_a_run_starts_from_the_drafter_it_was_given(tmp_path, capsys):
    method, source = DRAFTERS["specforge"]
    texts, target = tmp_path / "texts.jsonl", GOLDEN / "eagle" / "target"
    texts.write_text("".join(Text((np.arange(20) + i) % 30, ((4, 20),)).line() for i in range(30)))
    command = [method, "--model", str(target), "--data", str(texts), "--row-length", "48", "--batch-size", "4",
               "--steps", "10", "--learning-rate", "0.02", "--warm-up", "1", "--log-every", "1", "--unroll", "1",
               "--no-evaluation", "--no-plots", "--loss", "hard"]  # fmt: skip
    assert main([*command, "--output", str(tmp_path / "a"), "--init", str(source)]) == 0
    assert main([*command, "--output", str(tmp_path / "b"), "--init", str(tmp_path / "a" / "drafter")]) == 0
    first, second = (
        [json.loads(line)["loss"] for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("a", "b")
    )
    assert second[0] < 0.9 * first[0]
    with pytest.raises(SystemExit):
        main([*command, "--output", str(tmp_path / "c"), "--init", str(source), "--mlp-size", "16"])
    assert f"--mlp-size is for new drafters, and --init {source} is one already" in capsys.readouterr().err


def test_drafters_that_training_doesnt_compute_are_refused(targets, tmp_path):
    with pytest.raises(TrainError, match="causal within a block, or sliding"):
        continued(tmp_path / "a", "dflash", str(GOLDEN / "dflash" / "sliding"), targets["dflash"])
    folder, _ = write(GOLDEN / "dflash" / "full", tmp_path / "fp8")
    with pytest.raises(TrainError, match=f"--init {folder}: its weights are quantised"):
        continued(tmp_path / "b", "dflash", str(folder), targets["dflash"])


@pytest.mark.exhaustive  # what it reads and keeps of its layout is above
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_a_dflash_drafter_becomes_a_dspark_one_that_drafts_the_same(head, tmp_path):
    target, _, expected = golden("dflash", "full")
    folder = promote(tmp_path / head, str(GOLDEN / "dflash" / "full"), 4, head)
    got = propose(target, load_drafter(f"dspark:{folder}", target), expected["ids_16"].tolist(), 7)
    logits = expected["logits_16"][0]
    np.testing.assert_array_equal(got.tokens, logits.argmax(-1))
    assert got.count == 7
    np.testing.assert_allclose(got.logits, logits, atol=2e-2)  # weights are bfloat16 in the file


def test_fewer_neurons_are_those_with_the_largest_weights(targets, tmp_path):
    source = GOLDEN / "dflash" / "full"
    files = {size: promote(tmp_path / str(size), str(source), 4, None, size) for size in (48, 40)}
    whole, fewer = (load_drafter(f"dspark:{folder}", targets["dflash"]).params for folder in files.values())
    shapes = [[x.shape for x in jax.tree.leaves(params["layers"][0])] for params in (whole, fewer)]
    assert any(48 in shape or 96 in shape for shape in shapes[0]) and not any(48 in shape for shape in shapes[1])
    with pytest.raises(TrainError, match=r"--mlp-size 64: .* has 48 neurons in each MLP"):
        promote(tmp_path / "more", str(source), 4, None, 64)


@pytest.fixture
def dspark(tmp_path):
    """The command of a run that starts from a DFlash drafter."""
    source, target = GOLDEN / "dflash" / "full", GOLDEN / "dflash" / "target"
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(Text((np.arange(20) + i) % 30, ((4, 20),)).line() for i in range(30)))
    return ["dspark", "--model", str(target), "--data", str(texts), "--row-length", "48", "--batch-size", "4",
            "--steps", "2", "--no-evaluation", "--no-plots", "--init", str(source)]  # fmt: skip


@pytest.mark.exhaustive  # fewer neurons by themselves are above, a run from a drafter below
def test_a_dspark_run_of_fewer_neurons_starts_from_a_dflash_drafter(dspark, targets, tmp_path):
    more = ["--markov-rank", "4", "--mlp-size", "40", "--weigh-rounds"]
    assert main([*dspark, "--output", str(tmp_path / "a"), *more]) == 0
    config = json.loads((tmp_path / "a" / "drafter" / "config.json").read_text())
    assert config["intermediate_size"] == 40 and config["dflash_config"]["markov_rank"] == 4
    assert load_drafter(f"dspark:{tmp_path / 'a' / 'drafter'}", targets["dflash"]).drafter.first == 1


@pytest.mark.exhaustive  # whole ones start so above and below
def test_a_dspark_run_of_heads_alone_starts_from_a_dflash_drafter(dspark, tmp_path, capsys):
    assert main([*dspark, "--output", str(tmp_path / "h"), "--markov-head", "rnn", "--heads-only"]) == 0
    folders = tmp_path / "h" / "start", tmp_path / "h" / "drafter"
    start, trained = (ModelFolder(folder, folder / "config.json") for folder in folders)
    moved = {name for name in start.tensors() if (start.tensor(name) != trained.tensor(name)).any()}
    assert len(moved) > 3 and all(name.startswith(("markov_head.", "confidence_head.")) for name in moved)
    with pytest.raises(SystemExit):
        main([*dspark, "--output", str(tmp_path / "b"), "--num-layers", "1"])
    assert "--num-layers is for new drafters" in capsys.readouterr().err
