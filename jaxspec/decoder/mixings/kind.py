"""A kind of mixing, as the paths that run its layers see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array

from jaxspec.models.weights import Weight

Weights = dict[str, Array | jax.ShapeDtypeStruct | Weight]  # of a layer, or their shapes


@dataclass(frozen=True)
class Mixing:
    """The equations of one kind of description, between a layer's first products and its output projection.

    - `projections`: names of the weights whose products with the layer's normed rows it takes, in this order.
    - `mix(layer, weights, i, made, positions, mixer, cache, dtype=None)`: from these products to the input of the
      output projection, and the cache. `i`: the layer's index among those that share its memory. `dtype`: of the result
      where products come in parts; None: theirs.
    - `implements`: by name of a path, the fields of the description that hold there.
    - `by_axis(axes, mixing)`: the rope table for positions of three axes, which `mix` takes as `table`; None: this kind
      doesn't rotate by them.
    - `exact`: of the projections, those whose products are float32.
    - `parts`: products that aren't exact may come in parts [s b t n], to be summed in float32.
    - `padding`: rows of each request from t on are padding that a kernel left, and come out as anything. Other kinds
      are given t rows of each request.
    - `fixed(layer, weights, i, made, positions, mixer, cache, dtype, table, in_parts)`: as `mix`, where each sum has
      one order. `table`: the rope table. `in_parts`: the first product comes in parts [s r n] of all rows.
    - `fixed_refuses(layer, rows)`: why the kernels of `fixed` can't take so many rows of a request, or None.
    """

    projections: tuple[str, ...]
    mix: Callable[..., tuple[Array, Any]]
    implements: Mapping[str, frozenset[str]]
    by_axis: Callable[..., Any] | None = None
    exact: frozenset[str] = frozenset()
    parts: bool = False
    padding: bool = False
    fixed: Callable[..., tuple[Array, Any]] | None = None
    fixed_refuses: Callable[..., str | None] | None = None
