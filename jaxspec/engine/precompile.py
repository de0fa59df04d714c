"""`jaxspec compile`: make an engine's programs ahead of time, for images and fleets.

    jaxspec compile --model M --draft D --output DIR
    JAXSPEC_CACHE=DIR jaxspec serve --model M --draft D

Give the options that the server will have: they decide which programs there are, and of which shapes. A GPU of the kind
that will serve is needed, with the same driver, since both are part of a program's key. What is in DIR already is kept,
so one folder serves several models. With --check nothing new may be needed: the exit status is 1 if something was.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxspec.cache.memory_plan import claim_device
from jaxspec.checkpoint import CheckpointError
from jaxspec.checkpoint.demo import cache_folder
from jaxspec.compiling.ladder import ladder_of
from jaxspec.config.engine_config import SERVER_DEFAULTS, EngineConfig
from jaxspec.config.flags import CommandParser, add_engine_flags, engine_options, parse
from jaxspec.config.lazy_transformers import spare_torch
from jaxspec.config.options import ConfigError
from jaxspec.engine.runner import Runner
from jaxspec.text.errors import TokenizerError


def make_parser() -> argparse.ArgumentParser:
    """The parser: the cache to fill, and the engine's flags."""
    summary, _, method = __doc__.partition("\n\n")
    parser = CommandParser(
        "jaxspec compile",
        description=f"{summary}\n\n{method}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--output", type=Path, metavar="DIR", help="the cache to fill ($JAXSPEC_CACHE, or ~/.cache/jaxspec)")
    add("--check", action="store_true", help="exit with status 1 if a program had to be compiled")
    add_engine_flags(parser, SERVER_DEFAULTS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compile what `argv` asks for; returns the exit status."""
    parser = make_parser()
    args = parse(parser, sys.argv[1:] if argv is None else argv)
    spare_torch()
    if args.output is not None:
        os.environ["JAXSPEC_CACHE"] = str(args.output.absolute())
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("jaxspec").setLevel(logging.INFO)
    try:
        missing = compile_all(engine_options(args))
    except (CheckpointError, ConfigError, TokenizerError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    return int(args.check and missing > 0)


def compile_all(options: dict) -> int:
    """Fill the cache with an engine's programs, and say what was done; how many weren't there.

    **Raises:** `ConfigError` for options that can't work, a device whose programs can't be kept, and a drafter whose
    can't; `CheckpointError`.
    """
    if options["skip_warmup"] or options["disable_jit"] or options["dp_size"] != 1:
        raise ConfigError("compile makes all programs of one engine: drop --skip-warmup, --disable-jit and --dp-size")
    claim_device()
    if (backend := jax.default_backend()) != "gpu":
        raise ConfigError(f"programs are kept for GPUs alone, and this is a {backend}; jax can't keep others")
    began = time.monotonic()
    runner = Runner(EngineConfig(**options))
    if not runner.keeps_programs:
        raise ConfigError(
            f"--draft {runner.draft.name}: programs of a drafter of your own can't be kept, since its source isn't "
            "part of their key"
        )
    folder = cache_folder()
    size = sum(path.stat().st_size for path in (folder / "executables").iterdir())
    every, found = len(ladder_of(runner.shapes)), len(runner.programs.found)
    kind = jax.devices()[0].device_kind
    print(
        f"{every} programs for {kind}, {found} of them there before, in {time.monotonic() - began:.0f} s. "
        f"{folder} holds {size / 1e6:.0f} MB of programs. Serve with JAXSPEC_CACHE={folder} and the same options"
    )
    return every - found


if __name__ == "__main__":
    sys.exit(main())
