"""A command line of vLLM's or SGLang's, as the one that serves the same here.

Invariant: a translation is accepted by our own parser, and what it leaves out is said.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxspec.cli import called
from jaxspec.elsewhere import ELSEWHERE, NEEDLESS, SEVERAL_GPUS, SWITCHES, UNSUPPORTED
from jaxspec.options import flag
from server.cli.speculation import speculation

# what stands before the flags of the others' command lines
LAUNCHERS = (
    ("vllm", "serve"),
    ("-m", "vllm.entrypoints.openai.api_server"),
    ("sglang", "serve"),
    ("-m", "sglang.launch_server"),
    ("-m", "sglang.srt.entrypoints.http_server"),
)
VLLM_PORT = 8000  # where its clients look, who were told no port


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
    ours |= speculation(foreign, left)
    if server == "vllm":
        ours.setdefault("port", str(VLLM_PORT))
    ours = {name: value for name, value in ours.items() if not _is_default(name, value, known[name][1], left)}
    words = [word for name, value in ours.items() for word in (flag(name), value) if word is not None]
    return shlex.join([*called("serve", "server").split(), *words]), left


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
