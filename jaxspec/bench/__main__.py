"""`python -m jaxspec.bench`: one subcommand per thing measured, each of which prints a table and can write JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxspec.bench import host
from jaxspec.checkpoint import CheckpointError
from jaxspec.config import ConfigError

SUBCOMMANDS = {"host": host}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jaxspec.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in SUBCOMMANDS.items():
        summary, _, method = module.__doc__.partition("\n\n")
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary}\n\n{method}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    args = parser.parse_args(argv)
    try:
        SUBCOMMANDS[args.command].run(args)
    except (CheckpointError, ConfigError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
