"""N-gram drafting: find the last few tokens earlier in the request's own text and propose what followed them.

Prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding), on the device against the token
history, so it overlaps with everything else. Strong wherever the answer quotes the prompt or repeats itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp

from jaxspec.config.options import ConfigError, option
from jaxspec.drafters.base import Drafter, Proposal


@dataclass(frozen=True)
class Ngram(Drafter):
    """`min_match` to `max_match` tokens must repeat; longer matches win, then later ones. No match drafts nothing."""

    num_draft_tokens: int = 4
    min_match: int = option(2, "shortest match of the last tokens that counts", least=1)
    max_match: int = option(5, "longest match to look for", least=1)

    def __post_init__(self):
        if self.min_match > self.max_match:
            raise ConfigError(f"min_match ({self.min_match}) must not exceed max_match ({self.max_match})")

    @classmethod
    def load(cls, target, source, options):
        return cls(options.num_draft_tokens or 4), {}

    def on_one_of(self, size):
        """Return the drafter itself: all devices know all texts."""
        return self

    def propose(self, params, state, batch):
        c = batch.history.shape[1]
        position = jnp.arange(c)
        # matched[r, p]: how many tokens ending at p equal the request's last tokens, up to max_match
        running = position < batch.length[:, None] - 1
        matched = jnp.zeros(batch.history.shape, jnp.int32)
        for k in range(self.max_match):
            running &= (jnp.roll(batch.history, k, axis=1) == batch.tokens(-1 - k, 1)) & (position >= k)
            matched += running
        best = jnp.argmax(jnp.where(matched >= self.min_match, matched * c + position, -1), axis=1)
        found = jnp.take_along_axis(matched, best[:, None], axis=1)[:, 0] >= self.min_match
        # The match is `period` tokens back; past the end of the text its continuation repeats with that period.
        period = jnp.maximum(batch.length - 1 - best, 1)
        offset = jnp.arange(self.num_draft_tokens) % period[:, None]
        tokens = jnp.take_along_axis(batch.history, jnp.clip(best[:, None] + 1 + offset, 0, c - 1), axis=1)
        return Proposal(tokens, jnp.where(found & batch.live, self.num_draft_tokens, 0)), state

    def narrowed(self, drafts):
        return replace(self, num_draft_tokens=drafts) if drafts else super().narrowed(0)

    def idle(self, params, state, batch):
        return state
