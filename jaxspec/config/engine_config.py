"""Hold the engine's options: `EngineConfig`, frozen, checked when made, static under jit. It has no array."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.config.foreign_flags import DRAFT_METHODS, METHODS, meant
from jaxspec.config.options import ConfigError, check, flag, option
from jaxspec.config.request import shown

DTYPES = ("float32", "bfloat16", "float16")
DTYPE_ALIASES = {"auto": None, "half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16"}
KV_DTYPES = (*DTYPES, "float8_e4m3fn")
STATE_DTYPES = ("float32", "bfloat16")
ON_LOAD = ("fp8", "int4", "nvfp4")  # formats that weights can be quantised to while they load
ANY_ON_LOAD = f"{', '.join(ON_LOAD[:-1])} or {ON_LOAD[-1]}"
MOST_LORA_RANK = 64
SERVER_DEFAULTS = {"draft": "auto"}  # a server should be fast as it comes; the library defaults to no drafter

# groups of --help
MODEL, SPECULATION, MEMORY, RUNNING, ADAPTERS = "model", "speculation", "memory and batching", "running", "adapters"
ADAPTER_NAME = r"[A-Za-z0-9._:/+@-]{1,128}"


@dataclass(frozen=True)
class EngineConfig:
    """The engine's options: the server's flags with underscores. Made once, from keyword arguments.

    Each says below what it is; None means: chosen from the model and the machine.

    **Raises:** `ConfigError` naming the option, what was given and what is allowed.
    """

    model: str = option(
        "smollm2-135m-instruct", "hub id, folder or .gguf file; the default is the demo", "M", group=MODEL, common=True
    )
    draft: str = option(
        "none",
        f"none, auto (the best that needs no download), a method ({', '.join(DRAFT_METHODS)}), method:path_or_id, "
        "a path or hub id, or module:Class[:PATH]; a drafter's own options follow: ngram?max_match=8; suffix+D or "
        "ngram+D drafts with both",
        "D",
        group=SPECULATION,
        common=True,
    )
    revision: str | None = option(None, "branch, tag or commit of a hub id", "REV", group=MODEL, shown="none")
    dtype: str | None = option(
        None,
        "dtype of weights and activations: auto, float32, bfloat16 or float16",
        "TYPE",
        group=MODEL,
        shown="auto: float32 on a CPU, else the checkpoint's",
        choices=DTYPES,
        aliases=DTYPE_ALIASES,
        common=True,
    )
    quantization: str | None = option(
        None,
        f"{ANY_ON_LOAD} quantises weights while they load; a checkpoint that is quantised needs no flag",
        "FORMAT",
        group=MODEL,
        shown="none",
        choices=ON_LOAD,
        aliases={"none": None},
        hint="a checkpoint that is quantised is served as it is, so leave this out",
    )
    fp8_activations: str = option(
        "on",
        "on quantises the activations of FP8 weights as well, as such checkpoints are evaluated; off keeps them in "
        "--dtype, which is more exact, and slower for prompts and many requests",
        "SWITCH",
        group=MODEL,
        choices=("on", "off"),
    )
    tp_size: int = option(
        1,
        "tensor parallelism: GPUs of this host that the model and its drafter are sharded over",
        "N",
        group=MODEL,
        least=1,
        common=True,
    )
    ep_size: int = option(
        1, "expert parallelism: groups of these GPUs, each with its share of the experts", "N", group=MODEL, least=1
    )
    dp_attention: bool = option(
        False,
        "data-parallel attention: divide the requests of latent attention, and their KV, among these GPUs, not its "
        "heads",
        group=MODEL,
    )
    dp_size: int = option(
        1, "data parallelism: engines behind one port, each a process with --tp-size GPUs", "N", group=MODEL, least=1
    )
    draft_dtype: str | None = option(
        None,
        "dtype of the drafter's weights and activations; if it isn't the target's, the drafter has a copy of embedding "
        "and head",
        "TYPE",
        group=SPECULATION,
        shown="the target's; for a standalone drafter as --dtype",
        choices=DTYPES,
        aliases=DTYPE_ALIASES,
    )
    draft_quantization: str | None = option(
        None,
        f"{ANY_ON_LOAD} quantises the drafter's weights while they load; it drafts with an FP8 copy of the head",
        "FORMAT",
        group=SPECULATION,
        shown="none, whatever --quantization says",
        choices=ON_LOAD,
        aliases={"none": None, "unquant": None},
    )
    draft_token_map: str | None = option(
        None,
        "file (.json, .npy or .pt) of token ids: only these are drafted then, with a smaller head; methods that "
        "need the whole vocabulary refuse it",
        "FILE",
        group=SPECULATION,
        shown="none: all tokens",
    )
    load_format: str = option(
        "auto", "auto, or dummy: random weights from the config alone", "FORMAT", group=MODEL, choices=("auto", "dummy")
    )
    load_threads: int = option(
        8, "threads that read weights, of which the host holds 4 GiB at a time", "N", group=MODEL, least=1
    )
    context_length: int | None = option(
        None,
        "most tokens of prompt and output together; decides between LongRoPE's short and long factors",
        "TOKENS",
        group=MODEL,
        shown="the model's",
        least=2,
        common=True,
    )
    allow_longer_context: bool = option(
        False, "allow --context-length beyond the positions that the model was made for", group=MODEL
    )
    seed: int | None = option(
        None, "seed of dummy weights, and of requests that give none", "N", group=MODEL, shown="none", least=0
    )
    num_steps: int | None = option(
        None,
        "depth of the drafts: a tree's levels; for a chain, the same as --num-draft-tokens",
        "S",
        group=SPECULATION,
        shown="as many as drafts; 5 for trees, DFlash's block",
        least=1,
    )
    topk: int = option(
        1, "drafts that may follow one token; above 1, a tree (eagle, eagle3, dflash)", "K", group=SPECULATION, least=1
    )
    num_draft_tokens: int | None = option(
        None,
        "most tokens drafted per request and round; of a tree, all of its tokens",
        "N",
        group=SPECULATION,
        shown="the drafter's: 4; MTP's and EAGLE's 3, or 8 in a tree; DSpark's and Domino's block, or one less; other "
        "blocks less one",
        least=1,
    )
    draft_policy: str = option(
        "auto",
        "auto chooses before each round how many drafts to verify, from none to --num-draft-tokens, by what is fastest "
        "at this load and acceptance; ragged also divides them unequally among requests; fixed always verifies all, as "
        "the others do with --skip-warmup or --few-programs",
        "POLICY",
        group=SPECULATION,
        choices=("auto", "ragged", "fixed"),
    )
    max_running_requests: int | None = option(
        None,
        "request slots, so also the largest decode batch",
        "N",
        group=MEMORY,
        shown="4 on a CPU, else 128",
        least=1,
        common=True,
    )
    mem_fraction_static: float = option(
        0.88,
        "share of device memory for weights, caches and states together. XLA reserves "
        "$XLA_PYTHON_CLIENT_MEM_FRACTION of the device (0.95) regardless: set both for two servers on one GPU",
        "SHARE",
        group=MEMORY,
        between=(0, 1),
        common=True,
    )
    max_total_tokens: int | None = option(
        None,
        "tokens in the page pool; overrides what --mem-fraction-static gives",
        "TOKENS",
        group=MEMORY,
        shown="by the share above; on a CPU, 2 GiB of KV at most",
        least=1,
    )
    kv_cache_dtype: str = option(
        "auto",
        "dtype of keys and values; auto: as --dtype; fp8 (float8_e4m3fn) holds twice as many tokens, with the "
        "checkpoint's scales if it has some",
        "TYPE",
        group=MEMORY,
        choices=("auto", *KV_DTYPES),
        aliases={"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "bf16": "bfloat16"},
    )
    page_size: int | None = option(
        None, "tokens per KV page", "TOKENS", group=MEMORY, shown="16 on a CPU, else 64", least=1
    )
    chunked_prefill_size: int | None = option(
        None,
        "most prompt tokens in one program",
        "TOKENS",
        group=MEMORY,
        shown="256 on a CPU, else 2048; 8192 of a mixture of experts",
        least=1,
    )
    state_dtype: str = option(
        "float32",
        "dtype of linear attention's states: float32, or bfloat16, which halves memory and traffic and rounds them "
        "every round",
        "TYPE",
        group=MEMORY,
        choices=STATE_DTYPES,
    )
    max_state_snapshots: int | None = option(
        None,
        "copies of linear attention's states kept for cached prefixes, so that requests can continue there; 0 turns "
        "prefix caching off for hybrids",
        "N",
        group=MEMORY,
        shown="8 a request, within a quarter of the memory that weights leave",
        least=0,
    )
    state_snapshot_interval: int = option(
        256, "prompt tokens between two such copies, in whole pages", "TOKENS", group=MEMORY, least=1
    )
    disable_prefix_cache: bool = option(False, "don't share the KV of common prefixes", group=MEMORY)
    host_kv_gb: float = option(
        0.0,
        "GiB of the host's memory, of all GPUs of an engine together, for pages and state snapshots that leave the "
        "prefix cache; prompts that begin with them load them back where that is faster",
        "GIB",
        group=MEMORY,
        shown="0.0: none",
        least=0,
    )
    disk_kv_gb: float = option(
        0.0,
        "GiB of a disk, of each engine, for what leaves the host's memory (--host-kv-gb); a later start of the same "
        "model finds it there",
        "GIB",
        group=MEMORY,
        shown="0.0: none",
        least=0,
    )
    disk_kv_path: str | None = option(
        None, "folder for that, on a fast disk of this host", "DIR", group=MEMORY, shown="kv in $JAXSPEC_CACHE"
    )
    num_continuous_decode_steps: int | None = option(
        None,
        "rounds in one program while no request can be admitted; tokens are streamed that many rounds apart",
        "K",
        group=RUNNING,
        shown="on a GPU 8 for weights under 1 GiB, 2 over several, 2 for a lone request of a hybrid mixture; else 1",
        least=1,
    )
    max_itl_ms: int | None = option(
        None, "most ms between two rounds, prompts' programs included", "MS", group=RUNNING, shown="no limit", least=1
    )
    schedule_policy: str = option(
        "fcfs",
        "fcfs: in the order of arrival, clients in turn; priority: requests have a priority, lower values go first and "
        "preempt; priority-high-first: the same with higher values first",
        "POLICY",
        group=RUNNING,
        choices=("fcfs", "priority", "priority-high-first"),
    )
    disable_overlap: bool = option(False, "read each round's result before the next is dispatched", group=RUNNING)
    disable_structured_output: bool = option(False, "refuse grammars: fewer programs to compile", group=RUNNING)
    deterministic: bool = option(False, "a text is the same whatever batch it runs in", group=RUNNING)
    logprobs_mode: str = option(
        "raw_logprobs",
        "log-probabilities of generated tokens: raw_logprobs, the model's own; processed_logprobs, those after "
        "penalties, bias, grammar, temperature, min-p, top-k and top-p, from which tokens are drawn. Prompts' are raw",
        "MODE",
        group=RUNNING,
        choices=("raw_logprobs", "processed_logprobs"),
    )
    enable_return_hidden_states: bool = option(
        False, "keep every token's final hidden state beside its page, for requests that ask", group=RUNNING
    )
    enable_return_routed_experts: bool = option(
        False, "keep the experts that a mixture chose beside each page, for requests that ask", group=RUNNING
    )
    skip_warmup: bool = option(False, "compile on first use instead of at start", group=RUNNING)
    disable_jit: bool = option(
        False,
        "run programs operation by operation, to print and break in a drafter of one's own: slow, on one device, and "
        "on a GPU with --kernels plain",
        group=RUNNING,
    )
    few_programs: bool = option(False, "compile one batch size alone: ready sooner, slower at low load", group=RUNNING)
    batch_sizes: str | None = option(
        None,
        "numbers of requests that rounds are compiled for, as 1,2,4,8; --max-running-requests is always one",
        "SIZES",
        group=RUNNING,
        shown="powers of two",
    )
    prefill_sizes: str | None = option(
        None,
        "numbers of prompt tokens that prefills are compiled for, as 256,512; --chunked-prefill-size is always one",
        "SIZES",
        group=RUNNING,
        shown="powers of two times a block, of 64 tokens on a GPU",
    )
    kernels: str = option(
        "auto",
        "auto: Hopper's on an H100 or H200, portable ones on other GPUs; portable: these on Hopper, too; plain: none",
        "WHICH",
        group=RUNNING,
        choices=("auto", "portable", "plain"),
    )
    decode_log_interval: int = option(40, "rounds between two decode log lines; 0: none", "N", group=RUNNING, least=0)
    lora_modules: tuple[str, ...] = option(
        (),
        "LoRA adapters, PEFT's folders, and the names by which requests ask for them: sql=./sql poet=/data/poet",
        "NAME=PATH",
        group=ADAPTERS,
        shown="none",
        several=True,
    )
    enable_lora: bool = option(False, "make room for adapters that are loaded later", group=ADAPTERS)
    lora_root: str | None = option(
        None,
        "folder from which clients may load adapters, by /v1/load_lora_adapter; the server reads what they name there",
        "DIR",
        group=ADAPTERS,
        shown="none: clients may load none",
    )
    max_loras: int | None = option(
        None,
        "adapters on the device at once, so also the most that run in one batch",
        "N",
        group=ADAPTERS,
        shown="as many as --lora-modules, from 4 to 32",
        least=1,
    )
    max_lora_rank: int | None = option(
        None,
        "largest rank of an adapter, to 64; smaller ones are padded to it",
        "R",
        group=ADAPTERS,
        shown="the largest of --lora-modules, at least 16",
        least=1,
    )
    lora_target_modules: tuple[str, ...] = option(
        (),
        "modules that adapters may change, as q_proj down_proj: fewer take less memory and time",
        "MODULE",
        group=ADAPTERS,
        shown="those of --lora-modules; all with --enable-lora or --lora-root",
        several=True,
    )
    max_cpu_loras: int = option(
        256, "adapters loaded at once, which the host keeps in its memory", "N", group=ADAPTERS, least=1
    )

    def __post_init__(self):
        modules = self.lora_modules
        named = [f"{name}={path}" for name, path in modules.items()] if isinstance(modules, Mapping) else modules
        for name, value in (("lora_modules", named), ("lora_target_modules", self.lora_target_modules)):
            object.__setattr__(self, name, tuple(value) if isinstance(value, list | tuple) else value)
        check(self)
        self._check_adapters()
        method, cut, rest = re.match("([^:?]*)([:?]?)(.*)", self.draft, re.DOTALL).groups()
        method = method.lower() if method.lower() in ("none", "auto") else METHODS.get(method.lower(), method)
        object.__setattr__(self, "draft", method + cut + rest)  # the dataclass is frozen
        self._check_drafts()
        if self.disable_jit:
            object.__setattr__(self, "skip_warmup", True)  # there is nothing to compile
            if self.tp_size > 1:
                raise ConfigError(f"--disable-jit runs on one device, got --tp-size {self.tp_size}. Drop one of them")
        for name in ("batch_sizes", "prefill_sizes"):
            self.listed(name)
        if self.batch_sizes is not None and self.few_programs:
            raise ConfigError("--batch-sizes lists sizes and --few-programs compiles one alone; drop one of the two")

    def listed(self, name: str) -> tuple[int, ...]:
        """The numbers of an option that lists some, ascending; none where it isn't given. **Raises:** `ConfigError`."""
        given = getattr(self, name)
        texts = [] if given is None else [text.strip() for text in given.split(",")]
        if not all(text.isascii() and text.isdecimal() and 0 < int(text) < 10**6 for text in texts):
            raise ConfigError(f"{flag(name)} must be integers of at least 1 with commas between, got {given!r}")
        return tuple(sorted(set(map(int, texts))))

    @property
    def adapters(self) -> dict[str, str]:
        """The folder of each adapter that is named, in either of vLLM's forms. **Raises:** `ConfigError`."""
        found: dict[str, str] = {}
        for given in self.lora_modules:
            name, equals, path = given.partition("=")
            if given.startswith("{"):
                try:
                    fields = json.loads(given)
                    name, path, equals = fields["name"], fields["path"], True
                except (ValueError, TypeError, KeyError, RecursionError):
                    equals = False
            named = isinstance(name, str) and re.fullmatch(ADAPTER_NAME, name)
            if not (equals and named and isinstance(path, str) and path):
                raise ConfigError(
                    f'--lora-modules must be NAME=PATH or {{"name": ..., "path": ...}}, with names of letters, digits '
                    f"and . _ : / + @ -, got {shown(given)}"
                )
            if name in found:
                raise ConfigError(f"--lora-modules names {name} twice; give each adapter a name of its own")
            found[name] = path
        return found

    @property
    def quantises_activations(self) -> bool:
        """Whether FP8 weights quantise the activations that they multiply."""
        return self.fp8_activations == "on"

    @property
    def has_adapters(self) -> bool:
        """Whether requests may have adapters."""
        return bool(self.lora_modules or self.enable_lora or self.lora_root)

    def _check_adapters(self) -> None:
        named = self.adapters
        if (self.max_lora_rank or 0) > MOST_LORA_RANK:
            raise ConfigError(f"--max-lora-rank must be at most {MOST_LORA_RANK}, got {self.max_lora_rank}")
        if len(named) > self.max_cpu_loras:
            raise ConfigError(f"--lora-modules names {len(named)} adapters, more than --max-cpu-loras allows")

    def _check_drafts(self) -> None:
        """Check that drafts, steps and top-k agree. A chain's steps are its drafts; drafters read the latter alone."""
        names = ("num_draft_tokens", "num_steps", "topk", "draft_dtype", "draft_quantization", "draft_token_map")
        for name in names if self.draft == "none" else ():
            value = getattr(self, name)
            if value not in (None, EngineConfig.__dataclass_fields__[name].default):
                raise ConfigError(
                    f"{flag(name)} {value} needs a drafter; --draft is none. "
                    "Name one (for example --draft ngram) or drop the flag"
                )
        if self.topk > 1:
            return
        drafts, steps = self.num_draft_tokens, self.num_steps
        if drafts is not None and steps is not None and drafts != steps:
            raise ConfigError(
                f"--num-steps {steps} with --num-draft-tokens {drafts}: a chain has one draft a step. Drop one of the "
                "two, or give --topk for a tree"
            )
        object.__setattr__(self, "num_draft_tokens", drafts or steps)

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Construct from options; an unknown option's error names the nearest known one."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                hint = meant(name, known) or f"; options: {', '.join(known)}"
                raise ConfigError(f"unknown engine option {name!r}{hint}")
        return cls(**options)
