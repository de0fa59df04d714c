"""Two drafters side by side, `--draft suffix+eagle3`: each request takes the drafts of the likelier one in each round.

The first looks its drafts up in text (`ngram`, `suffix`) and is sure where the text repeats itself; the second is any
other. Both draft in each round, which costs the first one's lookup. Which drafts are taken depends on what the lookup
found and on how many drafts of each were accepted so far in this request, never on a token that was drawn in this
round, so sampled text keeps the target's distribution.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config.options import ConfigError
from jaxspec.drafters.base import Drafter, Proposal
from jaxspec.parallel.sharding import my_requests

LOOKUPS = ("ngram", "suffix")
MEMORY = 0.75  # of an average, that stays when a round is added
LOOKED_UP = 7  # drafts of the first, if the command line doesn't say: eight rows, which kernels take at once


def parts(draft: str) -> tuple[str, str] | None:
    """The two sides of `lookup+other`, the first with its own options; None if `draft` names one drafter."""
    found = re.fullmatch(rf"((?:{'|'.join(LOOKUPS)})(?:\?[^+]*)?)\+(.+)", draft, re.DOTALL)
    return found and (found[1], found[2])


@flax.struct.dataclass
class Memory:
    """Running averages of each slot's request: `share` of the first drafter's expected drafts that were accepted, and
    drafts of the second `accepted` in a round. `expected` is the first's in the last round, 0 if the second's
    drafts were taken. `length` is what the request will have in its next round, by which another one shows."""

    share: Float[Array, " r"]
    accepted: Float[Array, " r"]
    expected: Float[Array, " r"]
    length: Int[Array, " r"]


@dataclass(frozen=True)
class Combined(Drafter):
    """`first` looks up, `second` may have weights and state."""

    first: Drafter
    second: Drafter
    num_draft_tokens: int = 0

    def __post_init__(self):
        if self.second.topk > 1:
            raise ConfigError(
                f"{type(self.second).__name__} drafts trees (topk is {self.second.topk}), which can't be combined with "
                "a lookup; drop --topk, or the lookup"
            )
        object.__setattr__(self, "num_draft_tokens", max(each.num_draft_tokens for each in self.both))

    @property
    def both(self) -> tuple[Drafter, Drafter]:
        return self.first, self.second

    @property
    def feature_layers(self):
        return self.second.feature_layers

    @property
    def reach(self):
        return self.second.reach

    @property
    def recent(self):
        return self.second.recent

    @property
    def lookahead(self):
        return max(self.num_draft_tokens + 1, self.second.lookahead)

    def on_one_of(self, size):
        return replace(self, first=self.first.on_one_of(size), second=self.second.on_one_of(size))

    def kv_bytes_per_token(self, dtype):
        return self.second.kv_bytes_per_token(dtype)

    def init_state(self, layout, num_slots):
        start = Memory(
            share=jnp.ones(num_slots),
            accepted=jnp.ones(num_slots),
            expected=jnp.zeros(num_slots),
            length=jnp.zeros(num_slots, jnp.int32),
        )
        return *(each.init_state(layout, num_slots) for each in self.both), start

    def propose(self, params, state, batch):
        first, second, memory = state
        found, first = self.first.propose((), first, batch)
        drawn, second = self.second.propose(params, second, batch)
        expected = _expected(found)
        taken = (found.count > 0) & (expected * memory.share[batch.slots] > memory.accepted[batch.slots])
        expected = memory.expected.at[batch.slots].set(jnp.where(taken, expected, 0.0))
        proposal = self._chosen(taken, found, drawn, batch.greedy)
        return proposal, (first, second, memory.replace(expected=expected))

    def _chosen(self, taken: Array, found: Proposal, drawn: Proposal, greedy: bool) -> Proposal:
        n = self.num_draft_tokens
        wide = lambda x: jnp.pad(x, ((0, 0), (0, n - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))  # noqa: E731
        tokens = jnp.where(taken[:, None], wide(found.tokens), wide(drawn.tokens))
        count = jnp.where(taken, found.count, drawn.count)
        if greedy or drawn.probs is None:
            return Proposal(tokens, count)
        probs, (taken, own) = wide(drawn.probs), my_requests((taken, tokens))  # of which the probabilities are
        certain = own[..., None] == jnp.arange(probs.shape[-1])  # a lookup draws from nothing
        return Proposal(tokens, count, jnp.where(taken[:, None, None], certain.astype(probs.dtype), probs))

    def commit(self, params, state, batch, verified):
        """The second may find drafts that aren't its own, as where a grammar forced them."""
        first, second, memory = state
        first = self.first.commit((), first, batch, verified)
        second = self.second.commit_others(params, second, batch, verified)
        return first, second, self._remember(memory, batch, verified)

    commit_others = commit

    def narrowed(self, drafts):
        """Each side with at most so many drafts."""
        sides = (each.narrowed(drafts) if drafts < each.num_draft_tokens else each for each in self.both)
        return replace(self, **dict(zip(("first", "second"), sides, strict=True)))

    def prefill(self, params, state, batch, features):
        first, second, memory = state
        return first, self.second.prefill(params, second, batch, features), memory

    def _remember(self, memory: Memory, batch: Any, verified: Any) -> Memory:
        at, right = batch.slots, (verified.accepted - 1).astype(jnp.float32)
        drafted = memory.length[at] == batch.length  # else this is the first token of another request
        looked_up = drafted & (memory.expected[at] > 0)
        average = lambda before, now: MEMORY * before + (1 - MEMORY) * now  # noqa: E731
        share = average(memory.share[at], right / jnp.maximum(memory.expected[at], 1e-3))
        share = jnp.where(looked_up, share, jnp.where(drafted, memory.share[at], 1.0))
        drawn = ~looked_up & (self.num_draft_tokens > 0)  # a round without drafts says nothing of them
        accepted = jnp.where(drawn, average(memory.accepted[at], right), memory.accepted[at])
        accepted = jnp.where(drafted, accepted, 1.0)
        slots = jnp.where(batch.live, at, len(memory.share))  # out of range for padding, which is dropped
        return memory.replace(
            share=memory.share.at[slots].set(share, mode="drop"),
            accepted=memory.accepted.at[slots].set(accepted, mode="drop"),
            length=memory.length.at[slots].set(batch.length + verified.accepted, mode="drop"),
        )


def _expected(found: Proposal) -> Float[Array, " b"]:
    """How many drafts of a lookup are accepted, as far as it can tell: without a word of its own, half of them."""
    if found.confidence is None:
        return found.count / 2
    inside = jnp.arange(found.tokens.shape[1]) < found.count[:, None]
    return jnp.where(inside, jnp.cumprod(found.confidence, axis=1), 0.0).sum(axis=1)
