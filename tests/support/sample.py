"""Which cases of a large product `make test` runs; `make exhaustive` runs the others."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def rare(*values: Any) -> Any:
    """A case that `make exhaustive` runs: its neighbours cover what it does, at less cost."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def some(often: Collection[tuple], *axes: Iterable[Any]) -> list[Any]:
    """Cases of a product of axes for `parametrize`, of which `often` run by default."""
    cases = list(itertools.product(*axes))
    assert set(often) <= set(cases), set(often) - set(cases)
    return [pytest.param(*case, marks=() if case in often else pytest.mark.exhaustive) for case in cases]


def one_in(k: int, *axes: Sequence[Any]) -> list[Any]:
    """Cases of a product of axes for `parametrize`, of which one in `k` runs by default: those whose indices add up to
    a multiple of `k`.

    If `k` is the length of one axis, each combination of values of the other axes runs exactly once, and each value of
    that axis runs with many of them. Tuples in an axis stand for several arguments.
    """
    cases = []
    for case in itertools.product(*(enumerate(axis) for axis in axes)):
        values = [value if isinstance(value, tuple) else (value,) for _, value in case]
        marks = () if sum(index for index, _ in case) % k == 0 else pytest.mark.exhaustive
        cases.append(pytest.param(*itertools.chain(*values), marks=marks))
    return cases
