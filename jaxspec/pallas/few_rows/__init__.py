"""The matmuls of a layer at few rows, each with what stands before and after it, on Hopper: see `layer`."""

from jaxspec.pallas.few_rows.layer import add_product, gated, heads, normed
from jaxspec.pallas.few_rows.share import (
    GROUP,
    NARROW,
    TILE,
    normed_supported,
    supported,
)

__all__ = [
    "GROUP",
    "NARROW",
    "TILE",
    "add_product",
    "gated",
    "heads",
    "normed",
    "normed_supported",
    "supported",
]
