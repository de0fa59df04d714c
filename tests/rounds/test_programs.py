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
from tests.support.trees import Notes, assert_noted, padded

CONTEXT, VOCAB = 192, 64
LENGTHS = (1, 64, 71)  # one token; a whole prefill program; one and a bit
NEW_TOKENS = 23


@dataclass(frozen=True)
class Recorder(Notes, Drafter):
    num_draft_tokens: int = 2
    feature_layers: tuple[int, ...] = (1, 0)
    noted = CONTEXT

    def propose(self, params, state, batch):
        """The last two tokens again: right now and then, and wrong now and then."""
        return Proposal(batch.tokens(-2, 2), jnp.where(batch.live, 2, 0)), state


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
    texts = [out.prompt_token_ids + out.token_ids for out in outs]
    states = jaxspec.hidden_states(runner.model, padded(texts, 0), Recorder.feature_layers)
    for slot, text in enumerate(texts):  # slots are handed out in order, each to one request only
        assert_noted(runner.state.draft, slot, text, states[:, slot, : len(text) - 1])
