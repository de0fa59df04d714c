"""`--draft` and the options beside it, from what vLLM and SGLang are told of speculative decoding."""

from __future__ import annotations

import json
from typing import Any

from jaxspec.config.engine_config import ANY_ON_LOAD, ON_LOAD
from jaxspec.config.foreign_flags import METHODS, NEEDLESS
from jaxspec.config.json_values import shown
from jaxspec.config.options import flag

COUNTS_ROOT = "speculative_num_draft_tokens"  # SGLang's, which counts the newest token beside the drafts
# A drafter's own options, by what they are called there.
VLLM_DRAFTER_OPTIONS = {
    "ngram": {"min_match": "prompt_lookup_min", "max_match": "prompt_lookup_max"},
    "suffix": {
        "max_depth": "suffix_decoding_max_tree_depth",
        "max_requests": "suffix_decoding_max_cached_requests",
        "max_factor": "suffix_decoding_max_spec_factor",
        "min_prob": "suffix_decoding_min_token_prob",
    },
}
BLOCKS = "dflash", "dflash2", "dspark", "domino", "lilicorr"
SGLANG_DRAFTER_OPTIONS = {
    "ngram": {
        "min_match": "speculative_ngram_min_match_window_size",
        "max_match": "speculative_ngram_max_match_window_size",
    },
    **{block: {"window": "speculative_dflash_draft_window_size"} for block in BLOCKS},
}

VLLM_KEYS = {"method", "model", "num_speculative_tokens", "quantization", "draft_tensor_parallel_size"}.union(
    *map(dict.values, VLLM_DRAFTER_OPTIONS.values())
)

Flags = dict[str, str | None]  # another server's, by their names; what is understood is taken out


def speculation(foreign: Flags, left: list[str]) -> dict[str, str]:
    """Our options for SGLang's flags, vLLM's JSON, or vLLM's older flags. `left` receives a sentence about each thing
    that has no counterpart."""
    config = _json_config(foreign.pop("speculative_config", None), left)
    method, model = _method(foreign, config)
    found = METHODS.get(str(method).lower()) if method else None
    if method and not found:
        left.append(f"speculation by {shown(method)}: the methods are {', '.join(sorted(set(METHODS.values())))}")
        if not isinstance(model, str):
            return {}
    if found == "eagle" and not model and "method" not in config:
        found = "mtp"  # SGLang's name for a model's own module
    ours = {
        "draft": _draft(found, model, _own_options(found, foreign, config)),
        **({"num_draft_tokens": 1} if str(method).lower() == "naive_eagle" else {}),
        **_counts(foreign, config),
        "draft_quantization": _quantization(found, foreign, config, left),
        "draft_token_map": foreign.pop("speculative_token_map", None),
    }
    size = foreign.pop("speculative_draft_tensor_parallel_size", None) or config.get("draft_tensor_parallel_size", 1)
    if str(size) != "1":
        left.append(f"a drafter on {shown(size)} GPUs: it is divided as its target is, by --tp-size")
    left += [f"{flag(name)}: {NEEDLESS.get(name, 'it has no counterpart here')}" for name in foreign]
    return {name: str(value) for name, value in ours.items() if value is not None}


def _method(foreign: Flags, config: dict[str, Any]) -> tuple[Any, Any]:
    """The method as it is called there, and the drafter's model; None for what isn't named."""
    method = config.get("method") or foreign.pop("speculative_algorithm", None)
    names = "speculative_draft_model_path", "speculative_draft_model", "speculative_model"
    model = config.get("model") or next((foreign.pop(name) for name in names if name in foreign), None)
    return (model, None) if method is None and model in METHODS else (method, model)


def _draft(found: str | None, model: str | None, own: dict[str, Any]) -> str | None:
    """Value of `--draft` for this method, model and options of its own."""
    takes_model = found not in ("ngram", "suffix", "mtp")
    draft = f"{found}:{model}" if found and model and takes_model else found or model
    return f"{draft}?{'&'.join(f'{option}={value}' for option, value in own.items())}" if own else draft


def _own_options(found: str | None, foreign: Flags, config: dict[str, Any]) -> dict[str, Any]:
    """The drafter's own options that are given, by their names here."""
    names = VLLM_DRAFTER_OPTIONS.get(found, {})
    own = {option: config.get(name) or foreign.pop(name, None) for option, name in names.items()}
    for option, name in SGLANG_DRAFTER_OPTIONS.get(found, {}).items():
        own[option] = own.get(option) or foreign.pop(name, None)
    return {option: value for option, value in own.items() if value}


def _counts(foreign: Flags, config: dict[str, Any]) -> dict[str, Any]:
    """How many drafts a round has, in how many steps, and the branches of a tree."""
    drafts = config.get("num_speculative_tokens") or foreign.pop("num_speculative_tokens", None)
    steps, topk = foreign.pop("speculative_num_steps", None), foreign.pop("speculative_eagle_topk", None)
    rows = foreign.pop(COUNTS_ROOT, None)
    chain = topk in (None, "1")
    drafts = drafts or (steps if chain else None) or (_less_one(rows) if rows else None)
    counts = {"num_draft_tokens": drafts} if chain else {"topk": topk, "num_steps": steps, "num_draft_tokens": drafts}
    return {name: count for name, count in counts.items() if count is not None}


def _quantization(found: str | None, foreign: Flags, config: dict[str, Any], left: list[str]) -> str | None:
    """`--draft-quantization`, if the drafter has weights to quantise."""
    names = "speculative_draft_model_quantization", "speculative_model_quantization"
    given = [config.get("quantization"), *(foreign.pop(name, None) for name in names)]
    quantization = next(filter(None, given), None)
    if quantization in ON_LOAD and found not in ("ngram", "suffix"):
        return quantization
    if quantization not in (None, *ON_LOAD, "none", "unquant"):
        left.append(f"a drafter quantised by {shown(quantization)}: {ANY_ON_LOAD} can be made while loading or on disk")
    return None


def _json_config(text: str | None, left: list[str]) -> dict[str, Any]:
    """The object that `--speculative-config` holds; an empty one, and a sentence, if it is none."""
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        left.append(f"--speculative-config {shown(text)}: it isn't a JSON object")
        return {}
    readable = {
        key: value for key, value in config.items() if isinstance(value, str | int | float) and key in VLLM_KEYS
    }
    for key in config.keys() - readable.keys():
        why = f"it can't be {shown(config[key])}" if key in VLLM_KEYS else "it has no counterpart here"
        left += [f"--speculative-config {key}: {why}"] if config[key] is not None else []
    return readable


def _less_one(text: str) -> str | None:
    """One less than a number; None for 1, and what is none as it is."""
    if not text.isdecimal():
        return text
    return str(int(text) - 1) if int(text) > 1 else None
