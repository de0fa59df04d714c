"""The command line: the engine's flags (`jaxspec.config.flags`), the server's own, and `--config file.yaml`."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from huggingface_hub import try_to_load_from_cache

import jaxspec
from jaxspec import CheckpointError, ConfigError, EngineConfig
from jaxspec.checkpoint.check import read_json
from jaxspec.checkpoint.pooling import KINDS
from jaxspec.cli import called
from jaxspec.config.engine_config import SERVER_DEFAULTS
from jaxspec.config.flags import add_engine_flags, checked, engine_options, natural, positive
from jaxspec.config.foreign_flags import ELSEWHERE, SEVERAL_GPUS, SWITCHES, meant, unabbreviated
from jaxspec.config.options import flag
from jaxspec.drafters.registry import entries
from jaxspec.models.model_config import ModelConfig
from server import logs
from server.cli.translate import environment, full_name, name_of, pairs, translate, without_launcher
from server.http.cors import add_cors_flags
from server.media.flags import add_media_flags
from server.parsers import PARSERS, REASONING_PARSERS

_token = checked(str, "must not be empty", str.strip)
_seconds = checked(float, "must be a number of seconds above 0", lambda value: 0 < value < math.inf)


def _key(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty, which no client can send; leave it out for a server without a key")
    return text


LIMITS = (
    ("--max-queued-requests", natural, 4096, "N", "completions that may wait for a slot; further requests get 429"),
    ("--request-timeout", _seconds, None, "SECONDS", "time limit of a request, which then ends with a 504"),
    ("--watchdog-timeout", _seconds, 300, "SECONDS", "time after which a step counts as stuck: /health is 503, and "
     "the server ends if the step doesn't return within --drain-seconds more"),
    ("--drain-seconds", _seconds, 5, "SECONDS", "time for running requests to finish once the server is told to stop"),
    ("--idle-timeout", _seconds, 60, "SECONDS", "time after which a client that neither sends nor reads is cut off; "
     "headers have twice as long, and a body comes at 240 bytes a second or faster"),
    ("--max-connections", positive, 8192, "N", "connections open at once; requests on further ones get 503"),
)  # fmt: skip


class UsageError(ValueError):
    """A command line or config file that can't be used."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def make_parser() -> argparse.ArgumentParser:
    """The parser; its namespace has a field per `EngineConfig` field, and the server's own."""
    parser = _Parser(
        prog=called("serve", "server"),
        usage="%(prog)s [MODEL] [--draft D] [--port PORT] [flags below]",
        description="Serve a language model with speculative decoding, behind OpenAI's API.",
        epilog="Give a command line of vLLM's or SGLang's as it is, and the server prints its translation.",
        allow_abbrev=False,
        add_help=False,
    )
    common = parser.add_argument_group("what most people set")
    add_engine_flags(parser, SERVER_DEFAULTS, common)
    common.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    common.add_argument("--port", type=_port, default=30000, help="port, 0 for any that is free (default: %(default)s)")
    common.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="the model's name in the API (default: --model); requests may use further names, responses have the first",
    )
    key = "require this bearer token (default: $JAXSPEC_API_KEY)"
    common.add_argument("--api-key", type=_key, metavar="KEY", help=key)
    common.add_argument("--config", metavar="FILE", help="YAML file of flags (port: 8000); the command line wins")
    common.add_argument("--help", "-h", action="help", help="show this and exit")
    common.add_argument("--version", action="version", version=f"jaxspec {jaxspec.__version__}")
    server = parser.add_argument_group("server")
    add = server.add_argument

    def choice(name: str, default: str, choices: Sequence[str], says: str, metavar: str | None = None) -> None:
        add(name, default=default, choices=choices, metavar=metavar, help=f"{says} (default: %(default)s)")

    sampling = "sampling where a request doesn't say: model takes the checkpoint's generation_config.json, openai takes"
    choice("--sampling-defaults", "model", ("model", "openai"), f"{sampling} temperature 1")
    for name, table, what in (
        ("--reasoning-parser", REASONING_PARSERS, "reasoning"),
        ("--tool-call-parser", PARSERS, "tool calls"),
    ):
        formats = f"format of {what} in replies: {', '.join(table)}; auto reads it from the chat template, none leaves"
        choice(name, "auto", ("auto", "none", *table), f"{formats} it in the text", "NAME")
    pools = "make embeddings or scores by: auto what the checkpoint says, none nothing, last or mean token, yes or no"
    choice("--pooling", "auto", ("auto", "none", *KINDS), pools)
    choice("--log-level", "info", ("debug", "info", "warning", "error"), "least severe log lines to show")
    choice("--log-format", "text", logs.FORMATS, "format of log lines")
    ready = "be ready only once all programs are compiled: later, but then no request is slower for it (default: off)"
    add("--wait-for-programs", action="store_true", help=ready)
    rollout = "take new weights, pauses, releases of memory and profiles without an API key (default: off)"
    add("--enable-rollout-routes", action="store_true", help=rollout)
    add("--access-log", action="store_true", help="log a line per HTTP request (default: off)")
    texts = "append each finished text to this file as token ids, for jaxspec.train --data (default: off)"
    add("--log-prompts", type=Path, metavar="FILE", help=texts)
    traces = "send a trace of each request to this OTLP collector, http://host:4318/v1/traces (default: off)"
    add("--otlp-traces-endpoint", metavar="URL", help=traces)
    add_cors_flags(server)
    add_media_flags(server)
    _add_host_flags(parser)
    limits = parser.add_argument_group("limits")
    for name, kind, default, metavar, text in LIMITS:
        shown = "none" if default is None else default
        limits.add_argument(name, type=kind, default=default, metavar=metavar, help=f"{text} (default: {shown})")
    return parser


def _add_host_flags(parser: argparse.ArgumentParser) -> None:
    hosts = parser.add_argument_group(
        "several hosts", "One model over --tp-size GPUs of several hosts, as many on each."
    )
    hosts.add_argument("--nnodes", type=positive, default=1, metavar="N", help="hosts (default: %(default)s)")
    rank = "which of them this one is; 0 has the HTTP server (default: %(default)s)"
    hosts.add_argument("--node-rank", type=natural, default=0, metavar="R", help=rank)
    address = "address of node 0, the same on all; the port after it is used too (default: none)"
    hosts.add_argument("--dist-init-addr", metavar="HOST:PORT", help=address)
    token = "secret that nodes prove to each other to know, the same on all (default: $JAXSPEC_DIST_TOKEN)"
    hosts.add_argument("--dist-token", type=_token, metavar="TOKEN", help=token)


def check_hosts(args: argparse.Namespace) -> None:
    """**Raises:** `UsageError` for flags of several hosts that don't fit together."""
    nodes, rank, address = args.nnodes, args.node_rank, args.dist_init_addr
    if rank >= nodes:
        raise UsageError(f"--node-rank {rank}: of --nnodes {nodes} it is from 0 to {nodes - 1}")
    if nodes == 1:
        return
    port = (address or "").rpartition(":")[2]
    if not port.isdecimal() or not 0 < int(port) < 65535 or address.startswith(":"):
        given = f", got {address}" if address else ""
        raise UsageError(f"--nnodes {nodes} needs --dist-init-addr HOST:PORT, where node 0 is{given}")
    if args.tp_size % nodes:
        raise UsageError(
            f"--tp-size {args.tp_size} is the number of GPUs on all hosts; --nnodes {nodes} must divide it"
        )
    if args.dp_size != 1:
        raise UsageError(
            f"--dp-size {args.dp_size} runs on one host; with --nnodes {nodes}, put a router before several servers"
        )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line, and the config file it names.

    **Raises:** `UsageError` for unknown flags or keys (all of them, each with the nearest known one), a value of the
    wrong type, hosts that don't fit together, or a command line of vLLM's or SGLang's, with its translation.
    """
    parser = make_parser()
    if without_launcher(argv)[1] is not None:
        raise UsageError("this is another server's command line" + _translation(parser, argv))
    config = _parse_known(parser, argv).config
    before = [] if config is None else _from_file(parser, config)
    args = _parse_known(parser, [*before, *argv])  # the last of two equal flags wins
    check_hosts(args)
    return args


def _parse_known(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    argv = _without_one_gpu(argv)
    try:
        args, unknown = parser.parse_known_args(argv)
    except UsageError as error:
        known = set(map(name_of, _flags(parser)))
        if any(word.startswith("-") and _from_elsewhere(name_of(word), known) for word in argv):
            raise UsageError(str(error) + _translation(parser, argv)) from None
        raise
    named = list(pairs(unknown, SWITCHES))
    models = [value for name, value in named if name is None]
    wrong = [name for name, _ in named if name is not None]
    default = parser.get_default("model")
    if len(models) > 1 or (models and args.model not in (default, models[0])):
        other = models[1] if len(models) > 1 else f"--model {args.model}"
        raise UsageError(f"unknown argument {other}: {models[0]} is the model to serve, and there can be but one")
    if wrong:
        known = _flags(parser)
        told = [f"{_spelt(name, argv)}{_nearest(name.partition('.')[0], known)}" for name in dict.fromkeys(wrong)]
        message = f"unknown argument {told[0]}" if len(told) == 1 else "\n  ".join(["unknown arguments", *told])
        raise UsageError(message + (_translation(parser, argv) if any(map(_from_elsewhere, wrong)) else ""))
    args.model = models[0] if models else args.model
    return args


def _spelt(name: str, argv: Sequence[str]) -> str:
    """A flag as it was typed."""
    return next(
        word.partition("=")[0] for word in argv if word.startswith("-") and name in (name_of(word), full_name(word))
    )


def _from_elsewhere(name: str, known: Iterable[str] = ()) -> bool:
    """Whether a flag of that name has another name here."""
    return unabbreviated(name.partition(".")[0], known) in ELSEWHERE


def _without_one_gpu(argv: Sequence[str]) -> list[str]:
    """A command line without the others' flags that ask for one GPU, which is what there is without --tp-size."""
    rest, kept = list(argv), []
    names = SEVERAL_GPUS | {name for name, ours in ELSEWHERE.items() if ours in ("tp_size", "ep_size", "dp_size")}
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name.lstrip("-").replace("-", "_") in names and name.startswith("-"):
            if equals and value == "1":
                continue
            if not equals and rest[:1] == ["1"]:
                rest.pop(0)
                continue
        kept.append(name + equals + value)
    return kept


def _translation(parser: argparse.ArgumentParser, argv: Sequence[str]) -> str:
    """Translate the command line to our flags, on lines of its own."""
    actions = {name_of(name): action for name, action in _flags(parser).items() if name not in ("--help", "--version")}
    known = {name: (action.nargs != 0, action.choices) for name, action in actions.items()}
    words, left = translate(argv, known, lambda words: _refusal(parser, words))
    kept = [
        f"{name}={shlex.quote(value)} " for name, _, value in (word.partition("=") for word in environment(argv)[0])
    ]
    command = "".join(kept) + shlex.join([*called("serve", "server").split(), *words])
    lines = ["\nIn jaxspec's flags:", f"  {command}", *(f"left out: {each}" for each in left)]
    if why := _refusal(parser, words, check_hosts) or _refused_later(parser, words):
        lines.append(f"to be changed: {why}")
    return "\n".join(lines)


def _refusal(
    parser: argparse.ArgumentParser, argv: Sequence[str], check: Callable[[argparse.Namespace], None] | None = None
) -> str | None:
    """Why a command line of our own flags can't be used, by `check` too if there is one; None: it can."""
    try:
        args = _parse_known(parser, argv)
        EngineConfig(**engine_options(args))
        if check is not None:
            check(args)
    except (UsageError, ConfigError) as error:
        return str(error)
    return None


def _refused_later(parser: argparse.ArgumentParser, argv: Sequence[str]) -> str | None:
    """Why a start would refuse this command line, as far as that shows without a download; None: it doesn't."""
    options = EngineConfig(**engine_options(_parse_known(parser, argv)))
    for method, target, known in entries():
        if known.source and known.source.lower() == options.model.lower():
            return _drafter_alone(options.model, target, f"{method}:{known.source}")
    try:
        hf = _config_at_hand(options)
        if "speculators_config" in hf or (not hf and "-speculator" in options.model):  # vLLM's form of one argument
            verifier = (hf.get("speculators_config") or {}).get("verifier") or {}
            return _drafter_alone(options.model, str(verifier.get("name_or_path", "TARGET")), options.model)
        if hf:
            ModelConfig.from_hf(hf)
    except (ConfigError, CheckpointError) as error:
        return f"--model {options.model}: {error}"
    return None


def _drafter_alone(model: str, target: str, draft: str) -> str:
    return f"--model {model} is a drafter; name its target as the model: --model {target} --draft {draft}"


def _config_at_hand(options: EngineConfig) -> dict[str, Any]:
    """The config.json of the model's folder, or of what was downloaded before; {} for neither."""
    file = Path(options.model).expanduser() / "config.json"
    if not file.is_file():
        try:
            file = try_to_load_from_cache(options.model, "config.json", revision=options.revision)
        except ValueError:  # no hub id
            return {}
    return read_json(Path(file)) if isinstance(file, str | Path) else {}


def _from_file(parser: argparse.ArgumentParser, path: str) -> list[str]:
    """A YAML mapping as the command line it stands for, so that both are checked by the same parser."""
    try:
        content = yaml.compose(Path(path).read_text(), yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: {error}") from error
    if content is None:
        return []
    if not isinstance(content, yaml.MappingNode):
        raise UsageError(f"--config {path}: must hold one flag a line, like `page_size: 16`")
    known = _flags(parser)
    del known["--config"], known["--help"], known["--version"]
    argv = []
    for key, node in content.value:
        name = flag(str(key.value).removeprefix("--"))
        if name not in known:
            raise UsageError(f"--config {path}: unknown key {key.value}{_nearest(name, known)}")
        argv += _words_of(f"--config {path}: {key.value}", name, known[name], node)
    return argv


def _words_of(place: str, name: str, action: argparse.Action, node: yaml.Node) -> list[str]:
    """A flag of a file. Its value is the text as it is written: YAML would read the key 0123456 as the number 42798."""
    kind = node.tag.rpartition(":")[2]  # null, bool, int, ..., seq, map
    if kind == "null":
        return []
    if action.nargs == 0:
        if kind != "bool":
            raise UsageError(f"{place} takes true or false, got {node.value if kind not in ('seq', 'map') else kind}")
        return [name] if node.value.lower() in ("true", "yes", "on") else []
    if (
        kind == "seq"
        and action.metavar in ("LIST", "SIZES")
        and all(isinstance(e, yaml.ScalarNode) for e in node.value)
    ):
        values = [each.value for each in node.value]
        return [f"{name}={json.dumps(values) if action.metavar == 'LIST' else ','.join(values)}"]
    if kind == "seq" and action.nargs == "+" and all(isinstance(each, yaml.ScalarNode) for each in node.value):
        return [name, *(each.value for each in node.value)]
    if not isinstance(node, yaml.ScalarNode):
        raise UsageError(f"{place} takes one value, got a {'list' if kind == 'seq' else 'mapping'}")
    return [f"{name}={node.value}"]


def _flags(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {name: action for action in parser._actions for name in action.option_strings if name.startswith("--")}


def _nearest(name: str, known: Iterable[str]) -> str:
    option, *options = (each.lstrip("-").replace("-", "_") for each in (name, *known))
    return meant(option, options, flag) or "; --help lists the flags"


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) < 65536:
        raise argparse.ArgumentTypeError(f"a port is from 0 to 65535, got {text}")
    return int(text)
