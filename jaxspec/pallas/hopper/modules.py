"""Kernels' modules without their number in the process, which jax adds for the names of dumped files.

XLA compiles kernels of equal modules once. So a kernel is the same to XLA whichever process lowers it; XLA numbers its
own dumps itself. The function replaced is a private one of `layouts.KNOWN_JAX`.
"""

from __future__ import annotations

import functools

import jax

from jaxspec.pallas.hopper.jax_patches import KNOWN_JAX

NUMBERED = "mosaic_gpu.dump_basename"


@functools.cache
def install() -> None:
    """Replace jax's function, once. With another jax a kernel is compiled for each process that lowers it."""
    if jax.__version__ != KNOWN_JAX:
        return
    from jax.experimental.mosaic.gpu import core

    serialised = core._run_serde_pass

    def unnumbered(module, **options):
        if NUMBERED in module.operation.attributes:
            del module.operation.attributes[NUMBERED]
        return serialised(module, **options)

    core._run_serde_pass = unnumbered
