"""The type checker under the import hook of conftest.py: beartype, to which an int is a float, as PEP 484 has it.

A numpy array passes for jax's: jax takes either. Fields of dataclasses aren't checked: jax unflattens pytrees with
whatever it has in place of arrays. A function is checked once for each kind of arguments: the same shapes, dtypes and
other values pass again, and a check takes ten times as long as to see that.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeCallHintViolation

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))
_jaxtyped = jaxtyping.jaxtyped


def install(modules: list[str]) -> None:
    """Check functions of these modules, which nobody has imported yet."""
    jaxtyping.jaxtyped = _decorator  # what the hook puts above each function and class
    jaxtyping.install_import_hook(modules, f"{__name__}.check")


def check(function: Callable) -> Callable:
    """`function`, jaxtyping's stand-in of the same signature, raising what beartype raises of its arguments."""
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


def _decorator(*, typechecker: Callable) -> Callable:
    """In place of `jaxtyping.jaxtyped`: to check a function once for each kind of arguments, and no class."""
    jaxtyped = _jaxtyped(typechecker=typechecker)

    def decorate(function: Any) -> Any:
        if inspect.isclass(function):
            return function
        if not inspect.isfunction(function):  # a property, or a function under another decorator
            return jaxtyped(function)
        return _once(function, jaxtyped) if function.__annotations__ else function

    return decorate


def _once(function: Callable, jaxtyped: Callable) -> Callable:
    seen: set[Hashable] = set()
    made = functools.cache(lambda: jaxtyped(function))  # on use: to make a check of a signature takes a millisecond

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        kind = _kind(args, kwargs)
        if kind in seen:
            return function(*args, **kwargs)
        result = made()(*args, **kwargs)
        if kind is not None:
            seen.add(kind)
        return result

    return call


def _kind(args: tuple, kwargs: dict) -> Hashable:
    """Shapes and dtypes of arrays, and all else as it is. None with tables by class: their keys have no order, and each
    time that jax fails to flatten one, the process may recurse a little less deeply."""
    if any(isinstance(arg, dict) and not all(isinstance(key, str) for key in arg) for arg in args):
        return None
    leaves, tree = jax.tree.flatten((args, kwargs))
    return tree, tuple(map(_leaf, leaves))


def _leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return type(leaf).__module__, leaf.shape, leaf.dtype
    if inspect.isroutine(leaf):
        return getattr(leaf, "__code__", type(leaf))
    try:
        hash(leaf)
    except TypeError:
        return type(leaf)
    return type(leaf), leaf
