"""A command line of vLLM's or SGLang's, as the one that serves the same here.

Invariant: a translation is accepted by our own parser, which is asked, and what it leaves out is said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from jaxspec.config.foreign_flags import (
    ELSEWHERE,
    ENVIRONMENT,
    NEEDLESS,
    SEVERAL_GPUS,
    SWITCHES,
    THEIRS,
    UNSUPPORTED,
    unabbreviated,
)
from jaxspec.config.options import flag
from server.cli.speculation import speculation
from server.http.cors import names

# what stands before the flags of the others' command lines
LAUNCHERS = (
    ("vllm", "serve"),
    ("-m", "vllm.entrypoints.openai.api_server"),
    ("sglang", "serve"),
    ("-m", "sglang.launch_server"),
    ("-m", "sglang.srt.entrypoints.http_server"),
)
VLLM_IMAGE = re.compile(r"(.*/)?vllm-openai(-\w+)?([:@].*)?")  # of docker, whose entry point is the launcher
VLLM_PORT = 8000  # where its clients look, who were told no port
MASTER_PORT = 29501  # vLLM's for several hosts
THEIR_WORDS = re.compile("(SGLANG|SGL|VLLM)_")  # of the environment; others are kept
# vLLM's, with one dash
SHORT = {
    **{"sc": "speculative_config", "q": "quantization", "n": "nnodes", "r": "node_rank"},
    **dict.fromkeys(("cc", "O", "O0", "O1", "O2", "O3"), "compilation_config"),
}
LISTS = {"api_key", "served_model_name", "lora_modules", "lora_paths", "lora_target_modules"}  # of several values there
SEVERAL = {"served_model_name", "lora_modules", "lora_target_modules"}  # ours that take several values
NAME_LISTS = {"allowed_media_domains"}  # ours that are lists in JSON
SIZE_LISTS = {"batch_sizes", "prefill_sizes"}  # our flags whose value is a list where theirs has several values
SGLANG_PRIORITIES = ("enable_priority_scheduling", "schedule_low_priority_values_first")  # both make one option here
DOTTED = {"speculative_config", "limit_mm_per_prompt", "model_loader_extra_config", "compilation_config"}
# With others of the command line.
SETTLED_TOGETHER = {"enable_expert_parallel", "enable_dp_attention", "hicache_size", *SGLANG_PRIORITIES}
SIZES = {"context_length", "chunked_prefill_size", "max_running_requests", "max_total_tokens"}
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}  # vLLM's
READ_FROM_CHECKPOINT = re.compile("awq|gptq|compressed.tensors|mxfp4|nvfp4|modelopt|gguf|w4a16|w8a16")


def without_launcher(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """A command line without another server's name and what stands before it, such as env, nohup, uv or docker; and
    that name: "vllm", "sglang", or None."""
    rest = list(argv)
    while rest and not argv[0].startswith("-"):
        if re.fullmatch(r"docker|podman", argv[0]) and VLLM_IMAGE.fullmatch(rest[0]):
            return rest[3 if rest[1:3] == ["vllm", "serve"] else 1 :], "vllm"
        for launcher in LAUNCHERS:
            if tuple(rest[: len(launcher)]) == launcher:
                return rest[len(launcher) :], "vllm" if "vllm" in " ".join(launcher) else "sglang"
        rest.pop(0)
    return list(argv), None


def _is_word(text: str) -> bool:
    """Whether this is a word of the environment, as a shell takes them before a command."""
    return re.fullmatch(r"[A-Za-z_]\w*=.*", text, re.DOTALL) is not None


def environment(argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Words of the environment to keep, flags in place of others, and a sentence about each of the rest."""
    before = argv[: len(argv) - len(without_launcher(argv)[0])]
    in_container, kept, flags, left = before[:1] in (["docker"], ["podman"]), [], [], []
    for place, word in enumerate(before):
        if not _is_word(word) or (in_container and before[place - 1] not in ("-e", "--env")):
            continue
        name, _, value = word.partition("=")
        known = ENVIRONMENT.get(name, {})
        value = {"false": "0", "true": "1"}.get(value.lower(), value)
        answer = known.get(value, known.get("", "it has no counterpart here"))
        if not THEIR_WORDS.match(name):
            kept.append(word)
        elif answer.startswith("--"):
            flags.append(answer)
        else:
            left.append(f"{word}: {answer}")
    return kept, flags, left


def name_of(word: str) -> str:
    """A flag's name with underscores. Of a dotted one, vLLM's for a key of a JSON object, with the keys behind it."""
    name, dot, keys = word.partition("=")[0].partition(".")
    bare = name.lstrip("-").replace("-", "_")
    return (SHORT.get(bare, bare) if not name.startswith("--") else bare) + dot + keys.replace("-", "_")


def full_name(word: str, known: Collection[str] = ()) -> str:
    """A flag's name as `name_of` has it, and whole where it is abbreviated."""
    name, dot, keys = name_of(word).partition(".")
    return (unabbreviated(name, known) if word.startswith("--") else name) + dot + keys


def pairs(
    argv: Sequence[str], switches: frozenset[str] | set[str], known: Collection[str] = (), stray: bool = True
) -> Iterator[tuple[str | None, str | None]]:
    """(option with underscores, value) of each flag, (None, value) of what is none; a flag with several values comes
    as often.

    Abbreviated flags have their whole names. A flag that neither they nor `known` have may have any number of values,
    and if not `stray`, all flags may: every word then belongs to the flag before it.
    """
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            yield None, word
            continue
        name, (_, equals, value) = full_name(word, known), word.partition("=")
        whole = name.partition(".")[0]
        several = (
            not stray
            or name in LISTS | NAME_LISTS
            or ELSEWHERE.get(name) in SIZE_LISTS
            or whole not in THEIRS.union(known)
        )
        if not equals:
            value = None if name in switches or not rest or _is_flag(rest[0]) else rest.pop(0)
        yield name, value
        while several and value is not None and rest and not _is_flag(rest[0]):
            yield name, rest.pop(0)


def _is_flag(text: str) -> bool:
    return text.startswith("-") and re.fullmatch(r"-[\d.]+", text) is None


def translate(
    argv: Sequence[str], known: Mapping[str, tuple[bool, Any]], refusal: Callable[[list[str]], str | None]
) -> tuple[list[str], list[str]]:
    """The flags here for another server's command line, and a sentence about each thing that it leaves out.

    **Arguments:** `known` has our options, by their names with underscores: whether each takes a value, and the values
    that it may have, or None. `refusal` says why our parser refuses a command line; None: it doesn't.
    """
    _, flags, left = environment(argv)
    argv, server = without_launcher(argv)
    ours, foreign = _sorted([*argv, *flags], known, left, stray=server != "sglang")
    ours |= speculation(foreign, left)
    ours = {name: ours[name] for name in ("model", *ours) if name in ours}
    if server == "vllm":
        ours.setdefault("port", str(VLLM_PORT))
    ours = {name: value for name, value in ours.items() if not _is_default(name, value, known[name][1], left)}
    for name, value in list(ours.items()):
        if why := refusal(_words({name: value})):
            given = " ".join(_words({name: value}))
            left.append(f"{given}: {why.removeprefix('argument ').removeprefix(flag(name)).lstrip(': ')}")
            del ours[name]
    return _words(ours), list(dict.fromkeys(left))


def _sorted(
    argv: Sequence[str], known: Mapping[str, tuple[bool, Any]], left: list[str], stray: bool = True
) -> tuple[dict[str, str | None], dict[str, str | None]]:
    """Separate our options from the other server's for speculative decoding. `left`: as of `speculation`, `stray` as of
    `pairs`."""
    ours: dict[str, str | None] = {}
    foreign: dict[str, str | None] = {}
    dotted: dict[str, Any] = {}
    switches = SWITCHES | {name for name, (takes, _) in known.items() if not takes}
    for name, value in pairs(argv, switches, known, stray):
        if name is None or name in ("model_path", "model_tag"):
            if ours.setdefault("model", value) != value:
                left.append(f"{value}: only one model is served")
            continue
        whole, _, key = name.partition(".")
        here = None if key and whole not in DOTTED else whole if whole in known else ELSEWHERE.get(whole)
        speculative = whole.startswith("speculative") or whole == "num_speculative_tokens"
        is_switch = name in SWITCHES or (here in known and not known[here][0])
        if not value and (here is not None or speculative) and not is_switch:
            left.append(f"{flag(name)}: it came without a value")
        elif key and whole == "speculative_config":
            _set(dotted, key.split("."), value)
        elif speculative:
            foreign[name] = value
        elif whole in SEVERAL_GPUS:
            if value != "1":
                given = f"{flag(name)} {value or ''}".strip()
                left.append(f"{given}: of several GPUs, --tp-size, --ep-size and --dp-size are supported")
        elif name in SETTLED_TOGETHER or (name == "kv_transfer_config" and "OffloadingConnector" in str(value)):
            foreign[name] = value
        elif is_switch and here is not None:
            ours |= {} if str(value).lower() == "false" else {here: None}
        elif whole in ("master_addr", "master_port"):
            foreign[whole] = value
        elif here in NAME_LISTS:
            ours[here] = json.dumps([*json.loads(ours.get(here) or "[]"), *names(value)])
        elif here in SIZE_LISTS:
            ours[here] = ",".join(filter(None, (ours.get(here), value)))
        elif here == "limit_images_per_prompt" and here != whole:
            ours |= (most := _most_media(key, value))
            if not most:
                left.append(f"{flag(name)} {value}: it names no number of images or videos; audio is not supported")
        elif whole == "model_loader_extra_config":
            dotted_or_json = {key: value} if key else _json_object(value)
            left += _loading(dotted_or_json, name, ours)
        elif whole == "compilation_config" and (sizes := _captured(key, value)):
            ours["batch_sizes"] = sizes
        elif here is None:
            why = UNSUPPORTED.get(whole) or NEEDLESS.get(whole) or "it has no counterpart here"
            left.append(f"{flag(name)}: {why}")
        elif here in SEVERAL and here in ours:
            ours[here] += f"\n{_value(name, here, value)}"
        elif name in LISTS and here in ours:
            left.append(f"{flag(name)} {value}: there can be but one here")
        else:
            ours[here] = _value(name, here, value)
    _settle(ours, foreign, left)
    if dotted:
        foreign["speculative_config"] = _merged(foreign.get("speculative_config"), dotted)
    return ours, foreign


def _settle(ours: dict[str, str | None], foreign: dict[str, str | None], left: list[str]) -> None:
    """Take out of `foreign` the options that several of theirs decide together."""
    if "master_addr" in foreign:
        ours["dist_init_addr"] = f"{foreign.pop('master_addr')}:{foreign.pop('master_port', MASTER_PORT)}"
    if (size := _host_gb(foreign, ours.get("tp_size") or "1", left)) is not None:
        ours["host_kv_gb"] = size
    by_priority, low_first = (_turned_on(foreign, name) for name in SGLANG_PRIORITIES)
    if by_priority:
        ours["schedule_policy"] = "priority" if low_first else "priority-high-first"
    elif low_first:
        left.append("--schedule-low-priority-values-first: it means something with --enable-priority-scheduling alone")
    if _turned_on(foreign, "enable_dp_attention"):
        _divide_attention(ours, left)
    if _turned_on(foreign, "enable_expert_parallel"):
        if (size := ours.get("tp_size", "1")) != "1":
            ours.setdefault("ep_size", size)
        elif (size := ours.get("dp_size", "1")) != "1":
            left.append(
                "--enable-expert-parallel: engines don't share experts. If the model has latent attention, "
                f"--tp-size {size} --ep-size {size} --dp-attention in place of --dp-size {size} divides them so"
            )
        else:
            left.append("--enable-expert-parallel: it divides experts among --tp-size GPUs, and there is one")


def _divide_attention(ours: dict[str, str | None], left: list[str]) -> None:
    """Divide requests among GPUs. SGLang's --dp-size then says among how many groups of its --tp-size GPUs."""
    groups, size = ours.pop("dp_size", None) or "1", ours.get("tp_size") or "1"
    if groups == "1":
        left.append("--enable-dp-attention: it divides requests among --dp-size groups of GPUs, and there is one")
        return
    ours["dp_attention"] = None
    if groups != size:
        left.append(f"--dp-size {groups}: --dp-attention divides requests among all {size} GPUs of --tp-size")


def _host_gb(foreign: dict[str, str | None], ranks: str, left: list[str]) -> str | None:
    """The size of the cache in the host's memory, in GiB. SGLang's is GB a GPU, vLLM's connector has bytes."""
    given, config = foreign.pop("hicache_size", None), foreign.pop("kv_transfer_config", None)
    try:
        if given is not None:
            return f"{float(given) * int(ranks) * 1e9 / 2**30:.4g}"
        if config is not None:
            extra = json.loads(config)["kv_connector_extra_config"]
            size = extra.get("cpu_bytes_to_use") or extra["cpu_bytes_to_use_per_rank"] * int(ranks)
            if extra.get("secondary_tiers"):
                left.append("secondary_tiers: for a disk, give --disk-kv-gb GIB and --disk-kv-path DIR")
            return f"{size / 2**30:.4g}"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        left.append(f"{config or given}: it names no size of a cache in the host's memory; --host-kv-gb takes GiB")
    return None


def _turned_on(foreign: dict[str, str | None], name: str) -> bool:
    """Take a switch out of the other server's options: whether it is on."""
    return name in foreign and str(foreign.pop(name)).lower() != "false"


def _set(config: dict[str, Any], keys: list[str], text: str | None) -> None:
    """Set the value of a dotted flag, which is JSON if it can be."""
    *outer, last = keys
    for key in outer:
        if not isinstance(config.get(key), dict):
            config[key] = {}
        config = config[key]
    try:
        config[last] = json.loads(text or "")
    except (ValueError, RecursionError):
        config[last] = text


def _merged(text: str | None, dotted: dict[str, Any]) -> str:
    """The JSON object of `--speculative-config` with the keys that were given apart."""
    try:
        whole = {} if text is None else json.loads(text)
    except (ValueError, RecursionError):
        whole = None
    return json.dumps(whole | dotted) if isinstance(whole, dict) else str(text)


def _words(ours: Mapping[str, str | None]) -> list[str]:
    """Options as words of a command line."""
    words: list[str] = []
    for name, value in ours.items():
        if name in SEVERAL:
            words += [flag(name), *value.split("\n")]
            continue
        joined = value is not None and value.startswith("-")
        words += [f"{flag(name)}={value}"] if joined else [each for each in (flag(name), value) if each is not None]
    return words


def _value(name: str, here: str, value: str) -> str:
    """The value here of an option that is called `name` there, where it is spelt in another way."""
    if name == "generation_config":
        return "openai" if value == "vllm" else "model"
    if name == "lora_paths":
        return _adapter(value)
    if here in ("reasoning_parser", "tool_call_parser"):
        return {"qwen3_xml": "qwen3_coder", "llama4_json": "llama3_json"}.get(value, value.replace("-", "_"))
    if here in SIZES and (size := re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT])", value)):
        return str(round(float(size[1]) * UNITS[size[2]]))
    return value


def _adapter(value: str) -> str:
    """One of SGLang's adapters, NAME=PATH: there it may be a path alone, or a JSON object."""
    try:
        fields = json.loads(value)
        return f"{fields['lora_name']}={fields['lora_path']}"
    except (ValueError, TypeError, KeyError, RecursionError):
        return value if "=" in value else f"{value}={value}"


def _most_media(key: str, value: str) -> dict[str, str]:
    """Our limits of a prompt's images and videos, of vLLM's or SGLang's of each kind of media."""
    try:
        given = json.loads(value)
    except ValueError:
        given = dict(each.split("=", 1) for each in value.split(",") if "=" in each)  # vLLM's older form
    if key:
        given = {key.partition(".")[0]: given}
    if not isinstance(given, dict):
        return {}
    found = {f"limit_{kind}s_per_prompt": given.get(kind) for kind in ("image", "video")}
    counts = {name: most.get("count") if isinstance(most, dict) else most for name, most in found.items()}
    return {name: str(most) for name, most in counts.items() if str(most).isdecimal()}


def _captured(key: str, value: str | None) -> str | None:
    """The batch sizes that vLLM is told to compile for, as ours are written."""
    sizes = _json_object(f'{{"{key}": {value}}}' if key else value or "").get("cudagraph_capture_sizes")
    return ",".join(map(str, sizes)) if isinstance(sizes, list) else None


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _loading(given: dict[str, Any], name: str, ours: dict[str, str | None]) -> Iterator[str]:
    """Take the number of threads out of `--model-loader-extra-config`, and say of all else why it is left out."""
    given = dict(given)
    several = str(given.pop("enable_multithread_load", True)).lower() == "true"
    threads = given.pop("num_threads", None)
    if several and str(threads).isdecimal():
        ours["load_threads"] = str(threads)
    elif not several or threads is not None or not given:
        yield f"{flag(name)}: weights are read by --load-threads threads, of which there are 8"
    for key in given:
        yield f"{flag(name)}: {key} has no counterpart here"


def _is_default(name: str, value: str | None, allowed: Any, left: list[str]) -> bool:
    """Whether to leave out an option that has the name it has here, whose value means its default or isn't known."""
    if name != "load_format" and allowed is not None and value not in allowed:
        left.append(f"{flag(name)} {value}: it may be {', '.join(allowed)}")
        return True
    if name == "load_format" and value not in ("auto", "dummy"):
        if value not in ("safetensors", "pt", "gguf"):
            left.append(
                f"--load-format {value}: --load-threads threads read weights from safetensors, .bin or .gguf files"
            )
        return True
    if name in ("tp_size", "ep_size", "dp_size") and value == "1":
        return True
    if name == "chunked_prefill_size" and value == "-1":
        left.append("--chunked-prefill-size -1: long prompts are always prefilled in chunks; a large size comes near")
        return True
    if name == "context_length" and value in ("-1", "auto"):
        left.append(f"--context-length {value}: it is the model's anyway")
        return True
    if name == "quantization" and READ_FROM_CHECKPOINT.search(value):
        left.append(f"--quantization {value}: such a checkpoint is read by its config, without a flag")
        return True
    return False
