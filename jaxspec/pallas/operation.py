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
_LACKS = {HOPPER: lambda: hopper.kernels_here(), PORTABLE: lambda: portable.kernels_here(), ANY: lambda: None}


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    - `device`: whose kernels it needs, one of HOPPER, PORTABLE and ANY.
    - `refuses(*call)`: why it can't take such operands, or None if it can.
    - `run(*call)`: the result.
    - `processors`: multiprocessors that must run it at once.
    - `requested`: it serves only where `--kernels portable` asks for it, since no GPU has shown that it is right.
    """

    name: str
    device: str
    refuses: Callable[..., str | None]
    run: Callable[..., Any]
    processors: int = 1
    requested: bool = False

    def lacks(self) -> str | None:
        """Why this process's device doesn't run it, whatever the call, or None if it does."""
        if (reason := _LACKS[self.device]()) is not None:
            return reason
        if self.requested and hopper.requested_kernels() != PORTABLE:
            return "not timed on a GPU; --kernels portable requests it"
        if self.device == HOPPER and (count := hopper.multiprocessors()) < self.processors:
            return f"{count} multiprocessors; {self.processors} are needed"
        return None


Table = tuple[Implementation, ...]


def choose(operation: str, table: Table, *call: Any, **named: Any) -> Implementation:
    """The first implementation of `table` that runs here and takes the call. A device that has kernels and runs plain
    jnp all the same is logged, once for each reason.

    **Raises:** `NotImplementedError` if none takes it, with each one's reason.
    """
    reasons = {}
    for each in table:
        if each.lacks() is not None:
            continue
        if (reason := each.refuses(*call, **named)) is None:
            if each.device == ANY and reasons:
                _warn(operation, "; ".join(dict.fromkeys(reasons.values())))
            return each
        reasons[each.name] = reason
    raise NotImplementedError(f"{operation}: {'; '.join(f'{name}: {reason}' for name, reason in reasons.items())}")


@functools.cache
def _warn(operation: str, reasons: str) -> None:
    hopper.log.warning("%s runs in plain jax.numpy, which is slow: %s", operation, reasons)
