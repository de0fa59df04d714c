"""Configurations: frozen, validated when made, static under jit.

`ModelConfig` says what a checkpoint computes, `EngineConfig` how the engine runs it. Neither holds an array.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.decoder.spec import Attention, Decoder, DeltaRule, LinearScaling, Yarn
from jaxspec.elsewhere import METHODS, meant

DTYPES = ("float32", "bfloat16", "float16")
FLOAT32_MAX = 3.4e38
KV_DTYPES = (*DTYPES, "float8_e4m3fn")
STATE_DTYPES = ("float32", "bfloat16")

ALIASES = {
    "dtype": {"auto": None, "half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16"},
    "kv_cache_dtype": {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "bf16": "bfloat16"},
}

# The largest sizes that a config.json may name: far above any model's, low enough that nothing made of them in passing
# (a declaration for each layer and expert, a table of rotary frequencies) takes long.
LARGEST = {
    "num_hidden_layers": 4096,
    "num_experts": 2**14,
    "num_local_experts": 2**14,
    "head_dim": 2**16,
    "linear_conv_kernel_dim": 2**10,
    "max_position_embeddings": 2**27,
    "vocab_size": 2**28,
}


# By model_type, what reads a config.json into a decoder. Each family of `jaxspec.models` enters itself.
FAMILIES: dict[str, Callable[[Mapping[str, Any]], Decoder]] = {}


class ConfigError(ValueError):
    """A model config, engine option or combination of them that can't work. Names the option or key."""


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
        decoder = FAMILIES[model_type](hf)
        eos = hf.get("eos_token_id")
        eos = eos if isinstance(eos, list | tuple) else [] if eos is None else [eos]
        if bad := [token for token in eos if not _is_token(token)]:
            raise ConfigError(f"config.json: eos_token_id must be token ids, got {shown(bad[0])}")
        if (bos := hf.get("bos_token_id")) is not None and not _is_token(bos):
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


def shown(value: Any) -> str:
    """A value in an error message, cut short: a file may hold megabytes where a number belongs."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def end_tokens(*ends: Any) -> list[Any]:
    """Several `eos_token_id`s, each a number, a list or None, as one list without doubles."""
    flat = [token for end in ends for token in (end if isinstance(end, list | tuple) else [end]) if token is not None]
    return [token for i, token in enumerate(flat) if token not in flat[:i]]  # not hashed: they may be anything


def _is_token(token: Any) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31


def _text_model(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's part of a multimodal config, under the model type that it has alone.

    End tokens of both count, tying is the outer config's to say, if it does, and the dtype if the text's doesn't.
    """
    text = hf.get("text_config")
    if isinstance(text, Mapping):
        flat = end_tokens(hf.get("eos_token_id"), text.get("eos_token_id"))
        tied = hf.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        names = ("dtype", "torch_dtype")
        own = {"tie_word_embeddings": tied, "dtype": next((c[n] for c in (text, hf) for n in names if c.get(n)), None)}
        hf = {**text, **own, "eos_token_id": flat}
    if isinstance(kind := hf.get("model_type"), str):
        hf = {**hf, "model_type": kind.removesuffix("_text")}
    return hf


def _longest(decoder: Decoder, positions: int) -> int:
    """The most positions, of a config whose rope scaling a user may have added without raising `positions`."""
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


def positive(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A size of config.json. **Raises:** `ConfigError` naming the key."""
    value = hf.get(key)
    value = default if value is None else value
    most = LARGEST.get(key, 2**31 - 1)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        bound = f" of at most {most}" if isinstance(value, int) and value > most else ""
        raise ConfigError(f"config.json: {key} must be a positive integer{bound}, got {shown(value)}")
    return value


def positive_float(mapping: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number of config.json. **Raises:** `ConfigError` naming the key."""
    value = mapping.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= FLOAT32_MAX:
        raise ConfigError(f"config.json: {key} must be a positive number within float32, got {shown(value)}")
    return float(value)


def _dtype(hf: Mapping[str, Any]) -> str:
    dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(f"config.json: dtype {shown(dtype)} is not supported; supported: {', '.join(DTYPES)}")
    return dtype


@dataclass(frozen=True)
class EngineConfig:
    """The engine's options: the server's flags with underscores. Made once, from keyword arguments.

    **Arguments** (None means: chosen from the model and the machine):

    - `model`: hub id, folder, `.gguf` file, or `smollm2-135m-instruct`, the demo.
    - `draft`: `none`, `auto`, a method, `method:path_or_id`, a path or hub id, or `module:Class`.
    - `num_draft_tokens`: most tokens drafted per request and round. The verify width is one more.
    - `topk`: 1, and drafts are a chain; or how many drafts at most follow one token in a tree.
    - `num_steps`: how deep drafts go. A chain has one draft a step, so there it means the same as `num_draft_tokens`.
    - `ngram_min`, `ngram_max`: lengths of match, in tokens, that the n-gram drafter tries.
    - `dtype`: of weights and activations; `kv_cache_dtype`: of keys and values, `auto` is the same.
    - `context_length`: most tokens of prompt and output together.
    - `max_running_requests`: request slots, so also the largest decode batch.
    - `mem_fraction_static`: share of the device's memory for weights, caches and states together.
    - `max_total_tokens`: tokens in the page pool; overrides what `mem_fraction_static` gives.
    - `page_size`: tokens per KV page. `chunked_prefill_size`: most prompt tokens in one program.
    - `state_dtype`: of linear attention's states, `float32` or `bfloat16`, which rounds them once a round or block.
    - `max_state_snapshots`: of a model with linear attention, states kept after cached prefixes, without which those
      can't be gone on from; 0 keeps none. `state_snapshot_interval`: prompt tokens between two of them.
    - `num_continuous_decode_steps`: rounds in one program while no request can be taken in. Tokens are streamed, and
      requests taken in, that many rounds apart at most; it pays where a round is shorter than its dispatch.
    - `disable_overlap`: read each round's result before the next is dispatched. `disable_prefix_cache`: don't share the
      keys and values of common prefixes.
    - `disable_structured_output`: refuse requests with a grammar, and don't compile their programs.
    - `load_format`: `auto`, or `dummy` for random weights made from the config alone.
    - `revision`: branch, tag or commit of a hub id. `seed`: of dummy weights and of requests that give none.
    - `skip_warmup`: compile on first use instead of at start. `few_programs`: compile for one batch size: ready
      sooner, and slower where fewer requests run.
    - `decode_log_interval`: rounds between two decode log lines; 0 turns them off.

    **Raises:** `ConfigError` naming the option, what was given and what is allowed.
    """

    model: str = "smollm2-135m-instruct"
    draft: str = "none"
    num_draft_tokens: int | None = None
    num_steps: int | None = None
    topk: int = 1
    dtype: str | None = None
    kv_cache_dtype: str = "auto"
    context_length: int | None = None
    max_running_requests: int | None = None
    mem_fraction_static: float = 0.88
    max_total_tokens: int | None = None
    page_size: int | None = None
    chunked_prefill_size: int | None = None
    state_dtype: str = "float32"
    max_state_snapshots: int | None = None
    state_snapshot_interval: int = 256
    num_continuous_decode_steps: int | None = None
    disable_overlap: bool = False
    disable_prefix_cache: bool = False
    disable_structured_output: bool = False
    load_format: str = "auto"
    revision: str | None = None
    ngram_min: int = 2
    ngram_max: int = 5
    seed: int | None = None
    skip_warmup: bool = False
    few_programs: bool = False
    decode_log_interval: int = 40

    def __post_init__(self):
        self._take_aliases()
        for name, allowed in (
            ("dtype", (None, *DTYPES)),
            ("kv_cache_dtype", ("auto", *KV_DTYPES)),
            ("state_dtype", STATE_DTYPES),
            ("load_format", ("auto", "dummy")),
        ):
            if getattr(self, name) not in allowed:
                shown = ", ".join(str(a) for a in allowed if a)
                raise ConfigError(f"{flag(name)} must be one of {shown}, got {getattr(self, name)!r}")
        for name, low in (
            ("num_draft_tokens", 1),
            ("num_steps", 1),
            ("topk", 1),
            ("context_length", 2),
            ("max_running_requests", 1),
            ("max_total_tokens", 1),
            ("page_size", 1),
            ("chunked_prefill_size", 1),
            ("max_state_snapshots", 0),
            ("state_snapshot_interval", 1),
            ("num_continuous_decode_steps", 1),
            ("ngram_min", 1),
            ("ngram_max", 1),
            ("decode_log_interval", 0),
        ):
            value = getattr(self, name)
            if value is None and getattr(EngineConfig, name) is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(f"{flag(name)} must be an integer of at least {low}, got {value!r}")
        for name in ("model", "draft"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigError(f"{flag(name)} must be a name or a path, got {getattr(self, name)!r}")
        for name in (
            *("disable_overlap", "disable_prefix_cache", "disable_structured_output"),
            *("skip_warmup", "few_programs"),
        ):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{flag(name)} is on or off, got {getattr(self, name)!r}")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0):
            raise ConfigError(f"--seed must be a non-negative integer, got {self.seed!r}")
        share = self.mem_fraction_static
        if isinstance(share, bool) or not isinstance(share, int | float) or math.isnan(share) or not 0 < share < 1:
            raise ConfigError(f"--mem-fraction-static must be between 0 and 1, got {share!r}")
        if self.ngram_min > self.ngram_max:
            raise ConfigError(f"--ngram-min ({self.ngram_min}) must not exceed --ngram-max ({self.ngram_max})")
        self._check_drafts()

    def _take_aliases(self) -> None:
        """Values under vLLM's and SGLang's names, as ours; methods of drafting in any case."""
        for name, aliases in ALIASES.items():
            value = getattr(self, name)
            if isinstance(value, str) and value in aliases:
                object.__setattr__(self, name, aliases[value])  # the dataclass is frozen
        if isinstance(self.draft, str):
            method, colon, source = self.draft.partition(":")
            method = method.lower() if method.lower() in ("none", "auto") else METHODS.get(method.lower(), method)
            object.__setattr__(self, "draft", method + colon + source)

    def _check_drafts(self) -> None:
        """That drafts, steps and top-k fit together. A chain's steps are its drafts; drafters read the latter alone."""
        given = {"num_draft_tokens": self.num_draft_tokens, "num_steps": self.num_steps}
        given |= {"topk": None if self.topk == 1 else self.topk}
        for name, value in given.items():
            if self.draft == "none" and value is not None:
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
        """As the constructor, but an unknown option's error names the nearest known one."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                hint = meant(name, known) or f"; options: {', '.join(known)}"
                raise ConfigError(f"unknown engine option {name!r}{hint}")
        return cls(**options)


def flag(option: str) -> str:
    """The command-line spelling of an engine option: `page_size` -> `--page-size`."""
    return "--" + option.replace("_", "-")
