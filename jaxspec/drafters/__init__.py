"""Guess the next tokens: methods behind one protocol (`base`), a table of them (`registry`), and their loading."""

from jaxspec.drafters.loading import LoadedDrafter, load_drafter

__all__ = ["LoadedDrafter", "load_drafter"]
