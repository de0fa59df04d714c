"""Suffix decoding: draft what most often followed the last few tokens, in this request's text and recent responses.

SuffixDecoding (Oliaro et al., https://arxiv.org/abs/2411.04975). For each length of match there is a draft: the most
frequent next token, then the most frequent after that, for as long as the product of their shares is likely enough. The
draft of the highest expected yield wins, so its length follows how sure the text is. `Reference` is the definition.

The published implementation keeps suffix trees on the host. The host doesn't know the newest tokens here, since rounds
are dispatched before the last one is read, and a tree's pointers have no static shape. So nothing is indexed: a round
compares the last tokens with every position of the text, as `ngram` does, keeps the `max_matches` best, and counts
among these what the tree's nodes would. That needs no update but appending tokens, costs the same in each round, and
survives overlap, preemption and the prefix cache. The text is the request's own history, which the engine has, and a
pool of the last `max_requests` responses, one row each, the oldest overwritten. The pool is what n-grams over all
requests would be; there is no other drafter for that. It is shared: through timing a user can learn what others were
told, and `max_requests=0` keeps requests apart.

Among equally frequent tokens the tree takes the one at the front of a list that is sorted by swaps. `_order` finds it
without the list. Drafts equal `Reference`'s where no match has more than `max_matches` occurrences, nor more than
`LENGTHS` different lengths, tokens that tie have been seen at most `TIES` + 1 times, and no response has been
overwritten or cut off.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.config.options import option
from jaxspec.drafters.base import Drafter, Proposal
from jaxspec.drafters.suffix_reference import Reference as Reference

TIES = 6
LENGTHS = 8  # lengths of match that are tried, the longest of those there are
BLOCK = 128
NEVER = -2  # no token, and not the -1 that matches nothing either


@flax.struct.dataclass
class Pool:
    """Recent responses: row i has `tokens[i, :size[i]]`, the token at j appended at time `stamp[i, j]`.

    A request writes to the row of its slot, while that row's owner is its slot. `length` is what a slot's request will
    have in its next round, by which another request shows. `start` is the next row, `clock` the next time; time wraps
    around, so stamps compare by their age.
    """

    tokens: Int[Array, "n w"]
    stamp: Int[Array, "n w"]
    size: Int[Array, " n"]
    owner: Int[Array, " n"]
    row: Int[Array, " r"]
    length: Int[Array, " r"]
    start: Int[Array, ""]
    clock: Int[Array, ""]


@dataclass(frozen=True)
class Suffix(Drafter):
    """Matches have up to `max_depth` - 1 tokens, a match and its draft together up to `max_depth`."""

    num_draft_tokens: int = 8
    max_depth: int = option(24, "most tokens of a match and its draft together", least=2)
    max_requests: int = option(64, "recent responses to look in, of all requests; 0: the request's own text", least=0)
    max_response: int = option(1024, "tokens of a response that are kept for other requests", least=1)
    max_matches: int = option(64, "occurrences counted: those that match longest, then the latest", least=1)
    max_factor: float = option(1.0, "most drafts for each token of the match", between=(0, 1000))
    min_prob: float = option(0.1, "estimated probability below which a draft ends", between=(0, 1))

    @classmethod
    def load(cls, target, source, options):
        return cls(options.num_draft_tokens or 8), {}

    def on_one_of(self, size):
        """Return the drafter itself: all devices know all texts."""
        return self

    def init_state(self, layout, num_slots):
        if not self.max_requests:
            return {}
        rows = max(self.max_requests, num_slots - 1)  # each running request needs one
        zeros = lambda *shape: jnp.zeros(shape, jnp.int32)  # noqa: E731
        text = rows, self.max_response
        slots = zeros(num_slots), zeros(num_slots)
        return Pool(zeros(*text), zeros(*text), zeros(rows), zeros(rows) - 1, *slots, zeros(), zeros())

    def narrowed(self, drafts):
        return replace(self, num_draft_tokens=drafts)

    def propose(self, params, state, batch):
        if not self.num_draft_tokens:
            return Proposal.none(len(batch.length)), state
        back = jnp.arange(self.max_depth - 1)
        tail = jnp.take_along_axis(batch.history, jnp.maximum(batch.length[:, None] - 1 - back, 0), axis=1)
        tail = jnp.where(back < batch.length[:, None] - 1, tail, -1)  # the newest first; never the whole text

        def one(history, length, tail):
            texts = [self._matches(history[None], jnp.arange(history.size)[None], length[None], tail)]
            if self.max_requests:
                age = state.stamp - state.clock  # the oldest is lowest, however often the clock went around
                texts.append(self._matches(state.tokens, age, state.size, tail))
            tokens, probs, score = jax.vmap(self._draft)(*map(jnp.stack, zip(*texts, strict=True)))
            best = jnp.argmax(score)  # its own text, of equals
            return tokens[best], probs[best]

        tokens, probs = jax.vmap(one)(batch.history, batch.length, tail)
        before = jnp.pad(probs, ((0, 0), (1, 0)), constant_values=1.0)[:, :-1]
        count = jnp.where(batch.live, (probs > 0).sum(axis=1), 0)
        return Proposal(tokens, count, confidence=probs / jnp.where(before > 0, before, 1.0)), state

    def commit(self, params, state, batch, verified):
        if not self.max_requests:
            return state
        slots, q = batch.slots, verified.outputs.shape[1]
        rows, capacity = state.tokens.shape
        count = jnp.where(batch.live, verified.accepted, 0)
        # One row of a drafter that drafts is a request's first token; a preempted one comes back at another length than
        # its slot had.
        first = q == 1 and self.num_draft_tokens > 0
        starts = batch.live & (first | (state.length[slots] != batch.length))
        row = jnp.where(starts, (state.start + jnp.cumsum(starts) - 1) % rows, state.row[slots])
        fresh = jnp.where(starts, row, rows)
        owner = state.owner.at[fresh].set(slots, mode="drop")
        size = state.size.at[fresh].set(0, mode="drop")
        mine = batch.live & (owner[row] == slots)
        at = size[row][:, None] + jnp.arange(q)
        at = jnp.where(mine[:, None] & (jnp.arange(q) < count[:, None]), at, capacity)
        time = state.clock + (jnp.cumsum(count) - count)[:, None] + jnp.arange(q)
        known = jnp.where(batch.live, slots, len(state.row))
        return Pool(
            tokens=state.tokens.at[row[:, None], at].set(verified.outputs, mode="drop"),
            stamp=state.stamp.at[row[:, None], at].set(time, mode="drop"),
            size=size.at[jnp.where(mine, row, rows)].add(count, mode="drop").clip(max=capacity),
            owner=owner,
            row=state.row.at[known].set(row, mode="drop"),
            length=state.length.at[known].set(batch.length + count, mode="drop"),
            start=(state.start + starts.sum()) % rows,
            clock=state.clock + count.sum(),
        )

    def _matches(
        self, text: Int[Array, "n w"], time: Int[Array, "n w"], size: Int[Array, " n"], tail: Int[Array, " t"]
    ) -> tuple[Int[Array, " k"], Int[Array, "k d"], Int[Array, "k d"]]:
        """The k occurrences in `text[i, :size[i]]` that match most of `tail`, and of those the last.

        How many tokens each matches, 0 if it's none; the d tokens after it, -1 beyond the text; and their times.
        """
        k, (n, w), most = self.max_matches, text.shape, self.max_depth - 1
        padded = jnp.pad(text, ((0, 0), (most, 0)), constant_values=NEVER)
        running, found = jnp.arange(w) < size[:, None], jnp.zeros((n, w), jnp.int32)
        for back in range(most):
            running &= padded[:, most - back : most - back + w] == tail[back]
            found += running
        found = found.reshape(-1)[::-1]  # the last first
        # More than k match `short` tokens or more, while all that match one more have room. The last fill up the rest.
        short = jnp.int32(0)
        for bit in reversed(range(most.bit_length())):
            short += jnp.where((found >= short + (1 << bit)).sum() > k, 1 << bit, 0)
        sure, shorter = _first(found > short, k), _first((found == short) & (short > 0), k)
        room = k - (sure < len(found)).sum()
        at = jnp.where(jnp.arange(k) < k - room, sure, shorter[jnp.maximum(jnp.arange(k) - k + room, 0)])
        found = jnp.where(at < n * w, found[jnp.minimum(at, n * w - 1)], 0)
        at = n * w - 1 - at
        after = (at % w)[:, None] + 1 + jnp.arange(self.num_draft_tokens)
        there = (at // w)[:, None], jnp.minimum(after, w - 1)
        inside = (after < size[there[0]]) & (found[:, None] > 0)
        return found, jnp.where(inside, text[there], -1), time[there]

    def _draft(
        self, found: Int[Array, " k"], after: Int[Array, "k d"], time: Int[Array, "k d"]
    ) -> tuple[Int[Array, " d"], Float[Array, " d"], Float[Array, ""]]:
        """The best draft after these occurrences: its tokens, how likely they are up to each, and the sum of that.

        All lengths of match draft side by side, each from the occurrences that match at least so many tokens. A length
        that no occurrence has drafts the same as the next longer one, and may go further: `max_depth` counts both.
        """
        match = [found.max()]
        for _ in range(min(LENGTHS, self.max_depth - 1)):
            match.append(jnp.where(found < match[-1], found, 0).max())
        shorter, match = jnp.stack(match[1:]), jnp.stack(match[:-1])  # falling
        each = jnp.arange(1, self.max_depth)
        most = jnp.minimum((each * self.max_factor + 1e-6).astype(jnp.int32), self.max_depth - each)
        limit = jnp.where((each <= match[:, None]) & (each > shorter[:, None]), most, 0).max(axis=1)
        alive = (found >= match[:, None]) & (match > 0)[:, None]

        def step(carry, seen):
            alive, several, going, prob = carry
            number, token, time = seen
            same = (token[:, None] == token) & (token >= 0)
            alive &= token >= 0
            chosen, times = _favourite(alive, same, time)
            prob = prob * (times.astype(jnp.float32) / jnp.maximum(several, 1).astype(jnp.float32))
            going &= (times > 0) & (number < limit) & (prob >= jnp.float32(self.min_prob))
            carry = alive & same[chosen], times, going, prob
            return carry, (jnp.maximum(token[chosen], 0), jnp.where(going, prob, 0.0))

        start = alive, alive.sum(axis=1), match > 0, jnp.ones(len(match))
        _, (tokens, probs) = jax.lax.scan(step, start, (jnp.arange(self.num_draft_tokens), after.T, time.T))
        score = probs[0]
        for prob in probs[1:]:
            score = score + prob
        best = jnp.argmax(score)  # the longest match, of equals
        return tokens[:, best], probs[:, best], score[best]


def _first(mask: Bool[Array, " n"], k: int) -> Int[Array, " k"]:
    """Where the first k are set; n for those there aren't."""
    n = len(mask)
    blocks = jnp.pad(mask, (0, -n % BLOCK)).reshape(-1, BLOCK)
    total = blocks.sum(axis=1)
    upto, number = jnp.cumsum(total), jnp.arange(1, k + 1)
    block = (upto < number[:, None]).sum(axis=1)
    there = jnp.minimum(block, len(blocks) - 1)
    within = jnp.cumsum(blocks[there], axis=1) >= (number - upto[there] + total[there])[:, None]
    return jnp.where(block < len(blocks), there * BLOCK + jnp.argmax(within, axis=1), n)


def _favourite(
    alive: Bool[Array, "m k"], same: Bool[Array, "k k"], time: Int[Array, " k"]
) -> tuple[Int[Array, " m"], Int[Array, " m"]]:
    """Among the occurrences that are `alive`, one with the most frequent token, and how frequent it is.

    `same[i, j]`: i and j have the same token, seen at `time`. Of tokens that are equally frequent it's the one at the
    front of a suffix tree's list (`_order`).
    """
    time = (time > time[:, None]).sum(axis=0) + 1  # 1 is the earliest; all differ
    counted = same & (time <= time[:, None])
    rank = jnp.where(alive, jnp.einsum("mj,ij->mi", alive.astype(jnp.float32), counted.astype(jnp.float32)), 0)
    rank = rank.astype(jnp.int32)
    most = rank.max(axis=1)
    key = _order(alive, same, time, rank)
    return jnp.argmax(jnp.where(alive & (rank == most[:, None]), key, -len(time) - 1), axis=1), most


def _order(
    alive: Bool[Array, "m k"], same: Bool[Array, "k k"], time: Int[Array, " k"], rank: Int[Array, "m k"]
) -> Int[Array, "m k"]:
    """Where a token stands, once it has been seen for the `rank`-th time, among those seen as often: a higher key is
    further in front.

    A token that is seen again joins those with one more: in front of them if it was in front of those that it leaves,
    behind them otherwise, as are new tokens. So a key is the time for one that went to the front, and minus the time
    for one that went to the back. Whether it was in front follows from the keys one rank below: each pass settles one
    rank more.
    """
    never = len(time) + 1
    earlier = time < time[:, None]  # [i, j]: j before i
    again = jnp.where(alive[:, None] & same & earlier.T, time, never).min(axis=2)  # when a token was seen next
    last = jnp.where(alive[:, None] & same & earlier, time, 0)
    before = jnp.argmax(last, axis=2)  # where it was seen last
    left = alive[:, None] & earlier & (rank[:, None] == rank[..., None] - 1) & (again[:, None] >= time[:, None])
    key = jnp.broadcast_to(-time, rank.shape)
    for _ in range(TIES):
        front = jnp.where(left, key[:, None], -never).max(axis=2)
        key = jnp.where((rank > 1) & (jnp.take_along_axis(key, before, axis=1) == front), time, -time)
    return key
