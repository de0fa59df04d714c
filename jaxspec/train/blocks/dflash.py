"""DFlash's training: blocks that begin at random tokens of the answers, many of a text in one pass.

A block is an anchor and masks. It sees the context before the anchor, as keys and values made of the target's features,
and itself (https://arxiv.org/abs/2602.06036). A wrong draft costs less the further it is from the anchor, since all
drafts behind it are lost anyway: draft j counts exp(-(j - 1) / gamma). Layers and context are
`drafters.dflash.DFlash`'s own; only the layout of the keys differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.decoder.forward import write_keys_values
from jaxspec.decoder.mixer import OnlyAttention
from jaxspec.drafters.dflash import DFlash, context_projection
from jaxspec.train.attention import span_attention
from jaxspec.train.data import TrainError
from jaxspec.train.losses import Rows, Scorer, frozen_logits
from jaxspec.train.objective import Batch, Objective, check_rows, matmul_weights, report


@dataclass(frozen=True)
class _Context:
    """Stands where the drafter expects `paged.Rows`: the "cache" is just the keys and values written."""

    batch: Batch

    def positions(self, t: int) -> Int[Array, "b t"]:
        return self.batch.positions

    def pages(self, cache):
        return None

    def write(self, cache, layers, k, v):
        return k, v


@dataclass(frozen=True)
class DFlashObjective(Objective):
    """`anchors` blocks are drawn in each row of a batch."""

    drafter: DFlash
    anchors: int = 128
    gamma: float = 4.0

    head: ClassVar[tuple[str, ...]] = ()  # trained params that turn what `_student` gives into logits

    @property
    def positions(self):
        return self.drafter.block_size - self.drafter.first

    def loss(self, trained, frozen, target_params, batch, keys, done=0.0):
        n = self.positions
        hidden = self.read(target_params, batch)
        params = {**frozen, **self.cast(trained)}
        params |= context_projection(self.drafter.config, params["layers"])
        anchors, drawn = self._draw(batch, keys)
        out = self._blocks(params, hidden.features, batch, anchors)[:, :, self.drafter.first :]
        take = lambda x, at: jnp.take_along_axis(x, at.reshape(*at.shape, *(1,) * (x.ndim - 2)), axis=1)  # noqa: E731
        distance = jnp.arange(1, n + 1)
        at = jnp.minimum(anchors[..., None] + distance, batch.tokens.shape[1] - 1)
        valid = jnp.stack([take(batch.draftable(j), anchors) & drawn for j in range(1, n + 1)])  # [n, b, a]
        weights = valid * jnp.exp(-(distance - 1.0) / self.gamma)[:, None, None]
        b, a = anchors.shape
        flat = at.reshape(b, a * n)
        before = take(batch.tokens, at.reshape(b, a * n) - 1).reshape(b, a, n)
        newest = tuple(take(x, jnp.maximum(anchors - 1, 0)) for x in hidden.features)
        student = self._student(params, out, before, newest, anchors > take(batch.first, anchors))
        weights = weights * self._often(trained, student)
        student, weighted = self._guesses(student, jnp.moveaxis(weights, 0, 2), done)
        rows = Rows(
            student=student.reshape(len(student), b, a * n, -1),
            teacher=take(hidden.last, jnp.maximum(flat - 1, 0)),
            text=take(batch.tokens, flat),
            weights=weighted.reshape(len(student), b, a * n),
        )
        head = {name: trained[name] for name in self.head}
        total, right = self._scorer()(head, frozen, target_params, rows)
        return report(total, jnp.moveaxis(right[0].reshape(b, a, n), 2, 0), valid, weights)

    def flops(self, trained, row_length):
        target, config = self.target, self.drafter.config
        head = target.hidden_size * target.vocab_size
        context = config.num_layers * config.hidden_size * 2 * config.num_kv_heads * config.head_dim
        each = 6 if "layers" in trained else 2  # a layer that isn't trained has no backward pass
        blocks = self.anchors / row_length * (
            self.drafter.block_size * each * matmul_weights(config) + self.positions * self._head_flops(trained, head)
        )  # fmt: skip
        fused = len(self.drafter.feature_layers) * target.hidden_size * config.hidden_size
        return 2 * matmul_weights(target) + each * (fused + context) + blocks

    def _head_flops(self, trained: Any, head: int) -> float:
        """Operations for one draft behind the layers, by the target's head of this size and the drafter's own."""
        own = sum(x.size for name in self.head for x in jax.tree.leaves(trained[name]))
        return (2 + 4) * head + 6 * own

    def _student(
        self,
        params: Any,
        out: Float[Array, "b a n d"],
        before: Int[Array, "b a n"],
        newest: tuple[Float[Array, "b a d"], ...],
        known: Bool[Array, "b a"],
    ) -> Float[Array, "b a n w"]:
        """Input of the scorer for each draft's row. `before` is the text's token before the draft; `newest`: the
        target's features before the anchor, where they are `known`."""
        return out

    def _guesses(
        self, student: Float[Array, "b a n w"], weights: Float[Array, "b a n"], done: Float[Array, ""] | float
    ) -> tuple[Float[Array, "s b a n w"], Float[Array, "s b a n"]]:
        """The guesses to score and their weights, which add up to those given. The first are those that are drafted."""
        return student[None], weights[None]

    def _often(self, trained: Any, student: Float[Array, "b a n w"]) -> float | Float[Array, "b a"]:
        """How much each block counts beside the others."""
        return 1.0

    def _scorer(self) -> Scorer:
        return Scorer(self.kind, self.target, self._logits)

    def _logits(self, head: Any, frozen: Any, student: Float[Array, "*b w"]) -> Float[Array, "*b v"]:
        """Logits of the scorer's input. `head`: the trained params of that name."""
        return frozen_logits(frozen, student)

    def _draw(self, batch: Batch, keys: Key[Array, " b"]) -> tuple[Int[Array, "b a"], Bool[Array, "b a"]]:
        """Anchors, and which of them are real: a row may have fewer tokens that a block could begin with."""
        able = batch.draftable(1)
        order = jnp.where(able, jax.vmap(lambda key: jax.random.uniform(key, able.shape[1:]))(keys), -1.0)
        value, anchors = jax.lax.top_k(order, min(self.anchors, able.shape[1]))
        return anchors, value >= 0

    def _blocks(self, params: Any, features: tuple[Array, ...], batch: Batch, anchors: Int[Array, "b a"]) -> Array:
        """Final hidden states [b, a, block, d] of the blocks at these anchors."""
        drafter, (b, a), size = self.drafter, anchors.shape, self.drafter.block_size
        context, rows = drafter._context(params, features), _Context(batch)
        context = write_keys_values(drafter.config.decoder, params, context, rows, None)  # each [l, b, t, m, h]
        take = lambda x: jnp.take_along_axis(x, anchors, axis=1)  # noqa: E731
        masks = jnp.full((b, a, size - 1), drafter.mask_token, batch.tokens.dtype)
        tokens = jnp.concatenate([take(batch.tokens)[..., None], masks], axis=2)
        positions = take(batch.positions)[..., None] + jnp.arange(size)
        first = take(batch.first)

        def attend(cache, layer, q, k, v, window):
            if window is not None:
                raise TrainError(f"a DFlash layer with a window of {window} can't be trained; full ones can")
            blocks = lambda x: x.reshape(b, a, size, *x.shape[2:])  # noqa: E731
            seen = [jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in cache]
            out = span_attention(blocks(q), *seen, first, anchors - 1, (blocks(k), blocks(v)))
            return out.reshape(q.shape), cache

        check_rows(tokens.size)
        shape = (b * a, size) if getattr(drafter, "taps", 0) else (b, a * size)  # convolutions end with a block
        of = tokens.reshape(shape), positions.reshape(shape)
        hidden = drafter._forward(params, *of, OnlyAttention(attend), context)
        return hidden.last.reshape(b, a, size, -1)


class CorrectedObjective(DFlashObjective):
    """Objective of rows whose logits get a correction, of a latent that stands beside each. They are scored with it,
    and without."""

    def _plain_share(self, done: Float[Array, ""] | float) -> float | Float[Array, ""]:
        """The share of the loss without corrections."""
        raise NotImplementedError

    def _correction(self, head: Any, latent: Float[Array, "*b r"]) -> Float[Array, "*b v"]:
        """Addition of a latent to logits."""
        raise NotImplementedError

    def _guesses(self, student, weights, done):
        share, plain = self._plain_share(done), student.at[..., self.drafter.config.hidden_size :].set(0)
        return jnp.stack([student, plain]), jnp.stack([(1 - share) * weights, share * weights])

    def _head_flops(self, trained, head):
        return super()._head_flops(trained, head) + 4 * head

    def _logits(self, head, frozen, student):
        """Logits, whose addition is rounded as `dspark.DSparkObjective` rounds its own."""
        out, latent = jnp.split(student, [self.drafter.config.hidden_size], axis=-1)
        return frozen_logits(frozen, out) + self._correction(head, latent).astype(jnp.float32)
