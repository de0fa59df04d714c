"""Configurations: frozen, validated when made, static under jit.

`ModelConfig` says what a checkpoint computes, `EngineConfig` how the engine runs it. Neither holds an array.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec import sharding
from jaxspec.decoder.spec import Attention, Decoder, DeltaRule, LinearScaling, Yarn
from jaxspec.elsewhere import METHODS, meant
from jaxspec.options import ConfigError, check, flag, option
from jaxspec.values import positive, shown

DTYPES = ("float32", "bfloat16", "float16")
DTYPE_ALIASES = {"auto": None, "half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16"}
KV_DTYPES = (*DTYPES, "float8_e4m3fn")
STATE_DTYPES = ("float32", "bfloat16")


# By model_type, what reads a config.json into a decoder. Each family of `jaxspec.models` enters itself.
FAMILIES: dict[str, Callable[[Mapping[str, Any]], Decoder]] = {}
DEFAULTS: dict[str, Mapping[str, Any]] = {}  # what the families' config.jsons may be silent about


@dataclass(frozen=True)
class ModelConfig:
    """A model: what its decoder computes, and what its checkpoint says beside that."""

    model_type: str
    decoder: Decoder
    max_position: int
    mtp_layers: int = 0  # multi-token prediction modules that the checkpoint brings, by its config
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "bfloat16"  # what the checkpoint was saved in

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.decoder.width

    @property
    def num_layers(self) -> int:
        return len(self.decoder.layers)

    @property
    def num_heads(self) -> int:
        return self.decoder.attention.heads

    @property
    def num_kv_heads(self) -> int:
        return self.decoder.attention.kv_heads

    @property
    def head_dim(self) -> int:
        return self.decoder.attention.head_dim

    @property
    def linear(self) -> DeltaRule | None:
        """The linear attention of some layers; None: every layer attends to all tokens."""
        return self.decoder.delta_rule

    @property
    def num_linear_layers(self) -> int:
        """Layers whose past is a state of fixed size."""
        return self.decoder.count(DeltaRule)

    @property
    def num_kv_layers(self) -> int:
        """Layers whose past is keys and values of all tokens."""
        return self.decoder.count(Attention)

    def on_one_of(self, size: int) -> ModelConfig:
        """Config of one device's share among `size`. **Raises:** as `sharding.local`."""
        return dataclasses.replace(self, decoder=sharding.local(self.decoder, size)) if size > 1 else self

    def summary(self) -> dict[str, Any]:
        """Sizes and tokens, without the description of each layer."""
        told = [field.name for field in dataclasses.fields(self) if field.name != "decoder"]
        told += [
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_linear_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        ]
        return {name: getattr(self, name) for name in told}

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face `config.json` (as a mapping). Of a multimodal model, the text model is meant.

        **Raises:** `ConfigError` for a model family, activation, rope type or attention variant that isn't supported,
        or a missing or senseless size; the message names the key, its value and what is supported.
        """
        hf = _text_model(hf)
        model_type = hf.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            raise ConfigError(
                f"model_type {shown(model_type)} is not supported; supported: {', '.join(sorted(FAMILIES))}"
            )
        hf = {**DEFAULTS.get(model_type, {}), **hf}
        decoder = FAMILIES[model_type](hf)
        eos = hf.get("eos_token_id")
        eos = eos if isinstance(eos, list | tuple) else [] if eos is None else [eos]
        if bad := [token for token in eos if not is_token(token)]:
            raise ConfigError(f"config.json: eos_token_id must be token ids, got {shown(bad[0])}")
        if (bos := hf.get("bos_token_id")) is not None and not is_token(bos):
            raise ConfigError(f"config.json: bos_token_id must be a token id, got {shown(bos)}")
        return cls(
            model_type=model_type,
            decoder=decoder,
            max_position=_longest(decoder, positive(hf, "max_position_embeddings", 2048)),
            mtp_layers=_mtp_layers(hf),
            eos_token_ids=tuple(eos),
            bos_token_id=bos,
            dtype=_dtype(hf),
        )


def end_tokens(*ends: Any) -> list[Any]:
    """Several `eos_token_id`s, each a number, a list or None, as one list without doubles."""
    flat = [token for end in ends for token in (end if isinstance(end, list | tuple) else [end]) if token is not None]
    return [token for i, token in enumerate(flat) if token not in flat[:i]]  # not hashed: they may be anything


def is_token(token: Any) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31


def _text_model(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's part of a multimodal config, under the model type that it has alone.

    End tokens of both count, tying is the outer config's to say, if it does, and the dtype if the text's doesn't.
    """
    text = hf.get("text_config")
    if isinstance(text, Mapping):
        flat = end_tokens(hf.get("eos_token_id"), text.get("eos_token_id"))
        names = ("dtype", "torch_dtype")
        own = {"dtype": next((c[n] for c in (text, hf) for n in names if c.get(n)), None), "eos_token_id": flat}
        own |= {key: hf[key] for key in ("tie_word_embeddings",) if key in hf}
        hf = {**text, **own}
    if isinstance(kind := hf.get("model_type"), str):
        hf = {**hf, "model_type": kind.removesuffix("_text")}
    return hf


def _longest(decoder: Decoder, positions: int) -> int:
    """The most positions, of a config whose rope scaling a user may have added without raising `positions`.

    Where each kind of layer has a rope of its own, as in Gemma 3, `positions` count the scaling already.
    """
    if len({layer.mixing.rope for layer in decoder.layers if isinstance(layer.mixing, Attention)}) > 1:
        return positions
    match decoder.attention.rope.scaling:
        case Yarn(factor, original):
            return max(positions, int(factor * original))
        case LinearScaling(factor):
            return int(factor * positions)
    return positions


def _mtp_layers(hf: Mapping[str, Any]) -> int:
    """Under whichever name the config counts multi-token prediction modules."""
    names = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
    return next((positive(hf, name) for name in names if hf.get(name)), 0)


def _dtype(hf: Mapping[str, Any]) -> str:
    dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(f"config.json: dtype {shown(dtype)} is not supported; supported: {', '.join(DTYPES)}")
    return dtype


MODEL, SPECULATION, MEMORY, RUNNING = "model", "speculation", "memory and batching", "running"  # groups of --help


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
        "none, auto (the best that needs no download), a method (ngram, suffix, mtp, standalone, eagle, eagle3, "
        "dflash, dflash2, dspark), method:path_or_id, a path or hub id, or module:Class; a drafter's own options "
        "follow: ngram?max_match=8; suffix+D or ngram+D drafts with both",
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
        "fp8 quantises weights to FP8 while they load; a checkpoint that is quantised needs no flag",
        "FORMAT",
        group=MODEL,
        shown="none",
        choices=("fp8",),
        aliases={"none": None},
        hint="a checkpoint that is quantised is served as it is, so leave this out",
    )
    fp8_activations: str = option(
        "off",
        "off keeps activations in --dtype where weights are FP8; on quantises them to FP8, too, which is less exact",
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
        "fp8 quantises the drafter's weights while they load, and gives it an FP8 copy of the head that it drafts with",
        "FORMAT",
        group=SPECULATION,
        shown="none, whatever --quantization says",
        choices=("fp8",),
        aliases={"none": None, "unquant": None},
    )
    draft_token_map: str | None = option(
        None,
        "file (.json, .npy or .pt) of token ids: dflash, dflash2, dspark, eagle, eagle3 and mtp draft only these then, "
        "with a smaller head",
        "FILE",
        group=SPECULATION,
        shown="none: all tokens",
    )
    load_format: str = option(
        "auto", "auto, or dummy: random weights from the config alone", "FORMAT", group=MODEL, choices=("auto", "dummy")
    )
    context_length: int | None = option(
        None,
        "most tokens of prompt and output together",
        "TOKENS",
        group=MODEL,
        shown="the model's",
        least=2,
        common=True,
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
        shown="the drafter's: 4; MTP's and EAGLE's 3, or 8 in a tree; DSpark's block, or one less; DFlash's less one",
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
    disable_overlap: bool = option(False, "read each round's result before the next is dispatched", group=RUNNING)
    disable_structured_output: bool = option(False, "refuse grammars: fewer programs to compile", group=RUNNING)
    deterministic: bool = option(False, "a text is the same whatever batch it runs in", group=RUNNING)
    skip_warmup: bool = option(False, "compile on first use instead of at start", group=RUNNING)
    few_programs: bool = option(False, "compile one batch size alone: ready sooner, slower at low load", group=RUNNING)
    kernels: str = option(
        "auto",
        "auto: Hopper's on an H100 or H200, portable ones on other GPUs; portable: these on Hopper, too; plain: none",
        "WHICH",
        group=RUNNING,
        choices=("auto", "portable", "plain"),
    )
    decode_log_interval: int = option(40, "rounds between two decode log lines; 0: none", "N", group=RUNNING, least=0)

    def __post_init__(self):
        check(self)
        method, cut, rest = re.match("([^:?]*)([:?]?)(.*)", self.draft, re.DOTALL).groups()
        method = method.lower() if method.lower() in ("none", "auto") else METHODS.get(method.lower(), method)
        object.__setattr__(self, "draft", method + cut + rest)  # the dataclass is frozen
        self._check_drafts()

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
