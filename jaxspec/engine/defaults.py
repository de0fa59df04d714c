"""Resolve open engine options for a model and device, and choose the sizes of programs."""

from __future__ import annotations

import dataclasses
import logging

import jax
import numpy as np

from jaxspec.cache.memory_plan import device_memory
from jaxspec.cache.workspace import Demand
from jaxspec.checkpoint import Model, check_context
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.options import ConfigError, flag
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.loading import LoadedDrafter
from jaxspec.engine.pictures import rows_for
from jaxspec.models.vision import Tower
from jaxspec.pallas import hopper
from jaxspec.parallel import sharding
from jaxspec.rounds import ragged_verification
from jaxspec.rounds.packing import Shapes, ladder
from jaxspec.scheduling.draft_count import SKIP_DRAFTER, rungs

log = logging.getLogger("jaxspec")

SCORE_TOKENS = 128  # prompt tokens scored at once, since each needs logits over the vocabulary
SMALL_MODEL = 2**30  # bytes of weights below which a program has several rounds


@dataclasses.dataclass(frozen=True)
class Defaults:
    """The defaults of options that are left to the machine, and other differences between machines.

    `block`: prompt tokens in one row of a prefill, which whole chunks consist of: on a GPU, a tile of attention.
    `mixture_prefill_size`: `chunked_prefill_size` of a mixture of experts, since a program of many tokens reads all
    experts. `least_rows`: the fewest rows of a round of several requests, padding included; on a GPU fewer cost as
    much. `held_tokens`: prompt tokens computed between two rounds while a crowd waits for free slots.
    `seldom_requests`: the fewest requests, padding included, of a seldom round of several (`seldom_sizes`).
    `some_drafts`: whether there are rounds of some of a drafter's drafts, not just of none and all; on a CPU, where
    whole models take longest to compile, they'd gain 5%. `small_model_rounds`: in one program of a model whose
    rounds are short. `divided_rounds`: the same over several devices, whose dispatch takes so long that one round
    doesn't hide it. `quick_rounds`: the same for one request of a model with many arrays of which a round reads little.
    """

    block: int
    page_size: int
    max_running_requests: int
    chunked_prefill_size: int
    mixture_prefill_size: int
    least_rows: int
    held_tokens: int
    seldom_requests: int
    some_drafts: bool
    small_model_rounds: int
    divided_rounds: int
    quick_rounds: int


CPU = Defaults(
    block=32,
    page_size=16,
    max_running_requests=4,
    chunked_prefill_size=256,
    mixture_prefill_size=256,
    least_rows=1,
    held_tokens=256,
    seldom_requests=1,
    some_drafts=False,
    small_model_rounds=1,
    divided_rounds=1,
    quick_rounds=1,
)
GPU = Defaults(
    block=64,
    page_size=64,
    max_running_requests=128,
    chunked_prefill_size=2048,
    mixture_prefill_size=8192,
    least_rows=8,
    held_tokens=8192,
    seldom_requests=8,
    some_drafts=True,
    small_model_rounds=8,
    divided_rounds=2,
    quick_rounds=2,
)


def here() -> Defaults:
    return CPU if jax.default_backend() == "cpu" else GPU


def resolve(
    options: EngineConfig, model: Model, draft: LoadedDrafter, defaults: Defaults | None = None
) -> EngineConfig:
    """Fill in the options that were left open, and refuse combinations that don't fit together.

    `defaults`: of another machine than this one.
    """
    defaults = defaults or here()
    context = options.context_length or model.config.max_position
    if not options.allow_longer_context:
        check_context(context, model.config, model.name)
    elif context > model.config.max_position:
        log.warning(
            "--context-length %d exceeds the %d positions that %s was made for: text beyond them may be nonsense",
            *(context, model.config.max_position, model.name),
        )
    if (options.num_draft_tokens or 0) >= context:
        raise ConfigError(
            f"--num-draft-tokens {options.num_draft_tokens}: a draft must be shorter than --context-length {context}. "
            f"Give {context - 1} or less, or leave it to the drafter"
        )
    if model.config.recurrent and draft.drafter.topk > 1:
        raise ConfigError(
            f"--topk {draft.drafter.topk}: {model.name} has linear attention, whose state goes from one token to "
            "the next, so drafts must be a chain. Drop --topk"
        )
    if hasattr(model.config.decoder.attention, "further") and options.kv_cache_dtype.startswith("float8"):
        raise ConfigError(
            f"--kv-cache-dtype {options.kv_cache_dtype}: {model.name} selects what it attends to by keys that "
            "it keeps in pages, and rounded ones would select other blocks. Drop it"
        )
    for name in () if options.has_adapters else ("max_loras", "max_lora_rank", "lora_target_modules"):
        if getattr(options, name):
            raise ConfigError(f"{flag(name)} needs --lora-modules, --enable-lora or --lora-root. Add one, or drop it")
    if options.host_kv_gb and (options.enable_return_hidden_states or options.enable_return_routed_experts):
        name = "hidden_states" if options.enable_return_hidden_states else "routed_experts"
        raise ConfigError(
            f"--host-kv-gb keeps pages in the host's memory, and rows of --enable-return-{name.replace('_', '-')} "
            "aren't kept with them. Drop one"
        )
    if options.disk_kv_gb and not options.host_kv_gb:
        raise ConfigError("--disk-kv-gb keeps what leaves the host's memory. Give that a size, too, with --host-kv-gb")
    if options.disk_kv_path and not options.disk_kv_gb:
        raise ConfigError("--disk-kv-path needs --disk-kv-gb. Add it, or drop the path")
    if options.dp_attention:
        _check_dp_attention(options, draft, options.max_running_requests or defaults.max_running_requests)
    if options.draft_policy == "ragged" and (reason := _not_ragged(options, draft)):
        raise ConfigError(f"--draft-policy ragged: {reason}. Use --draft-policy auto")
    chunk = options.chunked_prefill_size or (
        defaults.mixture_prefill_size if model.config.decoder.mixture else defaults.chunked_prefill_size
    )
    chunk = -(-chunk // defaults.block) * defaults.block
    slots = options.max_running_requests or defaults.max_running_requests
    for name, bound, most in (
        ("batch_sizes", "max_running_requests", slots),
        ("prefill_sizes", "chunked_prefill_size", chunk),
    ):
        if (sizes := options.listed(name)) and sizes[-1] > most:
            raise ConfigError(
                f"{flag(name)} has {sizes[-1]}, more than {flag(bound)} {most}. Drop it, or raise the latter"
            )
    rounds = defaults.divided_rounds if options.tp_size > 1 else 1
    rounds = defaults.quick_rounds if rounds_for(options, model) else rounds
    rounds = max(defaults.small_model_rounds, rounds) if small_model(model) else rounds
    return dataclasses.replace(
        options,
        draft=draft.name,
        num_draft_tokens=draft.drafter.num_draft_tokens or None,
        num_steps=draft.drafter.longest or None,
        topk=draft.drafter.topk,
        dtype=model.dtype,
        context_length=context,
        max_running_requests=slots,
        chunked_prefill_size=chunk,
        page_size=options.page_size or defaults.page_size,
        disable_structured_output=options.disable_structured_output or options.deterministic,
        num_continuous_decode_steps=options.num_continuous_decode_steps or rounds,
    )


def _check_dp_attention(options: EngineConfig, draft: LoadedDrafter, slots: int) -> None:
    """**Raises:** `ConfigError` for what doesn't go together with requests that are divided among devices."""
    if slots % options.tp_size:
        more = -(-slots // options.tp_size) * options.tp_size
        raise ConfigError(
            f"--dp-attention divides requests evenly among {options.tp_size} GPUs: --max-running-requests {slots} must "
            f"be a multiple of it. Give {more}"
        )
    for given, there in (
        (f"--topk {draft.drafter.topk}", draft.drafter.topk > 1),
        ("--host-kv-gb", options.host_kv_gb),
        ("--lora-modules, --enable-lora or --lora-root", options.has_adapters),
    ):
        if there:
            raise ConfigError(f"--dp-attention doesn't go together with {given}. Drop one of them")


def _not_ragged(options: EngineConfig, draft: LoadedDrafter) -> str | None:
    """Why a round's rows can't be shared out among its requests; None if they can."""
    if draft.drafter.topk > 1:
        return f"--topk {draft.drafter.topk} drafts trees, and only chains can be cut anywhere"
    if options.deterministic:
        return "with --deterministic a text must not depend on the requests beside it"
    return None


def small_model(model: Model) -> bool:
    """Whether a round is so short that a program should have several."""
    return sharding.bytes_of(model.params) < SMALL_MODEL


def rounds_for(options: EngineConfig, model: Model) -> int | None:
    """The most requests that a program of several rounds is for; None: any number.

    A hybrid that is a mixture has hundreds of arrays, and a program that takes them takes the host about as long as a
    round of one request takes the device. Rounds of several requests read more experts and take longer.
    """
    quick = model.config.recurrent and model.config.decoder.mixture and not small_model(model)
    return 1 if quick and options.tp_size == 1 and options.num_continuous_decode_steps is None else None


def shapes_of(
    config: EngineConfig,
    drafter: Drafter,
    alone: bool = True,
    defaults: Defaults | None = None,
    rounds_for: int | None = None,
    tower: Tower | None = None,
) -> Shapes:
    """`alone`: whether there is a round for one request, whose attention is divided among all multiprocessors.

    Without it, one request is padded to `least_rows` as others are, which is faster for small models.
    `defaults`: as of `resolve`. `rounds_for`: as of `Shapes`. `tower`: that reads the model's pictures.
    """
    defaults, most = defaults or here(), drafter.num_draft_tokens
    slots, rounds = config.max_running_requests, config.num_continuous_decode_steps
    blocks = config.chunked_prefill_size // defaults.block

    def batches(drafts: int) -> tuple[int, ...]:
        if config.few_programs:
            return (slots,)
        if listed := config.listed("batch_sizes"):
            return tuple(sorted({*listed, slots}))
        least = defaults.least_rows
        return tuple(n for n in ladder(slots) if n * (drafts + 1) >= least or n == slots or (n == 1 and alone))

    narrower = ()
    if config.draft_policy != "fixed" and not config.few_programs and most:
        narrower = rungs(most) if drafter.topk == 1 and defaults.some_drafts else (0,)
        if drafter.rests and defaults.some_drafts and not config.deterministic:
            narrower = SKIP_DRAFTER, *narrower
    shared = [each for each in narrower if each > 0] if config.draft_policy == "ragged" else ()
    at_once = 1 if tower is None else tower.at_once
    prompts = [-(-tokens // defaults.block) for tokens in config.listed("prefill_sizes")]
    # One alone, or as many prompts as a prefill can hold; all of them may be one device's.
    firsts = tuple(sorted({1, min(slots, blocks * (config.tp_size if config.dp_attention else 1))}))
    return Shapes(
        num_slots=slots,
        capacity=config.context_length,
        pages_per_seq=-(-(config.context_length + drafter.lookahead) // config.page_size),
        block=defaults.block,
        prefills=tuple(sorted({*prompts, blocks})) if prompts else ladder(blocks),
        score=min(-(-max(SCORE_TOKENS, at_once) // defaults.block), config.chunked_prefill_size // defaults.block),
        firsts=firsts[-1:] if config.few_programs else firsts,
        batches=batches(most),
        seldom=seldom_sizes(batches(most), defaults.seldom_requests),
        rounds=rounds if rounds_for is None or rounds_for in batches(most) else 1,
        rounds_for=rounds_for,
        structured=not config.disable_structured_output,
        always_adapted=config.has_adapters and config.deterministic,  # bits are those of one set of programs
        processed=config.logprobs_mode == "processed_logprobs",
        narrower=tuple((drafts, batches(max(drafts, 0))) for drafts in narrower),
        pictures=0 if tower is None else rows_for(tower, blocks * defaults.block),
        ragged=tuple((each, ragged_verification.most(drafter, each)) for each in shared),
    )


def seldom_sizes(batches: tuple[int, ...], least: int) -> tuple[int, ...]:
    """The sizes of rounds that few requests need: every second one from the largest down to `least`, and one request.

    So few programs compile at start, and most of a round's time doesn't grow with its size: weights are read once, and
    attention skips padding. One request alone has its own program, since attention divides a long context among all
    multiprocessors there.
    """
    every_second = batches[::-2]
    return tuple(n for n in batches if n in (1, batches[-1]) or (n >= least and n in every_second))


def demand_of(
    config: EngineConfig, shapes: Shapes, drafter: Drafter, tower: Tower | None, memory: tuple[int, int] | None
) -> Demand:
    """The sizes of the largest programs, for the memory plan. `memory`: of a machine with Hopper's kernels that isn't
    here; None: of this one."""
    pictures = tower.columns // tower.out if shapes.pictures else 0
    return Demand(
        requests=shapes.num_slots,
        rows=drafter.num_draft_tokens + 1,
        scored=shapes.score * shapes.block,
        tokens=shapes.chunk,
        block=shapes.block,
        captured=len(drafter.feature_layers) + config.enable_return_hidden_states + pictures,
        itemsize=np.dtype(config.dtype).itemsize,
        devices=config.tp_size,
        kernels=memory is not None or hopper.kernels_here() is None,
        whole_stacks=memory is None and device_memory() is None,
    )
