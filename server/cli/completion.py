"""Completion of commands, flags and their values, for bash and zsh: `eval "$(jaxspec completion bash)"`.

The script holds all words, made from the parsers when it is printed, so that a completion starts no Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from jaxspec.bench.__main__ import make_parser as bench_parser
from jaxspec.cli import COMMANDS
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.flags import CommandParser
from jaxspec.config.options import options_of
from jaxspec.engine.precompile import make_parser as compile_parser
from jaxspec.train.flags import parser as train_parser
from server.cli.chat import make_parser as chat_parser
from server.cli.options import make_parser as serve_parser
from server.cli.send_one import make_parser as send_parser

PARSERS = {
    "serve": serve_parser,
    "chat": chat_parser,
    "send-one": send_parser,
    "bench": bench_parser,
    "train": train_parser,
    "compile": compile_parser,
}
SCRIPT = """\
_jaxspec() {{
    local words="{commands}"
    [ "$COMP_CWORD" -gt 1 ] && case "${{COMP_WORDS[1]}}:${{COMP_WORDS[2]}}:${{COMP_WORDS[COMP_CWORD-1]}}" in
{cases}
    completion:*) words="bash zsh" ;;
    *) words="" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _jaxspec jaxspec
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print a shell's script."""
    parser = CommandParser("jaxspec completion", description=__doc__)
    parser.add_argument("shell", choices=("bash", "zsh"))
    if parser.parse_args(argv).shell == "zsh":
        print("autoload -U +X compinit bashcompinit && compinit && bashcompinit")
    print(script(), end="")
    return 0


def script() -> str:
    """The script for bash, which zsh runs too."""
    cases = [f'    {pattern}) words="{" ".join(words)}" ;;' for pattern, words in _cases()]
    return SCRIPT.format(commands=" ".join((*COMMANDS, "--help", "--version")), cases="\n".join(cases))


def _cases() -> Iterator[tuple[str, list[str]]]:
    """Patterns of "command:second word:word before", the special ones first, with the words that may follow."""
    for command, make in PARSERS.items():
        parser = make()
        nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        for name, each in nested[0].choices.items() if nested else ():
            yield from _of_parser(f"{command}:{name}", each)
        if nested:
            yield f"{command}:*", [*nested[0].choices]
        else:
            yield from _of_parser(f"{command}:*", parser)


def _of_parser(pattern: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[str]]]:
    engine = options_of(EngineConfig)
    flags = {name: action for action in parser._actions for name in action.option_strings if name.startswith("--")}
    for name, action in flags.items():
        choices = action.choices or (engine[action.dest][2].choices if action.dest in engine else None)
        if choices:
            yield f"{pattern}:{name}", [*map(str, choices)]
    yield f"{pattern}:*", [*flags]
