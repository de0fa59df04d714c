"""The Drafter protocol: a frozen config and three pure functions over the drafter's own state.

The engine asks nothing else of a drafter, and those that come with jaxspec are written as a user's would be. Paging,
continuous batching, overlap, verification and metrics are the engine's work. Drafts are suggestions: a bad one costs
time, never correctness.
"""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache.mixers import Cache
from jaxspec.cache.paged import PageLayout, Rows
from jaxspec.checkpoint import Model
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.options import ConfigError
from jaxspec.decoder.forward import Overrides
from jaxspec.parallel import sharding
from jaxspec.sampling import sampling


@flax.struct.dataclass
class DraftBatch:
    """The requests of a program, as a drafter sees them: b rows, some of them padding (`live` is False).

    Request r has tokens `history[r, :length[r]]` and pages `table[r]`. The target has keys and values for all of these
    tokens but the newest.
    """

    slots: Int[Array, " b"]  # where the request's own state lives, for drafters that keep some by slot
    length: Int[Array, " b"]
    history: Int[Array, "b c"]
    table: Int[Array, "b p"]
    live: Bool[Array, " b"]
    sampling: sampling.Sampling
    greedy: bool = flax.struct.field(pytree_node=False)  # every request of this program takes the argmax
    coupled: bool = flax.struct.field(pytree_node=False, default=False)  # drafts take the noise of what they guess
    shift: Int[Array, " b"] | None = None  # of the target's positions behind pictures; None: it reads none
    cache: Cache | None = None  # the target's, which a drafter may read and nobody writes; `propose` has it

    def tokens(self, first: int, t: int) -> Int[Array, "b t"]:
        """The t tokens from position `length + first` on, i32[b, t]. Positions outside the history repeat its edge."""
        at = self.length[:, None] + first + jnp.arange(t)
        return jnp.take_along_axis(self.history, jnp.clip(at, 0, self.history.shape[1] - 1), axis=1)

    def rows(self, first: int, t: int, shifted: bool = False) -> Rows:
        """Rows of a forward of the drafter's own at positions `length + first ...`, none for padding.

        `shifted`: they have the target's positions, which pictures move; otherwise those of the text's tokens.
        """
        shift = self.shift if shifted else None
        return Rows(self.length + first, jnp.where(self.live, t, 0), self.table, shift=shift)

    def choose(
        self,
        logits: Float[Array, "b v"],
        step: int | Int[Array, ""],
        top: Int[Array, " b"] | None = None,
        vocab: int | None = None,
    ) -> tuple[Int[Array, " b"], Float[Array, "r w"] | None]:
        """Sample draft number `step` (from 0) from `logits` with each request's settings: tokens and probabilities.

        None for probabilities means a point mass, since every request here is greedy. Where drafts are `coupled`, the
        target samples with the same random numbers, and accepts a draft if it samples the same token. `top` are the
        tokens with the highest logits, if they are known already.

        With several devices, `vocab` says that `logits` are this one's part of so many
        (`sharding.logits_of_my_requests`), and the probabilities are of the requests that it decides for.
        """
        if self.greedy:
            return (sharding.top_tokens(logits, vocab)[0] if top is None else top), None
        settings, length = sharding.my_requests((self.sampling, self.length))
        p = sampling.probabilities(sharding.logits_of_my_requests(logits, vocab)[:, None], settings)[:, 0]
        key = sampling.round_keys(settings.seed, length, jnp.asarray(step), sampling.DRAFT)
        if self.coupled:
            key = sampling.keys(settings.seed, length + step, sampling.SAMPLE)
        return sharding.all_gather_requests(sampling.draw(p, key), len(logits)), p


@flax.struct.dataclass
class PrefillBatch:
    """Blocks of known text: block i holds `tokens[i]` at positions `rows.start[i] ...`; `next_tokens` are one later.

    Where the target reads pictures, `axes` are its positions, and `overrides` the pictures' rows among `next_tokens`,
    as of `decoder.forward.forward`.

    A prompt's last token isn't among `rows.count`, since what comes next isn't known yet. `commit` is called for it.
    """

    slots: Int[Array, " b"]
    tokens: Int[Array, "b t"]
    next_tokens: Int[Array, "b t"]
    rows: Rows
    axes: Int[Array, "3 b t"] | None = None
    overrides: Overrides | None = None

    @property
    def last(self) -> Bool[Array, " b"]:
        """Which blocks are the last of their request's here; none of those of padding."""
        slots, rows = self.slots, self.rows
        valid = rows.count > 0
        later = (slots[:, None] == slots) & (rows.start[:, None] < rows.start) & valid
        return valid & ~later.any(axis=1)


@flax.struct.dataclass
class Proposal:
    """Drafts for each request: `tokens[r, :count[r]]`, in order.

    `parents` makes a tree of them: draft i hangs from row `parents[r, i]`, where row 0 is the newest token and row
    j + 1 is draft j. Parents come before their children, so that any first few drafts are a tree too; of siblings, the
    likeliest comes first. None is a chain.

    `probs` is the distribution that each draft of a chain was sampled from, for block verification; None is a point
    mass on the token, as in a tree. `logits` is for study (`jaxspec.propose`) and costs nothing in a round. `forced` is
    for benchmarks alone: so many drafts are accepted whatever the target says, in a tree down the first child of each,
    and the text is no longer the target's.

    `confidence` is the drafter's own estimate that each draft of a chain is accepted, given that those before it are.
    Entry i may depend on drafts before i, and never on the token sampled for draft i: a `count` that did would bias the
    sampled distribution.
    """

    tokens: Int[Array, "b d"]
    count: Int[Array, " b"]
    probs: Float[Array, "b d v"] | None = None
    logits: Float[Array, "b d w"] | None = None
    forced: Int[Array, " b"] | None = None
    parents: Int[Array, "b d"] | None = None
    confidence: Float[Array, "b d"] | None = None

    @classmethod
    def none(cls, b: int) -> Proposal:
        """No drafts for any of b requests."""
        return cls(jnp.zeros((b, 0), jnp.int32), jnp.zeros((b,), jnp.int32))


@flax.struct.dataclass
class Verified:
    """The result of a verification of q rows a request.

    `tokens` are the rows' inputs, at positions `length - 1 ...`: the newest token, then the drafts. `outputs[r,
    :accepted[r]]` are the tokens that the request gained, the bonus token included. `features` holds the target's
    residual stream after each of the drafter's `feature_layers`, for all q rows; ignore rows from `accepted` on.

    q is the verify width. It is 1 in a round without drafts and with a request's first new token, and `longest + 1`
    after a tree, whose rows are those of the accepted path.
    """

    tokens: Int[Array, "b q"]
    outputs: Int[Array, "b q"]
    accepted: Int[Array, " b"]
    features: tuple[Float[Array, "b q d"], ...]


class Drafter:
    """Base class with the answers of a drafter that keeps no state. Subclass it as a frozen dataclass.

    Static declarations:

    - `num_draft_tokens`: the most tokens proposed. The verify width is one more.
    - `feature_layers`: the target layers (0-based) whose outputs `commit` and `prefill` receive; -1 stands for the
      embedding, and the target's number of layers for the final norm.
    - `reach`: how many tokens after a position the state of its page depends on. A cached page is reused only where so
      many tokens after it match too.
    - `recent`: how many of the newest positions' state it keeps by slot, not in pages. A prompt with a cached beginning
      computes at least so many of its last tokens.
    - `topk`: 1, or for a drafter of trees the most drafts that follow one row.
    """

    num_draft_tokens: int
    feature_layers: tuple[int, ...] = ()
    reach: int = 0
    recent: int = 0
    topk: int = 1
    steps: ClassVar[bool] = False  # each further draft takes it a step of its own
    rests: ClassVar[bool] = False  # rounds of plain decoding save `idle` and `commit`: see `draft_count.SKIP_DRAFTER`

    @property
    def longest(self) -> int:
        """Most drafts that one round can accept: those of a whole chain, or of a tree's longest path."""
        return self.num_draft_tokens

    @property
    def lookahead(self) -> int:
        """KV slots that a round may write, from the newest token's on. Pages are reserved for them.

        The verified rows take `num_draft_tokens + 1`. Override it for a drafter that needs more while it drafts.
        """
        return self.num_draft_tokens + 1

    @classmethod
    def load(cls, target: Model, source: str | None, options: EngineConfig) -> tuple[Drafter, Any]:
        """Make the drafter and its params for a target model.

        `source` is what followed `method:` or `module:Class:` on the command line, if anything. An override may take
        further keywords: those of the drafter's own options (`?name=value`) that shape its params. Others are set on
        the drafter that it returns. **Raises:** `ConfigError` when the drafter can't serve this target.
        """
        if not is_dataclass(cls):
            raise ConfigError(f"{cls.__name__} must be a frozen dataclass, or have a `load` of its own")
        if source:
            raise ConfigError(f"--draft: {cls.__name__} has no `load`, which would read {source}. Drop the path")
        return cls(num_draft_tokens=options.num_draft_tokens or 3), {}

    def on_one_of(self, size: int) -> Drafter:
        """The drafter as each of `size` devices runs it, on its part of the params.

        **Raises:** `ConfigError` if it can't be divided, which is what a drafter says that doesn't override this.
        """
        raise ConfigError(
            f"--tp-size {size}: {type(self).__name__} can't draft on several devices; use --tp-size 1 or "
            "another --draft"
        )

    def derived(self, params: Any, size: int) -> dict[str, Any]:
        """Params that are made of its other ones, on each of `size` devices; made again when weights change."""
        return {}

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of the drafter's own cache per token, if that is in `dtype`: for the memory plan."""
        return 0

    def init_state(self, layout: PageLayout, num_slots: int) -> Any:
        """The drafter's state, a pytree of arrays: its own cache over the same pages, arrays by slot, or nothing.

        `num_slots` counts the last one too, the dummy that padding rows name.
        """
        return {}

    def propose(self, params: Any, state: Any, batch: DraftBatch) -> tuple[Proposal, Any]:
        """Draft for every request: the drafts, and the new state. Called at the start of each round."""
        raise NotImplementedError(f"{type(self).__name__}.propose")

    def commit(self, params: Any, state: Any, batch: DraftBatch, verified: Verified) -> Any:
        """The state after a verification. `batch` is the one that `propose` got; before a request's first new token
        `propose` wasn't called."""
        return state

    def commit_others(self, params: Any, state: Any, batch: DraftBatch, verified: Verified) -> Any:
        """Commit a round whose drafts a grammar may have forced, so that they aren't those of `propose`.

        Override it if `propose` leaves something of its own drafts in the state that `commit` relies on.
        """
        return self.commit(params, state, batch, verified)

    def prefill(self, params: Any, state: Any, batch: PrefillBatch, features: tuple[Array, ...]) -> Any:
        """The state after blocks of a prompt. `features` are the target's, [b, t, d] of its dtype for each feature
        layer.

        Also called for the text of a preempted request, when that is computed again.
        """
        return state

    def narrowed(self, drafts: int) -> Drafter:
        """This drafter, with fewer drafts a round: 0 to `num_draft_tokens` - 1. State and params are the same, and
        rounds of any number of drafts may follow one another.

        Override it where fewer drafts cost less than all of them; for 0, override `idle`.
        """
        return Narrowed(self, drafts)

    def idle(self, params: Any, state: Any, batch: DraftBatch) -> Any:
        """The state after a round's `propose`, for a round without drafts; `commit` follows as ever.

        Override it to do only what the next `propose` relies on: by default, drafts are made and dropped.
        """
        return self.propose(params, state, batch)[1]


@dataclass(frozen=True)
class NoDrafter(Drafter):
    """Drafts nothing: the round is plain decoding."""

    num_draft_tokens: int = 0

    def on_one_of(self, size):
        return self

    def propose(self, params, state, batch):
        return Proposal.none(len(batch.length)), state


@dataclass(frozen=True)
class SkippedDrafter(Drafter):
    """Rounds of plain decoding that skip another drafter: no drafts, and its state isn't updated."""

    num_draft_tokens: int = 0

    def propose(self, params, state, batch):
        return Proposal.none(len(batch.length)), state


@dataclass(frozen=True)
class Narrowed(Drafter):
    """The first `num_draft_tokens` drafts of a drafter's chain. With 0, none, but its state is still updated."""

    of: Drafter
    num_draft_tokens: int

    @property
    def feature_layers(self):
        return self.of.feature_layers

    def propose(self, params, state, batch):
        n = self.num_draft_tokens
        if n == 0:
            return Proposal.none(len(batch.length)), self.of.idle(params, state, batch)
        proposal, state = self.of.propose(params, state, batch)
        each = {name: getattr(proposal, name) for name in ("tokens", "probs", "logits", "confidence")}
        return proposal.replace(**{name: x[:, :n] for name, x in each.items() if x is not None}), state

    def commit(self, params, state, batch, verified):
        return self.of.commit(params, state, batch, verified)


def proposed(drafter: Drafter, params: Any, state: Any, batch: DraftBatch) -> tuple[Proposal, Any]:
    """Call `drafter.propose` and check its result.

    **Raises:** `ConfigError` naming what isn't as `Proposal` says, while a program is traced: a round pays nothing.
    """
    result, name = drafter.propose(params, state, batch), f"{type(drafter).__name__}.propose"
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Proposal)):
        raise ConfigError(f"{name} must return a Proposal and the drafter's state, got {type(result).__name__}")
    proposal, b = result[0], len(batch.length)
    drafts = (b, proposal.tokens.shape[-1])
    for field, shape in {"tokens": drafts, "count": (b,), "parents": drafts, "confidence": drafts}.items():
        value = getattr(proposal, field)
        if value is not None and value.shape != shape:
            raise ConfigError(f"{name}: {field} must be {list(shape)}, got {list(value.shape)}")
        if value is not None and field != "confidence" and not jnp.issubdtype(value.dtype, jnp.integer):
            raise ConfigError(f"{name}: {field} must be integers, got {value.dtype}")
    for field in ("probs", "logits"):  # of several devices each has those of the requests that it decides for
        value = getattr(proposal, field)
        if value is not None and (value.ndim != 3 or value.shape[1] != drafts[1]):
            raise ConfigError(f"{name}: {field} must be {[*drafts, 'vocabulary']}, got {list(value.shape)}")
    return proposal, same_state(drafter, "propose", state, result[1])


def same_state(drafter: Drafter, method: str, before: Any, after: Any) -> Any:
    """Return `after`, the drafter's state as a method leaves it. **Raises:** `ConfigError` if it isn't `before` by
    structure, shapes and dtypes, which are the same in all programs."""
    was, now = (jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", state) for state in (before, after))
    if was != now:
        raise ConfigError(
            f"{type(drafter).__name__}.{method} must return a state of init_state's structure, shapes and dtypes, "
            f"{was}, got {now}"
        )
    return after
