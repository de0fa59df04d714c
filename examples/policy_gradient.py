"""A policy gradient (https://link.springer.com/article/10.1007/BF00992696) in one process, with drafts and no mismatch.

    python -m examples.policy_gradient                       # on the demo: some minutes on a CPU
    python -m examples.policy_gradient --left-behind         # its drafter stays as it is

The policy learns to write without the letter e. Each step samples texts, takes the gradient of their log-probabilities,
and hands the new weights to the engine by reference. Its EAGLE-3 drafter learns from the texts of each step, too.
"""

import argparse
import functools
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxspec
from jaxspec.config.flags import positive
from jaxspec.train.following import Follower

TOPICS = ("rain", "bread", "the sea", "a dog", "music", "iron", "winter", "trains")


def main(name="smollm2-135m-instruct", draft="auto", steps=12, samples=8, tokens=16, rate=3e-4, follow=True, **options):
    """Train for some `steps` of `samples` texts. Returns the reward, tokens a round and mismatches of each."""
    on_cpu = jax.default_backend() == "cpu"
    model = jaxspec.load_model(name, dtype="float32" if on_cpu else "bfloat16", progress=False)
    few = {"skip_warmup": True, "few_programs": True, "num_continuous_decode_steps": 1}  # programs to compile
    options = {"context_length": 64, "max_running_requests": samples, **few, **options}
    llm = jaxspec.LLM(model, draft, deterministic=True, draft_policy="fixed", **options)
    follower = Follower(llm, learning_rate=1e-4) if follow else None
    prompts = [model.tokenizer.encode(f"Here is a story about {topic}.") for topic in TOPICS]
    prompts = [prompts[i % len(prompts)] for i in range(samples)]
    lengths, optimiser = np.array([len(prompt) for prompt in prompts]), optax.adam(rate)
    size = lengths.max() + tokens
    answered = (np.arange(1, size) >= lengths[:, None]) & (np.arange(1, size) < lengths[:, None] + tokens)
    has_e = np.array(["e" in model.tokenizer.decode([i]).lower() for i in range(model.config.vocab_size)])
    logprobs = functools.partial(jaxspec.logprobs, model, config=llm.engine.config)

    def weights(params, policy):
        """The model's, with the policy's in the last layers: float32 here, in the model's dtype there."""
        last = jax.tree.map(lambda new, old: new.astype(old.dtype), policy, params["layers"][-len(policy) :])
        return {**params, "layers": [*params["layers"][: -len(policy)], *last]}

    @jax.jit
    def learn(policy, state, params, texts, advantages):
        loss = lambda policy: -(advantages * logprobs(texts, lengths, params=weights(params, policy))).sum()  # noqa: E731
        change, state = optimiser.update(jax.grad(loss)(policy), state)
        return optax.apply_updates(policy, change), state

    policy = jax.tree.map(lambda x: x.astype(jnp.float32), model.params["layers"][-8:])
    # Committed to a device, as the results of a step are: so each program is compiled once.
    first, policy, state = jax.device_put((model.params, policy, optimiser.init(policy)), jax.devices()[0])
    served, history = first, []
    nothing = np.zeros((samples, size), np.int32), np.zeros((samples, size - 1), np.float32)
    with ThreadPoolExecutor() as pool:  # XLA compiles the trainer's programs beside the engine's
        compiled = [pool.submit(logprobs, nothing[0], lengths, params=served),
                    pool.submit(learn, policy, state, served, *nothing)]  # fmt: skip
        if follower is not None:
            compiled.append(pool.submit(follower.compile, samples, size))
        llm.generate(prompts, jaxspec.SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0))
        for each in compiled:
            each.result()
    for step in range(steps):
        began = time.monotonic()
        settings = [jaxspec.SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0, seed=i + samples * step)
                    for i in range(samples)]  # fmt: skip
        outs = llm.generate(prompts, settings)
        rows = [prompt + out.token_ids for prompt, out in zip(prompts, outs, strict=True)]
        texts = np.array([row + [0] * (size - len(row)) for row in rows])
        # The engine's log-probabilities beside those of the weights that it was given: they have the same bits.
        mine = np.asarray(logprobs(texts, lengths, params=served))[answered]
        theirs = np.float32([one.logprob for out in outs for one in out.logprobs])
        reward = np.where(answered, 1.0 - has_e[texts[:, 1:]], 0)
        advantages = np.where(answered, reward - reward[answered].mean(), 0) / answered.sum()
        policy, state = learn(policy, state, first, texts, advantages.astype(np.float32))
        served = weights(first, policy)
        llm.update_weights(served, version=f"step {step + 1}")
        if follower is not None:
            follower.learn(texts, lengths, lengths + tokens)
            llm.update_weights(draft=follower.params(), version=f"step {step + 1}")
        rounds, yielded = (sum(getattr(out.metrics, field) for out in outs)
                           for field in ("verify_rounds", "verified_tokens"))  # fmt: skip
        history.append((reward[answered].mean(), yielded / rounds, int((mine != theirs).sum())))
        print("step {}: reward {:.3f}, {:.2f} tokens a round, {} mismatches".format(step, *history[-1]),
              f"in {len(mine)}, {time.monotonic() - began:.1f} s", flush=True)  # fmt: skip
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", dest="name", default="smollm2-135m-instruct", help="it is trained (%(default)s)")
    parser.add_argument("--steps", type=positive, default=12, help="updates (%(default)s)")
    parser.add_argument("--samples", type=positive, default=8, help="texts of each step (%(default)s)")
    parser.add_argument("--tokens", type=positive, default=16, help="of each text (%(default)s)")
    parser.add_argument("--left-behind", dest="follow", action="store_false", help="the drafter stays as it is")
    main(**vars(parser.parse_args()))
