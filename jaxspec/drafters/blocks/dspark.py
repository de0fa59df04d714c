"""DSpark: DFlash's block, whose drafts then follow one another, and an estimate of how far they hold.

A DFlash block draws all its drafts without knowing the others'. Here the Markov head adds to each row's logits what it
makes of the draft before: a product of rank r over the vocabulary, so drafts are drawn one after the other while the
layers still run once. The probabilities of a draft are those after the addition. The newest token's row drafts too, so
a block of B rows makes B drafts.

The confidence head guesses from a row and the draft before it whether the row's own draft will be accepted. With the
option `confidence`, a request's drafts end before the first whose guess is lower. The guess doesn't know the token that
was drawn for the row, so the cut leaves the target's distribution as it is.

Formats: DeepSpec (github.com/deepseek-ai/DeepSpec), SpecForge, speculators; see `dflash_checkpoint`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config.options import ConfigError, option
from jaxspec.decoder.markov import greedy_chain
from jaxspec.drafters import dflash_checkpoint as checkpoint
from jaxspec.drafters.blocks.sequential import SequentialBlock
from jaxspec.models.weights import WHOLE, bias, head, linear, matmul, table

HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DSpark(SequentialBlock):
    """`rank` is that of the Markov head, 0: there is none; `head` one of `HEADS`: what it makes of the draft before.

    `guesses`: there is a confidence head, which reads the draft before too if `guesses_by_draft`.
    """

    rank: int = 0
    head: str = "vanilla"
    guesses: bool = False
    guesses_by_draft: bool = False
    confidence: float | None = option(
        None,
        "leave out drafts from the first on that is accepted with a lower probability, as the drafter estimates",
        between=(0.0, 1.0),
    )

    after: ClassVar[str] = "markov_after"
    computes: ClassVar[frozenset[str]] = frozenset({"markov_rank"})
    first_by_default: ClassVar[int] = 0

    def __post_init__(self):
        super().__post_init__()
        if self.confidence is not None and not self.guesses:
            raise ConfigError("confidence: this drafter has no confidence head; leave the option out")

    @classmethod
    def more(cls, own, config):
        rank = checkpoint.integer("markov_rank", own.get("markov_rank") or 0, 0)
        head = own.get("markov_head_type") or "vanilla"
        if head not in HEADS:
            raise ConfigError(f"markov_head_type must be one of {', '.join(HEADS)}, got {head!r}")
        guesses = own.get("enable_confidence_head")
        if guesses is None:
            guesses = (own.get("confidence_head_alpha") or 0) > 0
        by_draft = bool(guesses and own.get("confidence_head_with_markov"))
        if by_draft and not rank:
            raise ConfigError("confidence_head_with_markov is true, and markov_rank is 0: it must be above 0")
        return {"rank": rank, "head": head, "guesses": bool(guesses), "guesses_by_draft": by_draft}

    def parameters(self, found=()):
        declared, d, r, v = super().parameters(found), self.config.hidden_size, self.rank, self.config.vocab_size
        if r:
            name = "markov_head."
            declared["markov_before"] = table(v, r, name + "markov_w1.weight")
            declared["markov_after"] = head(r, self.draft_ids or v, name + "markov_w2.weight")
        if r and self.head != "vanilla":
            name, inputs, outputs = {
                "gated": ("markov_head.gate_proj", d + r, r),
                "rnn": ("markov_head.joint_proj", 2 * r + d, 3 * r),
            }[self.head]
            declared["markov_joint"] = linear(inputs, {name + ".weight": outputs}, exact=True, split=WHOLE)
            declared["markov_joint_bias"] = bias({name + ".bias": outputs}, split=WHOLE)
        if self.guesses:
            name, inputs = "confidence_head.proj", d + r if self.guesses_by_draft else d
            declared["confidence"] = linear(inputs, {name + ".weight": 1}, exact=True, split=WHOLE)
            declared["confidence_bias"] = bias({name + ".bias": 1}, split=WHOLE)
        return declared

    def concluded(self, params, rows, befores, drafts):
        count, confidence = self.num_draft_tokens, None
        if self.guesses:
            before = jnp.stack(befores, axis=1) if self.guesses_by_draft else None
            confidence = jax.nn.sigmoid(self.odds(params, rows, before))
        if self.confidence is not None:
            count = self.standing(confidence)
        return drafts.proposal(count, confidence)

    def standing(self, confidence: Float[Array, "b n"]) -> Int[Array, " b"]:
        """How many drafts are verified: those before the first that the drafter trusts less than `self.confidence`."""
        return jnp.cumprod(confidence >= self.confidence, axis=1).sum(axis=1).astype(jnp.int32)

    def found(self, params, base, newest):
        if not self.rank or self.head != "vanilla" or "target_ids" in params:
            return None
        return greedy_chain(base, newest, params["markov_before"], params["markov_after"])

    def embedded(self, params, token):
        return params["markov_before"][token]

    def latent(self, params, before, row, memory, step):
        """Latent of the Markov head. An rnn has a memory."""
        joint = lambda *parts: matmul(jnp.concatenate(parts, axis=-1), params["markov_joint"])  # noqa: E731
        if self.head == "gated":
            return jax.nn.sigmoid(joint(row, before) + params["markov_joint_bias"]) * before, memory
        if self.head == "rnn":
            memory = jnp.zeros_like(before) if memory is None else memory
            keep, new, out = jnp.split(joint(memory, before, row) + params["markov_joint_bias"], 3, axis=-1)
            keep = jax.nn.sigmoid(keep)
            return jnp.tanh(out), keep * memory + (1 - keep) * jnp.tanh(new)
        return before, memory

    def odds(self, params: Any, rows: Float[Array, "*b d"], before: Float[Array, "*b r"] | None) -> Float[Array, "*b"]:
        """The confidence head's logit of each row, float32: the logarithm of the odds that its draft is accepted."""
        rows = rows if before is None else jnp.concatenate([rows, before], axis=-1)
        logits = matmul(rows.astype(jnp.float32), params["confidence"])[..., 0]
        return logits + params["confidence_bias"].astype(jnp.float32)[0]
