"""Training matches drafting: the objectives' logits are those of `jaxspec.propose`, in a row that others share."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.checkpoint import load_model
from jaxspec.decoder.forward import head_logits, unembed
from jaxspec.drafters.blocks.dflash2 import DFlash2
from jaxspec.drafters.blocks.domino import Domino
from jaxspec.drafters.blocks.dspark import DSpark
from jaxspec.drafters.blocks.lilicorr import LiLiCorr
from jaxspec.drafters.loading import load_drafter
from jaxspec.train import eagle3, objective
from jaxspec.train.blocks.dflash import DFlashObjective
from jaxspec.train.blocks.dflash2 import DFlash2Objective
from jaxspec.train.blocks.domino import DominoObjective
from jaxspec.train.blocks.dspark import DSparkObjective
from jaxspec.train.blocks.lilicorr import LiLiCorrObjective, Terms
from jaxspec.train.data import Text, TrainError
from jaxspec.train.eagle3 import Eagle3Objective
from jaxspec.train.objective import Batch, Objective
from jaxspec.train.packing import pack
from tests.support.blocks import write_drafter
from tests.support.sample import rare
from tests.support.tiny import tiny_checkpoint

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
BEFORE, PROMPT = 9, 12  # tokens of another text in the row, and of the prompt


@pytest.fixture(scope="module")
def target():
    return load_model(str(GOLDEN / "eagle" / "target"), "float32", progress=False)


def load(target, method, folder=None):
    return load_drafter(f"{method}:{folder or GOLDEN / 'trained' / method}", target)


def batch_of(ids, answer):
    """A row with the end of one text, then a prompt and this answer."""
    row = [*ids[-BEFORE:], *ids[:PROMPT], *answer]
    first = [0] * BEFORE + [BEFORE] * (len(row) - BEFORE)
    answer = [i >= BEFORE + PROMPT for i in range(len(row))]
    return Batch(jnp.array([row]), jnp.array([first]), jnp.array([answer]))


def drafted(target, method, n, folder=None):
    """A drafter, its proposal after a prompt, and a batch in which the text goes on as it drafted."""
    loaded = load(target, method, folder)
    ids = np.load(GOLDEN / "trained" / f"{'eagle3' if method == 'eagle3' else 'dflash'}.npz")["ids"]
    prop = jaxspec.propose(target, loaded, ids[:PROMPT].tolist(), n)
    return loaded, prop, batch_of(ids, [prop.next_token, *prop.tokens, 3, 1])


@pytest.mark.exhaustive  # that it is unrolled is seen in what is counted, below
def test_the_unrolled_chain_is_the_drafted_one(target):
    loaded, prop, batch = drafted(target, "eagle3", 4)
    ours = Eagle3Objective(loaded.drafter, target.config, "float32", "soft", steps=4)
    features = jax.jit(ours.read)(target.params, batch).features
    outputs = jax.jit(ours._unroll)(loaded.params, features, batch)
    at = BEFORE + PROMPT - 1
    for out, logits in zip(outputs, prop.logits, strict=True):
        np.testing.assert_allclose(loaded.drafter._logits(loaded.params, out[0, at]), logits, atol=1e-4)


@pytest.mark.exhaustive  # likewise
def test_the_unrolled_module_is_the_drafting_one():
    """MTP's chain too: the module goes on with its own normed output, over the hybrid target's last hidden state."""
    hybrid = load_model(str(GOLDEN / "hybrid" / "qwen3_5"), "float32", progress=False)
    loaded = load_drafter("mtp", hybrid)
    prompt = np.load(GOLDEN / "hybrid" / "qwen3_5.npz")["ids"][:33]
    prop = jaxspec.propose(hybrid, loaded, prompt.tolist(), 2)
    row = jnp.array([[*prompt, prop.next_token, *prop.tokens]])
    batch = Batch(row, jnp.zeros_like(row), jnp.ones(row.shape, bool))
    ours = Eagle3Objective(loaded.drafter, hybrid.config, "float32", "soft", steps=2)
    hidden = jaxspec.hidden_states(hybrid, row, loaded.drafter.feature_layers)
    outputs = jax.jit(ours._unroll)(loaded.params, tuple(hidden), batch)
    assert len(set(prop.tokens.tolist())) > 1
    for out, logits in zip(outputs, prop.logits, strict=True):
        np.testing.assert_allclose(loaded.drafter._logits(loaded.params, out[0, 32]), logits, atol=1e-4)


@pytest.mark.exhaustive  # DSpark's block, below, has the same layers
def test_a_trained_block_is_the_drafted_one(target):
    loaded, prop, batch = drafted(target, "dflash", 5)
    ours = DFlashObjective(loaded.drafter, target.config, "float32", "soft", anchors=2)
    features = jax.jit(ours.read)(target.params, batch).features
    anchors = jnp.array([[BEFORE + PROMPT + 2, BEFORE + PROMPT]])
    out = jax.jit(ours._blocks)(loaded.params, features, batch, anchors)
    np.testing.assert_allclose(head_logits(loaded.params, out[0, 1, 1:]), prop.logits, atol=1e-4)


@pytest.mark.parametrize("head", ["vanilla", rare("gated"), rare("rnn")])
def test_a_trained_dspark_block_is_the_drafted_chain(target, head, tmp_path):
    """Given the text's tokens, which are those that were drafted, the Markov head adds what it added to the chain."""
    heads = dict(markov_rank=6, markov_head_type=head, enable_confidence_head=True, confidence_head_with_markov=True)
    names = dict(architectures=["Qwen3DSparkModel"], block_size=5)
    folder = write_drafter(DSpark, tmp_path, GOLDEN / "eagle" / "target", **names, **heads)
    loaded, prop, batch = drafted(target, "dspark", 5, folder)
    ours = DSparkObjective(loaded.drafter, target.config, "float32", "soft", anchors=1)
    features = jax.jit(ours.read)(target.params, batch).features
    anchors = jnp.array([[BEFORE + PROMPT]])
    out = jax.jit(ours._blocks)(loaded.params, features, batch, anchors)
    before = batch.tokens[:, None, BEFORE + PROMPT : BEFORE + PROMPT + 5]
    student = ours._student(loaded.params, out, before)
    np.testing.assert_allclose(ours._logits(loaded.params, loaded.params, student)[0, 0], prop.logits, atol=1e-4)
    confidence = jax.nn.sigmoid(ours._odds(loaded.params, student))
    np.testing.assert_allclose(confidence[0, 0], prop.confidence, atol=1e-5)
    assert ours.positions == 5 and len(set(prop.tokens.tolist())) > 1


def parts(loaded):
    """A block drafter's params, trained and frozen."""
    declared = loaded.drafter.parameters()
    trained = {name: loaded.params[name] for name in declared}
    return trained, {name: loaded.params[name] for name in loaded.params if name in ("embed", "head")}


def one_block(batch, n):
    """The batch with an answer of the known token and n drafts, of which one block alone has all."""
    at = jnp.arange(batch.tokens.shape[1]) - (BEFORE + PROMPT)
    return dataclasses.replace(batch, answer=((at >= 0) & (at <= n))[None])


@pytest.mark.exhaustive  # serving's test_lilicorr_domino.py has its chain, and what is shared is tested with DSpark
def test_a_trained_domino_block_is_the_drafted_chain_and_its_loss_moves_there(target, tmp_path):
    sizes = dict(emb_dim=6, gru_hidden_dim=10, pure_draft_prefix_len=1, shift_label=True)
    folder = write_drafter(
        Domino, tmp_path, GOLDEN / "eagle" / "target", architectures=["DominoDraftModel"], block_size=4, **sizes
    )
    loaded, prop, batch = drafted(target, "domino", 4, folder)
    ours = DominoObjective(loaded.drafter, target.config, "float32", "soft", anchors=8)
    features = jax.jit(ours.read)(target.params, batch).features
    out = jax.jit(ours._blocks)(loaded.params, features, batch, jnp.array([[BEFORE + PROMPT]]))
    student = ours._student(loaded.params, out, batch.tokens[:, None, BEFORE + PROMPT : BEFORE + PROMPT + 4])
    np.testing.assert_allclose(ours._logits(loaded.params, loaded.params, student)[0, 0], prop.logits, atol=1e-4)
    trained, frozen = parts(loaded)
    given = trained, frozen, target.params, batch, jax.random.split(jax.random.key(0), 1)
    plain = DFlashObjective(loaded.drafter, target.config, "float32", "soft", anchors=8)
    loss = jax.jit(ours.loss)
    first, middle, last, later = (float(loss(*given, done)[0]) for done in (0.0, 0.25, 0.5, 0.9))
    assert np.isclose(first, float(jax.jit(plain.loss)(*given)[0]), rtol=1e-5)
    assert np.isclose(middle, (first + last) / 2, rtol=1e-5) and last == later and abs(first - last) > 1e-3


@pytest.mark.exhaustive  # DSpark's block, above, has the same layers; what a training of it saves is in test_loop.py
def test_a_trained_dflash2_block_is_the_drafted_path(target, tmp_path):
    """Given the text's tokens, which are those that were drafted, a row's candidates have the scores that they had."""
    sizes = dict(conv_kernel_size=2, conv_group_size=8, selector_rank=6, selector_top_k=5)
    names = dict(architectures=["DFlash2DraftModel"], block_size=5)
    folder = write_drafter(DFlash2, tmp_path, GOLDEN / "eagle" / "target", **names, **sizes)
    loaded, prop, batch = drafted(target, "dflash2", 4, folder)
    ours = DFlash2Objective(loaded.drafter, target.config, "float32", "soft", anchors=2)
    features = jax.jit(ours.read)(target.params, batch).features
    anchors = jnp.array([[BEFORE + PROMPT + 2, BEFORE + PROMPT]])
    out = jax.jit(ours._blocks)(loaded.params, features, batch, anchors)[:, 1:, 1:]
    student = ours._student(loaded.params, out, batch.tokens[:, None, BEFORE + PROMPT : BEFORE + PROMPT + 4])
    logits = ours._logits(loaded.params, loaded.params, student)[0, 0]
    seen = np.isfinite(prop.logits)
    assert (seen.sum(-1) == 5).all()
    np.testing.assert_allclose(np.where(seen, logits, 0), np.where(seen, prop.logits, 0), atol=1e-4)


@pytest.mark.exhaustive  # what a training of it saves is in test_loop.py
def test_a_trained_lilicorr_block_is_the_drafted_path_and_has_the_papers_losses(target, tmp_path):
    """A text that goes on as was drafted has the scores that the drafts were drawn from."""
    sizes = dict(candidate_topk=5, hidden_size=12, num_layers=1, num_heads=3, factor_dim=6, mlp_ratio=1.5)
    sizes |= dict(vector_eps=1e-6, logit_scale=9.0)
    own = {"lilicorr_" + name: value for name, value in sizes.items()}
    names = dict(architectures=["LiLiCorrDraftModel"], block_size=5)
    folder = write_drafter(LiLiCorr, tmp_path, GOLDEN / "eagle" / "target", **names, **own)
    loaded, prop, batch = drafted(target, "lilicorr", 4, folder)
    batch, terms = one_block(batch, 4), Terms(choice=0.3, lead=0.2, penalty=0.1, margin=2.5)
    given = loaded.drafter, target.config, "float32", "soft", 8
    ours, plain = LiLiCorrObjective(*given, terms=terms), DFlashObjective(*given)
    trained, frozen = parts(loaded)
    rest = frozen, target.params, batch, jax.random.split(jax.random.key(0), 1)
    (value, _), gradient = jax.jit(jax.value_and_grad(ours.loss, has_aux=True))(trained, *rest)
    alone = jax.jit(plain.loss)(trained, *rest)[0]
    at = BEFORE + PROMPT
    teacher = jaxspec.logits(target, batch.tokens[:, BEFORE : at + 5])[0, PROMPT : PROMPT + 4]
    expected = 0.0
    for scores, token, truth in zip(np.float64(prop.logits), prop.tokens, np.float64(teacher), strict=True):
        (ids,) = np.nonzero(np.isfinite(scores))
        q = np.exp(scores[ids]) / np.exp(scores[ids]).sum()
        lead = scores[token] - scores[ids[ids != token]].max()
        worse = np.maximum(truth[token] - truth[ids], 0)
        expected += 0.3 * -np.log(q[ids == token][0]) + 0.2 * max(2.5 - lead, 0) + 0.1 * (q * worse).sum()
    assert np.isclose(float(value - alone), expected / 4, rtol=1e-4)
    found = jax.tree.map(lambda x: float(jnp.abs(x).max()), gradient)
    assert all(0 < x < 1e3 for x in jax.tree.leaves(found)), found


def test_rounds_are_counted_where_an_answer_can_be_drafted(target):
    loaded, batch = load(target, "eagle3"), batch_of(list(range(20)), range(7))
    ours = Eagle3Objective(loaded.drafter, target.config, "float32", "soft", steps=3)
    split = lambda params, names: {k: v for k, v in params.items() if (k in names)}  # noqa: E731
    trained = split(loaded.params, ("fc", "layer", "norm", "head"))
    frozen = split(loaded.params, ("embed", "target_ids", "draft_ids"))
    loss = jax.jit(ours.loss)
    _, report = loss(trained, frozen, target.params, batch, jax.random.split(jax.random.key(0), 1))
    # Of 7 answer tokens, 6 have one after them, 5 two, 4 three.
    assert report.rounds.tolist() == [6, 5, 4]
    nothing = dataclasses.replace(batch, answer=jnp.zeros_like(batch.answer))
    value, report = loss(trained, frozen, target.params, nothing, jax.random.split(jax.random.key(0), 1))
    assert value == 0 and report.rounds.tolist() == [0, 0, 0]


def test_anchors_begin_blocks_of_answers_only(target):
    loaded, batch = load(target, "dflash"), batch_of(list(range(20)), range(8))
    ours = DFlashObjective(loaded.drafter, target.config, "float32", "soft", anchors=64)
    anchors, drawn = ours._draw(batch, jax.random.split(jax.random.key(1), 1))
    last = batch.tokens.shape[1] - 1
    assert sorted(anchors[drawn].tolist()) == list(range(BEFORE + PROMPT, last))


def test_acceptance_counts_unbroken_chains():
    from jaxspec.train.objective import report

    right = jnp.array([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]], bool)
    valid = jnp.array([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]], bool)
    _, got = report(jnp.float32(6), right, valid, valid * 1.0)
    assert got.accepted.tolist() == [3, 2, 1] and got.rounds.tolist() == [4, 4, 3]
    assert np.isclose(got.loss, 6 / 11)


def test_steps_too_small_for_a_gradient_are_refused(target, monkeypatch):
    monkeypatch.setattr(objective, "kernels_here", lambda: None)  # as on a Hopper GPU
    loaded, batch = load(target, "dflash"), batch_of(list(range(20)), range(8))
    with pytest.raises(TrainError, match="a step has 29 rows, and takes more than"):
        DFlashObjective(loaded.drafter, target.config, "float32", "soft").read(target.params, batch)


def test_a_layer_with_a_window_is_refused():
    with pytest.raises(TrainError, match="window of 4 can't be trained"):
        eagle3.Step(None, 0).attend([], jnp.int32(0), None, None, None, 4)


def test_a_hybrid_reads_each_text_of_a_batch_as_it_would_alone(target):
    """Take rows with a text each and padding behind it: the state takes in nothing else."""
    hybrid = load_model(str(tiny_checkpoint("qwen3_next", vocab=64)), "float32", progress=False)
    texts = [Text(np.arange(n) * step % 60 + 1, ((1, n),)) for n, step in ((23, 7), (23, 11))]
    batch = pack(texts, 32, 2, 0, alone=True).batch(0)
    reader = Objective(load(target, "eagle3").drafter, hybrid.config, "float32", "soft")
    reader = dataclasses.replace(reader, drafter=dataclasses.replace(reader.drafter, feature_layers=(0, 1)))
    logits = np.asarray(unembed(hybrid.params, jax.jit(reader.read)(hybrid.params, batch).last, hybrid.config.decoder))
    for tokens, first, found in zip(batch.tokens, batch.first, logits, strict=True):
        n = int(np.flatnonzero(first)[0])
        np.testing.assert_allclose(found[:n], jaxspec.logits(hybrid, [tokens[:n].tolist()])[0], atol=1e-5)
