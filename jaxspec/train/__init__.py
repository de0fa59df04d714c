"""Training of drafters for a given target: `python -m jaxspec.train`. Needs the extra `train` (optax and orbax)."""
