"""Forced acceptance: a drafter whose drafts are accepted at given rates, whatever the model says.

So a round's cost is measured apart from the quality of drafts, on random weights too. Drafting, the forward over all
rows, and the choice of a token at each row run as always. Only the verdict is replaced, so the text means nothing. A
tree's depth would depend on its content, which random weights make meaningless. So its first drafts form one path, and
that path is accepted. All shapes, and so the work, are those of any other tree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from jaxspec.bench.results import BenchError
from jaxspec.drafters.loading import LoadedDrafter
from jaxspec.engine.engine import Engine
from jaxspec.sampling import sampling

RATES = "accept_rates"  # of the drafter's params, f32[lists, drafts]


def force(draft: LoadedDrafter, rates: Sequence[float]) -> LoadedDrafter:
    """`draft` with a full number of drafts in every round, of which the first i+1 stand with probability
    `rates[0] * ... * rates[i]`: each rate is that of a position, given that all before it were accepted. The drafter's
    own confidence, which knows nothing of the rates, is dropped.

    **Raises:** `BenchError` unless there is a rate for each draft of a chain, or each step of a tree.
    """
    return force_mixed(draft, [rates])


def force_mixed(draft: LoadedDrafter, mixed: Sequence[Sequence[float]]) -> LoadedDrafter:
    """Force one of several lists of rates on each request of a batch, by their slots in turn. `impose` changes the
    rates later.

    **Raises:** `BenchError` as `force`.
    """
    drafter = draft.drafter
    for rates in mixed:
        _check(draft, rates)

    class Forced(type(drafter)):
        """A subclass, so that whatever else the engine asks of a drafter is answered by the original."""

        def propose(self, params, state, batch):
            proposal, state = super().propose(params, state, batch)
            rates = params[RATES]
            longest = rates.shape[1]
            position = batch.length[:, None] + jnp.arange(longest)
            coin = sampling.uniform(sampling.keys(batch.sampling.seed, position, sampling.ACCEPT))
            own = rates[batch.slots % len(rates)]
            stand = jnp.cumprod(coin < own, axis=1).sum(axis=1).astype(jnp.int32)
            drafts = self.num_draft_tokens
            count = jnp.where(batch.live, drafts, 0)  # an n-gram drafter finds nothing in random text
            if proposal.parents is not None:
                path = jnp.where(jnp.arange(drafts) < longest, jnp.arange(drafts), 0)
                proposal = proposal.replace(parents=jnp.broadcast_to(path, proposal.parents.shape))
            return proposal.replace(count=count, forced=stand, confidence=None), state

    fields = {f.name: getattr(drafter, f.name) for f in dataclasses.fields(drafter) if f.init}
    params = {**(draft.params or {}), RATES: jnp.array(mixed, jnp.float32)}
    return LoadedDrafter(draft.name, Forced(**fields), params)


def _check(draft: LoadedDrafter, rates: Sequence[float]) -> None:
    drafter = draft.drafter
    if len(rates) != drafter.longest:
        drafts, each, option = f"{drafter.num_draft_tokens} tokens", "draft", "--num-draft-tokens"
        if drafter.topk > 1:
            drafts, each, option = f"trees of {drafts}, {drafter.longest} deep", "step", "--num-steps"
        raise BenchError(
            f"--accept-rates has {len(rates)} rates; --draft {draft.name} drafts {drafts}: give one for each {each} "
            f"({option} says how many)"
        )


def impose(engine: Engine, mixed: Sequence[Sequence[float]]) -> None:
    """Other rates for the rounds of an engine whose drafter `force_mixed` made: as many lists for a batch as it had, or
    a number that divides it."""
    programs = engine.runner.programs
    target, draft = programs._params
    lists = len(draft[RATES])
    rates = jnp.array([mixed[i % len(mixed)] for i in range(lists)], jnp.float32)
    programs._params = target, {**draft, RATES: rates}


def expected_length(rates: Sequence[float]) -> float:
    """Mean tokens per round at these rates, the bonus included."""
    total, reach = 1.0, 1.0
    for rate in rates:
        reach *= rate
        total += reach
    return total
