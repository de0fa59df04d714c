"""The device programs of one engine: which there are, and their compilation ahead of calls.

`round` says what they compute, `executables` how they are kept on disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import jax
import numpy as np
from jax._src.dispatch import runtime_tokens  # jax waits for them at exit, and prints a failed callback's error again
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jaxspec.cache.host_blocks import PAGES, STATES, Blocks
from jaxspec.cache.memory_plan import gib, resident_memory
from jaxspec.compiling import ladder, xla_options
from jaxspec.compiling.divided import divided
from jaxspec.compiling.executable_store import Executables
from jaxspec.compiling.ladder import ADAPTED, One, drafting, kind_of
from jaxspec.compiling.lowering import Module, Processes, shape_of
from jaxspec.compiling.xla_options import no_garbage_collection
from jaxspec.config.progress import progress_bar, took
from jaxspec.drafters.base import Drafter, Proposal, SkippedDrafter
from jaxspec.models.model_config import ModelConfig
from jaxspec.pallas import hopper
from jaxspec.pallas.hopper import KERNELS, counting
from jaxspec.pallas.hopper.export import cores, not_in_jax_cache
from jaxspec.parallel.sharding import AXIS, BY_REQUEST, EVERYWHERE, Division, spread
from jaxspec.rounds import packing
from jaxspec.rounds.packing import Shapes, fit
from jaxspec.rounds.programs import (
    GREEDY,
    LOGPROBS,
    MODES,
    PROCESSED,
    SAMPLED,
    State,
    admit,
    clear,
    decode_round,
    decode_rounds,
    first,
    prefill,
    put,
    take,
)
from jaxspec.rounds.ragged_verification import Ragged, sharing
from jaxspec.scheduling.draft_count import SKIP_DRAFTER
from jaxspec.structured import programs as structured

log = logging.getLogger("jaxspec")

# For so long a start in stages lowers nothing further, once weights are there: an engine and a server come up.
QUIET_SECONDS = 2.0
FEW = 8  # programs that are lowered before other processes could help, which take seconds to come up


class Programs:
    """The compiled programs of one engine, one for each kind and number of rows, and how often each was dispatched.

    They are compiled ahead of their calls, by `warm_up` or on first use, or found in `store`; so a call never traces.
    The state given to a call is consumed.
    """

    without_warm_up = "are compiled when they are first used"

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
        self.shapes, self._made_of = shapes, (config, drafter, shapes)
        self.found: list[One] = []  # of the store's, those that were used
        self._store, self.division, self._kernels = store, division, hopper.requested_kernels()
        self.dispatches: Counter = Counter()
        self.broadcast: Callable[..., None] | None = None  # on several hosts: called with each program before it runs
        self._params = params, draft_params if division is None else (draft_params, division.peers)
        self.vocab, self.width = config.vocab_size, drafter.num_draft_tokens + 1  # rows that a round verifies at most

        def jit(f: Callable, *static: Any, by: Drafter = drafter, adapters: bool = False) -> Callable:
            run = partial(f, config, by, *static)
            if division is not None:
                given = (
                    division if adapters else dataclasses.replace(division, params=_without_adapters(division.params))
                )
                run = divided(f, run, given)
            return jax.jit(run, donate_argnums=2)

        def writing(f: Callable) -> Callable:
            """A program of the state and one array, without weights."""
            if division is not None:
                f = spread(f, division.mesh, (division.state, EVERYWHERE), division.state)
            return jax.jit(f, donate_argnums=0)

        def moving(f: Callable, kind: str, gives_state: bool) -> Callable:
            """A program that takes blocks of the host's cache out of the state, or puts them into it."""
            f = partial(f, kind)
            if division is not None:
                blocks, sums = BY_REQUEST, PartitionSpec(None, AXIS)  # each device's words, and its checksums
                given, gives = (division.state, EVERYWHERE, blocks), (division.state if gives_state else blocks, sums)
                f = spread(f, division.mesh, given if gives_state else given[:2], gives)
            return jax.jit(f, donate_argnums=0 if gives_state else ())

        whole = Ragged(drafter, self.width - 1) if shapes.ragged else drafter
        self._jits = {
            "admit": writing(admit),
            "clear": writing(partial(clear, config.decoder.by_request)),
            **{f"take_{kind}": moving(take, kind, False) for kind in (PAGES, STATES)},
            **{f"put_{kind}": moving(put, kind, True) for kind in (PAGES, STATES)},
            "prefill": jit(prefill, shapes.block, False),
            "score": jit(prefill, shapes.block, True),
            **{f"first_{mode}": jit(first, self._reporting(mode)) for mode in MODES},
            **{f"draft_{mode}": jit(structured.draft, mode) for mode in (GREEDY, SAMPLED)},
            "forward": jit(structured.forward),
            **{f"conclude_{mode}": jit(structured.conclude, self._reporting(mode)) for mode in MODES},
            "masked_first": jit(structured.first, self._reporting(LOGPROBS)),
        }
        self._jit = jit
        self._add_rounds("", whole)
        if shapes.adapters:
            self._jits |= {
                ADAPTED + "prefill": jit(prefill, shapes.block, False, adapters=True),
                ADAPTED + "score": jit(prefill, shapes.block, True, adapters=True),
                ADAPTED + "forward": jit(structured.forward, adapters=True),
            }
            self._add_rounds("", whole, ADAPTED)
        for drafts, _ in shapes.narrower:
            fewer = sharing if drafts in dict(shapes.ragged) else type(drafter).narrowed
            self.add_rounds(drafts, SkippedDrafter() if drafts == SKIP_DRAFTER else fewer(drafter, drafts))
        self._compiled: dict[One, Any] = {}
        self.behind: threading.Thread | None = None  # compiles what a start in stages left
        self._stopped = False
        self._others: Processes | None = None  # that lower programs
        self._quiet_until = 0.0  # on the monotonic clock
        self._unkept: list[tuple[One, Any, Counter]] = []  # programs and their kernels, not on disk yet
        self.watch: Callable[[str, np.ndarray | Array, float, tuple], None] | None = None  # told of each call
        self.compiling = 0  # calls that wait for their program to be compiled
        self.compiled_at = 0.0  # when the last of them had it, on the monotonic clock

    def fill(self, params: Any, draft_params: Any) -> None:
        """Have these weights from the next call on, in place of shapes or of others."""
        self._params = params, draft_params if self.division is None else (draft_params, self.division.peers)
        self._let_others_begin()

    def add_rounds(self, drafts: int, by: Drafter) -> None:
        """Have rounds of so many drafts, which `by` makes."""
        for before in ("", ADAPTED) if self.shapes.adapters else ("",):
            self._add_rounds(f"_{drafts}", by, before)

    def _add_rounds(self, suffix: str, by: Drafter, before: str = "") -> None:
        for mode in MODES:
            of, reported = {"by": by, "adapters": bool(before)}, self._reporting(mode)
            self._jits[f"{before}round_{mode}{suffix}"] = self._jit(decode_round, reported, **of)
            self._jits[f"{before}rounds_{mode}{suffix}"] = self._jit(decode_rounds, reported, self.shapes.rounds, **of)

    def _reporting(self, mode: str) -> str:
        """The mode of a program's function: which log-probabilities are reported is the engine's own."""
        return PROCESSED if mode == LOGPROBS and self.shapes.processed else mode

    def admit(self, state: State, packed: np.ndarray) -> State:
        return self._write("admit", state, packed)

    def clear(self, state: State, pages: np.ndarray) -> State:
        """Put zeros into pages. It isn't in the ladder, but compiled when it is first needed."""
        return self._write("clear", state, pages)

    def _write(self, kind: str, state: State, packed: np.ndarray) -> State:
        self.dispatches[kind] += 1
        if self.broadcast is not None:
            self.broadcast(kind, packed)
        return self._program(kind, len(packed), state)(state, packed)

    def take(self, kind: str, state: State, rows: np.ndarray) -> tuple[Blocks, Array]:
        """Copies of pages or state slots for the host's cache, and their checksums. The state stays as it is."""
        self.dispatches[f"take_{kind}"] += 1
        return self._program(f"take_{kind}", len(rows), state)(state, rows)

    def block_bytes(self, kind: str, state: State) -> int:
        """Bytes of one such copy, on all devices together."""
        ((block,), _) = self._jits[f"take_{kind}"].eval_shape(state, np.zeros(1, np.int32))
        return block.size * block.dtype.itemsize

    def put(self, kind: str, state: State, rows: np.ndarray, blocks: Blocks) -> tuple[State, Array]:
        """Write such copies back: the state, and their checksums."""
        self.dispatches[f"put_{kind}"] += 1
        return self._program(f"put_{kind}", len(rows), state)(state, rows, blocks)

    def prefill(self, state: State, packed: np.ndarray, adapters: bool = False) -> State:
        """`adapters`, here and below: some of the requests have one, and `packed` says which in its last column."""
        return self.dispatch(_kind("prefill", adapters), state, packed)[0]

    def score(self, state: State, packed: np.ndarray, adapters: bool = False) -> tuple[State, Array]:
        return self.dispatch(_kind("score", adapters), state, packed)

    def first(self, state: State, packed: np.ndarray, mode: str) -> tuple[State, Array]:
        return self.dispatch(f"first_{mode}", state, packed)

    def round(
        self, state: State, packed: np.ndarray, mode: str, drafts: int | None = None, adapters: bool = False
    ) -> tuple[State, Array]:
        """`drafts`: one of `Shapes.narrower`; None: the drafter's."""
        return self.dispatch(_kind(kind_of("round", mode, drafts), adapters), state, packed)

    def rounds(
        self, state: State, packed: np.ndarray, mode: str, drafts: int | None = None, adapters: bool = False
    ) -> tuple[State, Array]:
        """`Shapes.rounds` rounds in one program; results have a leading axis for them."""
        return self.dispatch(_kind(kind_of("rounds", mode, drafts), adapters), state, packed)

    def draft(self, state: State, packed: Array, mode: str) -> tuple[State, Proposal, Array]:
        """The drafts of a round that grammars constrain, and the same for the host: see `structured.programs`."""
        return self.dispatch(f"draft_{drafting(mode)}", state, packed)

    def forward(
        self, state: State, packed: Array, proposal: Proposal, adapters: bool = False
    ) -> tuple[State, Array, tuple[Array, ...]]:
        return self.dispatch(_kind("forward", adapters), state, packed, proposal.replace(probs=None))

    def conclude(self, state: State, packed: Array, mode: str, *handed: Any) -> tuple[State, Array]:
        """`handed`: the proposal, what `forward` returned, masks and forced drafts."""
        return self.dispatch(f"conclude_{mode}", state, packed, *handed)

    def masked_first(self, state: State, packed: np.ndarray, bits: np.ndarray, forced: np.ndarray):
        """Run `first` in mode logprobs, among the tokens that `bits` allow."""
        return self.dispatch("masked_first", state, packed, bits, forced)

    def warm_up(self, state: State, wanted: Callable[[One], bool] = lambda one: True) -> None:
        """Compile every program of the ladder, or those `wanted`, several at a time. An exception from one ends them
        all."""
        programs = list(filter(wanted, ladder.ladder_of(self.shapes)))
        with no_garbage_collection():
            self._compile_all(programs, state, cores())

    def warm_up_in_stages(self, state: State) -> None:
        """Compile a few programs that together serve nearly any request; the others in threads, after return. What
        grammars and prompts' log-probabilities need comes first of those: see `lacks`.

        Until a program is there, `stand_in` names another. An exception from one of the first ends them all. If a later
        one raises, it and those behind it stay `pending`.
        """
        essential, programs = ladder.essential(self.shapes), ladder.ladder_of(self.shapes)
        special = ladder.special(self.shapes)
        longest = "round" if self.width > 1 else "prefill"  # to compile, so it is lowered first
        first = sorted(essential, key=lambda one: (not one[0].startswith(longest), programs.index(one)))
        order = lambda one: (one not in special, *ladder.use(one))  # noqa: E731
        later = sorted((one for one in programs if one not in essential), key=order)
        with no_garbage_collection():
            self._compile_all(first, state, cores(), then=later)
        # Serving consumes the state's arrays; their shapes are all that later programs are made of.
        shapes = jax.tree.map(partial(shape_of, sharded=self.division is not None), state)
        self._let_others_begin()
        self.behind = threading.Thread(None, self._compile_later, "jaxspec-programs", [later, shapes], daemon=True)
        self.behind.start()

    @property
    def ready(self) -> int:
        """How many programs are there, compiled or found in the store."""
        return len(self._compiled)

    @property
    def pending(self) -> list[One]:
        """Kinds and sizes that a start in stages has still to bring."""
        if self.behind is None:
            return []
        return [one for one in ladder.ladder_of(self.shapes) if one not in self._compiled]

    def lacks(self, scores: bool, grammars: bool, adapters: bool = False) -> bool:
        """Whether programs are still to come without which prompts' log-probabilities, grammars or adapters can't be
        served."""
        behind = self.behind
        if behind is None or not behind.is_alive():  # what isn't there by now is compiled when it is called
            return False
        return any(one not in self._compiled for one in ladder.special(self.shapes, scores, grammars, adapters))

    def stand_in(self, name: str, modes: Sequence[str], requests: int, adapters: bool = False) -> One:
        """The mode and size to run `name` in: the first of `modes` and its smallest size that holds `requests`.

        While a start in stages goes on, those that there are. `name`: see `ladder.sizes_of`; "prefill" and
        "masked_first" have mode "" alone.
        """
        if self.behind is None:  # without warm-up too: what is best is compiled
            return modes[0], fit(requests, ladder.sizes_of(self.shapes, name, modes[0]))
        return ladder.stand_in(self._compiled, self.shapes, name, modes, requests, adapters)

    def stop(self) -> None:
        """Compile nothing further behind. What is being compiled is finished, and not waited for."""
        self._stopped = True
        self._end_lowering()

    def _compile_later(self, wanted: list[One], state: State) -> None:
        """The second stage, in a thread of its own, on all cores but two that serve."""
        started = time.monotonic()
        try:
            self._compile_all(wanted, state, max(cores() - 2, 1), shown=False)
        except Exception as error:
            if self._ending():
                return
            log.error(
                "%d programs are missing and others serve in their place, more slowly: %s",
                len(self.pending),
                ", ".join(f"{kind} {size}" for kind, size in self.pending),
                exc_info=error,
            )
            return
        after, host = time.monotonic() - started, gib(resident_memory())
        log.info("the other %d programs are ready, %.1f s after the first, with %s resident", len(wanted), after, host)
        self.behind = None

    def _begin_lowering(self, programs: Sequence[One], state: State) -> None:
        """Have other processes lower these, but not over several hosts, nor a subclass's."""
        if len(programs) > FEW and self.broadcast is None and type(self) is Programs and self._others is None:
            self._others = Processes.begin(self.made_of(), state, self._kernels, programs)

    def made_of(self) -> tuple:
        """This class's arguments for another process, arrays and devices among them by shape alone."""
        params, draft_params = self._params
        if self.division is None:
            return *self._made_of, params, draft_params, None, None
        return *self._made_of, params, draft_params[0], None, self.division.without_devices()

    def _end_lowering(self) -> None:
        others, self._others = self._others, None
        if others is not None:
            others.stop()

    def _let_others_begin(self) -> None:
        """Lower nothing further for a moment, so that whoever comes up meanwhile has all of Python."""
        self._quiet_until = time.monotonic() + QUIET_SECONDS

    def _ending(self) -> bool:
        """Whether to compile nothing further: `stop` was called, or the process ends, which waits for threads."""
        return self._stopped or not threading.main_thread().is_alive()

    def _compile_all(
        self, wanted: list[One], state: State, workers: int, shown: bool = True, then: Sequence[One] = ()
    ) -> None:
        """`then`: what comes later. Once all is lowered here, other processes begin with it. What is new is written to
        disk with it, not now."""
        wanted = [one for one in wanted if one not in self._compiled]
        # Two kinds of work: XLA's, in threads, and Python's, in other processes where there are many programs. Writing
        # to disk stops all of Python, and comes once all are lowered, since a program that isn't can't be compiled.
        python, all_lowered = ThreadPoolExecutor(1), threading.Event()
        with (
            progress_bar(len(wanted), "compiling", "program", shown) as bar,
            ThreadPoolExecutor(workers) as pool,
            ThreadPoolExecutor(1) as disk,
        ):

            def go_on() -> None:
                if self._ending():
                    raise CancelledError

            def kept(one: One) -> Any:
                go_on()
                return self._kept(*one, state)

            def lower(one: One) -> tuple[One, jax.stages.Lowered, Counter]:
                while (seconds := self._quiet_until - time.monotonic()) > 0:
                    time.sleep(seconds)
                go_on()
                one, module = (one, None) if others is None else others.take(go_on)
                lowered = self._lower(*one, state) if module is None else self._take_in(module, one, state)
                left.remove(one)
                if not left:
                    all_lowered.set()
                return one, *lowered

            def finish() -> None:
                *_, done = lowered.get()
                one, program, kernels = done.result()
                go_on()
                new = one, self._compile(*one, program), kernels
                self._unkept.append(new) if then else disk.submit(self._keep, state, *new)

            def put(done: Future) -> None:
                """Where several are lowered, those are compiled first that were wanted first."""
                failed = done.cancelled() or done.exception() is not None
                lowered.put((-1 if failed else missing.index(done.result()[0]), id(done), done))

            try:
                found = dict(zip(wanted, pool.map(kept, wanted), strict=True))
                missing = [one for one in wanted if found[one] is None]
                bar.update(len(wanted) - len(missing))
                left, lowered = set(missing), queue.PriorityQueue()
                self._begin_lowering(missing, state)
                if (others := self._others) is not None:
                    others.keep(left.copy())
                for one in missing:
                    python.submit(lower, one).add_done_callback(put)
                if missing:
                    python.submit(self._begin_lowering, then, state)
                if missing and not then:
                    disk.submit(all_lowered.wait)
                while self._unkept and not then:
                    disk.submit(self._keep, state, *self._unkept.pop())
                for done in as_completed([pool.submit(finish) for _ in missing]):
                    done.result()
                    bar.update()
            except BaseException:
                for executor in (python, pool, disk):
                    executor.shutdown(wait=False, cancel_futures=True)
                all_lowered.set()
                self._end_lowering()
                raise
            finally:
                python.shutdown(wait=False)
                if not then:
                    self._end_lowering()

    @property
    def most_rounds(self) -> int:
        """The most rounds of a program. A start in stages leaves those that are for few requests to the end."""
        there = self.behind is None or self.shapes.several(self.shapes.batches[-1:])
        return self.shapes.rounds if there else 1

    @property
    def workspace_bytes(self) -> int:
        """The most memory that a compiled program needs beside its operands and results."""
        return max((p.memory_analysis().temp_size_in_bytes for p in self._compiled.values()), default=0)

    def padding(self, rows: int, columns: int = 1) -> np.ndarray:
        """A packed batch of padding rows of a round: the dummy slot, the dummy page."""
        packed = np.zeros((rows, columns + self.shapes.pages_per_seq), np.int32)
        packed[:, 0] = self.shapes.num_slots
        return packed

    def dispatch(self, kind: str, state: State, packed: np.ndarray | Array, *handed: Any) -> tuple:
        """Call a program by its kind; `handed` comes behind the packed array. Returns the state, and its results."""
        self.dispatches[kind] += 1
        called = time.monotonic()
        if self.broadcast is not None:  # first, so that all nodes compile at once
            self.broadcast(kind, packed, *(each for each in handed if isinstance(each, np.ndarray)))
        program = self._program(kind, len(packed), state)
        results = program(*self._weights(kind), state, packed, *handed)
        if self.watch is not None:
            self.watch(kind, packed, called, results)
        return results

    def _program(self, kind: str, size: int, state: State) -> Any:
        program = self._compiled.get((kind, size)) or self._kept(kind, size, state)
        if program is None:
            self.compiling += 1
            try:
                lowered, kernels = self._lower(kind, size, state)
                program = self._compile(kind, size, lowered)
                self._keep(state, (kind, size), program, kernels)
            finally:
                self.compiling -= 1
                self.compiled_at = time.monotonic()
        return program

    def _weights(self, kind: str) -> tuple:
        """The target's and the drafter's weights. Passing hundreds of arrays takes a while, so programs that read none
        get none."""
        target, draft = self._params
        if kind.startswith(ADAPTED):
            return target, draft
        return None if kind.partition("_")[0] in ("draft", "conclude") else _without_adapters(target), draft

    def _arguments(self, kind: str, size: int, state: State) -> tuple:
        if kind.partition("_")[0] in ("admit", "clear", "take", "put"):
            return state, np.zeros(size, np.int32)
        plain, columns = kind.removeprefix(ADAPTED), 1
        if plain in ("prefill", "score"):
            columns = packing.block_columns(self.shapes.block, self.shapes.pictures > 0)
        if plain.partition("_")[0] in ("draft", "forward", "conclude", "masked"):
            columns = structured.columns(self.width - 1)
        columns += self.shapes.pages_per_seq + (plain != kind)
        return *self._weights(kind), state, np.zeros((size, columns), np.int32)

    def _handed(self, kind: str, size: int, state: State) -> tuple:
        """A program's arguments beside the packed array, by shape: the results of programs before it, and masks."""
        kind, _, mode = kind.removeprefix(ADAPTED).partition("_")
        shape_of = lambda kind, *handed: self._jits[kind].eval_shape(*self._arguments(kind, size, state), *handed)  # noqa: E731
        rows = 1 if kind == "masked" else self.width
        bits = np.zeros((size, rows, structured.words(self.vocab)), np.uint32)
        masks = bits, np.zeros((size, rows, self.width), np.int32)
        if kind == "masked":
            return masks
        if kind == "put":
            return (shape_of(f"take_{mode}")[0],)
        if kind not in ("forward", "conclude"):
            return ()
        _, proposal, _ = shape_of(f"draft_{drafting(mode or GREEDY)}")
        shown = proposal.replace(probs=None)
        return (shown,) if kind == "forward" else (proposal, *shape_of("forward", shown)[1:], *masks)

    def _kept(self, kind: str, size: int, state: State) -> Any:
        if self._store is None:
            return None
        with took(f"looked for {kind} {size}"):
            kept = self._store.load((kind, size), self._arguments(kind, size, state))
        if kept is None:
            return None
        program, kernels = kept
        KERNELS.update(kernels)
        self.found.append((kind, size))
        self._compiled[kind, size] = program
        return program

    def _take_in(self, module: Module, one: One, state: State) -> tuple[jax.stages.Lowered, Counter]:
        """Lower a program by another process's module, in place of `_lower`."""
        with took(f"took in {one[0]} {one[1]}"):
            return module.lower(self._arguments(*one, state), 0 if one[0] == "admit" else 2)

    def exported(self, one: One, state: State, platform: str) -> Module:
        """A program for another process, which has the device."""
        with hopper.use_kernels(self._kernels):
            handed = partial(self._handed, *one, state)
            return Module.of(self._jits[one[0]], self._arguments(*one, state), handed, platform)

    def _lower(self, kind: str, size: int, state: State) -> tuple[jax.stages.Lowered, Counter]:
        """A program before XLA sees it, and the kernels that it chose."""
        with counting() as kernels, hopper.use_kernels(self._kernels), took(f"lowered {kind} {size}"):
            arguments = *self._arguments(kind, size, state), *self._handed(kind, size, state)
            return self._jits[kind].lower(*arguments), kernels

    def _compile(self, kind: str, size: int, lowered: jax.stages.Lowered) -> Any:
        options = dict(xla_options.OPTIONS)
        if self.division and self.division.peers:
            options |= xla_options.WITH_PEERS
        elif hopper.kernels_run_here(self._kernels):
            prompts = kind.removeprefix(ADAPTED) in ("prefill", "score")
            options |= xla_options.autotuning(self._params, size * (self.shapes.block if prompts else 1))
        with took(f"compiled {kind} {size}"), contextlib.nullcontext() if self._store is None else not_in_jax_cache():
            program = self._compiled[kind, size] = xla_options.compiled(lowered, options, f"{kind} {size}")
        return program

    def _keep(self, state: State, one: One, program: Any, kernels: Counter) -> None:
        if self._store is not None:
            with took(f"kept {one[0]} {one[1]}"):
                self._store.save(one, self._arguments(*one, state), program, kernels)


def _kind(kind: str, adapters: bool) -> str:
    return ADAPTED + kind if adapters else kind


def _without_adapters(params: Any) -> Any:
    """The target's weights, or how they are divided, as programs take them that know no adapters."""
    if not isinstance(params, Mapping) or "adapters" not in params:
        return params
    return {name: each for name, each in params.items() if name != "adapters"}


def settle(owner: Any) -> None:
    """Wait for every program that made `owner.state`: jax aborts a process that ends while one still runs.

    Arrays that a failed program had consumed are deleted, and there is nothing to wait for. What it should have made
    raises its error, which whoever reads its result gets.
    """
    for x in jax.tree.leaves(owner.state):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if not x.is_deleted():
                x.block_until_ready()
    try:
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError:
        runtime_tokens.clear()


def programs_there(programs: Programs) -> str:
    """How many of an engine's programs are compiled, in words."""
    ready, pending = programs.ready, len(programs.pending)
    if pending:
        return f"{ready} of {ready + pending} programs. The others are being compiled; until then requests are slower"
    return f"{ready} programs" if ready else f"whose programs {programs.without_warm_up}"
