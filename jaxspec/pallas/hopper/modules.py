"""A kernel's module without its number among those that a process lowers, which jax gives it for names of dumped files.

XLA compiles kernels of equal modules once. So whichever process lowers a kernel, it is the same to XLA, which numbers
those that it dumps itself. The function replaced is a private one of the jax that `layouts` names.
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
