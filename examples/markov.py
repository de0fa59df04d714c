"""A drafter of your own, in one short file: a Markov chain over tokens that learns from everything the server reads.

    python -m server --draft examples.markov:Markov         # from the repository's root

One hash table on the device maps the last few tokens to the token that came next, last time anyone was there. It has
no weights and starts out empty; prompts and verified tokens fill it as they pass. The built-in `ngram` looks back in
the request's own text only. This one is shared by all requests, so it knows a question's answer the second time it is
asked, and a code base's idioms after a few files. The price: through timing, a user can learn what others were told.
Serve tenants who must not know of each other without it.

It is all that a drafter is: a frozen dataclass and pure functions over a state of its own. Nothing here is about
batching, paging, overlap, sampling or correctness, since drafts are suggestions: a hash collision costs a rejected
token. That is why the table needs no locks, no eviction, and no care for what two requests write into one place.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxspec.draft import Drafter, Proposal


@dataclass(frozen=True)
class Markov(Drafter):
    """The state is a table, u32[2**table_bits]; an entry is a token in the low bits and above it a tag of its context.

    `contexts`: how many of the last tokens are looked up, the most telling first. Empty entries are 0, as no tag is.
    """

    num_draft_tokens: int = 4
    vocab_bits: int = 18
    table_bits: int = 22  # 16 MiB
    contexts: tuple[int, ...] = (4, 2)

    @classmethod
    def load(cls, target, source, options):
        """Called once, with the target model: the place to read weights, which would be returned beside the drafter."""
        return cls(options.num_draft_tokens or 4, target.config.vocab_size.bit_length()), {}

    def init_state(self, layout, num_slots):
        """Whatever pytree is returned here lives on the device, and is handed from program to program."""
        return jnp.zeros(1 << self.table_bits, jnp.uint32)

    def propose(self, params, table, batch):
        """Walk the chain for all b requests at once, until a context was never seen."""
        window = batch.tokens(-max(self.contexts), max(self.contexts))  # i32[b, k], the newest token last
        known, count, drafts = batch.live, 0, []
        for _ in range(self.num_draft_tokens):
            token, found = self._next(table, window)
            known &= found
            count += known.astype(jnp.int32)
            drafts.append(token)
            window = jnp.concatenate([window[:, 1:], token[:, None]], axis=1)
        return Proposal(jnp.stack(drafts, axis=1), count), table

    def commit(self, params, table, batch, verified):
        """Learn what the target said: the tokens that this round yielded, each after those before it."""
        reach = max(self.contexts)
        text = jnp.concatenate([batch.tokens(-reach, reach), verified.outputs], axis=1)
        at = jnp.arange(text.shape[1])
        return self._learn(table, text, (at >= reach) & (at < reach + verified.accepted[:, None]))

    def prefill(self, params, table, batch, features):
        """Learn from a prompt, a block of it at a time (so contexts that straddle two blocks are missed)."""
        text = jnp.concatenate([batch.tokens[:, :1], batch.next_tokens], axis=1)
        return self._learn(table, text, jnp.arange(text.shape[1]) <= batch.rows.count[:, None])

    def _next(self, table, window):
        """The token after each window i32[b, k], by the first of the contexts that the table knows; and whether any."""
        token, found = jnp.zeros(window.shape[0], jnp.int32), jnp.zeros(window.shape[0], bool)
        for size in self.contexts:
            index, tag = self._place([window[:, i] for i in range(window.shape[1] - size, window.shape[1])])
            entry = table[index]
            hit = ~found & (entry - entry % (1 << self.vocab_bits) == tag)
            token = jnp.where(hit, (entry % (1 << self.vocab_bits)).astype(jnp.int32), token)
            found |= hit
        return token, found

    def _learn(self, table, text, new):
        """Enter the tokens of `text` i32[b, n] where `new` bool[b, n], under each of their contexts."""
        for size in self.contexts:
            ends = text.shape[1] - size
            index, tag = self._place([text[:, i : i + ends] for i in range(size)])
            entry = tag | text[:, size:].astype(jnp.uint32)
            table = table.at[jnp.where(new[:, size:], index, table.size)].set(entry, mode="drop")
        return table

    def _place(self, context):
        """Where a context, its tokens i32[...] in order, has its entry, and the tag that tells it from others there."""
        mixed = jnp.uint32(len(context))
        for token in context:
            mixed = (mixed ^ token.astype(jnp.uint32)) * jnp.uint32(0x9E3779B1)
            mixed ^= mixed >> 15
        tag = (mixed * jnp.uint32(0x85EBCA6B) | jnp.uint32(1 << 31)) >> self.vocab_bits << self.vocab_bits
        return mixed % (1 << self.table_bits), tag
