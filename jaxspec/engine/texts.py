"""A model over texts that grow, as pure functions with an explicit cache: `prefill`, `step`, `keep`.

They go through `jax.jit` and `jax.vmap`. Attention over pages has no derivative: `jax.grad` takes `jaxspec.logits` over
whole texts. A step's rows count only once `keep` says how many of them stand, so a step verifies drafts as the engine's
rounds do.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.cache.mixers import Cache, PromptBlocks, RoundRows, empty_cache
from jaxspec.cache.paged import PageLayout, Rows
from jaxspec.cache.recurrent import NOTHING
from jaxspec.checkpoint import Model
from jaxspec.config.json_values import shown
from jaxspec.config.request import RequestError
from jaxspec.decoder.forward import forward, unembed
from jaxspec.engine.functional import PAGE, checked, checked_layers, features_of, fits, integers, own_params
from jaxspec.sampling.acceptance import Tree


@flax.struct.dataclass
class TextCache:
    """Keys, values and recurrent states of b texts.

    **Attributes:**

    - `length`: tokens that stand in each text, i32[b].
    - `capacity`: most tokens of a text. `rows`: most rows of a step.
    """

    length: Int[Array, " b"]
    capacity: int = flax.struct.field(pytree_node=False)
    rows: int = flax.struct.field(pytree_node=False)
    _cache: Cache
    _replay: Int[Array, " b"]  # rows of the last step that stand and that recurrent layers have yet to enter
    _pending: Int[Array, ""]  # rows of the last step, until `keep` says how many of them stand

    @property
    def _table(self) -> Int[Array, "b p"]:
        pages = -(-(self.capacity + self.rows) // PAGE)
        return 1 + jnp.arange(len(self.length) * pages, dtype=jnp.int32).reshape(-1, pages)


@flax.struct.dataclass
class Step:
    """The result of `prefill` and `step`.

    **Attributes:**

    - `logits`: after every token, f32[b, t, v].
    - `hidden`: hidden states after the layers that were asked for, f32[l, b, t, d].
    - `cache`: a new `TextCache`; the one that was given stays as it was.
    """

    logits: Float[Array, "b t v"]
    hidden: Float[Array, "l b t d"]
    cache: TextCache


def prefill(
    model: Model,
    tokens: Int[Any, "b t"],
    lengths: Int[Any, " b"] | None = None,
    *,
    capacity: int,
    rows: int = 16,
    layers: tuple[int, ...] = (),
    params: Any = None,
) -> Step:
    """Begin b texts: compute what the cache holds of their first tokens.

    **Arguments:** `tokens`: int[b, t], shorter texts padded at their ends with any token. `lengths`: how many of them
    each text has, at least 1; None is t. `capacity`: most tokens that a text will have. `rows`: most rows of a later
    step. `layers` as of `hidden_states`. `params`: in place of the model's own, to differentiate by them or to keep
    them out of a compiled program's constants.

    **Raises:** as `logits`; `RequestError` for a `capacity` below t, or above the model's positions.
    """
    tokens, layers = checked(model, tokens), checked_layers(model, layers)
    b, t = tokens.shape
    most = model.config.max_position
    fits(model, "tokens", t)
    if not isinstance(capacity, int | np.integer) or not t <= capacity <= most:
        raise RequestError(
            f"capacity must be from the {t} tokens given to the model's {most} positions, got {shown(capacity)}",
            "capacity",
        )
    rows = int(integers("rows", rows, (), 1, most))
    lengths = jnp.asarray(integers("lengths", np.full(b, t) if lengths is None else lengths, (b,), 1, t))
    params = _without_derivative(own_params(model, params))
    return _prefill(model.config, model.dtype, int(capacity), rows, layers, params, tokens, lengths)


def step(
    model: Model,
    cache: TextCache,
    tokens: Int[Any, "b q"],
    parents: Int[Any, "b d"] | None = None,
    *,
    layers: tuple[int, ...] = (),
    params: Any = None,
) -> Step:
    """Run q more rows of each text. None of them stands until `keep` says so.

    **Arguments:** `tokens`: int[b, q], a chain: each row follows the one before it. `parents`: of a tree with
    d = q - 1 drafts behind row 0, as in `jaxspec.draft.Proposal`: row j + 1 follows row `parents[r, j]`. `layers` and
    `params` as of `prefill`.

    **Raises:** as `logits`; `RequestError` for more rows than the cache's, or a tree for a model whose state goes from
    one token to the next.
    """
    tokens, layers = checked(model, tokens), checked_layers(model, layers)
    (b, q), texts = tokens.shape, len(_cache(cache).length)
    if b != texts or q > cache.rows:
        raise RequestError(
            f"tokens must be int[{texts}, q] with q at most {cache.rows}, the cache's rows, got [{b}, {q}]", "tokens"
        )
    if parents is not None:
        if model.config.recurrent:
            raise RequestError(
                f"parents: {model.config.model_type} has recurrent layers, whose state goes from one token to the "
                "next; step over a chain",
                "parents",
            )
        parents = integers("parents", parents, (b, q - 1), 0, np.arange(q - 1), "a draft follows a row before its own")
    params = _without_derivative(own_params(model, params))
    return _step(model.config, layers, params, cache, tokens, parents)


def keep(cache: TextCache, count: Int[Any, " b"], path: Int[Any, "b k"] | None = None) -> TextCache:
    """Let the first `count[r]` rows of each text's last step stand; 0 leaves a text as it was.

    **Arguments:** `count`: i32[b], 0 to the step's rows. `path`: after a step over a tree, the rows of the accepted
    path from row 0 down, of which `count` stand (`jaxspec.verify.walk` returns both).

    **Raises:** `RequestError` for rows that the last step didn't have, and beyond the cache's capacity, if both are
    known; under `jax.jit` and the like they aren't.
    """
    known = not any(isinstance(each, jax.core.Tracer) for each in (_cache(cache).length, cache._pending, count))
    rows = int(cache._pending) if known else cache.rows
    count = integers("count", count, (len(cache.length),), 0, rows, f"the last step had {rows} rows")
    if known and (full := np.asarray(cache.length) + count > cache.capacity).any():
        raise RequestError(
            f"count {shown(count.tolist())} makes texts longer than the cache's capacity of {cache.capacity} tokens: "
            f"{np.flatnonzero(full).tolist()}. Keep fewer rows, or begin by prefill with a larger capacity",
            "count",
        )
    kv = cache._cache
    if path is not None:
        path = integers("path", path, (len(cache.length), "k"), 0, max(rows - 1, 0))
        at = Rows(cache.length, jnp.asarray(count), cache._table)
        kv = kv.replace(kv=tuple(at.compact(pages, jnp.asarray(path), jnp.asarray(count)) for pages in kv.kv))
    nothing = jnp.zeros((), jnp.int32)
    return cache.replace(length=cache.length + count, _cache=kv, _replay=jnp.asarray(count), _pending=nothing)


def _cache(cache: Any) -> TextCache:
    if not isinstance(cache, TextCache):
        raise RequestError(f"cache must be that of a prefill, a step or keep, got {type(cache).__name__}", "cache")
    return cache


@jax.custom_jvp
def _without_derivative(params: Any) -> Any:
    return params


@_without_derivative.defjvp
def _refuse(primals, tangents):
    raise RequestError(
        "params: prefill and step have no derivative, since they attend over pages. Differentiate jaxspec.logits or "
        "jaxspec.hidden_states over whole texts",
        "params",
    )


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _prefill(config, dtype, capacity, rows, layers, params, tokens, lengths):
    b = len(tokens)
    pages = -(-(capacity + rows) // PAGE)
    layout = PageLayout(b * pages + 1, PAGE, dtype)
    empty, none = empty_cache(config, layout, b, rows, dtype), jnp.zeros((b,), jnp.int32)
    cache = TextCache(lengths, capacity, rows, empty, none, jnp.zeros((), jnp.int32))
    at = Rows(jnp.zeros_like(lengths), lengths, cache._table)
    nothing = jnp.full((b,), NOTHING, jnp.int32)
    mixer = PromptBlocks(at, jnp.arange(b, dtype=jnp.int32), nothing, nothing)
    return _run(config, layers, params, cache, tokens, at, mixer)


@partial(jax.jit, static_argnums=(0, 1))
def _step(config, layers, params, cache, tokens, parents):
    b, q = tokens.shape
    at = Rows(cache.length, jnp.full((b,), q, jnp.int32), cache._table)
    if parents is not None:
        tree = Tree.of(parents, q - 1)
        at = at.replace(depth=tree.depth, mask=tree.follows)
    mixer = RoundRows(at, jnp.arange(b, dtype=jnp.int32), cache._replay)
    cache = cache.replace(_pending=jnp.int32(q))
    return _run(config, layers, params, cache, tokens, at, mixer)


def _run(config, layers, params, cache, tokens, rows, mixer):
    hidden = forward(
        config.decoder, params, tokens, rows.marked_positions(tokens.shape[1]), mixer, cache._cache, layers
    )
    logits = unembed(params, hidden.last, config.decoder).astype(jnp.float32)
    return Step(logits, features_of(hidden, logits.shape[:2], config), cache.replace(_cache=hidden.cache))
