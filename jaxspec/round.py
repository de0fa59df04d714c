"""The device programs: admission, prefill, and the round that drafts, verifies, accepts and commits.

Each is a pure function of (params, state, one packed int32 array); `Programs` compiles them, the state donated. What
the next round needs stays in `State`, so a round can be dispatched before the previous one's result was read. Plain
decoding is the round of a drafter that drafts nothing.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from jaxspec import batch as packing
from jaxspec import sampling, verify
from jaxspec.batch import Shapes, Slots
from jaxspec.cache import Rows
from jaxspec.config import ModelConfig
from jaxspec.draft import DraftBatch, Drafter, PrefillBatch, Proposal, Verified
from jaxspec.models import MODELS
from jaxspec.request import MAX_LOGPROBS

# Columns of a round's packed output: counts, then q output tokens, then (not in greedy programs) their logprobs.
EMITTED, ACCEPTED, DRAFTED, DONE, TOKENS = range(5)
LOGPROB_WIDTH = 1 + 2 * MAX_LOGPROBS  # the token's own, then the ids and the values of the top ones


@flax.struct.dataclass
class State:
    """All that changes from program to program: request slots, the target's cache, the drafter's own state."""

    slots: Slots
    kv: Float[Array, "l p 2 m s h"]
    draft: Any


def admit(state: State, packed: Int[Array, " k"]) -> State:
    return state.replace(slots=packing.admit(state.slots, packed))


def prefill(
    config: ModelConfig, drafter: Drafter, block: int, score: bool, params: Any, draft_params: Any, state: State, packed
) -> tuple[State, Int[Array, "b t w"] | None]:
    """Compute keys and values of prompt blocks. `packed[i]` is slot, start, count, then the slot's page table.

    A prefill never touches a request's newest token: the round that follows starts from it. With `score`, also returns
    the packed logprobs of the token after each row.
    """
    slots, rows = packed[:, 0], Rows(packed[:, 1], packed[:, 2], packed[:, 3:])
    positions = rows.positions(block)
    history = state.slots.history
    at = lambda p: history[slots[:, None], jnp.minimum(p, history.shape[1] - 1)]  # noqa: E731
    tokens, next_tokens = at(positions), at(positions + 1)
    family = MODELS[config.model_type]
    hidden = family.forward(params, config, tokens, positions, rows.attend, state.kv, drafter.feature_layers)
    draft = drafter.prefill(draft_params, state.draft, PrefillBatch(slots, tokens, next_tokens, rows), hidden.features)
    state = state.replace(kv=hidden.cache, draft=draft)
    if not score:
        return state, None
    return state, _pack_logprobs(family.unembed(params, hidden.last), next_tokens)


def decode_round(
    config: ModelConfig, drafter: Drafter, greedy: bool, params: Any, draft_params: Any, state: State, packed
) -> tuple[State, Int[Array, "b w"]]:
    """One round for the requests in `packed[i]` = slot, then the slot's page table.

    `greedy` programs are for batches in which nobody samples, adjusts logits or wants logprobs. A request that is done
    yields nothing and changes nothing.
    """
    ids, table = packed[:, 0], packed[:, 1:]
    slots = jax.tree.map(lambda x: x[ids], state.slots)
    live = ~slots.done
    batch = DraftBatch(ids, slots.length, slots.history, table, live, slots.sampling, greedy)
    proposal, draft = drafter.propose(draft_params, state.draft, batch)
    count = jnp.where(live, jnp.minimum(proposal.count, slots.drafts), 0)
    tokens = jnp.concatenate([batch.tokens(-1, 1), proposal.tokens], axis=1)
    rows = Rows(slots.length - 1, jnp.where(live, count + 1, 0), table)
    family = MODELS[config.model_type]
    positions = rows.positions(tokens.shape[1])
    hidden = family.forward(params, config, tokens, positions, rows.attend, state.kv, drafter.feature_layers)
    logits = family.unembed(params, hidden.last)

    outputs, accepted = _accept(logits, slots, proposal, count, greedy)
    accepted = jnp.where(live, accepted, 0)
    emitted, done = _stop(slots, outputs, accepted)
    verified = Verified(tokens, outputs, emitted, hidden.features)
    draft = drafter.commit(draft_params, draft, batch, verified)
    state = State(_advance(state.slots, ids, slots.length, outputs, emitted, done), hidden.cache, draft)

    columns = [jnp.stack([emitted, accepted, count, done.astype(jnp.int32)], axis=1), outputs]
    if not greedy:
        columns.append(_pack_logprobs(logits, outputs).reshape(outputs.shape[0], -1))
    return state, jnp.concatenate(columns, axis=1)


def _accept(logits: Array, slots: Slots, proposal: Proposal, count: Array, greedy: bool) -> tuple[Array, Array]:
    if greedy:
        return verify.match(jnp.argmax(logits, axis=-1).astype(jnp.int32), proposal.tokens, count)
    settings = slots.sampling
    adjusted = sampling.adjust(logits, settings, slots.history, slots.prompt, slots.length, proposal.tokens)
    p = sampling.probabilities(adjusted, settings)
    if proposal.probs is not None:
        return verify.reject(p, proposal.tokens, count, proposal.probs, settings.seed, slots.length)
    at = slots.length[:, None] + jnp.arange(logits.shape[1])
    chosen = sampling.draw(p, sampling.keys(settings.seed, at, sampling.SAMPLE))
    return verify.match(chosen, proposal.tokens, count)


def _stop(slots: Slots, outputs: Int[Array, "b q"], accepted: Int[Array, " b"]) -> tuple[Array, Array]:
    """How many of the accepted tokens stand once stop ids and the length limit cut in, and whether that ends it."""
    row = jnp.arange(outputs.shape[1])
    stops = (outputs[..., None] == slots.sampling.stop_ids[:, None]).any(-1) & (row < accepted[:, None])
    first_stop = jnp.where(stops.any(1), jnp.argmax(stops, axis=1) + 1, accepted)
    emitted = jnp.minimum(first_stop, slots.limit - slots.length)
    emitted = jnp.where(slots.done, 0, emitted)
    stopped = (stops & (row < emitted[:, None])).any(1)
    return emitted, slots.done | stopped | (slots.length + emitted >= slots.limit)


def _advance(slots: Slots, ids: Array, length: Array, outputs: Array, emitted: Array, done: Array) -> Slots:
    row = jnp.arange(outputs.shape[1])
    at = jnp.where(row < emitted[:, None], length[:, None] + row, slots.history.shape[1])
    return slots.replace(
        history=slots.history.at[ids[:, None], at].set(outputs, mode="drop"),
        length=slots.length.at[ids].set(length + emitted),
        done=slots.done.at[ids].set(done),
    )


def _pack_logprobs(logits: Float[Array, "b t v"], tokens: Int[Array, "b t"]) -> Int[Array, "b t w"]:
    """The raw distribution's log-probability of each token and of the most likely ones, as int32 bits."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    own = jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)
    k = min(MAX_LOGPROBS, logits.shape[-1])
    top, top_ids = jax.lax.top_k(logprobs, k)
    pad = ((0, 0), (0, 0), (0, MAX_LOGPROBS - k))
    bits = partial(jax.lax.bitcast_convert_type, new_dtype=jnp.int32)
    top = bits(jnp.pad(top, pad, constant_values=-jnp.inf))
    return jnp.concatenate([bits(own), jnp.pad(top_ids, pad, constant_values=-1), top], axis=-1)


@functools.cache
def compile_counter() -> Counter:
    """Counts this process's compilations under the key "compiles", from the first call on."""
    counter: Counter = Counter()

    def listen(event: str, duration: float, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            counter["compiles"] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    return counter


class Programs:
    """The compiled programs of one engine, one for each kind and number of rows, and how often each was dispatched.

    They are compiled ahead of their calls, by `warm_up` or on first use, so a call never traces. The state given to a
    call is consumed.
    """

    def __init__(self, config: ModelConfig, drafter: Drafter, shapes: Shapes, params: Any, draft_params: Any):
        self.shapes = shapes
        self.dispatches: Counter = Counter()
        self._params = params, draft_params
        jit = lambda f, *static: jax.jit(partial(f, config, drafter, *static), donate_argnums=2)  # noqa: E731
        self._jits = {
            "prefill": jit(prefill, shapes.block, False),
            "score": jit(prefill, shapes.block, True),
            "round_greedy": jit(decode_round, True),
            "round_sampled": jit(decode_round, False),
        }
        self._admit = jax.jit(admit, donate_argnums=0)
        self._compiled: dict[tuple[str, int], Any] = {}

    def admit(self, state: State, packed: np.ndarray) -> State:
        self.dispatches["admit"] += 1
        return self._program("admit", len(packed), state)(state, packed)

    def prefill(self, state: State, packed: np.ndarray) -> State:
        return self._call("prefill", state, packed)[0]

    def score(self, state: State, packed: np.ndarray) -> tuple[State, Array]:
        return self._call("score", state, packed)

    def round(self, state: State, packed: np.ndarray, greedy: bool) -> tuple[State, Array]:
        return self._call("round_greedy" if greedy else "round_sampled", state, packed)

    def warm_up(self, state: State) -> None:
        """Compile every program of the ladder, several at a time."""
        shapes = self.shapes
        wanted = [("admit", packing.admission_size(shapes.capacity)), ("score", shapes.score)]
        wanted += [("prefill", blocks) for blocks in shapes.prefills]
        wanted += [(kind, size) for size in shapes.batches for kind in ("round_greedy", "round_sampled")]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            compiling = pool.map(lambda wanted: self._program(*wanted, state), wanted)
            for _ in tqdm(compiling, total=len(wanted), desc="compiling", unit="program"):
                pass

    def padding(self, rows: int, columns: int) -> np.ndarray:
        """A packed batch of padding rows: the dummy slot, no tokens, the dummy page."""
        packed = np.zeros((rows, columns + self.shapes.pages_per_seq), np.int32)
        packed[:, 0] = self.shapes.num_slots
        return packed

    def _call(self, kind: str, state: State, packed: np.ndarray) -> tuple[State, Array | None]:
        self.dispatches[kind] += 1
        return self._program(kind, len(packed), state)(*self._params, state, packed)

    def _program(self, kind: str, size: int, state: State) -> Any:
        if (program := self._compiled.get((kind, size))) is None:
            if kind == "admit":
                lowered = self._admit.lower(state, np.zeros(size, np.int32))
            else:
                columns = 1 if kind.startswith("round") else 3
                lowered = self._jits[kind].lower(*self._params, state, self.padding(size, columns))
            program = self._compiled[kind, size] = lowered.compile()
        return program
