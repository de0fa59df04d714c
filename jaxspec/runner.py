"""The device side of an engine: weights, state, programs, sized for this machine. Knows slots and pages, no requests.

Everything the engine dispatches goes through here, in order. Results come back as device arrays whose copy to the host
has already been started, so reading them a round later doesn't wait.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

import jax
import numpy as np

from jaxspec.batch import Shapes, empty_slots, fit, ladder, pack_admission
from jaxspec.cache import MemoryPlan, PageLayout, kv_bytes_per_token, plan_memory
from jaxspec.checkpoint import Model, load_model
from jaxspec.checkpoint.demo import cache_folder
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.drafters import LoadedDrafter, load_drafter
from jaxspec.round import Programs, State, compile_counter
from jaxspec.scheduler import Chunk, Sequence

log = logging.getLogger("jaxspec")

BLOCK = 32  # prompt tokens in one row of a prefill: a chunk is padded to a whole number of these
SCORE_TOKENS = 128  # prompt tokens scored at once, since each needs logits over the vocabulary


def enable_compilation_cache() -> None:
    """Keep compiled programs on disk, so that a second start is quick, unless the user set jax's own option."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


class Runner:
    """Loads model and drafter, plans memory, makes the state, compiles the programs.

    `config` is resolved: what the options left to the model and the machine is filled in.

    **Raises:** `ConfigError`, `CheckpointError`.
    """

    def __init__(self, options: EngineConfig, model: Model | None = None, draft: LoadedDrafter | None = None):
        enable_compilation_cache()
        self.compiles = compile_counter()
        compiled, started = self.compiles["compiles"], time.monotonic()
        self.model = model or load_model(
            options.model,
            options.dtype,
            load_format=options.load_format,
            revision=options.revision,
            seed=options.seed or 0,
        )
        self.draft = draft or load_drafter(options.draft, self.model, options)
        self.config = _resolve(options, self.model, self.draft)
        self.width = self.draft.drafter.num_draft_tokens + 1
        self.shapes = _shapes(self.config, self.width)
        self.plan, layout = self._plan()
        self.programs = Programs(
            self.model.config, self.draft.drafter, self.shapes, self.model.params, self.draft.params
        )
        self.state = self._empty_state(layout)
        log.info("%s", self.plan)
        if not self.config.skip_warmup:
            self.programs.warm_up(self.state)
        log.info(
            "ready in %.1f s: %s with --draft %s, %d programs compiled or read from the cache",
            time.monotonic() - started,
            self.model.name,
            self.draft.name,
            self.compiles["compiles"] - compiled,
        )

    def _plan(self) -> tuple[MemoryPlan, PageLayout]:
        config, shapes = self.config, self.shapes
        dtype = config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        per_token = kv_bytes_per_token(self.model.config, dtype) + self.draft.drafter.kv_bytes_per_token(dtype)
        slots = jax.eval_shape(lambda: empty_slots(shapes.num_slots, shapes.capacity))
        rows = max(shapes.num_slots * self.width, shapes.score * shapes.block)
        plan = plan_memory(
            weight_bytes=_bytes(self.model.params),
            draft_weight_bytes=_bytes(self.draft.params),
            bytes_per_token=per_token,
            slot_bytes=_bytes(slots),
            # logits and the few arrays of their size that sampling makes; an MLP's activations in a prefill
            workspace_bytes=4 * (4 * rows * self.model.config.vocab_size)
            + 4 * shapes.prefills[-1] * shapes.block * 4 * self.model.config.mlp_size,
            page_size=config.page_size,
            mem_fraction=config.mem_fraction_static,
            max_total_tokens=config.max_total_tokens,
            most_useful_tokens=shapes.num_slots * shapes.pages_per_seq * config.page_size,
        )
        return plan, PageLayout(plan.num_pages, config.page_size, dtype)

    def _empty_state(self, layout: PageLayout) -> State:
        return State(
            slots=empty_slots(self.shapes.num_slots, self.shapes.capacity),
            kv=layout.kv(self.model.config),
            draft=self.draft.drafter.init_state(layout, self.shapes.num_slots + 1),
        )

    def admit(self, seq: Sequence, params: Any, seed: int, stop_ids: list[int]) -> None:
        """Write a sequence's slot: its tokens so far, its limit, how it samples (`params`: SamplingParams)."""
        packed = pack_admission(
            seq.slot,
            seq.tokens,
            seq.prompt_len,
            seq.limit,
            self.width - 1 if params.speculative else 0,
            seed,
            stop_ids,
            params,
            self.shapes.capacity,
        )
        self.state = self.programs.admit(self.state, packed)

    def prefill(self, chunks: list[Chunk], table: np.ndarray) -> jax.Array | None:
        """Dispatch the keys and values of prompt chunks. A chunk to be scored travels alone: its packed logprobs."""
        score, block = chunks[0].seq.score, self.shapes.block
        blocks = [
            (chunk.seq.slot, start, min(block, chunk.start + chunk.count - start))
            for chunk in chunks
            for start in range(chunk.start, chunk.start + chunk.count, block)
        ]
        size = self.shapes.score if score else fit(len(blocks), self.shapes.prefills)
        packed = self.programs.padding(size, 3)
        packed[: len(blocks), :3] = blocks
        packed[: len(blocks), 3:] = table[packed[: len(blocks), 0]]
        if not score:
            self.state = self.programs.prefill(self.state, packed)
            return None
        self.state, out = self.programs.score(self.state, packed)
        out.copy_to_host_async()
        return out

    def round(self, slots: list[int], table: np.ndarray, greedy: bool) -> jax.Array:
        """Dispatch a round for these slots; its packed output (see `round.decode_round`)."""
        packed = self.programs.padding(fit(len(slots), self.shapes.batches), 1)
        packed[: len(slots), 0] = slots
        packed[: len(slots), 1:] = table[slots]
        self.state, out = self.programs.round(self.state, packed, greedy)
        out.copy_to_host_async()
        return out


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _resolve(options: EngineConfig, model: Model, draft: LoadedDrafter) -> EngineConfig:
    """Fill in what was left to us, and refuse what doesn't fit together."""
    cpu = jax.default_backend() == "cpu"
    context = options.context_length or model.config.max_position
    if context > model.config.max_position:
        raise ConfigError(
            f"--context-length {context} exceeds what {model.name} was made for, {model.config.max_position} positions"
        )
    chunk = options.chunked_prefill_size or (256 if cpu else 2048)
    return dataclasses.replace(
        options,
        draft=draft.name,
        num_draft_tokens=draft.drafter.num_draft_tokens or None,
        dtype=str(jax.tree.leaves(model.params)[0].dtype),
        context_length=context,
        max_running_requests=options.max_running_requests or (4 if cpu else 128),
        chunked_prefill_size=-(-chunk // BLOCK) * BLOCK,
    )


def _shapes(config: EngineConfig, width: int) -> Shapes:
    return Shapes(
        num_slots=config.max_running_requests,
        capacity=config.context_length,
        pages_per_seq=-(-(config.context_length + 2 * width) // config.page_size),
        block=BLOCK,
        batches=ladder(config.max_running_requests),
        prefills=ladder(config.chunked_prefill_size // BLOCK),
        score=min(SCORE_TOKENS, config.chunked_prefill_size) // BLOCK,
    )
