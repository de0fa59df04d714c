"""The command line's engine flags: one per field of `EngineConfig`, for server, benchmarks and trainer.

`scripts/flags_table.py` writes them into docs/flags.md.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NoReturn

from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.foreign_flags import meant
from jaxspec.config.options import Option, flag, options_of


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are a line alone: the usage of a command with an engine's flags fills a screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def add_engine_flags(
    parser: argparse.ArgumentParser,
    defaults: Mapping[str, Any] | None = None,
    common: argparse._ArgumentGroup | None = None,
    without: Container[str] = (),
) -> None:
    """Give `parser` a flag per option of `EngineConfig`; `defaults` take the place of the dataclass's own.

    Those that most people set go to the group `common`, if there is one. Options in `without` get no flag.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, (kind, default, spec) in options_of(EngineConfig).items():
        if name in without:
            continue
        if spec.group not in groups:
            groups[spec.group] = parser.add_argument_group(spec.group)
        group = common if common is not None and spec.common else groups[spec.group]
        default = (defaults or {}).get(name, default)
        help_text = f"{spec.help} (default: {shown_default(default, spec)})".replace("%", "%%")
        if kind is bool:
            group.add_argument(flag(name), action="store_true", default=default, help=help_text)
        else:
            nargs = {"nargs": "+"} if spec.several else {}
            group.add_argument(flag(name), type=kind, default=default, metavar=spec.metavar, help=help_text, **nargs)


def shown_default(default: Any, spec: Option) -> str:
    """A default in words."""
    if isinstance(default, bool):
        return "on" if default else "off"
    return spec.shown or str(default)


def table(defaults: Mapping[str, Any]) -> str:
    """The engine's flags as rows of a Markdown table, for docs/flags.md. `defaults` as in `add_engine_flags`."""
    code = lambda default: f"`{default}`" if isinstance(default, str) else None  # noqa: E731
    options = {
        name: (defaults.get(name, default), spec) for name, (_, default, spec) in options_of(EngineConfig).items()
    }
    rows = [
        f"| `{flag(name)}` | {code(default) or shown_default(default, spec)} | {spec.help} |"
        for name, (default, spec) in options.items()
    ]
    return "\n".join(rows)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Engine options of the command line: keyword arguments of `LLM` and `AsyncLLM`."""
    return {name: getattr(args, name) for name in options_of(EngineConfig)}


def checked[T](
    read: Callable[[str], T], says: str, allowed: Callable[[T], bool] = lambda value: True
) -> Callable[[str], T]:
    """An argparse type: the value that `read` makes of a text. If there is none (`ValueError`), or it isn't `allowed`,
    the error `says` what would be."""

    def parse(text: str) -> T:
        try:
            value = read(text)
            if allowed(value):
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{says}, got {text!r}")

    return parse


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Read a command line; errors about an unknown subcommand or flag name the nearest there is, and exit."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in nested:
        if not argv:
            parser.error(f"give a command: {', '.join(action.choices)}")
        if not argv[0].startswith("-") and argv[0] not in action.choices:
            near = difflib.get_close_matches(argv[0], action.choices, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(action.choices)}"
            parser.error(f"no command {argv[0]!r}; {hint}")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        chosen = nested[0].choices[args.command] if nested else parser
        _refuse(chosen, unknown)
    return args


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    known = [name.lstrip("-").replace("-", "_") for action in parser._actions for name in action.option_strings]
    flags = [word.partition("=")[0] for word in unknown if word.startswith("-")] or list(unknown)
    hints = [meant(name.lstrip("-").replace("-", "_"), known, flag) for name in flags]
    told = [name + hint for name, hint in zip(flags, hints, strict=True)]
    listed = "" if all(hints) else "; --help lists the flags"
    parser.error(f"unknown argument{'s' * (len(told) > 1)} {', '.join(told)}{listed}")


def add_value(
    group: argparse._ActionsContainer, name: str, kind: Callable, default: Any, metavar: str | None, says: str
) -> None:
    """Give `group` a flag with a value of this kind. Its help ends with the default, unless that is None."""
    shown = "" if default is None else " (%(default)s)"
    group.add_argument(name, type=kind, default=default, metavar=metavar, help=says + shown)


positive = checked(int, "must be an integer of at least 1", lambda value: value >= 1)
above_zero = checked(float, "must be a number above 0", lambda value: 0 < value < math.inf)
from_zero = checked(float, "must be a number of at least 0", lambda value: 0 <= value < math.inf)
natural = checked(int, "must be an integer of at least 0", lambda value: value >= 0)
