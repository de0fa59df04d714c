"""Acceptance of drafted chains. Whatever was drafted, the tokens that come out have the target's distribution.

A round verifies q rows: the newest token and up to q-1 drafts. Row j's distribution is over the token after drafts
1..j. The result is always at least one token: the accepted drafts and then one more, the bonus.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxspec import sampling


def match(
    chosen: Int[Array, "b q"], drafts: Int[Array, "b d"], count: Int[Array, " b"]
) -> tuple[Int[Array, "b q"], Int[Array, " b"]]:
    """Accept drafts while they equal what the target chose at each row; the first row that differs gives the bonus.

    With `chosen` the argmax this is greedy verification. With `chosen` drawn from each row's distribution it is exact
    sampling: a draft from a point mass is accepted with the probability the target gives it, and otherwise the bonus
    follows the target without it, just as rejection sampling has it (https://arxiv.org/abs/2211.17192). The drawn
    tokens are those plain decoding would have drawn, so a seed gives the same text with and without drafts.

    Returns the yielded tokens (valid up to their number) and how many there are, 1 to q.
    """
    within = jnp.arange(drafts.shape[1]) < count[:, None]
    right = jnp.cumprod((drafts == chosen[:, :-1]) & within, axis=1)
    return chosen, right.sum(axis=1).astype(jnp.int32) + 1


def reject(
    p: Float[Array, "b q v"],
    drafts: Int[Array, "b d"],
    count: Int[Array, " b"],
    draft_p: Float[Array, "b d v"],
    seed: UInt32[Array, "b 2"],
    position: Int[Array, " b"],
) -> tuple[Int[Array, "b q"], Int[Array, " b"]]:
    """Rejection sampling with the drafter's own probabilities (https://arxiv.org/abs/2211.17192, algorithm 1).

    Draft x at row j is accepted with probability min(1, p_j(x) / draft_p_j(x)); at the first rejection the bonus is
    drawn from the positive part of p_j - draft_p_j, and from p when every draft was accepted. `position` is that of
    row 0's output.

    Returns the yielded tokens (valid up to their number) and how many there are, 1 to q.
    """
    b, q, _ = p.shape
    rows = position[:, None] + jnp.arange(q)
    coin = sampling.uniform(sampling.keys(seed, rows[:, :-1], sampling.ACCEPT))
    at_draft = lambda x: jnp.take_along_axis(x, drafts[..., None], axis=-1)[..., 0]  # noqa: E731
    within = jnp.arange(q - 1) < count[:, None]
    right = jnp.cumprod((coin * at_draft(draft_p) < at_draft(p[:, :-1])) & within, axis=1).sum(axis=1)
    row = jnp.arange(b), right
    left = p[row] - jnp.where((right < count)[:, None], draft_p[row[0], jnp.minimum(right, q - 2)], 0.0)
    left = jnp.maximum(left, 0.0)
    left = jnp.where(left.sum(-1, keepdims=True) > 0, left, p[row])  # p == draft_p up to rounding
    bonus = sampling.draw(left, sampling.keys(seed, rows[row], sampling.SAMPLE))
    tokens = jnp.where(jnp.arange(q) < right[:, None], jnp.pad(drafts, ((0, 0), (0, 1))), bonus[:, None])
    return tokens.astype(jnp.int32), right.astype(jnp.int32) + 1
