"""The matmuls between two attentions as one persistent kernel: see `chain`. Weights are bfloat16's or FP8's."""

from jaxspec.pallas.dense.weight_stream.chain import BLOCKS, MAX_ROWS, ROOM, STAGES
from jaxspec.pallas.dense.weight_stream.fp8 import stream_fp8, stream_part_fp8
from jaxspec.pallas.dense.weight_stream.fp8 import supported as fp8_supported
from jaxspec.pallas.dense.weight_stream.unquantised import (
    fixed_supported,
    norm_fixed,
    product_fixed,
    splits_fixed,
    stream,
    stream_fixed,
    stream_part,
    supported,
)

__all__ = [
    "BLOCKS",
    "MAX_ROWS",
    "ROOM",
    "STAGES",
    "fixed_supported",
    "fp8_supported",
    "norm_fixed",
    "product_fixed",
    "splits_fixed",
    "stream",
    "stream_fixed",
    "stream_fp8",
    "stream_part",
    "stream_part_fp8",
    "supported",
]
