"""Attend over pages, for rounds and for prompts, and write keys and values there."""
