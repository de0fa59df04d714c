"""The device programs of one engine: which there are, and their compilation ahead of calls.

`round` says what they compute, `executables` how they are kept on disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array
from tqdm import tqdm

from jaxspec import batch as packing
from jaxspec.batch import Shapes
from jaxspec.config import ModelConfig
from jaxspec.draft import Drafter, Proposal
from jaxspec.executables import Executables
from jaxspec.pallas.hopper import KERNELS, counting
from jaxspec.round import GREEDY, LOGPROBS, MODES, SAMPLED, State, admit, decode_round, decode_rounds, first, prefill
from jaxspec.sharding import EVERYWHERE, LOGITS, OWNED, Division, spread
from jaxspec.structured import programs as structured

# XLA counts every in-place update of the cache as a cache of its own, finds that too many don't fit, and would compute
# small arrays again and again to hold fewer at once: a seventh of the kernels of a round of a mixture's.
COMPILER_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}


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

    They are compiled ahead of their calls, by `warm_up` or on first use, or found in `store`; so a call never traces.
    The state given to a call is consumed.
    """

    def __init__(
        self,
        config: ModelConfig,
        drafter: Drafter,
        shapes: Shapes,
        params: Any,
        draft_params: Any,
        store: Executables | None = None,
        division: Division | None = None,
    ):
        """`config` and `drafter`: as each device runs them. `division`: among several, None: there is one."""
        self.shapes = shapes
        self.found: list[tuple[str, int]] = []  # of the store's, those that were used
        self._store = store
        self.dispatches: Counter = Counter()
        self._params = params, draft_params
        self.vocab, self.width = config.vocab_size, drafter.num_draft_tokens + 1  # rows that a round verifies at most

        def jit(f: Callable, *static: Any, by: Drafter = drafter) -> Callable:
            run = partial(f, config, by, *static)
            return jax.jit(run if division is None else _spread(f, run, division), donate_argnums=2)

        admitting = admit
        if division is not None:
            given = division.state, EVERYWHERE
            admitting = spread(admit, division.mesh, given, division.state)
        self._jits = {
            "admit": jax.jit(admitting, donate_argnums=0),
            "prefill": jit(prefill, shapes.block, False),
            "score": jit(prefill, shapes.block, True),
            **{f"first_{mode}": jit(first, mode) for mode in MODES},
            **{f"round_{mode}": jit(decode_round, mode) for mode in MODES},
            **{f"rounds_{mode}": jit(decode_rounds, mode, shapes.rounds) for mode in MODES},
            **{f"draft_{mode}": jit(structured.draft, mode) for mode in (GREEDY, SAMPLED)},
            "forward": jit(structured.forward),
            **{f"conclude_{mode}": jit(structured.conclude, mode) for mode in MODES},
            "masked_first": jit(structured.first, LOGPROBS),
        }
        for mode in MODES:
            for drafts, _ in self.narrower(mode):
                by = drafter.narrowed(drafts)
                self._jits[f"round_{mode}_{drafts}"] = jit(decode_round, mode, by=by)
                self._jits[f"rounds_{mode}_{drafts}"] = jit(decode_rounds, mode, shapes.rounds, by=by)
        self._compiled: dict[tuple[str, int], Any] = {}
        self.compiling = 0  # calls that wait for their program to be compiled
        self.compiled_at = 0.0  # when the last of them had it, on the monotonic clock

    def narrower(self, mode: str) -> Sequence[tuple[int, tuple[int, ...]]]:
        """Those of `Shapes.narrower` that this mode has: with log-probabilities, which few ask for, no drafts alone."""
        return [(drafts, sizes) for drafts, sizes in self.shapes.narrower if mode != LOGPROBS or not drafts]

    def admit(self, state: State, packed: np.ndarray) -> State:
        self.dispatches["admit"] += 1
        return self._program("admit", len(packed), state)(state, packed)

    def prefill(self, state: State, packed: np.ndarray) -> State:
        return self._call("prefill", state, packed)[0]

    def score(self, state: State, packed: np.ndarray) -> tuple[State, Array]:
        return self._call("score", state, packed)

    def first(self, state: State, packed: np.ndarray, mode: str) -> tuple[State, Array]:
        return self._call(f"first_{mode}", state, packed)

    def round(self, state: State, packed: np.ndarray, mode: str, drafts: int | None = None) -> tuple[State, Array]:
        """`drafts`: one of `Shapes.narrower`; None: the drafter's."""
        return self._call(_kind("round", mode, drafts), state, packed)

    def rounds(self, state: State, packed: np.ndarray, mode: str, drafts: int | None = None) -> tuple[State, Array]:
        """`Shapes.rounds` rounds in one program; results have a leading axis for them."""
        return self._call(_kind("rounds", mode, drafts), state, packed)

    def draft(self, state: State, packed: Array, mode: str) -> tuple[State, Proposal, Array]:
        """The drafts of a round that grammars constrain, and the same for the host: see `structured.programs`."""
        return self._call(f"draft_{_drafting(mode)}", state, packed)

    def forward(self, state: State, packed: Array, proposal: Proposal) -> tuple[State, Array, tuple[Array, ...]]:
        return self._call("forward", state, packed, proposal.replace(probs=None))

    def conclude(self, state: State, packed: Array, mode: str, *handed: Any) -> tuple[State, Array]:
        """`handed`: the proposal, what `forward` returned, masks and forced drafts."""
        return self._call(f"conclude_{mode}", state, packed, *handed)

    def masked_first(self, state: State, packed: np.ndarray, bits: np.ndarray, forced: np.ndarray):
        """As `first` in mode logprobs, among the tokens that `bits` allow."""
        return self._call("masked_first", state, packed, bits, forced)

    def warm_up(self, state: State) -> None:
        """Compile every program of the ladder, several at a time. An exception from one ends them all."""
        wanted = [one for one in self._ladder() if one not in self._compiled]
        # Two kinds of work: XLA's, in threads, and Python's, of which one thread does as much as many. That one lowers
        # everything before it keeps anything on disk, since a program that isn't lowered yet can't be compiled either.
        with (
            tqdm(total=len(wanted), desc="compiling", unit="program") as bar,
            ThreadPoolExecutor(os.cpu_count()) as pool,
            ThreadPoolExecutor(1) as python,
            _no_garbage_collection(),
            contextlib.nullcontext() if self._store is None else _not_in_jax_cache(),
        ):

            def finish(one: tuple[str, int], lowering: Future) -> None:
                lowered, kernels = lowering.result()
                python.submit(self._keep, *one, state, self._compile(*one, lowered), kernels)

            try:
                lowering = {}
                for one, found in zip(wanted, pool.map(lambda one: self._kept(*one, state), wanted), strict=True):
                    if found is None:
                        lowering[one] = python.submit(self._lower, *one, state)
                    else:
                        bar.update()
                for done in as_completed([pool.submit(finish, *each) for each in lowering.items()]):
                    done.result()
                    bar.update()
            except BaseException:
                for executor in (python, pool):
                    executor.shutdown(wait=False, cancel_futures=True)
                raise

    def _ladder(self) -> list[tuple[str, int]]:
        """All programs. Those that take XLA longest come first, so that little is left to do once all are lowered. One
        mode comes after the other, since later modes share its kernels and XLA's choices."""
        shapes = self.shapes
        kinds = ("round", "rounds") if shapes.rounds > 1 else ("round",)
        of_mode = {}
        for mode in MODES:
            widths = [(None, shapes.batches), *reversed(self.narrower(mode))]
            rounds = [(_kind(kind, mode, drafts), n) for kind in kinds for drafts, ns in widths for n in reversed(ns)]
            of_mode[mode] = [*rounds, *((f"first_{mode}", n) for n in reversed(shapes.firsts))]
        prompts = [("score", shapes.score), *(("prefill", blocks) for blocks in reversed(shapes.prefills))]
        admit = "admit", packing.admission_size(shapes.capacity)
        masked = []
        if shapes.structured:
            kinds = "forward", *(f"conclude_{mode}" for mode in MODES), f"draft_{SAMPLED}", f"draft_{GREEDY}"
            masked = [(kind, n) for kind in kinds for n in reversed(shapes.batches)]
            masked += [("masked_first", n) for n in shapes.firsts]
        return [*of_mode[LOGPROBS], *prompts, *of_mode[SAMPLED], *of_mode[GREEDY], admit, *masked]

    @property
    def workspace_bytes(self) -> int:
        """The most memory that a compiled program needs beside its operands and results."""
        return max((p.memory_analysis().temp_size_in_bytes for p in self._compiled.values()), default=0)

    def padding(self, rows: int, columns: int = 1) -> np.ndarray:
        """A packed batch of padding rows of a round: the dummy slot, the dummy page."""
        packed = np.zeros((rows, columns + self.shapes.pages_per_seq), np.int32)
        packed[:, 0] = self.shapes.num_slots
        return packed

    def _call(self, kind: str, state: State, packed: np.ndarray | Array, *handed: Any) -> tuple:
        self.dispatches[kind] += 1
        return self._program(kind, len(packed), state)(*self._weights(kind), state, packed, *handed)

    def _program(self, kind: str, size: int, state: State) -> Any:
        program = self._compiled.get((kind, size)) or self._kept(kind, size, state)
        if program is None:
            self.compiling += 1
            try:
                lowered, kernels = self._lower(kind, size, state)
                program = self._compile(kind, size, lowered)
                self._keep(kind, size, state, program, kernels)
            finally:
                self.compiling -= 1
                self.compiled_at = time.monotonic()
        return program

    def _weights(self, kind: str) -> tuple:
        """The target's and the drafter's weights. Passing hundreds of arrays takes a while, so programs that read none
        get none."""
        target, draft = self._params
        return (None, draft) if kind.partition("_")[0] in ("draft", "conclude") else (target, draft)

    def _arguments(self, kind: str, size: int, state: State) -> tuple:
        if kind == "admit":
            return state, np.zeros(size, np.int32)
        columns = packing.block_columns(self.shapes.block) if kind in ("prefill", "score") else 1
        if kind.partition("_")[0] in ("draft", "forward", "conclude", "masked"):
            columns = structured.columns(self.width - 1)
        return *self._weights(kind), state, np.zeros((size, columns + self.shapes.pages_per_seq), np.int32)

    def _handed(self, kind: str, size: int, state: State) -> tuple:
        """A program's arguments beside the packed array, by shape: the results of programs before it, and masks."""
        kind, _, mode = kind.partition("_")
        shape_of = lambda kind, *handed: self._jits[kind].eval_shape(*self._arguments(kind, size, state), *handed)  # noqa: E731
        rows = 1 if kind == "masked" else self.width
        bits = np.zeros((size, rows, structured.words(self.vocab)), np.uint32)
        masks = bits, np.zeros((size, rows, self.width), np.int32)
        if kind == "masked":
            return masks
        if kind not in ("forward", "conclude"):
            return ()
        _, proposal, _ = shape_of(f"draft_{_drafting(mode or GREEDY)}")
        shown = proposal.replace(probs=None)
        return (shown,) if kind == "forward" else (proposal, *shape_of("forward", shown)[1:], *masks)

    def _kept(self, kind: str, size: int, state: State) -> Any:
        if self._store is None or (kept := self._store.load((kind, size), self._arguments(kind, size, state))) is None:
            return None
        program, kernels = kept
        KERNELS.update(kernels)
        self.found.append((kind, size))
        self._compiled[kind, size] = program
        return program

    def _lower(self, kind: str, size: int, state: State) -> tuple[jax.stages.Lowered, Counter]:
        """A program before XLA sees it, and the kernels that it chose."""
        with counting() as kernels:
            arguments = *self._arguments(kind, size, state), *self._handed(kind, size, state)
            return self._jits[kind].lower(*arguments), kernels

    def _compile(self, kind: str, size: int, lowered: jax.stages.Lowered) -> Any:
        program = self._compiled[kind, size] = lowered.compile(COMPILER_OPTIONS)
        return program

    def _keep(self, kind: str, size: int, state: State, program: Any, kernels: Counter) -> None:
        if self._store is not None:
            self._store.save((kind, size), self._arguments(kind, size, state), program, kernels)


def _spread(f: Callable, run: Callable, division: Division) -> Callable:
    """The program `run`, which is `f` of some statics, over several devices."""
    all_same, state = EVERYWHERE, division.state
    proposal = Proposal(**{field.name: all_same for field in dataclasses.fields(Proposal)} | {"probs": OWNED})
    handed, result = (), (all_same,)
    if f is structured.draft:
        result = proposal, all_same
    elif f is structured.forward:
        handed, result = (proposal,), (LOGITS, all_same)
    elif f is structured.conclude:
        handed = proposal, LOGITS, all_same, all_same, all_same
    elif f is structured.first:
        handed = all_same, all_same
    params = None if f in (structured.draft, structured.conclude) else division.params
    given = params, division.draft_params, state, all_same, *handed
    return spread(run, division.mesh, given, (state, *result))


def _kind(kind: str, mode: str, drafts: int | None) -> str:
    """The kind of rounds with so many drafts; None: as many as the drafter makes."""
    return f"{kind}_{mode}" if drafts is None else f"{kind}_{mode}_{drafts}"


def _drafting(mode: str) -> str:
    """How drafts are made for a batch in this mode."""
    return GREEDY if mode == GREEDY else SAMPLED


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Lowering makes millions of objects, most of which stay. Collecting garbage again and again takes an eighth of its
    time.

    It is collected once at the end: half a second that a request would otherwise wait for.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
            gc.collect()


@contextlib.contextmanager
def _not_in_jax_cache() -> Iterator[None]:
    """jax's own cache is read but not written. Serialising a program stops all of Python, and jax would do it a second
    time, in the midst of lowering."""
    option = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, option)
    jax.config.update(option, float("inf"))
    try:
        yield
    finally:
        jax.config.update(option, before)
