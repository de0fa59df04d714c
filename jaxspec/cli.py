"""The command `jaxspec`: `serve`, `bench`, `train` and `compile`, each as `python -m` would run it.

Modules are imported when they are run, so that this package needs neither the server nor the trainer's libraries.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from jaxspec import __version__

COMMANDS = {
    "serve": ("server.__main__", "run", "serve a model: jaxspec serve MODEL --draft D"),
    "bench": ("jaxspec.bench.__main__", "main", "measure decoding, prefill, serving, kernels"),
    "train": ("jaxspec.train.__main__", "main", "train a drafter"),
    "compile": ("jaxspec.engine.precompile", "main", "make a server's programs ahead of time"),
}
OTHERS = ("vllm", "sglang")  # whose command lines `serve` answers with their translation


def called(command: str, module: str) -> str:
    """How this process was called: "jaxspec COMMAND" or "python -m MODULE"."""
    name = f"jaxspec {command}"
    return name if Path(sys.argv[0]).name == name else f"python -m {module}"


def main() -> int:
    """Run the command that `sys.argv` names; returns its exit status, 2 for a name that isn't known."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in OTHERS:
        sys.argv.insert(1, "serve")
        return main()
    if name == "--version":
        print(f"jaxspec {__version__}")
        return 0
    if name in COMMANDS:
        module, function, _ = COMMANDS[name]
        sys.argv[:2] = [f"{sys.argv[0]} {name}"]
        sys.path.insert(0, "")  # as `python -m` does: --draft module:Class finds a module of this folder
        return getattr(import_module(module), function)()
    wanted_help = name in ("--help", "-h")
    lines = [f"  jaxspec {command:<7} {text}" for command, (*_, text) in COMMANDS.items()]
    print("\n".join(["usage:", *lines, "Each has --help."]), file=sys.stdout if wanted_help else sys.stderr)
    if not wanted_help:
        print(f"jaxspec: no command {name!r}; commands: {', '.join(COMMANDS)}", file=sys.stderr)
    return 0 if wanted_help else 2
