"""Measure a drafter on texts, cell by cell: `MODEL=M python examples/idea.py`, or a notebook of an editor.

VS Code, PyCharm and jupytext open a script with cells as a notebook. `DRAFT` may be any drafter, one of yours too.
"""

# %% A model, a drafter, and a text that the model continues
import os

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec

model = jaxspec.load_model(os.environ.get("MODEL", "smollm2-135m-instruct"), dtype="float32")
drafter = jaxspec.load_drafter(os.environ.get("DRAFT", "ngram"), model)
text = np.array([model.tokenizer.encode("One, two, three, one, two, three, one, two, three, one,")])

# %% Prefill once, then a step a token: the model's own continuation
begun = jaxspec.prefill(model, text, capacity=text.shape[1] + 24)
cache, newest = begun.cache, begun.logits[:, -1:].argmax(-1)
step = jax.jit(lambda params, cache, tokens: jaxspec.step(model, cache, tokens, params=params))
for _ in range(16):
    text = np.concatenate([text, newest], axis=1)
    out = step(model.params, cache, newest)
    cache, newest = jaxspec.keep(out.cache, jnp.ones(1, jnp.int32)), out.logits[:, -1:].argmax(-1)
print(repr(model.tokenizer.decode(text[0].tolist())))

# %% Drafts after every position, beside what the text says there
drafts = 3
made = jaxspec.propose_along(model, drafter, text, drafts, start=4)
places = 4 + 1 + np.arange(made.tokens.shape[1])[:, None] + np.arange(drafts)  # of each draft's token
inside = (places < text.shape[1]) & (np.arange(drafts) < np.asarray(made.count)[0][:, None])
right = inside & (np.asarray(made.tokens)[0] == text[0][np.minimum(places, text.shape[1] - 1)])
length = 1 + np.cumprod(right, axis=1).sum(axis=1).mean()
print(f"{length:.2f} tokens a round, were there a round at every position")

# %% Sampled: the tokens a round to expect of these drafts, without the noise of coins
at = text.shape[1] - 1 - drafts  # a round whose drafts have all the text behind them
logits = jaxspec.logits(model, text)[0, at : at + drafts + 1]
guess = made.tokens[:, at - 4]
certain = jax.nn.one_hot(guess, logits.shape[-1])  # a drafter without probabilities is certain
p = jax.nn.softmax(logits / 0.8)[None]
expected = jaxspec.verify.expected_length(p, guess, made.count[:, at - 4], certain)
print(f"{float(expected[0]):.2f} tokens in a round at temperature 0.8")
