"""Medusa's heads (https://arxiv.org/abs/2401.10774) as an experiment: defined, trained, served and measured.

    python -m examples.medusa                                # on the demo: some minutes on a CPU

Head k is a residual block over the last hidden state, before the model's own output head. It guesses the token that is
k + 1 tokens after the next one. The heads learn from the model's own answers and are then given to the engine.
"""

import argparse
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxspec
from jaxspec.config.flags import positive
from jaxspec.decoder.forward import unembed
from jaxspec.draft import Drafter, Proposal

TOPICS = "rain, bread, the sea, a dog, music, iron, winter, trains, the moon, salt, clocks, a garden"
ANSWERS = jaxspec.SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)


@dataclass(frozen=True)
class Medusa(Drafter):
    """Drafts a chain from one hidden state, all heads at once. Params: the target's, and `heads` f32[k, d, d]."""

    num_draft_tokens: int
    decoder: object
    feature_layers: tuple[int, ...]  # the final norm's output

    def guess(self, params, hidden):
        """Logits f32[k, ..., v] of all heads after final hidden states [..., d] (section 2.1.1)."""
        hidden = hidden.astype(jnp.float32)
        out = hidden + jax.nn.silu(jnp.einsum("...d,kde->k...e", hidden, params["heads"]))
        return unembed(params["target"], out.astype(params["target"]["norm"].dtype), self.decoder)

    def init_state(self, layout, num_slots):
        return jnp.zeros((num_slots, self.decoder.width))

    def propose(self, params, state, batch):
        logits = self.guess(params, state[batch.slots])
        tokens, probs = zip(*(batch.choose(each, k) for k, each in enumerate(logits)), strict=True)
        probs = None if batch.greedy else jnp.stack(probs, axis=1)
        count = jnp.full_like(batch.length, self.num_draft_tokens)
        return Proposal(jnp.stack(tokens, axis=1), count, probs, jnp.moveaxis(logits, 0, 1)), state

    def commit(self, params, state, batch, verified):
        newest = verified.features[0][jnp.arange(len(batch.slots)), jnp.maximum(verified.accepted - 1, 0)]
        return state.at[batch.slots].set(newest.astype(state.dtype))


def train(model, texts, heads=2, steps=60, rows=128):
    """Fit the heads to texts int[b, t] that the model wrote. Returns a drafter that `jaxspec.LLM` takes."""
    layers, width, last = model.config.num_layers, model.config.hidden_size, texts.shape[1] - heads - 1
    drafter, optimiser = Medusa(heads, model.config.decoder, (layers,)), optax.adam(1e-3)
    # The hidden state at t leads to token t + 1; head k, from 0, learns token t + 2 + k.
    states = jaxspec.hidden_states(model, texts, (layers,))[0][:, :last].reshape(-1, width)
    labels = np.stack([texts[:, 2 + k : 2 + k + last].reshape(-1) for k in range(heads)])

    @jax.jit
    def step(params, state, target, x, y):
        guess = lambda heads: drafter.guess({"heads": heads, "target": target}, x)  # noqa: E731
        loss = lambda heads: optax.softmax_cross_entropy_with_integer_labels(guess(heads), y).mean()  # noqa: E731
        value, slope = jax.value_and_grad(loss)(params)
        change, state = optimiser.update(slope, state)
        return optax.apply_updates(params, change), state, value

    params = jnp.zeros((heads, width, width))
    state, draw = optimiser.init(params), np.random.default_rng(0)
    for _ in range(steps):
        some = draw.integers(0, len(states), rows)
        params, state, loss = step(params, state, model.params, states[some], labels[:, some])
    print(f"loss {loss:.2f} after {steps} steps")
    return jaxspec.LoadedDrafter("medusa", drafter, {"heads": params, "target": model.params})


def main(name="smollm2-135m-instruct", steps=60, **options):
    model = jaxspec.load_model(name, dtype="float32")
    prompts = [f"Write a paragraph about {topic}." for topic in TOPICS.split(", ")]
    plain = jaxspec.LLM(model, **options).generate(prompts, ANSWERS)
    texts = np.array([out.token_ids for out in plain])
    llm = jaxspec.LLM(model, train(model, texts[:-2], steps=steps), **options)
    assert [out.token_ids for out in llm.generate(prompts[-2:], ANSWERS)] == texts[-2:].tolist()
    length = llm.engine.stats()["avg_spec_accept_length"]
    print(f"{length:.2f} tokens a round on two other topics; the text is plain decoding's")
    return length


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", dest="name", default="smollm2-135m-instruct", help="it writes (%(default)s)")
    parser.add_argument("--steps", type=positive, default=60, help="of training (%(default)s)")
    main(**vars(parser.parse_args()))
