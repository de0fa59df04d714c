"""Choose what computes an operation: from a table of implementations, the first that takes the call.

A table is a tuple, read from top to bottom: kernels for Hopper, portable ones, and plain jnp last, which takes all.
Each operation's file has its own. The choice is made when a program is traced, from shapes, dtypes and formats alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxspec.pallas import hopper, portable

HOPPER, PORTABLE, ANY = "hopper", "portable", "any"  # the devices that an implementation is for
_LACKING = {HOPPER: lambda: hopper.kernels_here(), PORTABLE: lambda: portable.kernels_here(), ANY: lambda: None}


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    - `device`: whose kernels it needs, one of HOPPER, PORTABLE and ANY.
    - `refuses(*call)`: why it can't take such operands, or None if it can.
    - `run(*call)`: the result.
    - `requested`: it serves only where `--kernels portable` asks for it, since no GPU has shown that it is right.
    - `slow`: a device whose kernels refuse the call logs that this runs.
    """

    name: str
    device: str
    refuses: Callable[..., str | None]
    run: Callable[..., Any]
    requested: bool = False
    slow: bool = False

    @property
    def here(self) -> bool:
        """Whether this process's device runs it, for calls that it takes."""
        unwanted = self.requested and hopper.requested_kernels() != PORTABLE
        return not unwanted and _LACKING[self.device]() is None

    def takes(self, *call: Any) -> bool:
        """Whether it runs here and takes the call."""
        return self.here and self.refuses(*call) is None


Table = tuple[Implementation, ...]


def nothing(*call: Any) -> None:
    """Refuse no call, as the last implementation of a table."""


def choose(operation: str, table: Table, *call: Any) -> Implementation:
    """The first implementation of `table` that runs here and takes the call.

    If that is a slow one, and the device has kernels, a warning says why they don't serve, once for the same reasons.

    **Raises:** `NotImplementedError` if none takes it.
    """
    refused = []
    for each in table:
        if not each.here:
            continue
        if (reason := each.refuses(*call)) is None:
            if each.slow and refused:
                warn(operation, "; ".join(refused))
            return each
        if each.device != ANY:
            refused.append(f"{each.name}: {reason}")
    raise NotImplementedError(f"nothing here computes {operation}; {'; '.join(refused)}")


@functools.cache
def warn(operation: str, reasons: str) -> None:
    hopper.log.warning("%s runs in plain jax.numpy, which is slow (%s)", operation, reasons)
