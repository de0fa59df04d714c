"""Acceptance of chains and trees. Whatever was drafted, the resulting tokens have the target's distribution.

A round verifies q rows: the newest token and up to q-1 drafts. Row j's distribution is over the token after the drafts
that it follows: in a chain drafts 1..j, in a tree its ancestors and itself. The result is always at least one token:
the accepted drafts, then the bonus token.
"""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec import sampling


def match(
    chosen: Int[Array, "b q"], drafts: Int[Array, "b d"], count: Int[Array, " b"]
) -> tuple[Int[Array, "b q"], Int[Array, " b"]]:
    """Accept drafts while they equal the target's choice at each row; the first row that differs gives the bonus.

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


@flax.struct.dataclass
class Tree:
    """The q rows of a tree: row 0 is the newest token, the root; row j is draft j - 1.

    `follows[r, j, i]`: row i is row j, or one of its ancestors. `depth[r, j]` counts the ancestors. Both are exact down
    to depth `height`. Rows further down, which no path reaches, count as just below.
    """

    parents: Int[Array, "b d"]
    depth: Int[Array, "b q"]
    follows: Bool[Array, "b q q"]
    height: int = flax.struct.field(pytree_node=False)

    @classmethod
    def of(cls, parents: Int[Array, "b d"], height: int) -> Tree:
        """The tree in which draft i hangs from row `parents[r, i]`, down to `height`."""
        b, d = parents.shape
        up = jnp.pad(parents, ((0, 0), (1, 0)))  # the root is its own parent
        row = jnp.broadcast_to(jnp.arange(d + 1), (b, d + 1))
        depth, follows = jnp.zeros_like(row), jnp.broadcast_to(jnp.arange(d + 1) == 0, (b, d + 1, d + 1))
        for _ in range(height):
            follows = follows | (row[..., None] == jnp.arange(d + 1))
            depth = depth + (row > 0)
            row = jnp.take_along_axis(up, row, axis=1)
        return cls(parents, depth + (row > 0), follows, height)

    @property
    def drafts(self) -> Bool[Array, "b q d"]:
        """Which drafts each row follows."""
        return self.follows[:, :, 1:]

    def deepest(self, right: Bool[Array, "b d"]) -> tuple[Int[Array, "b k"], Int[Array, " b"]]:
        """The longest path from the root over drafts that are `right`, as rows in order, and how many of them count.

        k is `height` + 1. Of paths of the same length it is the first.
        """
        each = jnp.arange(len(right))
        wrong = self.drafts & ~right[:, None]
        stands = ~wrong.any(-1) & (self.depth <= self.height)
        end = jnp.argmax(jnp.where(stands, self.depth, -1), axis=1)
        on_path = self.follows[each, end]
        at = on_path[:, None] & (self.depth[:, None] == jnp.arange(self.height + 1)[:, None])
        return jnp.argmax(at, axis=2), self.depth[each, end] + 1

    def first_children(self) -> Bool[Array, "b d"]:
        """Whether each draft is the first that hangs from its parent: of siblings, the drafter's favourite."""
        same = self.parents[:, :, None] == self.parents[:, None]
        return ~jnp.tril(same, -1).any(-1)


def walk(
    chosen: Int[Array, "b q"], drafts: Int[Array, "b d"], count: Int[Array, " b"], tree: Tree
) -> tuple[Int[Array, "b k"], Int[Array, " b"]]:
    """As `match`, from the root of a tree down: wherever a child carries the token that the target chose, go there.

    Exact for the same reason: the children decide how far a round gets, never which tokens it yields. The path, rows
    i32[b, k] of which as many count as tokens are yielded, 1 to k: what was chosen at each of them.
    """
    within = jnp.arange(drafts.shape[1]) < count[:, None]
    return tree.deepest((drafts == jnp.take_along_axis(chosen, tree.parents, axis=1)) & within)
