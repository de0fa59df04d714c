"""A command line of vLLM's or SGLang's, as the one that serves the same here.

Invariant: a translation is accepted by our own parser, and what it leaves out is said.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxspec.elsewhere import ELSEWHERE, METHODS, NEEDLESS, SEVERAL_GPUS, SWITCHES, UNSUPPORTED
from jaxspec.options import flag
from jaxspec.values import shown

PROGRAM = "python -m server"
# what stands before the flags of the others' command lines
LAUNCHERS = (
    ("vllm", "serve"),
    ("-m", "vllm.entrypoints.openai.api_server"),
    ("sglang", "serve"),
    ("-m", "sglang.launch_server"),
    ("-m", "sglang.srt.entrypoints.http_server"),
)
VLLM_PORT = 8000  # where its clients look, who were told no port
COUNTS_ROOT = "speculative_num_draft_tokens"  # SGLang's, which counts the newest token beside the drafts


def without_launcher(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """A command line without another server's name at its beginning, and that name: "vllm", "sglang", or None."""
    rest = list(argv)
    while rest and (re.fullmatch(r"\w+=.*", rest[0]) or re.fullmatch(r"(.*/)?python[\d.]*", rest[0])):
        rest.pop(0)
    for launcher in LAUNCHERS:
        if tuple(rest[: len(launcher)]) == launcher:
            return rest[len(launcher) :], "vllm" if "vllm" in " ".join(launcher) else "sglang"
    return list(argv), None


def pairs(argv: Sequence[str], switches: frozenset[str] | set[str]) -> Iterator[tuple[str | None, str | None]]:
    """(option with underscores, value) of each flag, (None, value) of what is none. Of a flag's values, the first."""
    rest = list(argv)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("-"):
            yield None, name + equals + value
            continue
        name = {"-tp": "tp", "-dp": "dp", "-pp": "pp", "-ep": "ep"}.get(name, name.lstrip("-")).replace("-", "_")
        if not equals:
            value = None if name in switches or not rest or _is_flag(rest[0]) else rest.pop(0)
        yield name, value


def _is_flag(text: str) -> bool:
    return text.startswith("-") and re.fullmatch(r"-[\d.]+", text) is None


def translate(argv: Sequence[str], known: Mapping[str, tuple[bool, Any]]) -> tuple[str, list[str]]:
    """The command line here for one of another server, and a sentence about each thing that it leaves out.

    **Arguments:** `known` has our options, by their names with underscores: whether each takes a value, and the values
    that it may have, or None.
    """
    argv, server = without_launcher(argv)
    ours, left, foreign = {}, [], {}
    switches = SWITCHES | {name for name, (takes, _) in known.items() if not takes}
    for name, value in pairs(argv, switches):
        if name is None or name in ("model_path", "model_tag"):
            if ours.setdefault("model", value) != value:
                left.append(f"{value}: only one model is served")
        elif name in known:
            ours[name] = _parser(value) if name in ("reasoning_parser", "tool_call_parser") else value
        elif name.startswith("speculative") or name == "num_speculative_tokens":
            foreign[name] = value
        elif name in SEVERAL_GPUS:
            if value != "1":
                given = f"--{name.replace('_', '-')} {value or ''}".strip()
                left.append(f"{given}: of several GPUs, --tp-size, --ep-size and --dp-size are supported")
        elif name in ELSEWHERE:
            ours[ELSEWHERE[name]] = _value(name, value)
        else:
            why = UNSUPPORTED.get(name) or NEEDLESS.get(name) or "it has no counterpart here"
            left.append(f"{flag(name)}: {why}")
    ours |= _speculation(foreign, left)
    if server == "vllm":
        ours.setdefault("port", str(VLLM_PORT))
    ours = {name: value for name, value in ours.items() if not _is_default(name, value, known[name][1], left)}
    words = [word for name, value in ours.items() for word in (flag(name), value) if word is not None]
    return shlex.join([*PROGRAM.split(), *words]), left


def _value(name: str, value: str | None) -> str | None:
    """The value here of an option that has another name there."""
    if name == "generation_config":
        return "openai" if value == "vllm" else "model"
    return value


def _parser(name: str | None) -> str | None:
    """The format's name here, where it is spelt in another way."""
    return name and {"qwen3_xml": "qwen3_coder", "llama4_json": "llama3_json"}.get(name, name.replace("-", "_"))


def _is_default(name: str, value: str | None, allowed: Any, left: list[str]) -> bool:
    """Whether to leave out an option that has the name it has here, whose value means its default or isn't known."""
    if name != "load_format" and allowed is not None and value not in allowed:
        left.append(f"{flag(name)} {value}: it may be {', '.join(allowed)}")
        return True
    if name == "load_format" and value not in ("auto", "dummy"):
        return True
    if name in ("tp_size", "ep_size", "dp_size") and value == "1":
        return True
    if name == "chunked_prefill_size" and value == "-1":
        left.append("--chunked-prefill-size -1: long prompts are always prefilled in chunks")
        return True
    if name == "kv_cache_dtype" and value not in ("auto", "fp8", "fp8_e4m3", "bfloat16", "float16", "float8_e4m3fn"):
        left.append(f"--kv-cache-dtype {value}: supported are auto, fp8 (e4m3), bfloat16 and float16")
        return True
    return False


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
SGLANG_NGRAM_OPTIONS = {
    "min_match": "speculative_ngram_min_match_window_size",
    "max_match": "speculative_ngram_max_match_window_size",
}


def _speculation(foreign: dict[str, str | None], left: list[str]) -> dict[str, str]:
    """--draft and what belongs to it, from SGLang's flags, vLLM's JSON, or vLLM's older flags."""
    get = foreign.pop
    config = _json_config(get("speculative_config", None), left)
    method = config.get("method") or get("speculative_algorithm", None)
    model = config.get("model") or next(
        (get(name) for name in ("speculative_draft_model_path", "speculative_draft_model", "speculative_model")
         if name in foreign),
        None,
    )  # fmt: skip
    if method is None and model in METHODS:
        method, model = model, None
    ours: dict[str, Any] = {}
    found = METHODS.get(str(method).lower()) if method else None
    if method and not found:
        left.append(f"speculation by {shown(method)}: the methods are {', '.join(sorted(set(METHODS.values())))}")
        foreign.clear()
        return {}
    if found == "eagle" and not model and "method" not in config:
        found = "mtp"  # SGLang's name for a model's own module
    if found or model:
        takes_model = found not in ("ngram", "suffix", "mtp")
        ours["draft"] = f"{found}:{model}" if found and model and takes_model else found or model
    drafts = config.get("num_speculative_tokens") or get("num_speculative_tokens", None)
    steps, topk = get("speculative_num_steps", None), get("speculative_eagle_topk", None)
    rows = get(COUNTS_ROOT, None)
    if topk not in (None, "1"):
        ours |= {"topk": topk, "num_steps": steps}
    drafts = drafts or (steps if topk in (None, "1") else None) or (_less_one(rows) if rows else None)
    ours["num_draft_tokens"] = drafts
    own = {option: config.get(name) or get(name, None) for option, name in VLLM_DRAFTER_OPTIONS.get(found, {}).items()}
    for option, name in SGLANG_NGRAM_OPTIONS.items():
        value = get(name, None)
        if found == "ngram":
            own[option] = own[option] or value
    if given := [f"{option}={value}" for option, value in own.items() if value]:
        ours["draft"] += "?" + "&".join(given)
    names = ("speculative_draft_model_quantization", "speculative_model_quantization")
    given = [config.get("quantization"), *(get(name, None) for name in names)]
    if (quantization := next(filter(None, given), None)) == "fp8" and found not in ("ngram", "suffix"):
        ours["draft_quantization"] = quantization
    elif quantization not in (None, "fp8", "none", "unquant"):
        left.append(f"a drafter quantised by {shown(quantization)}: fp8 can be made while loading, or be on disk")
    ours["draft_token_map"] = get("speculative_token_map", None)
    size = get("speculative_draft_tensor_parallel_size", None) or config.get("draft_tensor_parallel_size", 1)
    if str(size) != "1":
        left.append(f"a drafter on {shown(size)} GPUs: it is divided as its target is, by --tp-size")
    left += [f"{flag(name)}: it has no counterpart here" for name in foreign]
    return {name: str(value) for name, value in ours.items() if value is not None}


def _json_config(text: str | None, left: list[str]) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        left.append(f"--speculative-config {shown(text)}: it isn't a JSON object")
        return {}
    return config


def _less_one(text: str) -> str | None:
    return str(int(text) - 1) if text.isdecimal() and int(text) > 1 else None
