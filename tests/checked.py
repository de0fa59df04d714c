"""The type checker under the import hook of conftest.py: beartype, to which an int is a float, as PEP 484 has it.

A numpy array passes for jax's: jax takes either. Fields of dataclasses aren't checked: jax unflattens pytrees with
whatever it has in place of arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeCallHintViolation

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable) -> Callable:
    """`function`, or jaxtyping's stand-in of the same signature, raising what beartype raises of its arguments."""
    if function.__name__ == "__init__":
        return function
    checked = _check(function)

    @functools.wraps(function)
    def either(*args: Any, **kwargs: Any) -> Any:
        try:
            return checked(*args, **kwargs)
        except BeartypeCallHintViolation:
            args, kwargs = jax.tree.map(_as_jax, (args, kwargs))
            return checked(*args, **kwargs)

    return either


def _as_jax(leaf: Any) -> Any:
    return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf
