"""Drafters see every committed token once, with the target's features of the token before it."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import LLM, SamplingParams
from jaxspec.drafters.base import Drafter, Proposal
from tests.support.sample import rare
from tests.support.tiny import tiny_checkpoint

CONTEXT, VOCAB, WIDTH = 192, 64, 32
LENGTHS = (1, 64, 71)  # one token; a whole prefill program; one and a bit
NEW_TOKENS = 23


@dataclass(frozen=True)
class Recorder(Drafter):
    """Notes by slot and position which token came next, the features it was shown with, and how often it was shown."""

    num_draft_tokens: int = 2
    feature_layers: tuple[int, ...] = (1, 0)

    def init_state(self, layout, num_slots):
        shape = (num_slots, CONTEXT)
        features = jnp.zeros((*shape, len(self.feature_layers), WIDTH))
        return {"next": jnp.zeros(shape, jnp.int32), "times": jnp.zeros(shape, jnp.int32), "features": features}

    def propose(self, params, state, batch):
        """The last two tokens again: right now and then, and wrong now and then."""
        return Proposal(batch.tokens(-2, 2), jnp.where(batch.live, 2, 0)), state

    def commit(self, params, state, batch, verified):
        return self._note(state, batch.slots, batch.length - 1, verified.accepted, verified.outputs, verified.features)

    def prefill(self, params, state, batch, features):
        return self._note(state, batch.slots, batch.rows.start, batch.rows.count, batch.next_tokens, features)

    def _note(self, state, slots, start, count, tokens, features):
        row = jnp.arange(tokens.shape[1])
        at = slots[:, None], jnp.where(row < count[:, None], start[:, None] + row, CONTEXT)
        return {
            "next": state["next"].at[at].set(tokens, mode="drop"),
            "times": state["times"].at[at].add(1, mode="drop"),
            "features": state["features"].at[at].set(jnp.stack(features, axis=2), mode="drop"),
        }


@pytest.mark.parametrize("rounds", [rare(1), 3])
def test_a_drafter_sees_every_token_once_with_the_features_before_it(rounds):
    llm = LLM(
        str(tiny_checkpoint("qwen3", VOCAB, 3)),
        f"{__name__}:Recorder",
        num_draft_tokens=2,
        context_length=CONTEXT,
        chunked_prefill_size=64,
        max_running_requests=len(LENGTHS),
        num_continuous_decode_steps=rounds,
        skip_warmup=True,
        few_programs=True,
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in LENGTHS]
    outs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True))
    runner, stats = llm.engine.runner, llm.engine.stats()
    assert ("rounds_greedy" in stats["dispatches"]) == (rounds > 1)
    assert sum(stats["accepted_per_position"]) > 0, "no draft was right, so rounds of several tokens weren't tested"
    for slot, out in enumerate(outs):  # slots are handed out in order, each to one request only
        text = out.prompt_token_ids + out.token_ids
        known, noted = len(text) - 1, {name: np.asarray(kept[slot]) for name, kept in runner.state.draft.items()}
        np.testing.assert_array_equal(noted["times"][:known], 1)
        np.testing.assert_array_equal(noted["times"][known:], 0)
        np.testing.assert_array_equal(noted["next"][:known], text[1:])
        expected = jaxspec.hidden_states(runner.model, [text[:-1]], Recorder.feature_layers)[:, 0]
        np.testing.assert_allclose(noted["features"][:known].swapaxes(0, 1), expected, atol=1e-4)
