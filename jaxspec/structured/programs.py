"""A round as three programs, so that a grammar's masks can depend on its drafts: draft, forward, conclude.

The drafts are known as soon as `draft` has run, and are copied to the host. While the device runs `forward`, the host
walks each grammar along them and makes the masks of all rows, with which `conclude` ends the round. Nothing else
differs from the round that is one program: the parts are the same functions of `round`.

The grammar's forced text is drafted here too. `conclude` is given, for each row, what must follow its own output,
keeps that of the last row that stands, and the next `draft` puts it in place of the drafter's proposal.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec.decoder.forward import unembed
from jaxspec.drafters.base import Drafter, Proposal
from jaxspec.models.model_config import ModelConfig
from jaxspec.parallel.sharding import all_gather_requests, logits_of_my_requests, my_requests, top_tokens
from jaxspec.rounds.packing import take_adapters
from jaxspec.rounds.programs import (
    GREEDY,
    Masks,
    State,
    batch_of,
    keep_replay,
    of_prompts,
    propose,
    run_rows,
    tokens_if_finite,
)
from jaxspec.rounds.programs import conclude as end
from jaxspec.sampling import sampling

ON_DEVICE = -1  # as a number of forced drafts: what the request's last round left there counts


@dataclasses.dataclass(frozen=True)
class OpenRound:
    """A round whose drafts and forward have been dispatched. `drafts` i32[b, w] are on their way to the host: for each
    request how many, which, and in a tree their parents."""

    packed: Array
    mode: str
    drafts: Array
    handed: tuple


def columns(drafts: int) -> int:
    """Columns of a packed request before its page table: its slot, how many drafts are forced, and those."""
    return 2 + drafts


def put_forced(packed: np.ndarray, forced: list[list[int] | None]) -> np.ndarray:
    """The packed requests, with the drafts that are forced in each; None: those that its last round left there."""
    for row, tokens in zip(packed, forced, strict=False):
        row[1] = ON_DEVICE if tokens is None else len(tokens)
        row[2 : 2 + len(tokens or ())] = tokens or ()
    return packed


def words(vocab: int) -> int:
    """32-bit words of a mask over the vocabulary."""
    return -(-vocab // 32)


def _requests(drafter: Drafter, state: State, packed: Int[Array, "b k"], mode: str):
    return batch_of(state, packed[:, 0], packed[:, columns(drafter.num_draft_tokens) :], mode)


def draft(
    config: ModelConfig, drafter: Drafter, mode: str, params: Any, draft_params: Any, state: State, packed
) -> tuple[State, Proposal, Int[Array, "b w"]]:
    """Draft for the requests in `packed[i]` = slot, forced drafts (`ON_DEVICE`, or how many), those, page table.

    Also returned, for the host: how many drafts, which, and in a tree their parents.
    """
    slots, batch = _requests(drafter, state, packed, mode)
    given, kept = packed[:, 1 : columns(drafter.num_draft_tokens)], state.forced[batch.slots]
    forced = jnp.where(given[:, :1] == ON_DEVICE, kept, given)
    change = lambda proposal: force(proposal, forced[:, 0], forced[:, 1:], drafter.longest)  # noqa: E731
    proposal, state = propose(drafter, draft_params, state, slots, batch, change)
    for_host = [proposal.count[:, None], proposal.tokens]
    if proposal.parents is not None:
        for_host.append(proposal.parents)
    return state, proposal.replace(logits=None), jnp.concatenate(for_host, axis=1)


def force(proposal: Proposal, count: Int[Array, " b"], tokens: Int[Array, "b d"], longest: int) -> Proposal:
    """The proposal with its first `count` drafts replaced by `tokens`, as many as a round can accept.

    The drafter's own further drafts stay if its first ones were these anyway; otherwise they follow another text.
    Forced drafts have no siblings, so a tree becomes a chain.
    """
    count, draft = jnp.minimum(count, longest), jnp.arange(tokens.shape[1])
    over = draft < count[:, None]
    same = ((proposal.tokens == tokens) | ~over).all(axis=1)
    probs, parents = proposal.probs, proposal.parents
    if parents is not None:
        same = jnp.zeros_like(same)
        parents = jnp.where(count[:, None] > 0, draft, parents)
    if probs is not None:
        own_over, own_tokens = my_requests((over, tokens))  # of which the probabilities are
        certain = jnp.arange(probs.shape[-1]) == own_tokens[..., None]
        probs = jnp.where(own_over[..., None], certain.astype(probs.dtype), probs)
    stays = (count == 0) | same & (proposal.count > count)
    return proposal.replace(
        tokens=jnp.where(over, tokens, proposal.tokens),
        count=jnp.where(stays, proposal.count, count),
        probs=probs,
        parents=parents,
    )


def forward(
    config: ModelConfig, drafter: Drafter, params: Any, draft_params: Any, state: State, packed, proposal: Proposal
) -> tuple[State, Float[Array, "b q v"], tuple[Float[Array, "b q d"], ...]]:
    """The target's logits after the newest token and each draft, of this device's part of the vocabulary, and the
    features that the drafter asks for, then the rows to be reported."""
    packed, adapters = take_adapters(params, packed)
    slots, batch = _requests(drafter, state, packed, GREEDY)
    hidden, state = run_rows(config, drafter, params, state, slots, batch, proposal, adapters)
    return state, unembed(params, hidden.last, config.decoder), hidden.features + state.reported.of(hidden)


def conclude(
    config: ModelConfig,
    drafter: Drafter,
    mode: str,
    params: Any,
    draft_params: Any,
    state: State,
    packed: Int[Array, "b k"],
    proposal: Proposal,
    logits: Float[Array, "b q v"],
    features: tuple[Float[Array, "b q d"], ...],
    bits: UInt32[Array, "b q w"],
    forced: Int[Array, "b q k"],
) -> tuple[State, Int[Array, "b w"]]:
    """Accept, commit and advance, among the tokens that `bits` allow. Packed as by `programs.decode_round`."""
    slots, batch = _requests(drafter, state, packed, mode)
    scores, masks = _score(logits, bits, forced, mode, config.vocab_size)
    state, out = end(drafter, mode, draft_params, state, slots, batch, proposal, scores, features, masks)
    return keep_replay(config, state, batch.slots, out), out


def first(
    config: ModelConfig, drafter: Drafter, mode: str, params: Any, draft_params: Any, state: State, packed, bits, forced
) -> tuple[State, Int[Array, "b w"]]:
    """`programs.first` among the tokens that `bits` u32[b, 1, w] allow; `forced` is i32[b, 1, k]."""
    slots, batch = _requests(drafter, state, packed, mode)
    nothing, hidden = of_prompts(state, batch)
    scores, masks = _score(unembed(params, hidden.last, config.decoder), bits, forced, mode, config.vocab_size)
    return end(drafter, mode, draft_params, state, slots, batch, nothing, scores, hidden.features, masks)


def _score(
    logits: Float[Array, "b q v"], bits: UInt32[Array, "b q w"], forced: Int[Array, "b q k"], mode: str, vocab: int
) -> tuple[Array, Masks]:
    """Scores as `conclude` takes them, and the masks."""
    b, logits = len(bits), logits_of_my_requests(logits, vocab)
    masks = Masks(unpack(my_requests(bits), vocab), forced)
    if mode != GREEDY:
        return logits, masks
    best = tokens_if_finite(*top_tokens(sampling.allow(logits, logits, masks.allowed)))
    return all_gather_requests(best, b), masks


def unpack(bits: UInt32[Array, "b q w"], vocab: int) -> Bool[Array, "b q v"]:
    """Masks of bits, the lowest of each word first, as booleans."""
    each = (bits[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    return each.reshape(*bits.shape[:2], -1)[..., :vocab].astype(bool)
