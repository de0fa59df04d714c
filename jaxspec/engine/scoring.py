"""Log-probabilities of whole texts, with the bits that an engine with `--deterministic` reports.

A prompt runs in prompt blocks and the rest in rounds of known tokens, as in the engine: the two differ in their bits.
"""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.cache.mixers import PromptBlocks, RoundRows, empty_cache
from jaxspec.cache.paged import PageLayout, Rows, page_dtype
from jaxspec.cache.recurrent import NOTHING
from jaxspec.checkpoint import Model
from jaxspec.compiling import xla_options
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.json_values import shown
from jaxspec.config.options import ConfigError
from jaxspec.config.request import RequestError
from jaxspec.decoder.forward import Hidden, forward
from jaxspec.engine.deterministic import PROMPT_BLOCK, fixed_order
from jaxspec.engine.functional import PAGE, checked, own_params, plain_logits
from jaxspec.models.model_config import ModelConfig
from jaxspec.pallas import hopper
from jaxspec.rounds.programs import own_logprobs

ROWS = 8  # of a text that run in one round


def logprobs(
    model: Model,
    tokens: Int[Any, "b t"],
    prompt: int | Int[Any, " b"],
    *,
    config: EngineConfig | None = None,
    params: Any = None,
) -> Float[Array, "b t-1"]:
    """Log-probability of every token but the first, given those before it, f32[b, t - 1].

    They have the bits that an engine with `--deterministic` reports for the prompt's tokens and for those it generates,
    whatever its batches, drafts and cache hits were.

    **Arguments:** `tokens`: int[b, t], shorter texts padded at their ends with any token. `prompt`: how many tokens of
    each text are its prompt, at least 1. `config`: the engine's, `llm.engine.config`, whose context length and dtypes
    count; None is an engine that was given none. `params`: in place of the model's own, to differentiate by them.

    The values are exact; their derivative is that of `jaxspec.logits`, which sums in another order.

    **Raises:** as `jaxspec.logits`; `RequestError` for a prompt that isn't 1 to t tokens long; `ConfigError` for a
    model that `--deterministic` doesn't support.
    """
    tokens = checked(model, tokens)
    b, t = tokens.shape
    lengths = np.asarray(prompt)
    if lengths.shape not in ((), (b,)) or lengths.dtype.kind not in "iu" or not ((lengths > 0) & (lengths <= t)).all():
        raise RequestError(
            f"prompt must be from 1 to {t} tokens, one number or int[{b}], got {shown(prompt)}", "prompt"
        )
    if config is not None and not isinstance(config, EngineConfig):
        raise ConfigError(f"config must be an engine's, such as llm.engine.config, got {shown(config)}")
    options = config or EngineConfig(model=model.name, deterministic=True)
    if options.tp_size > 1:
        raise ConfigError(
            f"config has tp_size={options.tp_size}, whose sums have another order than those of one device, on which "
            "log-probabilities of whole texts are computed. Run the engine with tp_size=1"
        )
    dtypes = model.dtype, page_dtype(options.kv_cache_dtype, model.dtype), options.state_dtype
    sizes = -(-int(lengths.max()) // PROMPT_BLOCK), -(-(t - 1 - int(lengths.min())) // ROWS)
    lengths = np.broadcast_to(lengths, (b,)).astype(np.int32)

    def in_order(params):
        own = dataclasses.replace(model, params=params)
        return own if own.config.decoder.deterministic else fixed_order(own, options, ROWS)

    @jax.custom_vjp
    def exact(params, tokens):
        own = in_order(params)
        return _jitted()(own.config, dtypes, sizes, own.params, tokens, lengths)

    def slopes(given, slope):
        params, tokens = given
        return *jax.vjp(partial(_plain, any_order(model.config), tokens), params)[1](slope), None

    exact.defvjp(lambda params, tokens: (exact(params, tokens), (params, tokens)), slopes)
    given = own_params(model, params)
    if any(isinstance(each, jax.core.Tracer) for each in jax.tree.leaves((given, tokens))):
        return exact(given, tokens)
    own = in_order(given)
    return _like_the_engine(own.params)(own.config, dtypes, sizes, own.params, tokens, lengths)


def any_order(config: ModelConfig) -> ModelConfig:
    """The config of the same model without `--deterministic`."""
    return dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, deterministic=0))


@partial(jax.jit, static_argnums=0)
def _plain(config, tokens, params):
    rows = jax.nn.log_softmax(plain_logits(config, params, tokens))[:, :-1]
    return jnp.take_along_axis(rows, tokens[:, 1:, None], axis=-1)[..., 0]


def _like_the_engine(params: Any) -> Any:
    """`_logprobs` compiled with the options of an engine's programs: XLA may time others' fusions, and choose one with
    other bits. In a program of the caller's, where none can be given, XLA is left to that."""
    few = xla_options.autotuning(params, ROWS) if hopper.kernels_here() is None else {}
    return _jitted(tuple((xla_options.OPTIONS | few).items()))


@functools.cache
def _jitted(options: tuple[tuple[str, Any], ...] = ()) -> Any:
    return jax.jit(_logprobs, static_argnums=(0, 1, 2), compiler_options=dict(options) or None)


def _logprobs(config, dtypes, sizes, params, tokens, prompt):
    (b, t), (dtype, pages_dtype, state_dtype), (blocks, rounds) = tokens.shape, dtypes, sizes
    order, width = config.decoder.deterministic, max(blocks * PROMPT_BLOCK, t + ROWS)
    pages = -(-width // PAGE)
    table = 1 + jnp.arange(b * pages, dtype=jnp.int32).reshape(b, pages)
    cache = empty_cache(config, PageLayout(b * pages + 1, PAGE, pages_dtype), b + 1, ROWS, dtype, state_dtype)
    known = jnp.pad(tokens, ((0, 0), (0, width + 1 - t)))
    score = lambda last, after: own_logprobs(config, params, Hidden(last, (), None), after)  # noqa: E731

    text, block = jnp.divmod(jnp.arange(b * blocks, dtype=jnp.int32), blocks)
    start = block * PROMPT_BLOCK
    rows = Rows(start, jnp.clip(prompt[text] - start, 0, PROMPT_BLOCK), table[text], fixed=order)
    slots, nothing = jnp.where(rows.count > 0, text, b), jnp.full_like(text, NOTHING)
    mixer = PromptBlocks(rows, slots, jnp.where(block > 0, text, NOTHING), nothing)
    said, after = (known[:, i : i + blocks * PROMPT_BLOCK].reshape(-1, PROMPT_BLOCK) for i in (0, 1))
    hidden = forward(config.decoder, params, said, rows.marked_positions(PROMPT_BLOCK), mixer, cache)
    of_prompts = jax.lax.map(lambda one: score(*one), (hidden.last[:, None], after[:, None])).reshape(b, -1)

    def run(carry, i):
        cache, replay = carry
        start = prompt + i * ROWS
        rows = Rows(start, jnp.clip(t - 1 - start, 0, ROWS), table, fixed=order)
        at = jnp.minimum(start[:, None] + jnp.arange(ROWS), width - 1)
        said, after = (jnp.take_along_axis(known, at + i, axis=1) for i in (0, 1))
        mixer = RoundRows(rows, jnp.arange(b, dtype=jnp.int32), replay)
        hidden = forward(config.decoder, params, said, rows.marked_positions(ROWS), mixer, cache)
        return (hidden.cache, rows.count), score(hidden.last, after)

    _, of_rounds = jax.lax.scan(run, (hidden.cache, jnp.zeros((b,), jnp.int32)), jnp.arange(rounds, dtype=jnp.int32))
    of_rounds = jnp.moveaxis(of_rounds, 0, 1).reshape(b, -1)
    at, both = jnp.arange(t - 1), jnp.concatenate([of_prompts, of_rounds], axis=1)
    return jnp.take_along_axis(both, jnp.where(at < prompt[:, None], at, of_prompts.shape[1] + at - prompt[:, None]), 1)
