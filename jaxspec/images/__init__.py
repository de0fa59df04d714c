"""Reads pictures and makes of each the pixels, the size and the key that an engine's request carries."""
