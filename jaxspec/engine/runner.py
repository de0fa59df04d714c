"""The device side of an engine: weights, state, programs, sized for this machine. Knows slots and pages, no requests.

Everything the engine dispatches goes through here, in order. Results come back as device arrays whose copy to the host
has already been started, so reading them a round later doesn't wait.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import jax
import numpy as np

from jaxspec.cache.memory_check import check_room, explain_out_of_memory
from jaxspec.cache.memory_plan import (
    HOST_STAGING,
    MemoryPlan,
    StateSlots,
    claim_device,
    device_memory,
    memory_in_use,
    plan_memory,
    resident_memory,
)
from jaxspec.cache.paged import PageLayout, kv_bytes_per_token, page_dtype
from jaxspec.cache.recurrent import state_bytes
from jaxspec.cache.workspace import workspace_estimate
from jaxspec.checkpoint import CheckpointError, Model, load_target
from jaxspec.checkpoint.demo import cache_folder
from jaxspec.checkpoint.kv_scales import by_group
from jaxspec.compiling import xla_options
from jaxspec.compiling.abstract_model import Loading, alike
from jaxspec.compiling.executable_store import Executables, enable_compilation_cache
from jaxspec.compiling.ladder import of_rounds, sizes_of
from jaxspec.compiling.op_by_op import OpByOp
from jaxspec.compiling.programs import Programs
from jaxspec.compiling.round_timing import time_rounds
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.options import ConfigError
from jaxspec.decoder.forward import describe, path_table
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.loading import LoadedDrafter, check_drafter, load_drafter
from jaxspec.engine.adapters import Adapters, places_of, tell_paths, with_adapters
from jaxspec.engine.defaults import demand_of, resolve, rounds_for, shapes_of, small_model
from jaxspec.engine.deterministic import prepared, reporting
from jaxspec.engine.pictures import PictureReader, refusal, tower_workspace
from jaxspec.engine.start_report import report_start
from jaxspec.models.model_config import ModelConfig
from jaxspec.pallas import hopper, portable
from jaxspec.parallel import peers, sharding
from jaxspec.parallel.hosts import Follower, Leader
from jaxspec.parallel.sharding import Division
from jaxspec.rounds.packing import fit, pack_admission, pack_blocks, put_adapters
from jaxspec.rounds.programs import MODES, State, empty_state
from jaxspec.scheduling.device_pages import rows_for
from jaxspec.scheduling.draft_count import SKIP_DRAFTER, Group
from jaxspec.scheduling.sequence import NO_STATE, Chunk, SequenceState
from jaxspec.structured.grammar import grammars_of
from jaxspec.structured.masks import ALL
from jaxspec.structured.programs import OpenRound, columns, put_forced

log = logging.getLogger("jaxspec")


class Runner:
    """Loads model and drafter, plans memory, makes the state, compiles the programs.

    `config` is resolved: options that were left to the model and the machine are filled in.

    **Raises:** `ConfigError`, `CheckpointError`.
    """

    _memory: tuple[int, int] | None = None  # as of `plan_memory`
    sums: str | None = None  # how those over several devices are made
    _recalled = False  # round times of an earlier start were asked for

    @hopper.with_requested_kernels
    def __init__(
        self,
        options: EngineConfig,
        model: Model | None = None,
        draft: LoadedDrafter | None = None,
        staged_start: bool = False,
        hosts: Leader | Follower | None = None,
    ):
        """`staged_start`: return once the programs that serve anything are there, and compile the others behind.
        `hosts`: the nodes that this one runs the model with."""
        if options.dp_size != 1:
            raise ConfigError(
                f"--dp-size {options.dp_size}: this is one engine. python -m server runs several, and in Python "
                "jaxspec.replicas.data_parallel.DataParallelLLM, which has AsyncLLM's methods"
            )
        self.hosts = hosts
        if hosts is not None and options.has_adapters:
            raise ConfigError("adapters aren't served on several hosts (--nnodes); merge one into its model")
        if hosts is not None and options.dp_attention:
            raise ConfigError("--dp-attention divides requests among one host's GPUs; drop it, or --nnodes")
        claim_device(options.host_kv_gb)
        enable_compilation_cache()
        log.info("kernels: %s", portable.kernel_choice())
        given = [each.params if each else () for each in (model, draft)]
        own = sharding.bytes_of(given[0]) + sharding.bytes_of(given[1], given[0])
        self._other_bytes = max(memory_in_use(options.tp_size) - own, 0)
        self.compiles = xla_options.compile_counter()
        started = time.monotonic()
        loading = None if model or draft or hosts else Loading.of(options)
        self._load(options, *((model, draft) if loading is None else (loading.model, loading.draft)))
        self._prepare(options)
        if loading is not None:
            loading.begin()
        grammars = lambda: grammars_of(self.model, self.config.skip_warmup) if self.shapes.structured else None  # noqa: E731
        with explain_out_of_memory(self.plan, self.config):
            self.pictures = self._reader()
            self.state = self._shaped_state() if loading else self._empty_state()
            self.grammars = None if loading else grammars()
            self._compile(options, staged_start, loading)
        self.grammars = self.grammars or grammars()
        if self.pictures is not None and not self.config.skip_warmup:
            self.pictures.programs.warm_up(self.config.dtype, staged_start)
        lacks_snapshots = self.snapshots == () and not self.config.disable_prefix_cache
        of = self.plan, self.model, self.draft, self.programs, self.page_dtype, lacks_snapshots
        report_start(started, *of)

    def _load(self, options: EngineConfig, model: Model | None, draft: LoadedDrafter | None) -> None:
        """Model and drafter, those given or those of the options; and both as one of several devices has them."""
        if model is None and draft is None:
            check_drafter(options)
        self.model = model or load_target(options)
        if self.model.tp_size != options.tp_size:
            raise ConfigError(
                f"--tp-size {options.tp_size}: {self.model.name} was loaded for {self.model.tp_size} devices; give "
                "load_model the same tp_size"
            )
        self.draft = draft or load_drafter(options.draft, self.model, options)
        self.model = reporting(prepared(self.model, self.draft, options), options, self.hosts is not None)
        self.mesh = sharding.mesh_of(options.tp_size)
        self._local, self._drafter = self.model.config.on_one_of(options.tp_size), self.draft.drafter
        if self.mesh is not None:
            self._drafter = self._drafter.on_one_of(options.tp_size)
            self.draft = dataclasses.replace(self.draft, params=sharding.everywhere(self.draft.params, self.mesh))
            self.model = dataclasses.replace(self.model, tower=sharding.everywhere(self.model.tower, self.mesh))

    def _prepare(self, options: EngineConfig) -> None:
        """All that follows from the shapes of model and drafter: options, memory, programs that aren't compiled yet."""
        self.config, drafter = resolve(options, self.model, self.draft), self._drafter
        # Rows that a round verifies per request, and most tokens that come of it.
        self.width, self.yields = drafter.num_draft_tokens + 1, drafter.longest + 1
        few, tower = rounds_for(options, self.model), None if self.no_pictures else self.model.config.tower
        shapes = shapes_of(self.config, drafter, alone=not small_model(self.model), rounds_for=few, tower=tower)
        self.adapters = Adapters(self.config, self.model, shapes.num_slots) if self.config.has_adapters else None
        self.shapes = dataclasses.replace(shapes, adapters=self.adapters.count if self.adapters else 0)
        self.narrower = dict(self.shapes.narrower)
        self.round_times: dict[Group, dict[int, float]] = {}  # seconds by drafts; none without warm-up
        self.plan, self._layout = self._plan()
        check_room(self.plan, self.config)
        of = self._local.decoder, sharding.on_one(self.model.params["layers"]), self.shapes.batches, self.width
        self.paths = path_table(*of, self._layout.dtype, self.config.tp_size)
        log.info("%s", describe(self.paths))
        if self.adapters is not None:
            tell_paths(self.adapters, *of, self._layout.dtype, self.config.tp_size)
        self._division = self._divide()
        params = with_adapters(self.model.params, self.adapters), self.draft.params
        made = OpByOp if self.config.disable_jit else Programs
        self.programs = made(self._local, drafter, self.shapes, *params, self._store(), self._division)

    def _compile(self, options: EngineConfig, staged: bool, loading: Loading | None) -> None:
        """Compile the programs, or in a `staged` start those that serve anything; meet the other hosts.

        While weights are `loading`, their shapes and the state's are what programs are compiled for.
        """
        hosts, warm = self.hosts, not self.config.skip_warmup
        self.starting = staged and warm  # programs are missing, or their times
        if loading is not None:
            loading.when_failed(self.programs.stop)
        try:
            if self.starting:
                self.programs.warm_up_in_stages(self.state)
            elif warm:
                self.programs.warm_up(self.state)
        except CancelledError:
            if loading is not None:
                loading.result()
            raise
        if loading is not None and not self._filled(*loading.result()):
            log.warning("weights aren't as the config says, so programs are compiled again")
            self.programs.stop()
            self._prepare(options)
            self.state = self._empty_state()
            self._compile(options, staged, None)
            return
        if hosts is not None:
            self.programs.broadcast = hosts.meet(self._digests())
        if warm and not (self.starting or (hosts is not None and hosts.follows)):
            self._complete(lambda: None)
        self.plan = dataclasses.replace(self.plan, host_bytes=resident_memory())

    def _filled(self, model: Model, draft: LoadedDrafter) -> bool:
        """Take these in place of their shapes, and make the state. Whether the programs are right for them."""
        shapes = self.model.params, self.draft.params, self.state
        same = (self.model.config, self.draft.drafter) == (model.config, draft.drafter)
        self._load(self.config, model, draft)
        if not (same and alike(shapes[:2], (model.params, draft.params)) and alike(shapes[2], self._shaped_state())):
            return False
        self._fill()
        self.pictures = self._reader()
        self.state = self._empty_state()
        return True

    def complete_start(self, flush: Callable[[], None] | None) -> bool:
        """After a start in stages: whether it is over. It is once all programs are there and their rounds are timed.

        Rounds are timed at the first start on a machine, which takes seconds and overwrites slots and pages. `flush`
        drops what is cached there and is called before; None while requests run: then they aren't timed.
        """
        if not self.starting:
            return True
        if (self.programs.behind is not None and self.programs.behind.is_alive()) or self.lacks_tower:
            return False
        self.starting = not self._complete(flush)
        return not self.starting

    def _complete(self, flush: Callable[[], None] | None) -> bool:
        if self.narrower and not self.programs.pending:
            if not self._recalled:
                self._recalled = True  # asked for once, since this may be called before each step
                self._recall_times()
            if not self.round_times:
                if flush is None:
                    return False
                flush()
                self._time_rounds()
        tower = self.pictures.workspace_bytes if self.pictures else 0
        self.plan = dataclasses.replace(
            self.plan, workspace_bytes=max(self.programs.workspace_bytes, tower) + self.host_staging
        )
        return True

    @property
    def no_pictures(self) -> str | None:
        """Why this engine reads no pictures, if it doesn't."""
        return refusal(self.model, self.config.chunked_prefill_size, self.hosts is not None)

    def _reader(self) -> PictureReader | None:
        of = self.model.config.tower, self.model.tower, self.shapes.pictures, self.mesh, self.config.deterministic
        return PictureReader(*of, self._store()) if self.shapes.pictures else None

    def _plan(self) -> tuple[MemoryPlan, PageLayout]:
        config, shapes = self.config, self.shapes
        dtype = page_dtype(config.kv_cache_dtype, config.dtype)
        together = config.page_size * self.by_request
        empty = self._state_shapes(PageLayout(self.by_request, config.page_size, dtype), self._local, self._drafter)
        drafter_per_token = self._drafter.kv_bytes_per_token(dtype)
        per_token = kv_bytes_per_token(self._local, dtype) + drafter_per_token
        per_token += sharding.bytes_of(empty.reported) // together
        drafter_by_slot = sharding.bytes_of(empty.draft) - together * drafter_per_token
        slot, state = state_bytes(self._local, self.width, config.dtype, config.state_dtype)
        demand = demand_of(config, shapes, self._drafter, self.model.config.tower, self._memory)
        workspace = workspace_estimate(self._local, sharding.on_one(self.model.params), demand)
        if shapes.pictures:
            workspace = max(workspace, tower_workspace(self.model.config.tower, demand.itemsize))
        plan = plan_memory(
            weight_bytes=sharding.bytes_of(self.model.params)
            + sharding.bytes_of(self.model.tower)
            + sharding.bytes_of(self.adapters and self.adapters.stacks),
            draft_weight_bytes=sharding.bytes_of(self.draft.params, self.model.params),
            bytes_per_token=per_token,
            slot_bytes=drafter_by_slot + sharding.bytes_of((empty.slots, empty.hidden, empty.features, empty.pictures)),
            draft_window=self._drafter.recent,
            workspace_bytes=workspace + self.host_staging,
            page_size=config.page_size,
            mem_fraction=config.mem_fraction_static,
            max_total_tokens=config.max_total_tokens,
            most_useful_tokens=shapes.num_slots * shapes.pages_per_seq * config.page_size,
            states=StateSlots(shapes.num_slots if slot else 0, 0, slot, shapes.num_slots * self.width * state),
            max_snapshots=config.max_state_snapshots if slot and not config.disable_prefix_cache else 0,
            memory=self._memory,
            devices=config.tp_size,
            other_bytes=self._other_bytes,
            by_request=self.by_request,
        )
        if self.hosts is not None:
            plan = plan.cut(*self.hosts.agree(plan.tokens, plan.states.snapshots))
        return plan, PageLayout(plan.num_pages, config.page_size, dtype)

    def _digests(self) -> dict[str, str]:
        """Digests of the shapes that programs were made of, which must be the same on every node."""
        trees = {"weights": self.model.params, "drafter weights": self.draft.params, "caches": self.state}
        shapes = {name: [(x.shape, str(x.dtype)) for x in jax.tree.leaves(tree)] for name, tree in trees.items()}
        digest = lambda of: hashlib.sha256(repr(of).encode()).hexdigest()[:12]  # noqa: E731
        return {f"{name} of shapes": digest(of) for name, of in (shapes | {"programs": self.shapes}).items()}

    @property
    def host_staging(self) -> int:
        """Bytes of a device that are kept for blocks on their way to the host and back."""
        device = self._memory or device_memory(self.config.tp_size) if self.config.host_kv_gb else None
        return 0 if device is None else int(device[0] * HOST_STAGING)

    @property
    def by_request(self) -> int:
        """How many devices requests are divided among."""
        return self._local.decoder.by_request

    @property
    def page_dtype(self) -> str:
        return self._layout.dtype

    @property
    def keeps_programs(self) -> bool:
        """Not on a CPU, where jax can't, nor for drafters whose source isn't here, nor on several hosts."""
        ours = type(self.draft.drafter).__module__.startswith("jaxspec.drafters")
        return jax.default_backend() == "gpu" and ours and self.hosts is None

    def _store(self) -> Executables | None:
        """The store of compiled programs, if they are kept."""
        drafter = self.draft.drafter
        if not self.keeps_programs:
            return None
        options = self.config.tp_size, self.config.kernels
        made_by = self.model.config, type(drafter).__qualname__, drafter, self.shapes, *options
        devices = None if self.mesh is None else list(self.mesh.devices)
        return Executables(cache_folder() / "executables", made_by, devices)

    def _divide(self) -> Division | None:
        """How programs run on several devices; None for one."""
        if self.mesh is None:
            return None
        layout = dataclasses.replace(self._layout, whole=True)
        whole = self._state_shapes(layout, self.model.config, self.draft.drafter)
        state = sharding.divided(whole, self._state_shapes(self._layout, self._local, self._drafter))
        workspaces, self.sums = peers.opened(self.mesh)
        params = with_adapters(self.model.params, self.adapters), self.draft.params
        return Division(self.mesh, *sharding.specs_of(params), state, workspaces)

    def _state_shapes(self, layout: PageLayout, config: ModelConfig, drafter: Drafter) -> State:
        return jax.eval_shape(lambda: self._state_of(layout, 0, config, drafter))

    def _shaped_state(self) -> State:
        """The shapes of an empty state."""
        return jax.eval_shape(lambda: self._local_state())  # a new function: jax keeps what it saw of one

    def _recall_times(self) -> None:
        """Fill in `round_times` as an earlier start noted them beside the programs that were kept."""
        if (store := self._store()) is not None:
            self.round_times = store.recall(("round times", self.plan.num_pages)) or {}

    def _time_rounds(self) -> None:
        """Measure `round_times`, and note them beside the programs that were kept."""
        started, dispatched = time.monotonic(), Counter(self.programs.dispatches)
        of = self.plan.num_pages, self.config.page_size
        self.state, self.round_times = time_rounds(self.programs, self.state, *of, devices=self.by_request)
        self.reset()
        self.programs.dispatches.clear()
        self.programs.dispatches.update(dispatched)
        if (store := self._store()) is not None:
            store.note(("round times", self.plan.num_pages), self.round_times)
        log.info("rounds of %s drafts timed in %.1f s", self.drafts, time.monotonic() - started)

    @property
    def drafts(self) -> tuple[int, ...]:
        """The numbers of drafts that a round may have, ascending; the last is the drafter's own."""
        return *(drafts for drafts in self.narrower if drafts != SKIP_DRAFTER), self.width - 1

    def yields_of(self, drafts: int) -> int:
        """Most tokens that a round of so many drafts yields a request."""
        return max(dict(self.shapes.ragged).get(drafts, drafts), 0) + 1 if drafts in self.narrower else self.yields

    def _empty_state(self) -> State:
        if self._division is None:
            return self._local_state()
        return jax.jit(sharding.spread(self._local_state, self.mesh, (), self._division.state))()

    def _local_state(self) -> State:
        """A device's part of an empty state."""
        return self._state_of(self._layout, self.plan.states.snapshots, self._local, self._drafter)

    def _state_of(self, layout: PageLayout, snapshots: int, config: ModelConfig, drafter: Drafter) -> State:
        shapes, options = self.shapes, self.config
        sizes = shapes.num_slots, shapes.capacity, options.dtype, snapshots, options.state_dtype
        scales = self.model.kv_scales if layout.dtype.startswith("float8") else None
        scales = None if scales is None else by_group(scales, config.decoder)
        more = scales, shapes.pictures, options.enable_return_hidden_states
        return empty_state(config, drafter, layout, *sizes, *more)

    def reset(self) -> None:
        """Replace the state by an empty one. The old one is freed first: there is no room for two."""
        if self.programs.broadcast is not None:
            self.programs.broadcast("reset")
        self.release_state()
        self.state = jax.block_until_ready(self._empty_state())
        if self.pictures is not None:
            self.pictures.forget()

    def set_weights(self, model: Model, draft: LoadedDrafter) -> None:
        """Compute with these from the next program on. **Raises:** `CheckpointError` if programs don't take them."""
        if not alike((self.model.params, self.draft.params), (model.params, draft.params)):
            raise CheckpointError("the weights differ from the engine's in structure, shape or dtype")
        self.model, self.draft = model, draft
        if self.pictures is not None:
            self.pictures.fill(model.tower)
        self._fill()

    def _fill(self) -> None:
        self.programs.fill(with_adapters(self.model.params, self.adapters), self.draft.params)

    def release_state(self) -> None:
        """Delete pages, slots and states; `reset` makes them again."""
        for array in jax.tree.leaves(self.state):
            if not array.is_deleted():
                array.delete()

    @property
    def snapshots(self) -> tuple[int, ...] | None:
        """State slots for snapshots, behind those of requests and the dummy's; None if the model has no such states."""
        first = self.shapes.num_slots + 1
        return tuple(range(first, first + self.plan.states.snapshots)) if self.model.config.recurrent else None

    def admit(self, seq: SequenceState, params: Any, seed: int, stop_ids: list[int]) -> None:
        """Write a sequence's slot: its tokens so far, its limit, how it samples (`params`: SamplingParams)."""
        packed = pack_admission(
            seq.slot,
            seq.tokens,
            seq.prompt_len,
            seq.limit,
            self.width - 1 if params.speculative and seq.drafter_seen is None else 0,
            seed,
            stop_ids,
            params,
            self.shapes.capacity,
            seq.pictures,
        )
        self.state = self.programs.admit(self.state, packed)

    def clear(self, pages: list[int]) -> None:
        """Put zeros into pages that nobody holds, some at a time."""
        most = self.shapes.pages_per_seq
        for start in range(0, len(pages), most):
            packed = np.zeros(most, np.int32)  # the dummy page where there are fewer
            packed[: len(pages[start : start + most])] = pages[start : start + most]
            self.state = self.programs.clear(self.state, packed)

    def reported(self, pages: list[int], count: int) -> list[np.ndarray | None]:
        """Rows that are kept, as `Reported.read`."""
        return self.state.reported.read(pages, count)

    @property
    def encoded(self) -> int:
        """Pictures that the tower has read."""
        return self.pictures.encoded if self.pictures else 0

    @property
    def lacks_tower(self) -> bool:
        """Whether a start in stages has still to bring programs of the tower."""
        return self.pictures is not None and self.pictures.programs.starting

    def unread(self, seq: SequenceState) -> bool:
        """Whether the tower hasn't read all pictures of a prompt's next chunk."""
        return self.pictures is not None and bool(self.pictures.unread(seq, self.shapes.chunk))

    def read_pictures(self, seq: SequenceState) -> None:
        """Dispatch the tower for the first of them."""
        self.state = self.state.replace(pictures=self.pictures.read_ahead(self.state.pictures, seq, self.shapes.chunk))

    def prefill(self, chunks: list[Chunk], table: np.ndarray) -> jax.Array | None:
        """Dispatch the keys and values of prompt chunks, before or after their sequences are admitted.

        A chunk to be scored travels alone: its packed logprobs.
        """
        read = None
        if self.pictures is not None:
            held, read = self.pictures.of_chunks(self.state.pictures, chunks)
            self.state = self.state.replace(pictures=held)
        if read is not None and len(read) < len(chunks):  # the others' pictures have no room beside these
            self.prefill(chunks[: len(read)], table)
            return self.prefill(chunks[len(read) :], table)
        score, block = chunks[0].seq.score, self.shapes.block
        blocks, texts, pictures = [], [], []
        for i, chunk in enumerate(chunks):
            cut = chunk.blocks(block)
            blocks += [(chunk.seq.slot, *each) for each in cut]
            texts += [chunk.seq.tokens] * len(cut)
            pictures += [read[i]] * len(cut) if read is not None else []
        adapted = self._adapted([chunk.seq.slot for chunk in chunks])
        size = self.programs.stand_in("prefill", ("",), len(blocks), adapted)[1]
        padding = (self.shapes.score if score else size) - len(blocks)
        blocks += [(self.shapes.num_slots, 0, 0, NO_STATE, NO_STATE)] * padding
        pictures = None if read is None else pictures + [None] * padding
        packed = pack_blocks(blocks, texts + [[]] * padding, table[[slot for slot, *_ in blocks]], block, pictures)
        packed = self._with_adapters(packed, adapted)
        if not score:
            self.state = self.programs.prefill(self.state, packed, adapted)
            return None
        self.state, out = self.programs.score(self.state, packed, adapted)
        out.copy_to_host_async()
        return out

    def first(self, slots: list[int], table: np.ndarray, mode: str) -> jax.Array:
        """Dispatch the first tokens of these slots, whose prompts are prefilled; packed like those of a round."""
        _, size = self.programs.stand_in("first", (mode,), self.rows_for(slots))
        self.state, out = self.programs.first(self.state, self._pack(slots, table, size), mode)
        out.copy_to_host_async()
        return out

    def round(
        self, slots: list[int], table: np.ndarray, mode: str, rounds: int = 1, drafts: int | None = None
    ) -> jax.Array:
        """Dispatch a round for these slots, or `Shapes.rounds` of them; packed output (see `programs.decode_round`).

        `drafts`: one of `Runner.drafts`, or `SKIP_DRAFTER`; None: the drafter's own number.
        """
        run, adapted = getattr(self.programs, of_rounds(rounds)), self._adapted(slots)
        narrow = drafts if drafts in self.narrower else None
        if narrow is None:
            _, size = self.programs.stand_in(of_rounds(rounds), (mode,), self.rows_for(slots), adapted)
        else:
            size = fit(self.rows_for(slots), sizes_of(self.shapes, of_rounds(rounds), mode, narrow))
        packed = self._with_adapters(self._pack(slots, table, size), adapted)
        self.state, out = run(self.state, packed, mode, narrow, adapted)
        out.copy_to_host_async()
        return out

    def mode_of_first(self, mode: str, slots: list[int]) -> str:
        """The mode of `first` for requests that need `mode`: another only while that one's programs are missing."""
        return self._mode_of("first", mode, slots)

    def mode_of_round(self, mode: str, slots: list[int], rounds: int = 1) -> str:
        """The mode of `round`, chosen as in `mode_of_first`."""
        return self._mode_of(of_rounds(rounds), mode, slots, self._adapted(slots))

    def mode_of_open_round(self, mode: str, slots: list[int]) -> str:
        """The mode of `open_round`, chosen as in `mode_of_first`."""
        return self._mode_of("structured", mode, slots, self._adapted(slots))

    def _mode_of(self, name: str, mode: str, slots: list[int], adapted: bool = False) -> str:
        return self.programs.stand_in(name, MODES[MODES.index(mode) :], self.rows_for(slots), adapted)[0]

    def _adapted(self, slots: list[int]) -> bool:
        """Whether the programs for adapters serve these slots, whose requests' adapters are then on the device."""
        if not self.shapes.always_adapted and places_of(self.adapters, slots) is None:
            return False
        if self.adapters.written():
            self._fill()
        return True

    def _with_adapters(self, packed: np.ndarray, adapted: bool) -> np.ndarray:
        return put_adapters(packed, self.adapters.places.of_slot[packed[:, 0]]) if adapted else packed

    def open_round(self, slots: list[int], table: np.ndarray, mode: str, forced: list[list[int] | None]) -> OpenRound:
        """Dispatch drafts and forward of a round that `close_round` ends, with the masks made meanwhile.

        `forced`: for each slot the drafts that a grammar forces; None where the slot's last round left them.
        """
        adapted = self._adapted(slots)
        _, size = self.programs.stand_in("structured", (mode,), self.rows_for(slots), adapted)
        given = put_forced(self._pack(slots, table, size, columns(self.width - 1)), forced)
        packed = given if self.hosts else jax.device_put(given)
        self.state, proposal, drafts = self.programs.draft(self.state, packed, mode)
        drafts.copy_to_host_async()
        rows = self._with_adapters(given, True) if adapted else packed
        self.state, logits, features = self.programs.forward(self.state, rows, proposal, adapted)
        return OpenRound(packed, mode, drafts, (proposal, logits, features))

    def close_round(self, opened: OpenRound, bits: np.ndarray, forced: np.ndarray) -> jax.Array:
        """Dispatch the end of a round; packed output as of `round`. `bits` u32[b, q, w] are the tokens allowed at each
        row, `forced` i32[b, q, k] the drafts forced after it; b is that of `opened.drafts`."""
        run = self.programs.conclude
        self.state, out = run(self.state, opened.packed, opened.mode, *opened.handed, bits, forced)
        out.copy_to_host_async()
        return out

    def masked_first(self, slots: list[int], table: np.ndarray, bits: np.ndarray, forced: np.ndarray) -> jax.Array:
        """Dispatch `first` in mode logprobs, among the tokens that `bits` u32[slots, 1, w] allow."""
        _, size = self.programs.stand_in("masked_first", ("",), self.rows_for(slots))
        packed = put_forced(self._pack(slots, table, size, columns(self.width - 1)), [None] * len(slots))
        padding = ((0, len(packed) - len(slots)), (0, 0), (0, 0))
        bits = np.pad(bits, padding, constant_values=ALL)
        self.state, out = self.programs.masked_first(self.state, packed, bits, np.pad(forced, padding))
        out.copy_to_host_async()
        return out

    def rows_for(self, slots: list[int]) -> int:
        """The least size of a program for these slots."""
        return rows_for(slots, self.shapes.num_slots // self.by_request, self.by_request)

    def _pack(self, slots: list[int], table: np.ndarray, size: int, columns: int = 1) -> np.ndarray:
        packed = self.programs.padding(size, columns)
        packed[: len(slots), 0] = slots
        packed[: len(slots), columns:] = table[slots]
        return packed
