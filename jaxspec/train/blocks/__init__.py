"""Objectives of the block drafters in `drafters.blocks`."""
