"""The device programs: admission, prefill, the first token, and the round that drafts, verifies, accepts and commits.

Each is a pure function of (params, state, one packed int32 array), compiled with the state donated (`programs`). The
next program's inputs stay in `State`, so a round can be dispatched before the previous one's result is read. Plain
decoding is the round of a drafter that drafts nothing, and a first token is the round whose rows the prefill has run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache import host_blocks
from jaxspec.cache.host_blocks import Blocks
from jaxspec.cache.mixers import Cache, PromptBlocks, RoundRows, empty_cache
from jaxspec.cache.paged import PageLayout, Rows, Scales
from jaxspec.cache.reported import Reported, empty_reported
from jaxspec.config.options import ConfigError
from jaxspec.config.request import MAX_LOGPROBS
from jaxspec.decoder.forward import Hidden, forward, top_tokens, unembed
from jaxspec.decoder.functions import row_of
from jaxspec.drafters.base import (
    DraftBatch,
    Drafter,
    PrefillBatch,
    Proposal,
    SkippedDrafter,
    Verified,
    proposed,
    same_state,
)
from jaxspec.models.model_config import ModelConfig
from jaxspec.pallas.sliced_rows import sliced
from jaxspec.parallel import sharding
from jaxspec.parallel.sharding import all_gather_requests, logits_of_my_requests, my_requests
from jaxspec.rounds import packing, ragged_verification
from jaxspec.rounds.packing import Slots
from jaxspec.rounds.ragged_verification import Ragged
from jaxspec.sampling import acceptance, sampling
from jaxspec.sampling.acceptance import Tree

# What a program does with logits, each all that those before it do: take the argmax; sample and adjust; and report
# log-probabilities. A batch runs in the first that serves all its requests.
MODES = GREEDY, SAMPLED, LOGPROBS = "greedy", "sampled", "logprobs"
PROCESSED = "processed"  # mode logprobs of an engine that reports those of the distribution drawn from

# Columns of a round's packed output: counts, then as many tokens as it yields at most (q, or a tree's height and one),
# then (in mode logprobs) what `_pack_logprobs` packs. DRAFTED is how many drafts it could have accepted. DONE is 1
# where a request ends, and NOT_FINITE where it ends because the logits after its newest token are NaN or infinite.
EMITTED, ACCEPTED, DRAFTED, DONE, TOKENS = range(5)
NOT_FINITE = 2
NO_TOKEN = -1  # that such logits give
DRAWN_ROWS = 8  # that a deterministic engine draws at a time
LOGPROB_WIDTH = 1 + 2 * MAX_LOGPROBS  # the token's own, then the ids and the values of the top ones


@flax.struct.dataclass
class State:
    """Everything that changes from program to program: request slots, the target's cache, the drafter's own state.

    Of each slot's last round, the first `replay` rows stand, and recurrent layers have yet to enter them into their
    state. After a prefill there are none, and in a model without such layers there never are. `hidden` and `features`
    are the final hidden state and the drafter's features of each slot's last prompt token, from the prefill that
    computed it until `first` has made a token of it. `forced` is how many of the next drafts a grammar has determined,
    then those drafts (`structured`). `pictures` are embeddings of pictures' tokens, which stand in for those of a
    prompt's; which row is whose, the host knows (`engine.pictures`). None: the model reads no pictures. `reported` are
    rows that requests may ask for, which the rounds pass on behind the drafter's features.
    """

    slots: Slots
    cache: Cache
    replay: Int[Array, " r"]
    draft: Any
    hidden: Float[Array, "r d"]
    features: tuple[Float[Array, "r d"], ...]
    forced: Int[Array, "r k"]
    pictures: Float[Array, "n c"] | None = None
    reported: Reported = Reported()


def empty_state(
    config: ModelConfig,
    drafter: Drafter,
    layout: PageLayout,
    num_slots: int,
    capacity: int,
    dtype: str,
    snapshots: int = 0,
    state_dtype: str = "float32",
    kv_scales: tuple[Scales, ...] | None = None,
    pictures: int = 0,
    hidden_states: bool = False,
) -> State:
    """A state without requests: `num_slots` of them, histories of `capacity` tokens, activations in `dtype`, so many
    rows for `pictures`, and pages for the `hidden_states` of all tokens.

    Of a model with recurrent layers, there are `snapshots` state slots beside those of the requests, in `state_dtype`.
    """
    rows = drafter.num_draft_tokens + 1
    slots = packing.empty_slots(num_slots, capacity, pictures > 0)
    cache = empty_cache(config, layout, num_slots + 1 + snapshots, rows, dtype, state_dtype, kv_scales)
    streams, every = config.decoder.streams, config.decoder.last_streams
    last = lambda width=config.hidden_size: jnp.zeros((num_slots + 1, width), dtype)  # noqa: E731
    wide = config.hidden_size * (streams.count if streams else 1)
    draft = drafter.init_state(layout, num_slots + 1)
    replay = jnp.zeros((num_slots + 1,), jnp.int32)
    forced = jnp.zeros((num_slots + 1, rows), jnp.int32)
    features = tuple(last(wide) if i == every else last() for i in drafter.feature_layers)
    embedded = jnp.zeros((pictures, config.tower.columns), dtype) if pictures else None
    reported = empty_reported(config, layout, dtype, hidden_states)
    return State(slots, cache, replay, draft, last(), features, forced, embedded, reported)


def admit(state: State, packed: Int[Array, " k"]) -> State:
    return state.replace(slots=packing.admit(state.slots, packed))


def clear(devices: int, state: State, pages: Int[Array, " n"]) -> State:
    """Put zeros into these pages, the target's and the drafter's, and in place of NaN in what the drafter keeps by
    slot. NaN there would reach their next owners, at weight zero too. `devices`: those that divide the target's."""
    held, own = state.cache.kv[0].shape[1], pages
    if devices > 1:
        own = jnp.where(pages // held == jax.lax.axis_index(sharding.AXIS), pages % held, 0)
    numbers = {held: own, held * devices: pages} if devices > 1 else {held: pages}
    cleared = [x.at[:, numbers[x.shape[1]]].set(0) for x in host_blocks.paged(state.cache, state.draft, numbers)]
    finite = lambda x: jnp.nan_to_num(x, posinf=0, neginf=0) if x.ndim > cleared[0].ndim else x  # noqa: E731
    draft = jax.tree.map(finite, state.draft)
    cache, draft = host_blocks.with_paged(state.cache, draft, cleared, numbers)
    return state.replace(cache=cache, draft=draft)


def take(kind: str, state: State, rows: Int[Array, " n"]) -> tuple[Blocks, Array]:
    """The blocks of these pages or state slots, and their checksums."""
    of_pages = kind == host_blocks.PAGES
    arrays = host_blocks.paged(state.cache, state.draft) if of_pages else host_blocks.stateful(state.cache)
    return host_blocks.take(arrays, rows)


def put(kind: str, state: State, rows: Int[Array, " n"], blocks: Blocks) -> tuple[State, Array]:
    """Write blocks back into these pages or state slots; their checksums, as they are now."""
    if kind == host_blocks.STATES:
        arrays, sums = host_blocks.put(host_blocks.stateful(state.cache), rows, blocks)
        return state.replace(cache=host_blocks.with_stateful(state.cache, arrays)), sums
    arrays, sums = host_blocks.put(host_blocks.paged(state.cache, state.draft), rows, blocks)
    cache, draft = host_blocks.with_paged(state.cache, state.draft, arrays)
    return state.replace(cache=cache, draft=draft), sums


def prefill(
    config: ModelConfig, drafter: Drafter, block: int, score: bool, params: Any, draft_params: Any, state: State, packed
) -> tuple[State, Int[Array, ""] | Int[Array, "b t w"]]:
    """Compute keys, values and states of blocks of known tokens, packed by `packing.pack_blocks`. State slots to start
    from and to keep snapshots in are those of `mixers.PromptBlocks`. Request slots themselves aren't read.

    A block that ends with the newest known token leaves that row for `first`. The drafter doesn't see the row: the
    token after it isn't known yet. Returned are how many tokens there were, which shows when they are done; with
    `score`, the packed logprobs of the token after each row.
    """
    reads, (packed, adapters) = state.pictures is not None, packing.take_adapters(params, packed)
    (slots, start, count, source, keep, newest), known, table = packing.unpack_blocks(packed, block, reads)
    tokens, next_tokens = known[:, :-1], known[:, 1:]
    axes, last_seen, own, following, in_windows = None, None, None, None, False
    if reads:
        axes, last_seen, at = packing.unpack_pictures(packed, block)
        axes = axes if config.tower.merge else None
        last_seen = last_seen if config.tower.mutual else None
        in_windows = config.tower.mutual_in_windows
        own, following = (state.pictures, at[:, :-1]), (state.pictures, at[:, 1:])
    rows = Rows(start, count, table, axes=axes, last_seen=last_seen, in_windows=in_windows, uneven=True)
    mixer, marked = PromptBlocks(_order(config, rows), slots, source, keep), rows.marked_positions(block)
    last = jnp.maximum(count - 1, 0)
    read = any(i >= config.num_layers - 1 for i in drafter.feature_layers)
    every = score or read or state.reported.kept  # whether all rows of the last layer are needed
    requested = None if every else jnp.where(newest > 0, last, -1)
    given = drafter.feature_layers, requested, own, adapters
    hidden = forward(config.decoder, params, tokens, marked, mixer, state.cache, *given)

    seen = rows.replace(count=count - newest, axes=None, last_seen=None)
    shown = PrefillBatch(slots, tokens, next_tokens, seen, axes, following)
    draft = drafter.prefill(draft_params, state.draft, shown, hidden.features)
    draft = same_state(drafter, "prefill", state.draft, draft)
    into = jnp.where(newest > 0, slots, len(state.hidden))  # out of range for all other blocks: their rows are dropped
    left = lambda x, old, row: old.at[into].set(row_of(x, row)[:, 0], mode="drop")  # noqa: E731
    final = left(hidden.last, state.hidden, last if every else None)
    features = tuple(left(x, old, last) for x, old in zip(hidden.features, state.features, strict=True))
    replay = state.replay.at[slots].set(0)
    reported = state.reported.write(rows, state.reported.of(hidden))
    state = state.replace(
        cache=hidden.cache, replay=replay, draft=draft, hidden=final, features=features, reported=reported
    )
    if not score:
        return state, jnp.sum(count)
    scores, fixed = _score(config, params, hidden, LOGPROBS), config.decoder.deterministic > 0
    logprobs = _log_softmax(scores, fixed)
    return state, all_gather_requests(_pack_logprobs(logprobs, my_requests(next_tokens)), len(tokens))


def first(
    config: ModelConfig, drafter: Drafter, mode: str, params: Any, draft_params: Any, state: State, packed
) -> tuple[State, Int[Array, "b w"]]:
    """The token after each prompt whose prefill has run to its end, for the requests in `packed`, as in a round.

    It is a round of one row, whose forward's result the prefill has left in the state.
    """
    slots, batch = batch_of(state, packed[:, 0], packed[:, 1:], mode)
    nothing, hidden = of_prompts(state, batch)
    scores = _score(config, params, hidden, mode)
    of = draft_params, state, slots, batch, nothing, scores, hidden.features
    return conclude(drafter, mode, *of, fixed=config.decoder.deterministic)


def of_prompts(state: State, batch: DraftBatch) -> tuple[Proposal, Hidden]:
    """For a round of one row after a prompt: no drafts, and the row that the prefill has left."""
    nothing = Proposal.none(len(batch.slots))
    hidden, features = jax.tree.map(lambda kept: kept[batch.slots][:, None], (state.hidden, state.features))
    return nothing, Hidden(hidden, features, None)


def decode_round(
    config: ModelConfig, drafter: Drafter, mode: str, params: Any, draft_params: Any, state: State, packed
) -> tuple[State, Int[Array, "b w"]]:
    """One round for the requests in `packed[i]` = slot, then the slot's page table.

    `mode` is one of `MODES`. A request that is done yields nothing and changes nothing.
    """
    packed, adapters = packing.take_adapters(params, packed)
    return _round(config, drafter, mode, params, draft_params, state, packed[:, 0], packed[:, 1:], adapters)


def _round(config, drafter, mode, params, draft_params, state, ids, table, adapters):
    slots, batch = batch_of(state, ids, table, mode)
    if fixed := config.decoder.deterministic:
        batch = batch.replace(coupled=True)
    proposal, state = propose(drafter, draft_params, state, slots, batch)
    proposal = proposal.replace(probs=None) if fixed else proposal
    spread = lambda x: x  # noqa: E731
    if isinstance(drafter, Ragged) and drafter.packs:
        proposal = drafter.shared(proposal, slots, batch)
        hidden, packed = ragged_verification.run(
            config, drafter, params, state.cache, state.replay[ids], batch, proposal, adapters
        )
        state, spread = state.replace(cache=hidden.cache), partial(packed.spread, q=proposal.tokens.shape[1] + 1)
    else:
        hidden, state = run_rows(config, drafter, params, state, slots, batch, proposal, adapters)
    scores = _score(config, params, hidden, mode, spread)
    features = jax.tree.map(spread, hidden.features + state.reported.of(hidden))
    state, out = conclude(drafter, mode, draft_params, state, slots, batch, proposal, scores, features, fixed=fixed)
    if isinstance(drafter, Ragged):
        state = state.replace(slots=ragged_verification.observe(state.slots, ids, out[:, DRAFTED], out[:, ACCEPTED]))
    if isinstance(drafter, SkippedDrafter):  # from here on the drafter's state is too old for these requests
        state = state.replace(slots=state.slots.replace(drafts=state.slots.drafts.at[ids].set(0)))
    return keep_replay(config, state, ids, out), out


def keep_replay(config: ModelConfig, state: State, ids: Int[Array, " b"], out: Int[Array, "b w"]) -> State:
    """Record how many rows of this round linear layers have yet to enter into their states."""
    return state.replace(replay=state.replay.at[ids].set(out[:, EMITTED])) if config.recurrent else state


def propose(
    drafter: Drafter,
    draft_params: Any,
    state: State,
    slots: Slots,
    batch: DraftBatch,
    change: Callable[[Proposal], Proposal] = lambda proposal: proposal,
) -> tuple[Proposal, State]:
    """The drafts of a round, after `change`: no more than each request may have, none for those that are done."""
    proposal, draft = proposed(drafter, draft_params, state.draft, batch)
    proposal = change(proposal)
    most = jnp.minimum(slots.drafts, proposal.tokens.shape[1])
    count = jnp.where(batch.live, jnp.clip(proposal.count, 0, most), 0)
    if state.pictures is not None:  # what an earlier text goes on with may be a picture, which can't be drafted
        rows = proposal.tokens >= packing.PICTURE_ROW
        count = jnp.minimum(count, jnp.argmax(jnp.pad(rows, ((0, 0), (0, 1)), constant_values=True), axis=1))
        proposal = proposal.replace(tokens=jnp.where(rows, 0, proposal.tokens))
    return proposal.replace(count=count), state.replace(draft=draft)


def run_rows(
    config: ModelConfig,
    drafter: Drafter,
    params: Any,
    state: State,
    slots: Slots,
    batch: DraftBatch,
    proposal: Proposal,
    adapters: Int[Array, " b"] | None = None,
) -> tuple[Hidden, State]:
    """The target's forward over the newest token and the drafts, each request's with its adapter."""
    tokens = jnp.concatenate([batch.tokens(-1, 1), proposal.tokens], axis=1)
    tree = _tree(drafter, proposal)
    if tree is not None and config.recurrent:  # the runner refuses those that say so by their `topk`
        raise ConfigError(
            f"{type(drafter).__name__} drafts a tree (Proposal.parents), and {config.model_type} has linear attention, "
            "whose state goes from one token to the next; it must draft a chain"
        )
    if tree is not None and config.decoder.deterministic:
        raise ConfigError(
            f"{type(drafter).__name__} drafts a tree (Proposal.parents), whose rows' sums have another order than a "
            "chain's; with --deterministic it must draft a chain"
        )
    rows = Rows(slots.length - 1, jnp.where(batch.live, proposal.count + 1, 0), batch.table, shift=batch.shift)
    if tree is not None:
        rows = rows.replace(depth=tree.depth, mask=tree.follows)
    positions = rows.marked_positions(tokens.shape[1])
    mixer = RoundRows(_order(config, rows), batch.slots, state.replay[batch.slots])
    of = config.decoder, params, tokens, positions, mixer, state.cache, drafter.feature_layers
    hidden = forward(*of, adapters=adapters)
    return hidden, state.replace(cache=hidden.cache)


def _order(config: ModelConfig, rows: Rows) -> Rows:
    """Rows whose attention has one order of sums, if the decoder is deterministic."""
    return rows.replace(fixed=config.decoder.deterministic)


def _tree(drafter: Drafter, proposal: Proposal) -> Tree | None:
    return None if proposal.parents is None else Tree.of(proposal.parents, drafter.longest)


def decode_rounds(
    config: ModelConfig, drafter: Drafter, mode: str, rounds: int, params: Any, draft_params: Any, state: State, packed
) -> tuple[State, Int[Array, "k b w"]]:
    """Run `rounds` rounds, one after the other, and return each one's result."""
    packed, adapters = packing.take_adapters(params, packed)
    ids, table = packed[:, 0], packed[:, 1:]  # taken apart once

    def step(state, _):
        return _round(config, drafter, mode, params, draft_params, state, ids, table, adapters)

    return jax.lax.scan(step, state, length=rounds)


def batch_of(state: State, ids: Int[Array, " b"], table: Int[Array, "b p"], mode: str) -> tuple[Slots, DraftBatch]:
    """The slots of these requests, and the same as a drafter sees them."""
    slots = jax.tree.map(lambda x: x[ids], state.slots)
    of = ids, slots.length, slots.history, table, ~slots.done, slots.sampling, mode == GREEDY
    return slots, DraftBatch(*of, shift=slots.shift, cache=state.cache)


def _score(
    config: ModelConfig, params: Any, hidden: Hidden, mode: str, spread: Callable[[Array], Array] = lambda x: x
) -> Array:
    """The logits, f32[b, q, v], of the requests that this device decides for; in mode greedy the argmax of all,
    i32[b, q], as `tokens_if_finite` gives it. `spread`: from the rows of `hidden` to those of requests."""
    fixed = config.decoder.deterministic  # there all modes have the same logits
    if mode == GREEDY and not fixed and hidden.unnormed is not None:
        top = top_tokens(params, config.decoder.norm, params["norm"], hidden.unnormed)
        if top is not None:
            return spread(tokens_if_finite(*top))
    logits = unembed(params, hidden.last, config.decoder)
    if mode == GREEDY:
        return spread(tokens_if_finite(*sharding.top_tokens(logits, config.vocab_size)))
    return logits_of_my_requests(spread(logits), config.vocab_size)


def tokens_if_finite(tokens: Int[Array, "b q"], top: Float[Array, "b q"]) -> Int[Array, "b q"]:
    """The tokens whose logits, the `top` of their rows, are finite numbers; NO_TOKEN for others."""
    return jnp.where(jnp.isfinite(top), tokens, NO_TOKEN)


@flax.struct.dataclass
class Masks:
    """A grammar's masks: for each row the allowed tokens, and the drafts that it forces after the row's output, in a
    later round: how many, then the tokens. What is allowed is of the requests that this device decides for."""

    allowed: Bool[Array, "b q v"]
    forced: Int[Array, "b q k"]


def conclude(
    drafter: Drafter,
    mode: str,
    draft_params: Any,
    state: State,
    slots: Slots,
    batch: DraftBatch,
    proposal: Proposal,
    scores: Float[Array, "b q v"] | Int[Array, "b q"],
    features: tuple[Float[Array, "b q d"], ...],
    masks: Masks | None = None,
    fixed: bool = False,
) -> tuple[State, Int[Array, "b w"]]:
    """From q rows' scores, as `_score` gives them, to tokens: accept, stop, commit, advance, and pack the result.

    Behind the drafter's `features` may be rows to be reported. With `masks`, scores in mode greedy are the argmax among
    the allowed tokens. `fixed`: what a row draws has the same bits whatever rows are beside it.
    """
    b = len(batch.slots)
    mine, all_of = my_requests, partial(all_gather_requests, b=b)
    if mode == GREEDY:  # scores are of all requests on each device
        mine = all_of = lambda x: x
    tokens = jnp.concatenate([batch.tokens(-1, 1), proposal.tokens], axis=1)
    drafted, tree = proposal.count, _tree(drafter, proposal)
    forced, allowed = (None, None) if masks is None else (masks.forced, masks.allowed)
    shown = proposal.replace(probs=None, logits=None)
    if tree is None:
        own = mine(shown).replace(probs=proposal.probs)
        outputs, accepted = all_of(_accept(scores, mine(slots), own, mode, masks, fixed))
    else:
        outputs, path, accepted = all_of(_accept_path(scores, *mine((slots, shown, tree)), mode, masks))
        # From here on the accepted path is a chain.
        along = lambda x, path: jnp.take_along_axis(x, path.reshape(*path.shape, *[1] * (x.ndim - 2)), axis=1)  # noqa: E731
        rows = Rows(slots.length - 1, jnp.where(batch.live, accepted, 0), batch.table)
        kv = tuple(rows.compact(pages, path, rows.count) for pages in state.cache.kv)
        state = state.replace(cache=state.cache.replace(kv=kv))
        tokens, features, forced = jax.tree.map(partial(along, path=path), (tokens, features, forced))
        scores, allowed = jax.tree.map(partial(along, path=mine(path)), (scores, allowed))
        within = jnp.arange(tree.depth.shape[1]) <= drafted[:, None]
        drafted = jnp.where(within, jnp.minimum(tree.depth, tree.height), 0).max(axis=1)
    accepted = jnp.where(batch.live, accepted, 0)
    own = len(drafter.feature_layers)
    features, reported = features[:own], features[own:]
    reported = state.reported.write(Rows(slots.length - 1, accepted, batch.table), reported)
    emitted, done, broken = _stop(slots, outputs, accepted)
    commit = drafter.commit if masks is None else drafter.commit_others
    draft = commit(draft_params, state.draft, batch, Verified(tokens, outputs, emitted, features))
    draft = same_state(drafter, "commit", state.draft, draft)
    advanced = _advance(state.slots, batch.slots, slots.length, outputs, emitted, done)
    state = state.replace(slots=advanced, draft=draft, reported=reported)
    if forced is not None:
        last = jnp.take_along_axis(forced, jnp.maximum(emitted - 1, 0)[:, None, None], axis=1)[:, 0]
        state = state.replace(forced=state.forced.at[batch.slots].set(last))

    ended = jnp.where(broken, NOT_FINITE, done.astype(jnp.int32))
    columns = [jnp.stack([emitted, accepted, drafted, ended], axis=1), outputs]
    if mode in (LOGPROBS, PROCESSED):
        if mode == PROCESSED:
            logprobs = _processed(scores, *mine((slots, tokens[:, 1:])), allowed, fixed)
        else:
            logprobs = _log_softmax(scores, fixed)
        columns.append(all_of(_pack_logprobs(logprobs, mine(outputs))).reshape(b, -1))
    return state, jnp.concatenate(columns, axis=1)


def _accept(
    scores: Array, slots: Slots, proposal: Proposal, mode: str, masks: Masks | None, fixed: bool = False
) -> tuple[Array, Array]:
    """For a chain: the outputs, and how many of them count."""
    settings, count = slots.sampling, proposal.count
    if mode != GREEDY and proposal.probs is not None:
        p, finite = _probabilities(scores, slots, proposal, None, masks)
        outputs, accepted = acceptance.block(p, proposal.tokens, count, proposal.probs, settings.seed, slots.length)
        outputs = jnp.where(finite, outputs, NO_TOKEN)
    else:
        chosen = _drawn(scores, slots, proposal) if fixed and mode != GREEDY else None
        chosen = _choose(scores, slots, proposal, None, mode, masks) if chosen is None else chosen
        outputs, accepted = acceptance.match(chosen, proposal.tokens, count)
    if proposal.forced is not None:
        accepted = jnp.minimum(proposal.forced, count) + 1
    return outputs, accepted


def _accept_path(
    scores: Array, slots: Slots, proposal: Proposal, tree: Tree, mode: str, masks: Masks | None
) -> tuple[Array, Array, Array]:
    """For a tree: the outputs along the accepted path, its rows, and how many of them count."""
    chosen = _choose(scores, slots, proposal, tree, mode, masks)
    if proposal.forced is None:
        path, accepted = acceptance.walk(chosen, proposal.tokens, proposal.count, tree)
    else:
        within = jnp.arange(tree.parents.shape[1]) < proposal.count[:, None]
        stand = tree.first_children() & (tree.depth[:, 1:] <= proposal.forced[:, None]) & within
        path, accepted = tree.deepest(stand)
    return jnp.take_along_axis(chosen, path, axis=1), path, accepted


def _choose(
    scores: Array, slots: Slots, proposal: Proposal, tree: Tree | None, mode: str, masks: Masks | None
) -> Int[Array, "b q"]:
    """The target's token at every row, as plain decoding would choose it there."""
    if mode == GREEDY:
        return scores
    p, finite = _probabilities(scores, slots, proposal, tree, masks)
    depth = jnp.arange(scores.shape[1]) if tree is None else tree.depth
    drawn = sampling.draw(p, sampling.keys(slots.sampling.seed, slots.length[:, None] + depth, sampling.SAMPLE))
    return jnp.where(finite, drawn, NO_TOKEN)


def _drawn(logits: Float[Array, "b q v"], slots: Slots, proposal: Proposal) -> Int[Array, "b q"]:
    """Draw as `_choose` does, a few rows at a time: the order of a sum over the vocabulary may depend on how many."""
    known = slots.history, slots.prompt, slots.length, proposal.tokens
    adjusted, (b, q, _) = sampling.adjust(logits, slots.sampling, *known), logits.shape
    settings = jax.tree.map(lambda x: jnp.repeat(x, q, axis=0), slots.sampling)
    position = (slots.length[:, None] + jnp.arange(q)).reshape(-1)

    def draw(rows, settings, position):
        p = sampling.probabilities(rows[:, None], settings)[:, 0]
        drawn = sampling.draw(p, sampling.keys(settings.seed, position, sampling.SAMPLE))
        return jnp.where(sampling.finite(rows), drawn, NO_TOKEN)

    return sliced(draw, DRAWN_ROWS, adjusted.reshape(b * q, -1), settings, position).reshape(b, q)


def _probabilities(
    logits: Array, slots: Slots, proposal: Proposal, tree: Tree | None, masks: Masks | None
) -> tuple[Float[Array, "b q v"], Bool[Array, "b q"]]:
    """The distribution of each row, and whether its logits are finite numbers."""
    follows = None if tree is None else tree.drafts
    known = slots.history, slots.prompt, slots.length, proposal.tokens
    adjusted = sampling.adjust(logits, slots.sampling, *known, follows)
    if masks is not None:
        adjusted = sampling.allow(adjusted, logits, masks.allowed)
    return sampling.probabilities(adjusted, slots.sampling), sampling.finite(adjusted)


def _stop(slots: Slots, outputs: Int[Array, "b q"], accepted: Int[Array, " b"]) -> tuple[Array, Array, Array]:
    """How many of the accepted tokens stand after stop ids and the length limit, whether the request ends, and whether
    it does because the token after those is NO_TOKEN."""
    row = jnp.arange(outputs.shape[1])
    stops = (outputs[..., None] == slots.sampling.stop_ids[:, None]).any(-1)
    stop = jnp.min(jnp.where(stops, row + 1, len(row) + 1), axis=1)  # tokens up to the first that is one
    emitted = jnp.minimum(jnp.minimum(accepted, stop), slots.limit - slots.length)
    emitted = jnp.where(slots.done, 0, emitted)
    sound = jnp.min(jnp.where(outputs == NO_TOKEN, row, len(row)), axis=1)  # tokens before the first that is none
    broken = sound < emitted
    emitted = jnp.minimum(emitted, sound)
    return emitted, slots.done | broken | (stop <= emitted) | (slots.length + emitted >= slots.limit), broken


def _advance(slots: Slots, ids: Array, length: Array, outputs: Array, emitted: Array, done: Array) -> Slots:
    row = jnp.arange(outputs.shape[1])
    at = jnp.where(row < emitted[:, None], length[:, None] + row, slots.history.shape[1])
    return slots.replace(
        history=slots.history.at[ids[:, None], at].set(outputs, mode="drop"),
        length=slots.length.at[ids].set(length + emitted),
        done=slots.done.at[ids].set(done),
    )


def own_logprobs(config: ModelConfig, params: Any, hidden: Hidden, tokens: Int[Array, "b t"]) -> Float[Array, "b t"]:
    """The log-probability of each token after its row, as `_pack_logprobs` packs it."""
    logits = _score(config, params, hidden, LOGPROBS)
    logprobs = _log_softmax(logits, config.decoder.deterministic > 0)
    return jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]


def _log_softmax(logits: Float[Array, "b t v"], fixed: bool) -> Float[Array, "b t v"]:
    """Log-probabilities; if `fixed`, with the same bits in any program."""
    return sampling.log_softmax_fixed(logits) if fixed else jax.nn.log_softmax(logits, axis=-1)


def _processed(
    logits: Float[Array, "b q v"],
    slots: Slots,
    drafts: Int[Array, "b d"],
    allowed: Bool[Array, "b q v"] | None,
    fixed: bool,
) -> Float[Array, "b q v"]:
    """Log-probabilities of the distributions that a chain's rows are drawn from; `fixed` as of `_log_softmax`."""
    adjusted = sampling.adjust(logits, slots.sampling, slots.history, slots.prompt, slots.length, drafts)
    if allowed is not None:
        adjusted = sampling.allow(adjusted, logits, allowed)
    if not fixed:
        return _log_softmax(sampling.drawn_logits(adjusted, slots.sampling), fixed)
    settings = jax.tree.map(lambda x: jnp.repeat(x, logits.shape[1], axis=0), slots.sampling)
    each = lambda rows, settings: sampling.drawn_logits(rows[:, None], settings)[:, 0]  # noqa: E731
    drawn = sliced(each, DRAWN_ROWS, adjusted.reshape(-1, logits.shape[-1]), settings)
    return _log_softmax(drawn.reshape(logits.shape), fixed)


def _pack_logprobs(logprobs: Float[Array, "b t v"], tokens: Int[Array, "b t"]) -> Int[Array, "b t w"]:
    """The log-probability of each token and of the most likely ones, as int32 bits."""
    own = jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)
    k = min(MAX_LOGPROBS, logprobs.shape[-1])
    top, top_ids = jax.lax.top_k(logprobs, k)
    pad = ((0, 0), (0, 0), (0, MAX_LOGPROBS - k))
    bits = partial(jax.lax.bitcast_convert_type, new_dtype=jnp.int32)
    top = bits(jnp.pad(top, pad, constant_values=-jnp.inf))
    return jnp.concatenate([bits(own), jnp.pad(top_ids, pad, constant_values=-1), top], axis=-1)
