"""A weight format of our own: signed bytes, each so many 64ths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from jaxspec.models.weights import Format


@dataclass(frozen=True)
class FixedPoint(Format):
    bytes_each: ClassVar[float | None] = 1
    implements: ClassVar = {"plain": frozenset()}

    def quantise(self, rows):
        return jnp.clip(jnp.round(rows.astype(jnp.float32) * 64), -127, 127).astype(jnp.int8), None

    def dequantise(self, values, scales):
        return values.astype(jnp.float32) / 64
