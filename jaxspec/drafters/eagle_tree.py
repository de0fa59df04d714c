"""EAGLE's dynamic tree (EAGLE-2, https://arxiv.org/abs/2406.16858): expand where drafts are likely, keep the likeliest.

A step runs a *beam* of k drafts through the drafter's layer and takes the k likeliest tokens after each of them. Of
these k * k *candidates*, the k likeliest are the next step's beam, by the product of probabilities down from the root.
In the end the n likeliest candidates of all steps make the tree. A candidate is never likelier than its parent, and a
tie goes to the one found first. So the whole branch of each chosen candidate is chosen too, and in the order in which
they were found, parents come first.

Invariant: in step i (from 1), beam j's keys and values lie k * (i - 1) + j KV slots behind the newest token's. Each row
sees everything before these and, through the mask, its own branch. The next commit overwrites them.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache.paged import KV, Rows
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.options import ConfigError
from jaxspec.drafters.base import DraftBatch, Proposal
from jaxspec.drafters.chain import Chain
from jaxspec.drafters.vocabulary import as_targets, known_tokens
from jaxspec.parallel.sharding import top_logprobs

STEPS, DRAFTS = 5, 8  # what is not given, unless what is given asks for less or more


def shape(options: EngineConfig, most: int = STEPS) -> tuple[int, int]:
    """Steps and drafts of the tree that the options ask for. `--topk` is above 1. `most`: steps, if none are given."""
    steps = options.num_steps or min(most, options.num_draft_tokens or most)
    return steps, options.num_draft_tokens or min(max(DRAFTS, steps), _candidates(steps, options.topk))


def check(steps: int | None, topk: int, drafts: int) -> None:
    """**Raises:** `ConfigError` unless the steps find as many candidates as there are drafts, no fewer than steps."""
    if steps is None or not 1 <= steps <= drafts:
        raise ConfigError(
            f"--num-steps {steps} with --num-draft-tokens {drafts}: a tree as deep as its steps has a draft for each "
            "at least. Lower --num-steps or raise --num-draft-tokens"
        )
    if drafts > (found := _candidates(steps, topk)):
        raise ConfigError(
            f"--num-draft-tokens {drafts}: --num-steps {steps} with --topk {topk} finds {found} candidates, "
            f"{topk} in the first step and {topk} x {topk} in each after it. Lower it, or raise one of the others"
        )


def slots(steps: int, topk: int) -> int:
    """How many KV slots, from the newest token's on, the beams of all steps take."""
    return topk * (steps - 1)


def _candidates(steps: int, topk: int) -> int:
    return topk + (steps - 1) * topk * topk


@flax.struct.dataclass
class _Found:
    """Candidates in the order in which they were found: target ids, log-probabilities down from the root, the candidate
    that each hangs from (counted from 1; 0 is the root), and which of the logits it was read from."""

    tokens: Int[Array, "b c"]
    score: Float[Array, "b c"]
    parent: Int[Array, "b c"]
    source: Int[Array, "b c"]


def propose(
    drafter: Chain, steps: int, params: Any, kv: KV, hidden: Float[Array, "b d"], batch: DraftBatch
) -> tuple[Proposal, KV]:
    """Grow a tree from `hidden`, the output of each request's last row. Sampled requests get the same as greedy ones:
    a target's own draw decides which branch it takes."""
    k, b = drafter.topk, len(hidden)
    tokens, score, logits = _expand(drafter, params, hidden[:, None], jnp.zeros((b, 1)))
    root = jnp.zeros((b, k), jnp.int32)
    found, all_logits = [_Found(tokens, score, root, root)], [logits]
    number, mask = 1 + jnp.broadcast_to(jnp.arange(k), (b, k)), jnp.zeros((b, k, 0), bool)
    hidden = jnp.broadcast_to(hidden[:, None], (b, k, hidden.shape[-1]))
    for step in range(1, steps):
        mask = jnp.concatenate([mask, jnp.broadcast_to(jnp.eye(k, dtype=bool), (b, k, k))], axis=2)
        rows = _beam_rows(batch, step, k, mask)
        hidden, kv = drafter._layer(params, kv, tokens, drafter._feedback(params, hidden), rows)
        hidden = hidden[:, :k]
        candidates, likely, logits = _expand(drafter, params, hidden, score)
        source = (step - 1) * k + 1 + jnp.repeat(jnp.arange(k), k)
        found.append(_Found(candidates, likely, jnp.repeat(number, k, axis=1), jnp.broadcast_to(source, (b, k * k))))
        all_logits.append(logits)
        if step + 1 < steps:
            score, best = jax.lax.top_k(likely, k)
            tokens, number = _pick(candidates, best), 1 + k + (step - 1) * k * k + best
            hidden, mask = _pick(hidden, best // k), _pick(mask, best // k)
    found = jax.tree.map(lambda *steps: jnp.concatenate(steps, axis=1), *found)
    return _likeliest(drafter.num_draft_tokens, found, jnp.concatenate(all_logits, axis=1), batch), kv


def of_block(
    logits: Float[Array, "b s w"], topk: int, drafts: int, params: Any, batch: DraftBatch, vocab: int
) -> Proposal:
    """The tree of a block drafter, which knows one distribution for each place, whatever was drafted before it.

    So a step takes no pass: its candidates are the `topk` likeliest tokens of its place, after each draft of the beam.
    `vocab`: the drafter's, of which logits may be a device's part.
    """
    top, ids, total = top_logprobs(logits, topk, vocab)
    likely = top - total
    ids, _ = as_targets(params, ids, None)
    b, steps, k = ids.shape
    root = jnp.zeros((b, k), jnp.int32)
    score, number = likely[:, 0], 1 + jnp.broadcast_to(jnp.arange(k), (b, k))
    found = [_Found(ids[:, 0], score, root, root)]
    for step in range(1, steps):
        after = score[:, :, None] + likely[:, None, step]
        tokens = jnp.broadcast_to(ids[:, None, step], (b, k, k))
        flat = lambda x: x.reshape(b, k * k)  # noqa: E731
        source = jnp.full((b, k * k), step)
        found.append(_Found(flat(tokens), flat(after), jnp.repeat(number, k, axis=1), source))
        score, best = jax.lax.top_k(flat(after), k)
        number = 1 + k + (step - 1) * k * k + best
    found = jax.tree.map(lambda *each: jnp.concatenate(each, axis=1), *found)
    return _likeliest(drafts, found, logits, batch)


def _expand(
    drafter: Chain, params: Any, out: Float[Array, "b k d"], score: Float[Array, "b k"]
) -> tuple[Int[Array, "b c"], Float[Array, "b c"], Float[Array, "b k w"]]:
    """The likeliest tokens after each row, row by row, as target ids; their scores; and the logits."""
    logits = drafter._logits(params, out)
    top, ids, total = top_logprobs(logits, drafter.topk, known_tokens(params, drafter.config.vocab_size))
    likely = top - total + score[..., None]
    flat = lambda x: x.reshape(len(x), -1)  # noqa: E731
    return flat(drafter._target_ids(params, ids)), flat(likely), logits


def _beam_rows(batch: DraftBatch, step: int, k: int, mask: Bool[Array, "b k w"]) -> Rows:
    """The rows of a step's beam. Their position is that of a chain's row at the same depth."""
    rows = batch.rows((step - 1) * k - 1, k, shifted=True)
    return rows.replace(depth=jnp.full(mask.shape[:2], step - 1), mask=mask)


def _likeliest(n: int, found: _Found, logits: Float[Array, "b s w"], batch: DraftBatch) -> Proposal:
    """The n likeliest candidates as a tree, in the order in which they were found."""
    chosen = jnp.sort(jax.lax.top_k(found.score, n)[1], axis=1)
    kept = jax.tree.map(lambda x: _pick(x, chosen), found)
    is_parent = kept.parent[..., None] == chosen[:, None] + 1
    parents = jnp.where(kept.parent > 0, jnp.argmax(is_parent, axis=2) + 1, 0)
    count = jnp.where(batch.live, n, 0)
    return Proposal(kept.tokens, count, logits=_pick(logits, kept.source), parents=parents)


def _pick(x: Array, at: Int[Array, "b k"]) -> Array:
    """x[r, at[r]] for each request r."""
    return jax.vmap(lambda row, index: row[index])(x, at)
