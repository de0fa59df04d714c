"""The command `jaxspec`: `serve`, `chat`, `bench`, `train` and others, the first three as `python -m` would run them.

Modules are imported when they are run, so that `--help` needs no jax, and this package needs neither the server nor the
trainer's libraries.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from jaxspec import __version__

COMMANDS = {
    "serve": ("server.__main__", "run", "serve a model: jaxspec serve MODEL --draft D"),
    "chat": ("server.cli.chat", "main", "talk to a model, or to a server by its URL"),
    "send-one": ("server.cli.send_one", "main", "send one prompt to a server; latency, speed, accept length"),
    "bench": ("jaxspec.bench.__main__", "main", "measure decoding, prefill, serving, kernels"),
    "train": ("jaxspec.train.__main__", "main", "train a drafter"),
    "compile": ("jaxspec.engine.precompile", "main", "make a server's programs ahead of time"),
    "collect-env": ("server.cli.collect_env", "main", "print versions and devices, for a bug report"),
    "completion": ("server.cli.completion", "main", 'complete commands and flags: eval "$(jaxspec completion bash)"'),
}
OTHERS = ("vllm", "sglang")  # whose command lines `serve` answers with their translation
PIPE_CLOSED = 141  # a shell's status of a process that SIGPIPE ended


def called(command: str, module: str) -> str:
    """How this process was called: "jaxspec COMMAND" or "python -m MODULE"."""
    name = f"jaxspec {command}"
    return name if Path(sys.argv[0]).name == name else f"python -m {module}"


def without_traceback[T](run: Callable[[], T]) -> T | int:
    """Run a command whose reader may close the pipe, as `head` does: then it ends with a status and no traceback."""
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own flush at exit
        return PIPE_CLOSED


def main() -> int:
    """Run the command that `sys.argv` names; returns its exit status, 2 for a name that isn't known."""
    return without_traceback(_run)


def _run() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in OTHERS:
        sys.argv.insert(1, "serve")
        return _run()
    if name == "--version":
        print(f"jaxspec {__version__}")
        return 0
    if name in COMMANDS:
        module, function, _ = COMMANDS[name]
        sys.argv[:2] = [f"{sys.argv[0]} {name}"]
        sys.path.insert(0, "")  # as `python -m` does: --draft module:Class finds a module of this folder
        return getattr(import_module(module), function)()
    wanted_help = name in ("--help", "-h")
    lines = [f"  jaxspec {command:<11} {text}" for command, (*_, text) in COMMANDS.items()]
    print("\n".join(["usage:", *lines, "Each has --help."]), file=sys.stdout if wanted_help else sys.stderr)
    if not wanted_help:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(COMMANDS)}"
        print(f"jaxspec: no command {name!r}; {hint}", file=sys.stderr)
    return 0 if wanted_help else 2
