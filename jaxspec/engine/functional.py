"""Models and drafters as plain functions, for research and tests: no engine, no server, no state between calls."""

from __future__ import annotations

import functools
import operator
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.cache.mixers import WholeTexts
from jaxspec.cache.paged import PageLayout
from jaxspec.cache.recurrent import NOTHING
from jaxspec.checkpoint import Model
from jaxspec.config.json_values import shown
from jaxspec.config.options import ConfigError
from jaxspec.config.request import RequestError
from jaxspec.decoder.forward import forward, unembed
from jaxspec.drafters.base import DraftBatch, proposed
from jaxspec.drafters.loading import LoadedDrafter
from jaxspec.rounds import programs as rounds
from jaxspec.rounds.packing import empty_slots, pack_blocks

PAGE = 16
SHORTEST = 32  # tokens that `propose` pads a prompt to, at least: to a power of two, so that few programs are compiled


def logits(model: Model, tokens: Int[Any, "b t"]) -> Float[Array, "b t v"]:
    """Logits after every token, f32[b, t, v]. No cache; every sequence starts at position 0.

    **Arguments:** `tokens`: token ids int[b, t], as an array or lists of one length. Compiles for each new [b, t].

    **Raises:** `RequestError` for tokens that aren't i32[b, t] within the vocabulary, `ConfigError` if `model` isn't
    one that `jaxspec.load_model` returns.
    """
    tokens = _checked(model, tokens)
    return _logits(model.config, model.params, tokens)


def hidden_states(
    model: Model, tokens: Int[Any, "b t"], layers: tuple[int, ...] | list[int]
) -> Float[Array, "l b t d"]:
    """Hidden states after decoder layers: the residual stream before any further norm, f32[l, b, t, d].

    **Arguments:** `tokens` as for `logits`. `layers`: layer numbers from 0, in the order of the result; the model's
    number of layers stands for the final norm's output.

    **Raises:** as `logits`, and `RequestError` for a layer that the model doesn't have.
    """
    tokens = _checked(model, tokens)
    try:
        layers = tuple(operator.index(i) for i in layers)
    except TypeError as error:
        raise RequestError(f"layers must be a list of layer numbers, got {shown(layers)}", "layers") from error
    if not layers:
        raise RequestError("layers must name at least one layer", "layers")
    if bad := [i for i in layers if not 0 <= i <= model.config.num_layers]:
        raise RequestError(
            f"layers {bad} don't exist; the model has layers 0 to {model.config.num_layers - 1}, and "
            f"{model.config.num_layers} stands for the final norm",
            "layers",
        )
    return _hidden_states(model.config, layers, model.params, tokens)


def _checked(model: Model, tokens: Any) -> np.ndarray:
    if not isinstance(model, Model):
        named = repr(model) if isinstance(model, str) else "'Qwen/Qwen3-8B'"
        raise ConfigError(f"model must be a loaded one, got {shown(model)}; load it first: jaxspec.load_model({named})")
    if model.tp_size > 1:
        raise ConfigError(
            f"model was loaded with tp_size={model.tp_size}; these functions run on one device: load it with tp_size=1"
        )
    if isinstance(tokens, jax.core.Tracer):
        raise RequestError(
            "tokens must be known, since their values are checked; call this outside of jax.jit, vmap and the like: it "
            "is compiled already",
            "tokens",
        )
    try:
        tokens = np.asarray(tokens)
    except ValueError as error:
        raise RequestError("tokens must be int[b, t]: sequences of one length, or one at a time", "tokens") from error
    if tokens.ndim != 2 or tokens.size == 0 or not np.issubdtype(tokens.dtype, np.integer):
        raise RequestError(f"tokens must be int[b, t], not empty; got {tokens.dtype}{list(tokens.shape)}", "tokens")
    if tokens.min() < 0 or tokens.max() >= model.config.vocab_size:
        raise RequestError(
            f"token ids must be 0 to {model.config.vocab_size - 1}, got {tokens.min()} to {tokens.max()}", "tokens"
        )
    return tokens.astype(np.int32)


def _forward(config, params, tokens, capture=()):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return forward(config.decoder, params, tokens, positions, WholeTexts(), None, capture)


@partial(jax.jit, static_argnums=0)
def _logits(config, params, tokens):
    return unembed(params, _forward(config, params, tokens).last, config.decoder)


@partial(jax.jit, static_argnums=(0, 1))
def _hidden_states(config, layers, params, tokens):
    return jnp.stack(_forward(config, params, tokens, layers).features).astype(jnp.float32)


@flax.struct.dataclass
class Proposed:
    """Result of `propose`. `tokens[:count]` are drafts of the tokens after `next_token`, as target ids.

    In a tree, draft i follows `next_token` if `parents[i]` is 0, and draft `parents[i] - 1` otherwise. `confidence` is
    the drafter's estimate that each draft is accepted if those before it are, None if it makes none.
    """

    next_token: int
    tokens: Int[np.ndarray, " n"]
    count: int
    logits: Float[np.ndarray, "n w"] | None
    parents: Int[np.ndarray, " n"] | None = None
    confidence: Float[np.ndarray, " n"] | None = None


def propose(model: Model, drafter: LoadedDrafter, prompt_tokens: list[int], n: int) -> Proposed:
    """Run the target over a prompt, take its greedy next token, then draft up to `n` tokens after that.

    **Arguments:** `prompt_tokens`: token ids, at least one. `n`: most drafts; of a tree, all of its tokens.

    **Returns:** a `Proposed`. Its `logits`, f32[n, draft vocabulary], are those that each draft was taken from, None if
    the drafter has none.

    The functions are those of the engine's programs. They are compiled once for prompts of similar lengths if the
    drafter is hashable.

    **Raises:** as `logits`, and `ConfigError` if `drafter` isn't one that `jaxspec.load_drafter` returns, or can't
    draft `n` tokens.
    """
    if not isinstance(prompt_tokens, list | tuple | np.ndarray | jax.Array) or not np.size(prompt_tokens):
        raise RequestError(
            f"prompt_tokens must be a list of token ids, at least one, got {shown(prompt_tokens)}", "prompt_tokens"
        )
    if isinstance(prompt_tokens, np.ndarray | jax.Array) and prompt_tokens.ndim != 1:
        raise RequestError(
            f"prompt_tokens must be int[t], got {prompt_tokens.dtype}{list(prompt_tokens.shape)}", "prompt_tokens"
        )
    prompt = _checked(model, [prompt_tokens])[0]
    if not isinstance(drafter, LoadedDrafter):
        named = repr(drafter) if isinstance(drafter, str) else "'ngram'"
        raise ConfigError(
            f"drafter must be a loaded one, got {shown(drafter)}; load it first: jaxspec.load_drafter({named}, model)"
        )
    drafter = _resized(drafter, n, model.config.max_position)
    length, lookahead = len(prompt), drafter.drafter.lookahead
    block = max(SHORTEST, 1 << (length - 1).bit_length())
    table = np.arange(1, 1 - (-(block + 1 + lookahead) // PAGE))
    known = pack_blocks([(0, 0, length, NOTHING, NOTHING)], [prompt.tolist()], table[None], block)
    padded = np.pad(prompt, (0, block + 1 + lookahead - length))
    args = model.params, drafter.params, padded, length, known, table
    what = model.config, drafter.drafter, block, model.dtype
    try:
        run = _proposer(*what)
    except TypeError:  # the drafter can't be hashed
        run = _proposer.__wrapped__(*what)
    next_token, proposal = run(*args)
    return Proposed(
        next_token=int(next_token),
        tokens=np.asarray(proposal.tokens[0]),
        count=int(np.clip(proposal.count[0], 0, proposal.tokens.shape[1])),
        logits=None if proposal.logits is None else np.asarray(proposal.logits[0]),
        parents=None if proposal.parents is None else np.asarray(proposal.parents[0]),
        confidence=None if proposal.confidence is None else np.asarray(proposal.confidence[0]),
    )


@functools.lru_cache(maxsize=32)
def _proposer(config, drafter, block, dtype):
    return jax.jit(partial(_propose, config, drafter, block, dtype))


def _propose(config, drafter, block, dtype, params, draft_params, history, length, known, table):
    """The token after `history[:length]`, and a `Proposal` of what follows it. `known` is a prefill's one block."""
    (capacity,), (pages,) = history.shape, table.shape
    slots = empty_slots(1, capacity)
    slots = slots.replace(
        history=slots.history.at[0].set(history),
        length=slots.length.at[0].set(length),
        limit=slots.limit.at[0].set(capacity),
        done=slots.done.at[0].set(False),
    )
    state = rounds.empty_state(config, drafter, PageLayout(pages + 1, PAGE, dtype), 1, capacity, dtype)
    args = params, draft_params
    state, _ = rounds.prefill(config, drafter, block, False, *args, state.replace(slots=slots), known)
    state, out = rounds.first(config, drafter, rounds.GREEDY, *args, state, jnp.append(0, table)[None])
    slots = jax.tree.map(lambda x: x[:1], state.slots)
    batch = DraftBatch(
        jnp.zeros((1,), jnp.int32), slots.length, slots.history, table[None], ~slots.done, slots.sampling, True
    )
    return out[0, rounds.TOKENS], proposed(drafter, draft_params, state.draft, batch)[0]


def _resized(drafter: LoadedDrafter, n: int, most: int) -> LoadedDrafter:
    import dataclasses

    if isinstance(n, bool) or not isinstance(n, int | np.integer) or not 1 <= n <= most:
        raise ConfigError(f"n must be an integer from 1 to {most}, the model's positions, got {n!r}")
    n = int(n)
    if n == drafter.drafter.num_draft_tokens:
        return drafter
    if not drafter.drafter.num_draft_tokens:
        raise ConfigError(f"{drafter.name} drafts nothing; load another drafter, for example ngram")
    if not dataclasses.is_dataclass(drafter.drafter):
        raise ConfigError(
            f"{drafter.name} drafts {drafter.drafter.num_draft_tokens} tokens; make it a dataclass to change that"
        )
    return dataclasses.replace(drafter, drafter=dataclasses.replace(drafter.drafter, num_draft_tokens=n))
