"""Objectives of the block drafters: DFlash, and those in `drafters.blocks`."""
