"""Acceptance of chains and trees. Whatever was drafted, the resulting tokens have the target's distribution.

A round verifies q rows: the newest token and up to q-1 drafts. Row j's distribution is over the token after the drafts
that it follows: in a chain drafts 1..j, in a tree its ancestors and itself. The result is always at least one token:
the accepted drafts, then the bonus token.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec.sampling import sampling


def match(
    chosen: Int[Array, "b q"], drafts: Int[Array, "b d"], count: Int[Array, " b"]
) -> tuple[Int[Array, "b q"], Int[Array, " b"]]:
    """Accept drafts while they equal the target's choice at each row; the first row that differs gives the bonus.

    With `chosen` the argmax this is greedy verification. With `chosen` drawn from each row's distribution it is exact
    sampling: a draft from a point mass is accepted with the probability the target gives it, and otherwise the bonus
    follows the target without it, just as rejection sampling has it (https://arxiv.org/abs/2211.17192). The drawn
    tokens are those plain decoding would have drawn, so a seed gives the same text with and without drafts.

    Returns the yielded tokens (valid up to their number) and how many there are, 1 to q.

    **Raises:** `ValueError` for other shapes: each request has a choice for each draft, and one more.
    """
    _shaped(count, drafts, chosen=(chosen, 2, 1))
    within = jnp.arange(drafts.shape[1]) < count[:, None]
    right = jnp.cumprod((drafts == chosen[:, :-1]) & within, axis=1)
    return chosen, right.sum(axis=1).astype(jnp.int32) + 1


def block(
    p: Float[Array, "b q v"],
    drafts: Int[Array, "b d"],
    count: Int[Array, " b"],
    draft_p: Float[Array, "b d v"],
    seed: UInt32[Array, "b 2"],
    position: Int[Array, " b"],
) -> tuple[Int[Array, "b q"], Int[Array, " b"]]:
    """Block verification with the drafter's own probabilities (https://arxiv.org/abs/2403.10444, algorithm 2).

    Drafts are judged together, and the longest prefix that passes is accepted: a likely draft makes up for an unlikely
    one before it. So as many drafts are accepted as by rejecting token by token, or more. The bonus is drawn from what
    the accepted prefix leaves of its row, or from p when every draft was accepted. `position` is that of row 0's
    output. Whether a request has a draft at row j (`count`) may depend on the drafts before row j, never on that draft.

    Drafts beyond the accepted ones have had a say, so their random numbers are spent: the next round draws drafts and
    coins with its own (`sampling.round_keys`).

    Returns the yielded tokens (valid up to their number) and how many there are, 1 to q.

    **Raises:** `ValueError` for other shapes, or a seed of another dtype.
    """
    weight, rate = pass_rates(p, drafts, count, draft_p)
    b, q, _ = p.shape
    _numbered(b, seed, position)
    coin = sampling.uniform(sampling.round_keys(seed, position, jnp.arange(1, q), sampling.ACCEPT))
    right = jnp.max(jnp.where(coin < rate, jnp.arange(1, q), 0), axis=1)
    row = jnp.arange(b), right
    left = jnp.maximum(weight[row][:, None] * p[row] - draft_p[row[0], jnp.minimum(right, q - 2)], 0.0)
    # Nothing is left where p == draft_p up to rounding.
    left = jnp.where((right < count)[:, None] & (left.sum(-1, keepdims=True) > 0), left, p[row])
    bonus = sampling.draw(left, sampling.keys(seed, position + right, sampling.SAMPLE))
    tokens = jnp.where(jnp.arange(q) < right[:, None], jnp.pad(drafts, ((0, 0), (0, 1))), bonus[:, None])
    return tokens.astype(jnp.int32), right.astype(jnp.int32) + 1


def pass_rates(
    p: Float[Array, "b q v"], drafts: Int[Array, "b d"], count: Int[Array, " b"], draft_p: Float[Array, "b d v"]
) -> tuple[Float[Array, "b q"], Float[Array, "b d"]]:
    """The weight of each prefix of drafts, and how likely it passes; the longest that does is accepted.

    `weight[:, j]` is the probability that the first j drafts or more are accepted: the running product of p / draft_p,
    never above 1. `rate[:, j - 1]` is the probability that the first j pass, given that no longer prefix does. It needs
    the residual's sum of its row, so one pass over the vocabulary reads rows 1 to d - 1 of both distributions.
    """
    _shaped(count, drafts, p=(p, 3, 1), draft_p=(draft_p, 3, 0))
    if not (d := drafts.shape[1]):
        raise ValueError("drafts must be int[b, d] with d at least 1. A round without drafts yields one token of p")
    at_draft = lambda x: jnp.take_along_axis(x, drafts[..., None], axis=-1)[..., 0]  # noqa: E731
    target, drawn, least = at_draft(p[:, :-1]), at_draft(draft_p), jnp.finfo(draft_p.dtype).tiny
    weights = [jnp.ones_like(target[:, 0])]
    for j in range(d):
        mass = weights[-1] * target[:, j]
        bound = jnp.maximum(drawn[:, j], least)
        inside = (mass < bound) & (drawn[:, j] > least)  # elsewhere a quotient would have no slope
        outside = jnp.select([mass >= bound, mass < bound], [1.0, 0.0], mass + drawn[:, j])  # NaN stays NaN
        weights.append(jnp.where(inside, mass / jnp.where(inside, drawn[:, j], 1.0), outside))
    weight = jnp.stack(weights, axis=1)
    left = jnp.maximum(weight[:, 1:-1, None] * p[:, 1:-1] - draft_p[:, 1:], 0.0).sum(-1)
    inner = weight[:, 1:-1]
    short = jnp.where(inner < 1, left / jnp.where(inner < 1, left + 1 - inner, 1.0), 1.0)
    short = jnp.pad(short, ((0, 0), (0, 1)))
    row = jnp.arange(1, d + 1)
    rate = jnp.where(row < count[:, None], short, weight[:, 1:])
    return weight, jnp.where(row <= count[:, None], rate, 0.0)


def expected_length(
    p: Float[Array, "b q v"], drafts: Int[Array, "b d"], count: Int[Array, " b"], draft_p: Float[Array, "b d v"]
) -> Float[Array, " b"]:
    """Tokens that `block` yields for these drafts, the bonus included: the mean over its coins, 1 to q.

    Differentiable by both distributions. Its mean over drafts sampled from `draft_p` is a drafter's mean acceptance.
    """
    rate = pass_rates(p, drafts, count, draft_p)[1]
    none_from = jnp.cumprod((1 - rate)[:, ::-1], axis=1)[:, ::-1]  # that no prefix of j drafts or more passes
    return 1 + (1 - none_from).sum(axis=1)


def _numbered(b: int, seed: Any, position: Any) -> None:
    """Check what random numbers of `b` requests are made of. **Raises:** `ValueError` if they can't be."""
    said = lambda x: f"{x.dtype}{[*x.shape]}" if hasattr(x, "shape") else type(x).__name__  # noqa: E731
    if said(seed) != f"uint32[{b}, 2]":
        raise ValueError(
            f"{b} requests take a seed of uint32[{b}, 2], such as jnp.zeros(({b}, 2), jnp.uint32), got {said(seed)}"
        )
    if getattr(position, "shape", None) != (b,) or not jnp.issubdtype(position.dtype, jnp.integer):
        raise ValueError(f"{b} requests take a position of int[{b}], got {said(position)}")


def _shaped(count: Any, drafts: Any, **others: tuple[Any, int, int]) -> None:
    """Check that arrays suit `drafts` [b, d] and `count` [b]. Of `others`: each array, its number of axes, and how many
    more rows than drafts it has. **Raises:** `ValueError` if one doesn't."""
    for name, array in {"drafts": drafts, "count": count, **{name: each[0] for name, each in others.items()}}.items():
        if not hasattr(array, "shape"):
            raise ValueError(f"{name} must be an array, got {type(array).__name__}. Make it one by jnp.asarray")
    if drafts.ndim != 2 or count.shape != drafts.shape[:1]:
        raise ValueError(f"drafts must be int[b, d] and count int[b], got {[*drafts.shape]} and {[*count.shape]}")
    for name, (array, axes, more) in others.items():
        rows = drafts.shape[0], drafts.shape[1] + more
        if array.ndim != axes or array.shape[:2] != rows:
            wanted = ", ".join([*map(str, rows), *"v" * (axes - 2)])
            raise ValueError(f"{drafts.shape[1]} drafts take {name} of [{wanted}], got {[*array.shape]}")
    if len({each[0].shape[2:] for each in others.values()}) > 1:
        sizes = " and ".join(f"{name} {[*each[0].shape]}" for name, each in others.items())
        raise ValueError(f"{sizes} must be over one vocabulary")


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
    """Match like `match`, from the root of a tree down: wherever a child carries the target's token, go there.

    Exact for the same reason: the children decide how far a round gets, never which tokens it yields. Returns the path,
    rows i32[b, k], and how many of them count, 1 to k: each yields the token chosen there.

    **Raises:** as `match`, and for a tree of other drafts.
    """
    _shaped(count, drafts, chosen=(chosen, 2, 1), parents=(tree.parents, 2, 0))
    within = jnp.arange(drafts.shape[1]) < count[:, None]
    return tree.deepest((drafts == jnp.take_along_axis(chosen, tree.parents, axis=1)) & within)
