"""Measurements: `python -m jaxspec.bench SUBCOMMAND`. Each subcommand is a module with `add_arguments` and `run`."""
