"""`python -m jaxspec.bench`: one subcommand for each thing measured. Each prints a table and can write JSON and PNG.

A benchmark's module has `add_arguments(parser)`; `run(args, result)`, which adds rows; `TABLES` of them, the first
printed row by row; and `plot(document, figure)`. Its docstring is the help. `report` turns the files of --json into
markdown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from jaxspec.bench import (
    accept,
    accuracy,
    adaptive,
    decode,
    host,
    kernels,
    load,
    parity,
    plan,
    plots,
    prefill,
    report,
    schemas,
    serve,
    structured,
    sums,
)
from jaxspec.bench.results import BenchError, Result, check_writable, write_csv
from jaxspec.cache.memory_plan import claim_device
from jaxspec.checkpoint import CheckpointError
from jaxspec.cli import called, without_traceback
from jaxspec.config.flags import CommandParser, parse
from jaxspec.config.lazy_transformers import spare_torch
from jaxspec.config.options import ConfigError
from jaxspec.config.own_code import blame
from jaxspec.config.request import RequestError
from jaxspec.text.errors import TokenizerError
from jaxspec.text.prompts import DataError

SUBCOMMANDS = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        *(decode, adaptive, prefill, serve, load, accept, kernels),
        *(parity, accuracy, host, schemas, structured, plan, sums),
    )
}


def make_parser() -> argparse.ArgumentParser:
    """The parser, with a subcommand for each benchmark."""
    parser = CommandParser(prog=called("bench", "jaxspec.bench"), description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in SUBCOMMANDS.items():
        command = _add(commands, name, module)
        output = command.add_argument_group("output")
        output.add_argument("--json", type=Path, metavar="FILE", help="write figures and circumstances here")
        output.add_argument("--csv", type=Path, metavar="FILE", help="write the rows' figures here")
        output.add_argument("--plot", type=Path, metavar="FILE", help="draw them here, as PNG (needs matplotlib)")
    _add(commands, "report", report)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    argv, parser = list(sys.argv[1:] if argv is None else argv), make_parser()
    args = parse(parser, argv)
    try:
        if args.command == "report":
            report.run(args.folder, {name: module.TABLES for name, module in SUBCOMMANDS.items()}, args.plot)
        else:
            _measure(SUBCOMMANDS[args.command], args, argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (BenchError, CheckpointError, ConfigError, DataError, RequestError, TokenizerError) as error:
        parser.exit(2, f"{parser.prog} {args.command}: {error}\n")
    except Exception as error:
        if (said := blame(error)) is None:
            raise
        parser.exit(2, f"{parser.prog} {args.command}: {said}\n")
    return 0


def _add(commands: argparse._SubParsersAction, name: str, module: ModuleType) -> argparse.ArgumentParser:
    summary, _, method = module.__doc__.partition("\n\n")
    command = commands.add_parser(
        name,
        help=summary,
        description=f"{summary}\n\n{method}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(command)
    return command


def _measure(module: ModuleType, args: argparse.Namespace, argv: list[str]) -> None:
    """Run a benchmark; its first table comes row by row, the others at the end."""
    if args.plot is not None:
        plots.check(args.plot)
    for flag, path in (("--json", args.json), ("--csv", args.csv)):
        if path is not None:
            check_writable(flag, path)
    claim_device()  # before anything asks what device there is: it can't be done later
    spare_torch()
    first, *others = module.TABLES
    result = Result(args.command, argv, args, first, args.json)
    try:
        module.run(args, result)
    finally:  # an error or ^C loses no row; before the first one an earlier file stays
        if result.rows:
            result.save()
            if args.csv is not None:
                write_csv(args.csv, result.rows)
    for table in others:
        if table.lines(result.rows):
            print("\n" + table.plain(result.rows))
    if args.plot is not None:
        plots.draw(module.plot, result.document, args.plot)


if __name__ == "__main__":
    sys.exit(without_traceback(main))
