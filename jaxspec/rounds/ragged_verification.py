"""Ragged verification: a round's rows shared out among its requests, by how likely each one's drafts are to stand.

A round of n drafts a request verifies b * (n + 1) rows. Here the drafter drafts more, and those rows go to the drafts
that are likeliest to be accepted together with all before them, whosever they are. One request may have all of its
drafts verified and its neighbour none.

Rows are packed: the target's forward sees each as a request of one row, with the page table of the request it is of. So
kernels and paths are those of plain decoding. A row sees the rows before it of the same request because each layer
writes all rows' keys and values before any row attends. Linear attention gets each request's rows side by side.

Invariant: whether draft j of a request is verified depends on the drafts before it, on rounds that were concluded and
on other requests, never on the token drawn for draft j or for one after it. So sampled text keeps the target's
distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache.mixers import Cache, RoundRows
from jaxspec.cache.paged import Rows
from jaxspec.decoder.forward import Hidden, forward
from jaxspec.drafters.base import DraftBatch, Drafter, Proposal
from jaxspec.models.model_config import ModelConfig
from jaxspec.pallas.recurrence.causal_conv import Channels
from jaxspec.rounds.packing import Slots

DECAY = 0.97  # of what a request's drafts came to, with each further round
AHEAD = 2  # times the average: the most drafts of one request, where each takes the drafter a step
FIRST = 0.6  # acceptance before any draft was tried
LEAST, MOST = 4.0, 1e4  # drafts that all requests' acceptance counts as, beside a request's own


@dataclass(frozen=True)
class Ragged(Drafter):
    """A drafter of chains, of whose drafts a round verifies `each` a request on average. If that is all of them, rows
    aren't packed."""

    of: Drafter
    each: int

    @property
    def num_draft_tokens(self):
        return self.of.num_draft_tokens

    @property
    def feature_layers(self):
        return self.of.feature_layers

    @property
    def packs(self) -> bool:
        return self.each < self.num_draft_tokens

    def propose(self, params, state, batch):
        return self.of.propose(params, state, batch)

    def commit(self, params, state, batch, verified):
        return self.of.commit(params, state, batch, verified)

    def shared(self, proposal: Proposal, slots: Slots, batch: DraftBatch) -> Proposal:
        """The proposal with the drafts that are verified, by the drafter's own confidence or else by how often each
        request's drafts were accepted."""
        if not self.packs:
            return proposal
        rates = proposal.confidence
        if rates is None:
            rates = jnp.broadcast_to(standing(slots, batch.live)[:, None], proposal.tokens.shape)
        rows = len(batch.live) * (self.each + 1)
        return proposal.replace(count=share(rates, proposal.count, rows - batch.live.sum()))


def most(drafter: Drafter, each: int) -> int:
    """The most drafts that a request has of those that are shared out, `each` on average."""
    return min(drafter.num_draft_tokens, AHEAD * each) if drafter.steps else drafter.num_draft_tokens


def sharing(drafter: Drafter, each: int) -> Ragged:
    """The drafter of rounds with `each` drafts a request on average."""
    some = most(drafter, each)
    return Ragged(drafter if some == drafter.num_draft_tokens else drafter.narrowed(some), each)


def share(rates: Float[Array, "b d"], count: Int[Array, " b"], rows: Int[Array, ""]) -> Int[Array, " b"]:
    """How many drafts of each request to verify, so that `rows` of them, all requests' together, come to the most
    accepted tokens. `rates` says how likely each is accepted if those before it are; there are `count` of each.

    A draft's worth is the product of the rates up to it. Nobody's later draft is worth more than an earlier one, so the
    `rows` of the highest worth are the first few of each request. Of equals, the first request's come first.
    """
    b, d = rates.shape
    worth = jax.lax.cummin(jnp.cumprod(rates.astype(jnp.float32), axis=1), axis=1)  # sums in a tree may round upwards
    worth = jnp.where(jnp.arange(d) < count[:, None], worth, -1.0).reshape(-1)
    order = jnp.arange(b * d)
    better = (worth > worth[:, None]) | ((worth == worth[:, None]) & (order < order[:, None]))
    chosen = (better.sum(axis=1) < rows) & (worth >= 0)
    return chosen.reshape(b, d).sum(axis=1).astype(jnp.int32)


def standing(slots: Slots, live: Bool[Array, " b"]) -> Float[Array, " b"]:
    """How likely a draft of each request is accepted, by its own drafts lately and by all requests'.

    All requests' acceptance counts as much as so many drafts of a request's own that differences between requests are
    told from chance (empirical Bayes, by moments). So those that are alike have equally many drafts.
    """
    tried, stood = (jnp.where(live, x, 0.0) for x in (slots.tried, slots.stood))
    usual = (stood.sum() + LEAST * FIRST) / (tried.sum() + LEAST)
    chance = usual * (1 - usual)  # the variance of a draft, were all requests alike
    beyond = jnp.sum((stood - usual * tried) ** 2 - tried * chance) / jnp.maximum(jnp.sum(tried**2), 1.0)
    prior = jnp.clip(chance / jnp.maximum(beyond, 1e-9), LEAST, MOST)
    return (stood + prior * usual) / (tried + prior)


def observe(slots: Slots, ids: Int[Array, " b"], drafted: Int[Array, " b"], accepted: Int[Array, " b"]) -> Slots:
    """The slots after a round, in which so many drafts of each request were verified and so many tokens accepted, the
    target's own included. Drafts behind the first that was refused weren't tried."""
    tried = DECAY * slots.tried[ids] + jnp.minimum(drafted, accepted)
    stood = DECAY * slots.stood[ids] + jnp.maximum(accepted - 1, 0)
    return slots.replace(tried=slots.tried.at[ids].set(tried), stood=slots.stood.at[ids].set(stood))


@flax.struct.dataclass
class Packed:
    """Rows of several requests one behind the other: packed row i is row `row[i]` of request `request[i]`.

    Request r has its first one at `first[r]`. Rows that aren't `valid` are padding, at the end.
    """

    request: Int[Array, " n"]
    row: Int[Array, " n"]
    valid: Bool[Array, " n"]
    first: Int[Array, " b"]

    @classmethod
    def of(cls, count: Int[Array, " b"], n: int) -> Packed:
        """n rows, `count` of each request, which are no more together."""
        end, at = jnp.cumsum(count), jnp.arange(n)
        request = jnp.minimum((end <= at[:, None]).sum(axis=1), len(count) - 1)
        first = end - count
        return cls(request, jnp.maximum(at - first[request], 0), at < end[-1], first)

    def take(self, x: Array) -> Array:
        """[b, q, ...] -> [n, 1, ...]."""
        return x[self.request, jnp.minimum(self.row, x.shape[1] - 1)][:, None]

    def spread(self, x: Array, q: int) -> Array:
        """[n, 1, ...] -> [b, q, ...]. Rows that a request doesn't have are another's, and to be ignored."""
        return x[:, 0][jnp.minimum(self.first[:, None] + jnp.arange(q), len(x) - 1)]


PACKED = "the rows are packed"


@flax.struct.dataclass
class PackedRows(RoundRows):
    """`RoundRows` of packed rows. Recurrent layers, whose state goes from row to row, have each request's side by side,
    `width` of them; those that a request doesn't have are never entered into its state."""

    packed: Packed
    width: int = flax.struct.field(pytree_node=False)

    def convolve(self, cache, layer, x, weight, mix, bias=None):
        mix = mix._replace(rows=self.width) if isinstance(mix, Channels) else mix
        out, cache = super().convolve(cache, layer, self.packed.spread(x, self.width), weight, mix, bias)
        return jax.tree.map(self.packed.take, out), cache

    def before(self, cache, layer, x, back):
        x = self.packed.spread(x, self.width)
        before, cache = super().before(cache, layer, x, back)
        inputs, row = jnp.concatenate([before, x], axis=1), self.packed.row[:, None] + jnp.arange(back)
        return inputs[self.packed.request[:, None], row], cache

    def recur(self, cache, layer, q, k, v, decay, beta, padded_rows):
        rows = (self.packed.spread(x, self.width) for x in (q, k, v, decay, beta))
        out, cache = super().recur(cache, layer, *rows, self.width)
        out = self.packed.take(out)
        return jnp.pad(out, ((0, 0), (0, padded_rows - 1), (0, 0), (0, 0))), cache

    def accumulate(self, cache, layer, *of):
        out, cache = super().accumulate(cache, layer, *(self.packed.spread(x, self.width) for x in of))
        return self.packed.take(out), cache

    def unnormed(self, cache, q, v):
        return PACKED

    def unstepped(self, cache, q, x):
        return PACKED


def run(
    config: ModelConfig,
    drafter: Ragged,
    params: Any,
    cache: Cache,
    replay: Int[Array, " b"],
    batch: DraftBatch,
    proposal: Proposal,
    adapters: Int[Array, " b"] | None = None,
) -> tuple[Hidden, Packed]:
    """The target's forward over each request's newest token and its drafts that are verified, packed as returned.

    `replay`: as of `mixers.RoundRows`. `adapters`: as of `forward`, by request.
    """
    count = jnp.where(batch.live, proposal.count + 1, 0)
    packed = Packed.of(count, len(count) * (drafter.each + 1))
    of = packed.request
    tokens = packed.take(jnp.concatenate([batch.tokens(-1, 1), proposal.tokens], axis=1))
    rows = Rows(batch.length[of] - 1 + packed.row, packed.valid.astype(jnp.int32), batch.table[of], uneven=True)
    rows = rows if batch.shift is None else rows.replace(shift=batch.shift[of])
    mixer = PackedRows(rows, batch.slots, replay, packed, drafter.num_draft_tokens + 1)
    positions = rows.marked_positions(1)
    given = config.decoder, params, tokens, positions, mixer, cache, drafter.feature_layers
    return forward(*given, adapters=None if adapters is None else adapters[of]), packed
