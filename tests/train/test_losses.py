"""Losses in chunks are the losses, and their gradients the gradients."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.model_config import ModelConfig
from jaxspec.train import losses
from jaxspec.train.__main__ import main
from jaxspec.train.data import TrainError
from jaxspec.train.eagle3 import Eagle3Objective
from jaxspec.train.losses import Rows, Scorer
from jaxspec.train.objective import own
from tests.support.tiny import tiny_checkpoint, tiny_config

V, D, S, B, R = 40, 8, 2, 2, 7
CONFIG = ModelConfig.from_hf(tiny_config("llama", vocab=V, hidden_size=D, tie_word_embeddings=True))
IDS = np.array([1, 3, 4, 9, 20, 33])
FROZEN = {
    "target_ids": jnp.asarray(IDS),
    "draft_ids": jnp.full(V, len(IDS)).at[IDS].set(jnp.arange(len(IDS))),
}


def inputs():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    text = jnp.asarray(rng.choice(IDS, (B, R)))
    weights = jnp.asarray(rng.random((S, B, R)), jnp.float32).at[:, :, 2].set(0)
    embed = draw(V, D).at[IDS].multiply(4)  # so that many right answers are in the vocabulary
    return draw(D, len(IDS)), {"embed": embed}, Rows(draw(S, B, R, D), draw(B, R, D), text, weights)


def student(head, frozen, x):
    return x @ head


def plain(kind, head, target_params, rows):
    """Reference of the loss, written down at once."""
    truth = rows.teacher @ target_params["embed"].T
    known = FROZEN["draft_ids"][rows.text if kind == "hard" else truth.argmax(-1)]
    log_q = jax.nn.log_softmax(rows.student @ head)
    if kind == "soft":
        each = -(jax.nn.softmax(truth[..., IDS]) * log_q).sum(-1)
    elif kind == "overlap":
        each = -jnp.log(jnp.minimum(jax.nn.softmax(truth)[..., IDS], jnp.exp(log_q)).sum(-1) + 1e-9)
    else:
        each = -jnp.take_along_axis(log_q, jnp.broadcast_to(known, log_q.shape[:-1])[..., None], -1)[..., 0]
    return (each * rows.weights * (known < len(IDS))).sum()


@pytest.mark.parametrize("kind", losses.KINDS)
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunks_add_up_to_loss_and_gradient(kind, chunk, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_LOGITS", chunk * S * B * len(IDS))
    head, target_params, rows = inputs()

    def ours(head, x):
        return Scorer(kind, CONFIG, student)(head, FROZEN, target_params, rows.replace(student=x))[0] * 0.5

    def theirs(head, x):
        return plain(kind, head, target_params, rows.replace(student=x)) * 0.5

    got, want = (jax.jit(jax.value_and_grad(loss, (0, 1)))(head, rows.student) for loss in (ours, theirs))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_right_is_the_targets_favourite_over_its_whole_vocabulary():
    head, target_params, rows = inputs()
    right = Scorer("soft", CONFIG, student)(head, FROZEN, target_params, rows)[1]
    favourite = np.asarray(rows.teacher @ target_params["embed"].T).argmax(-1)
    guess = IDS[np.asarray(rows.student @ head).argmax(-1)]
    assert right.tolist() == (guess == favourite).tolist() and right.any()


def test_confidence_learns_how_often_drafts_are_accepted():
    """It adds the cross-entropy to the overlap of both distributions, and moves the odds alone towards it."""
    head, target_params, rows = inputs()
    frozen = {name: value for name, value in FROZEN.items() if not name.endswith("_ids")}
    head = {"logits": jnp.pad(head, ((0, 0), (0, V - head.shape[1]))), "odds": head[:, 0]}
    give = lambda head, frozen, x: x @ head["logits"]  # noqa: E731
    odds = lambda head, x: x @ head["odds"]  # noqa: E731

    def loss(head, odds=None):
        return Scorer("soft", CONFIG, give, odds)(head, frozen, target_params, rows)[0]

    p = jax.nn.softmax(rows.teacher @ target_params["embed"].T)
    overlap = jnp.minimum(p, jax.nn.softmax(rows.student @ head["logits"])).sum(-1)
    guess = jax.nn.sigmoid(rows.student @ head["odds"])
    entropy = -(overlap * jnp.log(guess) + (1 - overlap) * jnp.log(1 - guess))
    (with_odds, gradient), (without, plain_gradient) = (jax.value_and_grad(loss)(head, each) for each in (odds, None))
    np.testing.assert_allclose(with_odds - without, (entropy * rows.weights).sum(), rtol=1e-4)
    np.testing.assert_allclose(gradient["logits"], plain_gradient["logits"], rtol=1e-5, atol=1e-6)
    towards = jnp.einsum("sbr,sbrd->d", (guess - overlap) * rows.weights, rows.student)
    np.testing.assert_allclose(gradient["odds"], towards, rtol=1e-4, atol=1e-5)


def distance(log_q, truth, everything, answer):
    """A loss of one's own: total variation."""
    return jnp.abs(jnp.exp(log_q) - jnp.exp(truth - everything)).sum(-1) / 2


def scalar(log_q, truth, everything, answer):
    return log_q.sum()


def test_a_loss_of_ones_own_has_gradients():
    head, target_params, rows = inputs()
    run = lambda head: Scorer(f"{__name__}:distance", CONFIG, student)(head, FROZEN, target_params, rows)[0]  # noqa: E731

    def expected(head):
        truth = jax.nn.softmax(rows.teacher @ target_params["embed"].T)[..., IDS]
        known = FROZEN["draft_ids"][(rows.teacher @ target_params["embed"].T).argmax(-1)] < len(IDS)
        each = jnp.abs(jax.nn.softmax(rows.student @ head) - truth).sum(-1) / 2
        return (each * rows.weights * known).sum()

    (value, slope), (wanted, wanted_slope) = jax.value_and_grad(run)(head), jax.value_and_grad(expected)(head)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(slope, wanted_slope, rtol=1e-4, atol=1e-6)
    with pytest.raises(TrainError, match="must give a loss for each of"):
        Scorer(f"{__name__}:scalar", CONFIG, student)(head, FROZEN, target_params, rows)


@pytest.mark.parametrize("name, message", [
    ("nowhere:loss", "--loss nowhere:loss must be module:function, such as mine:narrow: No module named 'nowhere'"),
    (f"{__name__}:lost", "has no attribute 'lost'"),
    (f"{__name__}:V", "must be a function, got int"),
    (f"{__name__}:Doubled", "must be a function, got a class"),
])  # fmt: skip
def test_a_loss_that_is_not_there(name, message):
    with pytest.raises(TrainError, match=message):
        losses.imported("--loss", name)


@dataclass(frozen=True)
class Doubled(Eagle3Objective):
    factor: float = 2.0


class Lacking(Eagle3Objective):
    def __init__(self, drafter, target, dtype, kind, steps, decay, factor):
        pass


def test_an_objective_of_ones_own_has_the_methods_settings():
    mine = own(f"{__name__}:Doubled", Eagle3Objective)(None, CONFIG, "float32", "soft", 3, 0.5)
    assert isinstance(mine, Doubled) and (mine.steps, mine.decay, mine.factor) == (3, 0.5, 2.0)
    for name, said in (
        ("inputs", "must be a class, got function"),
        ("Scorer", "must be a subclass of jaxspec.train.eagle3.Eagle3Objective"),
        ("Lacking", "must take Eagle3Objective's fields alone: missing a required argument: 'factor'"),
    ):
        with pytest.raises(TrainError, match=said):
            own(f"{__name__}:{name}", Eagle3Objective)


def of_two(log_q, truth):
    return log_q.sum(-1)


def of_one_vocabulary(log_q, truth, everything, answer):
    return (log_q - jnp.zeros(24)).sum(-1)


@pytest.mark.parametrize("flags, said", [
    (["--loss", "sift"], "argument --loss: must be soft, hard, overlap or module:function, got 'sift'"),
    (["--loss", f"{__name__}:Doubled"], "must be a function, got a class"),
    (["--loss", f"{__name__}:scalar"], "must give a loss for each of (3, 2, 3) rows, got ()"),
    (["--loss", f"{__name__}:of_two"], "of_two fails: TypeError: of_two() takes 2 positional arguments but 4 were"),
    (["--loss", f"{__name__}:of_one_vocabulary"], "[(3, 2, 3, 64), (24,)]"),
    (["--loss", f"{__name__}:of_one_vocabulary", "--draft-vocab-size", "24"], "--data"),  # the loss is fine,
    (["--objective", f"{__name__}:Scorer"], "must be a subclass of jaxspec.train.eagle3.Eagle3Objective"),
])  # fmt: skip
def test_ones_own_are_checked_before_texts_are_written(flags, said, tmp_path, capsys):
    command = ["eagle3", "--model", str(tiny_checkpoint()), "--data", str(tmp_path / "none"), "--steps", "3"]
    with pytest.raises(SystemExit):
        main([*command, "--unroll", "3", "--output", str(tmp_path), "--no-plots", *flags])
    assert said in capsys.readouterr().err
