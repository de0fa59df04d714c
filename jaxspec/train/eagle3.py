"""EAGLE-3's training: the drafter is unrolled on its own outputs, as it will be when it drafts.

Row t pairs the target's features at t with the token at t + 1 and predicts the one at t + 2. In step i of the unrolled
chain (https://arxiv.org/abs/2503.01840, "training-time test") row t reads its own output of step i - 1 in place of
features, and the text's token at t + 1 + i. It sees what a chain that started at t would: the first step's keys up to
t, and its own of the steps since. The layer is `drafters.eagle.Eagle3`'s own; only the layout of the keys differs.

Of several MTP modules, step i of the chain is module i's, over rows of its own. Where all modules read the text's own
tokens, module i's rows see those before them, as in serving. From the last module on, the chain goes on as above.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config.options import ConfigError
from jaxspec.decoder.forward import Hidden
from jaxspec.drafters.eagle import Eagle3
from jaxspec.drafters.mtp import Mtp
from jaxspec.drafters.mtp_modules import MtpModules
from jaxspec.train.attention import causal_attention
from jaxspec.train.data import TrainError
from jaxspec.train.losses import Rows, Scorer
from jaxspec.train.objective import Batch, Objective, Report, matmul_weights, report

HEAD = ("norm", "head")  # params that turn the layer's output into logits


@dataclass(frozen=True)
class Step:
    """Stands where the drafter expects `paged.Rows`. Its cache is a list of (keys, values), one of each step."""

    batch: Batch
    step: int

    def positions(self, t: int) -> Int[Array, "b t"]:
        return self.batch.positions + self.step

    marked_positions = positions  # padding is a text too

    def only(self, asked):
        return self

    def pages(self, cache):
        return None

    def attend(self, cache, layer, q, k, v, window):
        if window is not None:
            raise TrainError(f"an EAGLE-3 layer with a window of {window} can't be trained; one without can")
        cache = [*cache, (k, v)]
        own = [jnp.stack(each, axis=2) for each in zip(*cache[1:], strict=True)]
        return causal_attention(q, *cache[0], self.batch.first, tuple(own) or None), cache


@dataclass(frozen=True)
class Eagle3Objective(Objective):
    """`steps` are unrolled; step i counts `decay**i`."""

    drafter: Eagle3
    steps: int = 7
    decay: float = 0.8

    @property
    def positions(self):
        return self.steps

    def loss(self, trained, frozen, target_params, batch, keys, done=0.0):
        return self.chain_loss(trained, frozen, target_params, self.read(target_params, batch), batch)

    def chain_loss(
        self, trained: Any, frozen: Any, target_params: Any, hidden: Hidden, batch: Batch
    ) -> tuple[Float[Array, ""], Report]:
        """The loss after the target's reading of the batch."""
        outputs = self._unroll({**frozen, **self.cast(trained)}, hidden.features, batch)
        # All guesses at a token in one column, where the target's own stands: step i guessed it from i + 1 rows before.
        align = lambda x, i: jnp.roll(x, i + 1, axis=1)  # noqa: E731
        valid = [jnp.roll(batch.draftable(i + 1), -1, axis=1) & self._same(batch, i) for i in range(self.steps)]
        weights = jnp.stack([align(v, i) * self.decay**i for i, v in enumerate(valid)])
        rows = Rows(
            student=jnp.stack([align(out, i) for i, out in enumerate(outputs)]),
            teacher=hidden.last,
            text=jnp.roll(batch.tokens, -1, axis=1),
            weights=weights,
        )
        head = {name: trained[name] for name in HEAD if name in trained}
        total, right = Scorer(self.kind, self.target, self._logits)(head, frozen, target_params, rows)
        right = jnp.stack([jnp.roll(x, -(i + 1), axis=1) for i, x in enumerate(right)])
        return report(total, right, jnp.stack(valid), weights)

    def flops(self, trained, row_length):
        target, config = self.target, self.drafter.config
        own = "head" in trained
        size = trained["head"]["head"].outputs if own else target.vocab_size
        layer = matmul_weights(config) + config.hidden_size * trained["layer"]["qkv"].outputs  # it reads two vectors
        step = 6 * layer + (6 if own else 4) * config.hidden_size * size
        target_flops = 2 * matmul_weights(target) + 2 * target.hidden_size * target.vocab_size
        return target_flops + 6 * trained["fc"].values.size + self.steps * step

    def _unroll(self, params: Any, features: tuple[Array, ...], batch: Batch) -> list[Array]:
        hidden, cache, outputs = self.drafter._fuse(params, features), [], []
        for i in range(self.steps):
            tokens = jnp.roll(batch.tokens, -(i + 1), axis=1)
            out, cache = self.drafter._layer(params, cache, tokens, hidden, Step(batch, i))
            outputs.append(out)
            hidden = self.drafter._feedback(params, out)
        return outputs

    def _same(self, batch: Batch, step: int) -> Array:
        """Whether the token that step predicts at a row belongs to the row's own text."""
        offset, t = step + 2, batch.tokens.shape[1]
        return (jnp.roll(batch.first, -offset, axis=1) == batch.first) & (jnp.arange(t) < t - offset)

    def _logits(self, head: Any, frozen: Any, out: Array) -> Array:
        return self.drafter._logits({**frozen, **self.cast(head)}, out)


@dataclass(frozen=True)
class MtpObjective(Eagle3Objective):
    """`trained` are the module's params, or those of several."""

    drafter: Mtp

    def __post_init__(self):
        if getattr(self.drafter, "separate", False):
            raise ConfigError("MTP modules with norms of their own can't be trained; train another drafter")

    def _unroll(self, params, features, batch):
        if not isinstance(self.drafter, MtpModules):
            return super()._unroll(params, features, batch)
        hidden, outputs, last = self.drafter._fuse(params, features), [], self.drafter.modules - 1
        cache: list = []
        for i in range(self.steps):
            module, further = min(i, last), max(i - last, 0)
            cache = cache if further else []
            tokens, rows = jnp.roll(batch.tokens, -(i + 1), axis=1), Step(batch, further)
            out, cache = self.drafter._layer(self.drafter._own(params, module), cache, tokens, hidden, rows)
            outputs.append(out)
            hidden = self.drafter._feedback(params, out)
        return outputs
