"""LiLiCorr's training: DFlash's loss, and three of the scores between candidates (https://arxiv.org/abs/2608.20530).

A row's candidates are its likeliest tokens, and the text's own token is the right one. Given the right one of the row
before, the row's scores are a distribution over its candidates, and of that are taken: the cross-entropy to the right
one; how far the right one is from leading by a margin; and the expectation of how much less the target thinks of a
candidate than of the right one. Rows count as long as they and all before them have the right token among their
candidates, in blocks that the answer fills. Gradients reach the block through its rows and log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.decoder.functions import normed
from jaxspec.drafters.blocks.lattice import Lattice
from jaxspec.drafters.blocks.lilicorr import LiLiCorr
from jaxspec.models.weights import matmul
from jaxspec.train.blocks.dflash import DFlashObjective
from jaxspec.train.losses import Scorer, frozen_logits


@dataclass(frozen=True)
class Terms:
    """Weights of the three losses, and the margin of the second."""

    choice: float = 0.25
    lead: float = 0.0
    penalty: float = 0.25
    margin: float = 2.0


@dataclass(frozen=True)
class LiLiCorrObjective(DFlashObjective):
    """Objective of block and network together."""

    drafter: LiLiCorr
    terms: Terms = Terms()

    head: ClassVar[tuple[str, ...]] = ("lattice",)

    def _student(self, params, out, before, newest, known):
        """Rows, the anchor of their block, and whether that is known, side by side."""
        features = jnp.concatenate([x.astype(out.dtype) for x in newest], axis=-1)
        anchor = normed(matmul(features, params["fc"]), params["hidden_norm"], self.drafter.config.decoder.norm)
        anchor = jnp.concatenate([anchor, known[..., None].astype(anchor.dtype)], axis=-1)
        each = jnp.broadcast_to(anchor[:, :, None], (*out.shape[:3], anchor.shape[-1]))
        return jnp.concatenate([out, each], axis=-1)

    def _scorer(self):
        return LatticeScorer(
            self.kind, self.target, self._logits, unit=self.positions, lattice=self.drafter.lattice, terms=self.terms,
            dtype=self.dtype,
        )  # fmt: skip

    def _head_flops(self, trained, head):
        own = super()._head_flops(trained, 0)  # of a candidate
        return (2 + 4 + 2) * head + self.drafter.lattice.top * own

    def _logits(self, head: Any, frozen: Any, student: Float[Array, "*b w"]) -> Float[Array, "*b v"]:
        return frozen_logits(frozen, student[..., : self.drafter.config.hidden_size])


@dataclass(frozen=True)
class LatticeScorer(Scorer):
    """A scorer of whole blocks of `unit` rows. `dtype` is the network's activations'."""

    lattice: Lattice | None = None
    terms: Terms = Terms()
    dtype: str = "float32"

    def __call__(self, head, frozen, target_params, rows):
        """Candidates are found before anything is scored, since a row's weight depends on how many rows count."""
        split, joined = self._chunks(rows, frozen)
        find = lambda x: jax.lax.top_k(self.student(head, frozen, x), self.lattice.top)[1]  # noqa: E731
        ids = joined(jax.lax.map(find, split(jax.lax.stop_gradient(rows.student), 2)))
        blocks = lambda x: x.reshape(*x.shape[:2], -1, self.unit)  # noqa: E731
        there = jnp.cumprod(blocks((ids == rows.text[..., None]).any(-1)), axis=-1)
        counted = there * (blocks(rows.weights) > 0).all(-1, keepdims=True)
        each = jnp.maximum(rows.weights.sum(), 1.0) / jnp.maximum(counted.sum(), 1.0)  # the caller divides by weights
        counted = (counted * each).reshape(rows.weights.shape)
        return super().__call__(head, frozen, target_params, rows.replace(more=(ids, counted)))

    def _beside(self, head, frozen, student, logits, truth, given):
        _, text, _, (ids, counted) = given
        wide, n, each = self.lattice.wide, self.unit, jnp.take_along_axis
        blocks = lambda x: x.reshape(-1, n, *x.shape[3:])  # noqa: E731
        out, anchor, known = (blocks(x) for x in jnp.split(student, [wide, 2 * wide], axis=-1))
        logprobs = blocks(each(logits, ids, axis=-1) - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
        wanted = blocks(each(jnp.broadcast_to(truth, logits.shape), ids, axis=-1))
        shape, ids, text = ids.shape[:3], blocks(ids), text.reshape(-1, n, 1)
        place = jnp.argmax(ids == text, axis=-1)[..., None]
        network = jax.tree.map(lambda x: x.astype(self.dtype), head["lattice"])
        embedded = jax.lax.stop_gradient(frozen["embed"])[ids]
        start, pair = self.lattice.scores(network, embedded, logprobs, out, anchor[:, 0], known[:, 0, 0])
        later = each(pair, place[:, :-1, :, None], axis=2)[:, :, 0]
        scores = jnp.concatenate([start[:, None], later], axis=1)
        logq = jax.nn.log_softmax(scores, axis=-1)
        rivals = jnp.where(jnp.arange(scores.shape[-1]) == place, -jnp.inf, scores)
        lead = each(scores, place, axis=-1)[..., 0] - rivals.max(-1)
        worse = jax.nn.relu(each(wanted, place, axis=-1) - wanted)
        terms = self.terms
        losses = terms.choice * -each(logq, place, axis=-1)[..., 0]
        losses += terms.lead * jax.nn.relu(terms.margin - lead)
        losses += terms.penalty * jnp.sum(jnp.exp(logq) * worse, axis=-1)
        guess = each(ids, jnp.argmax(scores, axis=-1)[..., None], axis=-1)[..., 0]
        return jnp.sum(losses * blocks(counted)), guess.reshape(shape)
