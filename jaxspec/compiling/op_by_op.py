"""Programs that run operation by operation (`--disable-jit`): Python of a drafter sees arrays in each round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.compiling.programs import Programs
from jaxspec.config.options import ConfigError
from jaxspec.pallas import hopper, portable


class OpByOp(Programs):
    """An engine's functions, uncompiled. The state given to a call isn't consumed.

    **Raises:** `ConfigError` where kernels would run, which are made for programs alone.
    """

    without_warm_up = "run operation by operation, slowly (--disable-jit)"

    def __init__(self, *made_of: Any):
        super().__init__(*made_of)
        if None in (hopper.kernels_here(), portable.kernels_here()):
            raise ConfigError(
                f"--disable-jit runs no kernels, got --kernels {hopper.requested_kernels()}. Add --kernels plain"
            )

    def _program(self, kind: str, size: int, state: Any) -> Callable:
        def run(*arguments: Any) -> Any:
            with jax.disable_jit(), hopper.use_kernels(self._kernels):
                return self._jits[kind](*jax.tree.map(jnp.asarray, arguments))

        return run
