"""The matmuls between two attentions as one persistent kernel: see `chain`. Weights are bfloat16's or FP8's."""

from jaxspec.pallas.weight_stream.chain import BLOCKS, MAX_ROWS, ROOM, STAGES
from jaxspec.pallas.weight_stream.fp8 import stream_fp8
from jaxspec.pallas.weight_stream.fp8 import supported as fp8_supported
from jaxspec.pallas.weight_stream.unquantised import stream, stream_part, supported

__all__ = ["BLOCKS", "MAX_ROWS", "ROOM", "STAGES", "fp8_supported", "stream", "stream_fp8", "stream_part", "supported"]
