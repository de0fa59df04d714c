"""Compute one round, as a pure function of the state."""
