"""A drafter's loss against the target's logits, without ever holding the logits of a whole batch.

Rows are processed in chunks. The result is one number, so each chunk's gradient is computed on the spot
(`over_chunks`), and its logits are computed once and dropped. All steps of an unrolled chain that predict the same
token share the target's logits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.config.own_code import import_own
from jaxspec.decoder.forward import head_logits, unembed
from jaxspec.models.model_config import ModelConfig
from jaxspec.train.data import TrainError

KINDS = {
    "soft": "cross-entropy to the target's distribution over the drafter's vocabulary",
    "hard": "cross-entropy to the text",
    "overlap": "minus the logarithm of how often rejection sampling would accept",
}
CHUNK_LOGITS = 2**27  # of the drafter, at once


@flax.struct.dataclass
class Rows:
    """Rows to score: hidden states of `s` guesses at each of r tokens, and the target's final hidden state there."""

    student: Float[Array, "s b r d"]
    teacher: Float[Array, "b r d"]
    text: Int[Array, "b r"]  # the token there
    weights: Float[Array, "s b r"]  # 0: not counted
    more: Any = ()  # arrays [s, b, r, ...] that a scorer of one's own takes with them


@dataclass(frozen=True)
class Scorer:
    """`student(head, frozen, x)` gives a drafter's logits f32[..., w]; `head` is trained, `frozen` isn't.

    `odds(head, x)`, if given, are logits f32[...] of a drafter's guess that a draft is accepted. Its loss, added to the
    other, is the cross-entropy to how often rejection sampling would accept.

    Chunks are of a multiple of `unit` tokens.
    """

    kind: str
    target: ModelConfig
    student: Callable[[Any, Any, Array], Array]
    odds: Callable[[Any, Array], Array] | None = None
    unit: int = 1

    def __call__(
        self, head: Any, frozen: Any, target_params: Any, rows: Rows
    ) -> tuple[Float[Array, ""], Bool[Array, "s b r"]]:
        """The weighted sum of losses, and where the drafter's favourite is the target's.

        Not counted are rows whose right answer isn't in the drafter's vocabulary: no drafter could do better.
        """
        split, joined = self._chunks(rows, frozen)
        more = jax.tree.map(partial(split, axis=2), rows.more)
        given = split(rows.teacher, 1), split(rows.text, 1), split(rows.weights, 2), more
        total, right = over_chunks(self._chunk, head, split(rows.student, 2), given, (frozen, target_params))
        return total, joined(right)

    def _chunks(self, rows: Rows, frozen: Any) -> tuple[Callable, Callable]:
        """How to split arrays along their axis of tokens, into chunks along a leading one, and to join [_, s, b, r,
        ...] again."""
        s, b, r, _ = rows.student.shape
        size = self.target.vocab_size if "target_ids" not in frozen else len(frozen["target_ids"])
        chunk = max(min(CHUNK_LOGITS // (s * b * size), r) // self.unit, 1) * self.unit
        count = -(-r // chunk)
        pad = count * chunk - r

        def split(x: Array, axis: int) -> Array:
            x = jnp.pad(x, [(0, pad if i == axis else 0) for i in range(x.ndim)])
            x = x.reshape(*x.shape[:axis], count, chunk, *x.shape[axis + 1 :])
            return jnp.moveaxis(x, axis, 0)

        def joined(x: Array) -> Array:
            return jnp.moveaxis(x, 0, 2).reshape(s, b, count * chunk, *x.shape[4:])[:, :, :r]

        return split, joined

    def _chunk(self, head, student, given, fixed):
        teacher, text, weights, _ = given
        frozen, target_params = fixed
        logits = self.student(head, frozen, student)
        truth = unembed(target_params, teacher, self.target.decoder)
        beside, guess = self._beside(head, frozen, student, logits, truth, given)
        favourite = jnp.argmax(truth, axis=-1)
        everything = jax.nn.logsumexp(truth, axis=-1, keepdims=True)
        answer = text if self.kind == "hard" else favourite
        if "target_ids" in frozen:
            ids, own = frozen["target_ids"], frozen["draft_ids"]
            guess, truth = ids[guess], truth[..., ids]
            weights = jnp.where(own[answer] < len(ids), weights, 0.0)
            answer = jnp.minimum(own[answer], len(ids) - 1)
        log_q = jax.nn.log_softmax(logits, axis=-1)
        losses = self._losses(log_q, truth, everything, answer)
        if self.odds is not None:
            often, odds = jax.lax.stop_gradient(_overlap(log_q, truth, everything)), self.odds(head, student)
            losses = losses - often * jax.nn.log_sigmoid(odds) - (1 - often) * jax.nn.log_sigmoid(-odds)
        return jnp.sum(losses * weights) + beside, guess == favourite

    def _beside(
        self, head: Any, frozen: Any, student: Array, logits: Array, truth: Array, given: Any
    ) -> tuple[Float[Array, ""] | float, Int[Array, "s b c"]]:
        """A chunk's loss beside that of its logits, and the drafter's favourites, in its own ids."""
        return 0.0, jnp.argmax(logits, axis=-1)

    def _losses(
        self, log_q: Float[Array, "s b c w"], truth: Float[Array, "b c w"], everything: Array, answer: Int[Array, "b c"]
    ) -> Float[Array, "s b c"]:
        if self.kind == "soft":
            return -jnp.sum(jax.nn.softmax(truth, axis=-1) * log_q, axis=-1)
        if self.kind == "overlap":
            return -jnp.log(_overlap(log_q, truth, everything) + 1e-9)
        if self.kind not in KINDS:
            return _own(self.kind, log_q, truth, everything, answer)
        return -jnp.take_along_axis(log_q, jnp.broadcast_to(answer, log_q.shape[:-1])[..., None], axis=-1)[..., 0]


def check_loss(name: str, guesses: int, width: int) -> None:
    """Trace a loss of the user's over a few rows, of `guesses` over `width` tokens at each, without computing it.

    **Raises:** `TrainError` if it isn't a function, or gives other shapes; and as the function itself.
    """
    floats = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    answer = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    jax.eval_shape(partial(_own, name), floats(guesses, 2, 3, width), floats(2, 3, width), floats(2, 3, 1), answer)


def _own(name: str, log_q: Array, truth: Array, everything: Array, answer: Array) -> Float[Array, "s b c"]:
    losses = imported("--loss", name)(log_q, truth, everything, answer)
    shape = getattr(losses, "shape", type(losses).__name__)
    if shape != log_q.shape[:-1]:
        raise TrainError(f"--loss {name} must give a loss for each of {log_q.shape[:-1]} rows, got {shape}")
    return losses


def imported(flag: str, name: str) -> Any:
    """Import `module:name`: a function for `--loss`, a class for `--objective`.

    **Raises:** `TrainError` if it can't be imported, or is another thing.
    """
    module, _, own = name.partition(":")
    try:
        found = getattr(import_own(f"{flag} {name}", module), own)
    except (ImportError, AttributeError, ValueError) as error:
        example = {"--loss": "module:function, such as mine:narrow", "--objective": "module:Class, such as mine:Own"}
        raise TrainError(f"{flag} {name} must be {example[flag]}: {error}") from error
    is_class, wants_class = isinstance(found, type), flag == "--objective"
    if is_class != wants_class or not callable(found):
        got = "a class" if is_class else type(found).__name__
        raise TrainError(f"{flag} {name} must be a {'class' if wants_class else 'function'}, got {got}")
    return found


def _overlap(log_q: Float[Array, "s b c w"], truth: Float[Array, "b c w"], everything: Array) -> Float[Array, "s b c"]:
    """How often rejection sampling accepts a draft: one minus the total variation distance."""
    return jnp.sum(jnp.minimum(jnp.exp(truth - everything), jnp.exp(log_q)), axis=-1)


@jax.custom_vjp
def frozen_logits(params: Any, hidden: Float[Array, "*b d"]) -> Float[Array, "*b v"]:
    """Logits, float32, of the target's own embeddings or head, which aren't trained.

    Their gradient is rounded to the hidden states' dtype: a multiplication of float32 takes several times as long.
    """
    return head_logits(params, hidden)


def _frozen_forward(params, hidden):
    return frozen_logits(params, hidden), params


def _frozen_backward(params, gradient):
    embed = params["embed"]
    weight = params["head"].dequantised(embed.dtype) if "head" in params else embed.T
    return None, gradient.astype(weight.dtype) @ weight.T


frozen_logits.defvjp(_frozen_forward, _frozen_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def over_chunks(loss: Callable, head: Any, hidden: Array, given: Any, fixed: Any) -> tuple[Array, Any]:
    """The sum of `loss(head, hidden[i], given[i], fixed)[0]` over i, and the second results, stacked.

    Differentiable in `head` and `hidden`.
    """
    return _forward(loss, head, hidden, given, fixed)[0]


def _forward(loss, head, hidden, given, fixed):
    def step(carry, chunk):
        total, d_head = carry
        (value, aux), (dh, dx) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(head, *chunk, fixed)
        return (total + value, jax.tree.map(jnp.add, d_head, dh)), (aux, dx)

    start = jnp.zeros(()), jax.tree.map(jnp.zeros_like, head)
    (total, d_head), (aux, d_hidden) = jax.lax.scan(step, start, (hidden, given))
    return (total, aux), (d_head, d_hidden)


def _backward(loss, gradients, cotangents):
    scale = cotangents[0]
    d_head, d_hidden = jax.tree.map(lambda g: (g * scale).astype(g.dtype), gradients)
    return d_head, d_hidden, None, None


over_chunks.defvjp(_forward, _backward)
