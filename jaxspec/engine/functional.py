"""Models and drafters as plain functions, for research and tests: no engine, no server, no state between calls."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
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
from jaxspec.config.request import RequestError, SamplingParams
from jaxspec.decoder.forward import Hidden, forward, unembed
from jaxspec.drafters.base import DraftBatch, Proposal, Verified, proposed
from jaxspec.drafters.loading import LoadedDrafter
from jaxspec.models.model_config import ModelConfig
from jaxspec.rounds import programs as rounds
from jaxspec.rounds.packing import empty_slots, pack_blocks

PAGE = 16
ENCODE = "model.tokenizer.encode makes them of a text"
SHORTEST = 32  # tokens that `propose` pads a prompt to, at least: to a power of two, so that few programs are compiled


def logits(model: Model, tokens: Int[Any, "b t"], *, params: Any = None) -> Float[Array, "b t v"]:
    """Logits after every token, f32[b, t, v]. No cache; every sequence starts at position 0.

    **Arguments:** `tokens`: token ids int[b, t], as an array or lists of one length. Compiles for each new [b, t].
    Under `jax.jit`, `vmap` and the like they may be traced; then their values aren't checked. `params`: in place of the
    model's own, to differentiate by them or to keep them out of a compiled program's constants.

    **Raises:** `RequestError` for tokens that aren't i32[b, t] within the vocabulary, `ConfigError` if `model` isn't
    one that `jaxspec.load_model` returns.
    """
    tokens = checked(model, tokens)
    return plain_logits(model.config, own_params(model, params), tokens)


def hidden_states(
    model: Model, tokens: Int[Any, "b t"], layers: tuple[int, ...] | list[int], *, params: Any = None
) -> Float[Array, "l b t d"]:
    """Hidden states after decoder layers: the residual stream before any further norm, f32[l, b, t, d].

    **Arguments:** `tokens` and `params` as for `logits`. `layers`: layer numbers from 0, in the order of the result; -1
    stands for the embedding, and the model's number of layers for the final norm's output.

    **Raises:** as `logits`, and `RequestError` for a layer that the model doesn't have.
    """
    tokens, layers = checked(model, tokens), checked_layers(model, layers)
    if not layers:
        raise RequestError("layers must name at least one layer", "layers")
    return _hidden_states(model.config, layers, own_params(model, params), tokens)


def checked_layers(model: Model, layers: Any) -> tuple[int, ...]:
    """Layer numbers as a tuple. **Raises:** `RequestError` for one that the model doesn't have."""
    try:
        layers = tuple(operator.index(i) for i in layers)
    except TypeError as error:
        raise RequestError(f"layers must be a list of layer numbers, got {shown(layers)}", "layers") from error
    if bad := [i for i in layers if not -1 <= i <= model.config.num_layers]:
        raise RequestError(
            f"layers {bad} don't exist; the model has layers 0 to {model.config.num_layers - 1}; -1 stands for the "
            f"embedding and {model.config.num_layers} for the final norm",
            "layers",
        )
    return layers


def checked(model: Model, tokens: Any) -> np.ndarray | Array:
    """Tokens i32[b, t] for this model. **Raises:** as `logits`."""
    checked_model(model)
    return integers("tokens", tokens, ("b", "t"), 0, model.config.vocab_size - 1, ENCODE)


def checked_model(model: Any) -> None:
    """**Raises:** `ConfigError` unless it is one that `jaxspec.load_model` returns, on one device."""
    if not isinstance(model, Model):
        named = repr(model) if isinstance(model, str) else "'Qwen/Qwen3-8B'"
        raise ConfigError(f"model must be a loaded one, got {shown(model)}; load it first: jaxspec.load_model({named})")
    if model.tp_size > 1:
        raise ConfigError(
            f"model was loaded with tp_size={model.tp_size}; these functions run on one device: load it with tp_size=1"
        )


def fits(model: Model, name: str, length: int) -> None:
    """**Raises:** `RequestError` for a text that is longer than the model's positions."""
    if length > (most := model.config.max_position):
        raise RequestError(f"{name}: {length} tokens are more than the model's {most} positions. Give fewer", name)


def integers(
    name: str, value: Any, shape: Sequence[int | str], least: int, most: int | np.ndarray, hint: str = ""
) -> np.ndarray | Array:
    """`value` as an i32 array of `shape`, in which letters stand for any size above 0; traced values stay unread.

    **Raises:** `RequestError` for another shape or dtype, and for known values outside of `least` to `most`.
    """
    axes = ", ".join(map(str, shape))
    wanted = f"{name} must be int[{axes}]" if shape else f"{name} must be an integer"
    hint = f"; {hint}" if hint else ""
    traced = any(isinstance(each, jax.core.Tracer) for each in jax.tree.leaves(value))
    try:
        array = jnp.asarray(value) if traced else np.asarray(value)
    except ValueError as error:
        raise RequestError(f"{wanted}: sequences of one length, got {shown(value)}{hint}", name) from error
    if not np.issubdtype(array.dtype, np.integer) or not _has_shape(array, shape):
        given = shown(value) if array.dtype.kind in "OSU" else f"{array.dtype}[{', '.join(map(str, array.shape))}]"
        raise RequestError(f"{wanted}, got {given}{hint}", name)
    if traced:
        return array.astype(jnp.int32)
    if ((array < least) | (array > most)).any():
        raise RequestError(f"{name} must be from {least} to {np.max(most)}, got {shown(value)}{hint}", name)
    return array.astype(np.int32)


def _has_shape(array: Any, shape: Sequence[int | str]) -> bool:
    axes = zip(array.shape, shape, strict=False)
    return array.ndim == len(shape) and all(n > 0 if isinstance(axis, str) else n == axis for n, axis in axes)


def own_params(model: Model, params: Any) -> Any:
    """`params`, or the model's own if None. **Raises:** `RequestError` for a tree that lacks some of the model's."""
    if params is None:
        return model.params
    if not isinstance(params, Mapping) or (missing := sorted(model.params.keys() - params.keys())):
        lacks = f"it lacks {', '.join(missing)}" if isinstance(params, Mapping) else f"got {shown(params)}"
        raise RequestError(f"params must be a tree like model.params; {lacks}", "params")
    return params


def _forward(config, params, tokens, capture=()):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return forward(config.decoder, params, tokens, positions, WholeTexts(), None, capture)


@partial(jax.jit, static_argnums=0)
def plain_logits(config, params, tokens):
    return unembed(params, _forward(config, params, tokens).last, config.decoder)


@partial(jax.jit, static_argnums=(0, 1))
def _hidden_states(config, layers, params, tokens):
    return features_of(_forward(config, params, tokens, layers), tokens.shape, config)


def features_of(hidden: Hidden, shape: tuple[int, ...], config: ModelConfig) -> Float[Array, "l b t d"]:
    """Stack the layers that a forward captured: f32[l, b, t, d]."""
    none = jnp.zeros((0, *shape, config.hidden_size))
    return jnp.stack(hidden.features).astype(jnp.float32) if hidden.features else none


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
    checked_model(model)
    prompt = integers("prompt_tokens", prompt_tokens, ("t",), 0, model.config.vocab_size - 1, ENCODE)
    fits(model, "prompt_tokens", len(prompt))
    drafter = _resized(_loaded(drafter), n, model.config.max_position)
    length, lookahead = len(prompt), drafter.drafter.lookahead
    block = max(SHORTEST, 1 << (length - 1).bit_length())
    table = np.arange(1, 1 - (-(block + 1 + lookahead) // PAGE))
    known = pack_blocks([(0, 0, length, NOTHING, NOTHING)], [prompt.tolist()], table[None], block)
    padded = np.pad(prompt, (0, block + 1 + lookahead - length))
    args = model.params, drafter.params, padded, length, known, table
    what = model.config, drafter.drafter, block, model.dtype
    next_token, proposal = _cached(_proposer, *what)(*args)
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
    of = jnp.zeros((1,), jnp.int32), slots.length, slots.history, table[None], ~slots.done, slots.sampling, True
    batch = DraftBatch(*of, cache=state.cache)
    return out[0, rounds.TOKENS], proposed(drafter, draft_params, state.draft, batch)[0]


@flax.struct.dataclass
class ProposedAlong:
    """Result of `propose_along`, for s positions of b texts. Fields as of `Proposed`, and `probs`: what each draft was
    sampled from, None where the drafter takes the likeliest."""

    tokens: Int[Array, "b s n"]
    count: Int[Array, "b s"]
    logits: Float[Array, "b s n w"] | None
    probs: Float[Array, "b s n v"] | None
    parents: Int[Array, "b s n"] | None
    confidence: Float[Array, "b s n"] | None


def propose_along(
    model: Model,
    drafter: LoadedDrafter,
    tokens: Int[Any, "b t"],
    n: int,
    *,
    start: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
    distributions: bool = False,
) -> ProposedAlong:
    """Draft up to `n` tokens after each position of given texts, in one program.

    **Arguments:** `tokens`: int[b, t]. `start`: the first position whose token drafts follow; result [:, i] follows
    `tokens[:, :start + i + 1]`, to the texts' ends. `temperature` and `seed`: how drafts are sampled; 0 takes the
    likeliest. `distributions`: return `logits` and `probs` too, [b, t - start, n, vocabulary].

    The drafter's state follows the text, as the engine's follows accepted tokens one at a time.

    **Raises:** as `propose`.
    """
    tokens = checked(model, tokens)
    if isinstance(tokens, jax.core.Tracer):
        raise RequestError("tokens must be known; propose_along is one compiled program already", "tokens")
    if tokens.shape[1] < 2:
        raise RequestError("tokens must be two or more: drafts follow the second token on, which is known", "tokens")
    fits(model, "tokens", tokens.shape[1])
    start = int(integers("start", start, (), 1, tokens.shape[1] - 1))
    sampling = SamplingParams(temperature=temperature, seed=0 if seed is None else seed)  # which checks both
    temperature, seed = sampling.temperature, sampling.seed
    drafter = _resized(_loaded(drafter), n, model.config.max_position)
    what = model.config, drafter.drafter, model.dtype, start, temperature > 0, distributions
    seeds = np.array([[seed >> 32 & 0xFFFFFFFF, i + seed & 0xFFFFFFFF] for i in range(len(tokens))], np.uint32)
    run = _cached(_along_program, *what)
    return run(model.params, drafter.params, tokens, jnp.float32(temperature), seeds)


@functools.lru_cache(maxsize=32)
def _along_program(*what):
    return jax.jit(partial(_propose_along, *what))


def _cached(make, *what):
    """The program for this; made anew if the drafter can't be hashed."""
    try:
        return make(*what)
    except TypeError:
        return make.__wrapped__(*what)


def _propose_along(
    config, drafter, dtype, start, sampled, distributions, params, draft_params, texts, temperature, seeds
):
    (b, t), lookahead = texts.shape, drafter.lookahead
    pages = -(-(t + 1 + lookahead) // PAGE)
    table, ids, mode = 1 + jnp.arange(b * pages).reshape(b, pages), jnp.arange(b), rounds.SAMPLED
    layout, capacity = PageLayout(b * pages + 1, PAGE, dtype), t + 1 + lookahead
    state = rounds.empty_state(config, drafter, layout, b, capacity, dtype)
    slots = state.slots.replace(
        history=state.slots.history.at[:b, :t].set(texts),
        length=state.slots.length.at[:b].set(start),
        limit=state.slots.limit.at[:b].set(capacity),
        done=state.slots.done.at[:b].set(False),
        sampling=state.slots.sampling.replace(
            temperature=state.slots.sampling.temperature.at[:b].set(temperature),
            seed=state.slots.sampling.seed.at[:b].set(seeds),
        ),
    )
    state = state.replace(slots=slots)
    # A prefill of the texts' beginnings, all their tokens known, the newest row included.
    blocks = jnp.stack([ids, 0 * ids, 0 * ids + start, 0 * ids + NOTHING, 0 * ids + NOTHING, 0 * ids + 1], axis=1)
    packed = jnp.concatenate([blocks, texts[:, : start + 1], table], axis=1).astype(jnp.int32)
    state, _ = rounds.prefill(config, drafter, start, False, params, draft_params, state, packed)

    def take(state, batch, hidden):
        """The text's own next token, as if a round had yielded it."""
        row = Verified(batch.tokens(-1, 1), batch.tokens(0, 1), jnp.ones((b,), jnp.int32), hidden.features)
        draft = drafter.commit(draft_params, state.draft, batch, row)
        length = state.slots.length.at[:b].add(1)
        return state.replace(slots=state.slots.replace(length=length), draft=draft)

    def batch_of(state):
        slots, batch = rounds.batch_of(state, ids, table, mode)
        return slots, batch.replace(greedy=not sampled)

    _, batch = batch_of(state)
    state = take(state, batch, rounds.of_prompts(state, batch)[1])

    def at_position(state, _):
        slots, batch = batch_of(state)
        proposal, draft = proposed(drafter, draft_params, state.draft, batch)
        state = state.replace(draft=draft)
        hidden, state = rounds.run_rows(config, drafter, params, state, slots, batch, Proposal.none(b))
        state = take(state, batch, hidden)
        replay = state.replay.at[:b].set(1 if config.recurrent else 0)
        if not distributions:
            proposal = proposal.replace(logits=None, probs=None)
        count = jnp.clip(proposal.count, 0, proposal.tokens.shape[1])
        return state.replace(replay=replay), proposal.replace(count=count, forced=None)

    _, each = jax.lax.scan(at_position, state, length=t - start)
    each = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), each)
    return ProposedAlong(each.tokens, each.count, each.logits, each.probs, each.parents, each.confidence)


def _loaded(drafter: Any) -> LoadedDrafter:
    if not isinstance(drafter, LoadedDrafter):
        named = repr(drafter) if isinstance(drafter, str) else "'ngram'"
        raise ConfigError(
            f"drafter must be a loaded one, got {shown(drafter)}; load it first: jaxspec.load_drafter({named}, model)"
        )
    return drafter


def _resized(drafter: LoadedDrafter, n: int, most: int) -> LoadedDrafter:
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
