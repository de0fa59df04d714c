"""The matmuls of a layer at few rows, each with the operations before and after it, on Hopper: see `layer`."""

from jaxspec.pallas.dense.few_rows.adapters import Adapters, adapters_supported
from jaxspec.pallas.dense.few_rows.four_bits import four_bits_of, four_bits_supported
from jaxspec.pallas.dense.few_rows.fp8 import Fp8Weight, Fp8WeightAndRows, format_of, fp8_supported
from jaxspec.pallas.dense.few_rows.layer import (
    Scaled,
    add_product,
    gated,
    heads,
    keys_values,
    normed,
    product,
    scale_rows,
)
from jaxspec.pallas.dense.few_rows.share import (
    BLOCKS,
    FP8_ROWS,
    GROUP,
    NARROW,
    TILE,
    WIDE_ROWS,
    normed_supported,
    product_supported,
    supported,
    tiles_of_squares,
    top_supported,
)
from jaxspec.pallas.dense.few_rows.top import top_tokens

__all__ = [
    "BLOCKS",
    "FP8_ROWS",
    "GROUP",
    "NARROW",
    "TILE",
    "WIDE_ROWS",
    "Adapters",
    "Fp8Weight",
    "Fp8WeightAndRows",
    "Scaled",
    "adapters_supported",
    "add_product",
    "format_of",
    "four_bits_of",
    "four_bits_supported",
    "fp8_supported",
    "gated",
    "heads",
    "keys_values",
    "normed",
    "normed_supported",
    "product",
    "product_supported",
    "scale_rows",
    "supported",
    "tiles_of_squares",
    "top_supported",
    "top_tokens",
]
