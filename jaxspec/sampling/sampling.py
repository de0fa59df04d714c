"""From logits to tokens: a request's settings applied to a distribution, and the random numbers it draws.

The order is vLLM's: minimum length and bias, then penalties, then temperature, min-p, top-k, top-p. Every function
works on all q rows of a verify round; row j sees the drafts before it, in a tree those of its own branch. Random
numbers depend on a request's seed, the position of the token and the purpose of the draw, and on nothing else; those of
drafts and of their acceptance on the position that their round starts at, and the step within it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec.config.request import MAX_LOGIT_BIAS, MAX_STOP_IDS, SamplingParams

SUMMANDS = 16  # that `log_softmax_fixed` adds up at a time
PURPOSES = ACCEPT, SAMPLE, DRAFT = range(3)  # what a random number is for


class Sampled(NamedTuple):
    """A request, as its settings are made of it. `stop_ids`: all tokens that end it. `seed` has 64 bits."""

    params: SamplingParams
    prompt: int = 0  # its tokens
    seed: int = 0
    stop_ids: Sequence[int] = ()


class Setting(NamedTuple):
    """How a request's setting reaches the device.

    - `of(request)`: its number, or a list of up to `shape` numbers, which `off` fills up.
    - `off`: its number where no request is.
    - `adjusts`: it changes logits, where it isn't off, and so the text at temperature 0.
    """

    of: Callable[[Sampled], Any]
    off: float = 0
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    adjusts: bool = False


def _setting(*of: Any, **how: Any) -> Any:
    return flax.struct.field(metadata={"setting": Setting(*of, **how)})


_IDS = {"off": -1, "dtype": "int32"}


@flax.struct.dataclass
class Sampling:
    """Sampling settings, one row per request (or per slot), and where each comes from."""

    seed: UInt32[Array, "b 2"] = _setting(lambda r: divmod(r.seed % 2**64, 2**32), dtype="uint32", shape=(2,))
    temperature: Float[Array, " b"] = _setting(lambda r: r.params.temperature)
    top_k: Int[Array, " b"] = _setting(lambda r: max(r.params.top_k, 0), dtype="int32")
    top_p: Float[Array, " b"] = _setting(lambda r: r.params.top_p, off=1)
    min_p: Float[Array, " b"] = _setting(lambda r: r.params.min_p)
    repetition: Float[Array, " b"] = _setting(lambda r: r.params.repetition_penalty, off=1, adjusts=True)
    presence: Float[Array, " b"] = _setting(lambda r: r.params.presence_penalty, adjusts=True)
    frequency: Float[Array, " b"] = _setting(lambda r: r.params.frequency_penalty, adjusts=True)
    # tokens, prompt included, before which no stop id may come
    min_length: Int[Array, " b"] = _setting(
        lambda r: r.params.min_tokens and r.prompt + r.params.min_tokens, dtype="int32", adjusts=True
    )
    stop_ids: Int[Array, "b s"] = _setting(lambda r: r.stop_ids, **_IDS, shape=(MAX_STOP_IDS,))
    bias_ids: Int[Array, "b k"] = _setting(lambda r: [*r.params.logit_bias], **_IDS, shape=(MAX_LOGIT_BIAS,))
    bias: Float[Array, "b k"] = _setting(
        lambda r: [*r.params.logit_bias.values()], shape=(MAX_LOGIT_BIAS,), adjusts=True
    )


SETTINGS: dict[str, Setting] = {each.name: each.metadata["setting"] for each in dataclasses.fields(Sampling)}


def adjusts(params: SamplingParams) -> bool:
    """Whether some setting changes logits, and not only what is drawn of them."""
    changing = [setting for setting in SETTINGS.values() if setting.adjusts]
    return any(setting.of(Sampled(params)) not in (setting.off, []) for setting in changing)


def adjust(
    logits: Float[Array, "b q v"],
    sampling: Sampling,
    history: Int[Array, "b c"],
    prompt: Int[Array, " b"],
    length: Int[Array, " b"],
    drafts: Int[Array, "b d"],
    follows: Bool[Array, "b q d"] | None = None,
) -> Float[Array, "b q v"]:
    """Minimum length, bias and penalties.

    `history[:, :length]` are the tokens so far, the first `prompt` of them the prompt's. Row j of `logits` follows
    `drafts[:, :j]`, or in a tree those that `follows[:, j]` names. They count as generated tokens there.
    """
    b, q, v = logits.shape
    each = jnp.arange(b)[:, None]
    position = jnp.arange(history.shape[1])
    known = position < length[:, None]
    generated = known & (position >= prompt[:, None])
    seen = jnp.zeros((b, v), bool).at[each, _or_drop(history, known, v)].set(True, mode="drop")
    counts = jnp.zeros((b, v), jnp.float32).at[each, _or_drop(history, generated, v)].add(1.0, mode="drop")
    stop_ids = _or_drop(sampling.stop_ids, sampling.stop_ids >= 0, v)
    bias_ids = _or_drop(sampling.bias_ids, sampling.bias_ids >= 0, v)

    def one(row: Array, seen: Array, counts: Array, length: Array) -> Array:
        early = (length < sampling.min_length)[:, None]
        row = jnp.where(early, row.at[each, stop_ids].set(-jnp.inf, mode="drop"), row)
        row = row.at[each, bias_ids].add(sampling.bias, mode="drop")
        repetition = sampling.repetition[:, None]
        row = jnp.where(seen, jnp.where(row > 0, row / repetition, row * repetition), row)
        return row - sampling.frequency[:, None] * counts - sampling.presence[:, None] * (counts > 0)

    def branch(row: Array, follows: Array) -> Array:
        token = _or_drop(drafts, follows, v)
        marked = seen.at[each, token].set(True, mode="drop"), counts.at[each, token].add(1.0, mode="drop")
        return one(row, *marked, length + follows.sum(axis=1))

    if follows is not None:
        return jax.vmap(branch, in_axes=1, out_axes=1)(logits, follows)
    rows = []
    for j in range(q):
        if j:
            token = drafts[:, j - 1 : j]
            seen, counts = seen.at[each, token].set(True), counts.at[each, token].add(1.0)
        rows.append(one(logits[:, j], seen, counts, length + j))
    return jnp.stack(rows, axis=1)


def allow(
    adjusted: Float[Array, "b q v"], logits: Float[Array, "b q v"], allowed: Bool[Array, "b q v"]
) -> Float[Array, "b q v"]:
    """Adjusted logits of the tokens that a grammar allows, -inf elsewhere.

    If `adjust` has banned all of those, such as an end token before `min_tokens`, the grammar wins: then the model's
    own logits stand. At least one token of each row must be allowed.
    """
    masked = jnp.where(allowed, adjusted, -jnp.inf)
    banned = jnp.isneginf(masked.max(-1, keepdims=True))
    return jnp.where(allowed & banned, logits, masked)


def _or_drop(ids: Array, keep: Array, v: int) -> Array:
    """Ids, with those not kept sent out of range, where `mode="drop"` ignores them."""
    return jnp.where(keep, ids, v)


def finite(logits: Float[Array, "*b v"]) -> Bool[Array, "*b"]:
    """Which rows have a largest logit that is a finite number: neither NaN nor infinity is among them."""
    return jnp.isfinite(logits.max(-1))


def probabilities(logits: Float[Array, "b q v"], sampling: Sampling) -> Float[Array, "b q v"]:
    """The distribution a token is drawn from: temperature, min-p, top-k, top-p. Temperature 0 is all on the argmax.

    Top-p is the smallest set of most likely tokens, after min-p and top-k, whose renormalised mass reaches it. Tokens
    tied at a threshold are all kept.
    """
    setting = lambda x: x[:, None, None]  # noqa: E731
    greedy = setting(sampling.temperature <= 0)
    # The maximum goes first: dividing by a tiny temperature would round away, or overflow, what tells logits apart.
    below = logits - logits.max(-1, keepdims=True)
    p = jax.nn.softmax(below / jnp.where(greedy, 1.0, setting(sampling.temperature)), axis=-1)
    p = jnp.where(p >= setting(sampling.min_p) * p.max(-1, keepdims=True), p, 0.0)
    k = jnp.where(sampling.top_k > 0, sampling.top_k, logits.shape[-1]).astype(jnp.float32)
    p = _keep_top(p, jnp.ones_like(p), setting(k))
    p = p / p.sum(-1, keepdims=True)
    mass = jnp.where(sampling.top_p < 1, sampling.top_p, 2.0)  # 2 is never reached: everything stays
    p = _keep_top(p, p, setting(mass))
    p = p / p.sum(-1, keepdims=True)
    return jnp.where(greedy, jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1]), p)


def drawn_logits(logits: Float[Array, "b q v"], sampling: Sampling) -> Float[Array, "b q v"]:
    """Logits whose softmax is `probabilities`; at temperature 0 the logits themselves, as vLLM reports them."""
    temperature = sampling.temperature[:, None, None]
    greedy = temperature <= 0
    kept = greedy | (probabilities(logits, sampling) > 0)
    below = (logits - logits.max(-1, keepdims=True)) / jnp.where(greedy, 1.0, temperature)
    return jnp.where(kept, below, -jnp.inf)


def log_softmax_fixed(logits: Float[Array, "*b v"]) -> Float[Array, "*b v"]:
    """Log-probabilities whose sums have one order, in any program and for any number of rows.

    XLA chooses how to sum along an axis, on a GPU by timing. Here it adds up arrays, each element by itself.
    """
    alone = jax.lax.optimization_barrier
    top = alone(logits.max(-1, keepdims=True))
    total = jnp.exp(logits - top)
    while (width := total.shape[-1]) > 1:
        pad = [(0, 0)] * (total.ndim - 1) + [(0, -width % SUMMANDS)]
        total, *others = jnp.split(jnp.pad(total, pad), SUMMANDS, axis=-1)
        for each in others:
            total = total + each
        total = alone(total)
    return logits - top - alone(jnp.log(total))


def _keep_top(p: Array, weights: Array, target: Array) -> Array:
    """Zero all but the largest values, as few as have `weights` summing to `target`. No sort.

    The threshold is found two bits at a time: non-negative floats are ordered as their bit patterns are, so the largest
    pattern whose tail still reaches the target is built from the top bits down.
    """
    bits = jax.lax.bitcast_convert_type(p, jnp.uint32)

    def step(i, threshold):
        unit = jnp.uint32(1) << jnp.uint32(30 - 2 * i)
        tails = [jnp.sum(jnp.where(bits >= threshold + n * unit, weights, 0.0), -1, keepdims=True) for n in (1, 2, 3)]
        return threshold + unit * sum((tail >= target).astype(jnp.uint32) for tail in tails)

    threshold = jax.lax.fori_loop(0, 16, step, jnp.zeros((*p.shape[:-1], 1), jnp.uint32))
    return jnp.where(bits >= threshold, p, 0.0)


def keys(seed: UInt32[Array, "b 2"], position: Int[Array, "b ..."], purpose: int) -> Array:
    """A random key for each position of each request."""
    return _keys(seed, position, jnp.uint32(purpose))


def round_keys(seed: UInt32[Array, "b 2"], start: Int[Array, " b"], step: Int[Array, "..."], purpose: int) -> Array:
    """Random keys of rounds that start at these positions, for each step of them: those of no other round.

    Drafts and coins of a round decide together how much of it stands. So a later round, which drafts for some of the
    same positions, must not meet their numbers again.
    """
    start = jnp.expand_dims(start, tuple(range(1, 1 + step.ndim)))
    return _keys(seed, start, (step.astype(jnp.uint32) + 1) * len(PURPOSES) + purpose)


def _keys(seed: UInt32[Array, "b 2"], position: Int[Array, "b ..."], purpose: UInt32[Array, "..."]) -> Array:
    """One block of Threefry for each position and purpose, which broadcast: the seed encrypts both."""
    shape = jnp.broadcast_shapes(position.shape, purpose.shape)
    words = (jnp.expand_dims(word, tuple(range(1, len(shape)))) for word in seed.T)
    operands = *words, position.astype(jnp.uint32), purpose
    # If `vmap` maps one of them, it must map all: the primitive doesn't see to that.
    zero = sum(x & 0 for x in operands)
    bits = threefry2x32_p.bind(*(jnp.broadcast_to(x, shape) + zero for x in operands))
    return jax.random.wrap_key_data(jnp.stack(bits, axis=-1), impl="threefry2x32")


def draw(p: Float[Array, "*b v"], key: Array) -> Int[Array, "*b"]:
    """One token from each distribution, by the Gumbel-max trick; `p` need not be normalised.

    The noise has all its bits: with few, ties among the largest of 150k tokens would favour low ids.
    """
    noise = partial(jax.random.gumbel, mode="high")
    for _ in range(key.ndim):
        noise = jax.vmap(noise, (0, None))
    return jnp.argmax(jnp.log(p) + noise(key, p.shape[-1:]), axis=-1).astype(jnp.int32)


def uniform(key: Array) -> Float[Array, "*b"]:
    """One number in [0, 1) for each key."""
    draw_one = jax.random.uniform
    for _ in range(key.ndim):
        draw_one = jax.vmap(draw_one)
    return draw_one(key)
