"""Forced acceptance: each position is accepted at its rate, in an engine whose drafts no model would accept."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import load_model
from jaxspec.bench import forced
from jaxspec.bench.results import BenchError
from jaxspec.drafters.base import DraftBatch, Drafter, Proposal
from jaxspec.drafters.loading import LoadedDrafter
from jaxspec.drafters.ngram import Ngram
from jaxspec.rounds.packing import empty_slots
from tests.support.sample import rare
from tests.support.tiny import tiny_checkpoint
from tests.support.trees import Session

ROWS = 4000
NGRAM = LoadedDrafter("ngram", Ngram(num_draft_tokens=3), {})


def propose(rates, length=50, seed=0) -> Proposal:
    """Propose with a forced n-gram drafter for many requests whose texts have no n-gram twice; the last is padding."""
    slots = jax.tree.map(lambda x: x[:ROWS], empty_slots(ROWS, 64))
    seeds = jax.random.bits(jax.random.key(seed), (ROWS, 2), "uint32")
    history = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32), (ROWS, 64))
    lengths = jnp.full((ROWS,), length, jnp.int32)
    live = jnp.arange(ROWS) < ROWS - 1
    sampling = slots.sampling.replace(seed=seeds)
    batch = DraftBatch(jnp.arange(ROWS), lengths, history, jnp.zeros((ROWS, 1), jnp.int32), live, sampling, True)
    draft = forced.force(NGRAM, rates)
    return jax.jit(draft.drafter.propose)(draft.params, {}, batch)[0]


def test_each_position_is_accepted_at_its_rate_if_those_before_were():
    stand = np.asarray(propose([0.75, 0.5, 0.25]).forced)
    for position, rate in enumerate((0.75, 0.5, 0.25)):
        reached = stand >= position
        assert np.mean(stand[reached] > position) == pytest.approx(rate, abs=4 * np.sqrt(0.25 / reached.sum()))
    assert 1 + stand.mean() == pytest.approx(forced.expected_length([0.75, 0.5, 0.25]), abs=0.08)
    assert forced.expected_length([0.75, 0.5, 0.25]) == 1 + 0.75 + 0.375 + 0.09375


def test_acceptance_follows_seed_and_position():
    rates = [0.5, 0.5, 0.5]
    first, again = np.asarray(propose(rates).forced), np.asarray(propose(rates).forced)
    assert (first == again).all()
    for other in (propose(rates, length=60), propose(rates, seed=1)):
        assert np.mean(first != np.asarray(other.forced)) > 0.5


def test_every_live_request_drafts_in_full_though_nothing_matches():
    count = np.asarray(propose([1.0, 0.0, 1.0]).count)
    assert (count[:-1] == 3).all() and count[-1] == 0


def test_the_rest_of_the_drafter_is_the_original():
    made = forced.force(NGRAM, [0.1, 0.2, 0.3]).drafter
    assert isinstance(made, Ngram) and (made.num_draft_tokens, made.max_match) == (3, 5)


@dataclasses.dataclass(frozen=True)
class Bush(Drafter):
    """All drafts hang from the newest token, so no path is longer than one."""

    num_draft_tokens: int = 7
    topk: int = 7

    @property
    def longest(self):
        return 3

    def propose(self, params, state, batch):
        tokens = jnp.zeros((len(batch.length), self.num_draft_tokens), jnp.int32)
        return Proposal(tokens, jnp.zeros(len(tokens), jnp.int32), parents=tokens), state


@pytest.mark.parametrize("stand", [rare(0), rare(2), 3])
def test_a_trees_first_drafts_are_the_path_that_stands(stand):
    model = load_model(str(tiny_checkpoint()), dtype="float32", progress=False)
    rates = [1.0] * stand + [0.0] * (3 - stand)
    draft = forced.force(LoadedDrafter("bush", Bush(), {}), rates)
    session = Session(model, draft.drafter, draft.params, [[1, 2, 3], [4]], new_tokens=13)
    full = 12 // (stand + 1)  # the first token is no round's
    for accepted, drafted in zip(session.accepted, session.drafted, strict=True):
        assert accepted[:full] == [stand + 1] * full and set(drafted) == {3}


def test_rates_must_be_as_many_as_drafts():
    with pytest.raises(
        BenchError, match="has 2 rates; --draft bush drafts trees of 7 tokens, 3 deep: give one for each s"
    ):
        forced.force(LoadedDrafter("bush", Bush(), {}), [0.5, 0.5])
    with pytest.raises(BenchError, match="has 2 rates; --draft ngram drafts 3 tokens: give one for each draft"):
        forced.force(NGRAM, [0.5, 0.5])
