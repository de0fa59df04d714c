"""Finding models and streaming them, one shard at a time, into params pytrees."""

from jaxspec.checkpoint.check import CheckpointError
from jaxspec.checkpoint.find import Source, locate, may_be_model, resolve
from jaxspec.checkpoint.gguf.file import GgufFile
from jaxspec.checkpoint.load import (
    MTP,
    Model,
    check_context,
    in_format,
    kept_format,
    load_model,
    load_target,
    mtp_name,
    outlined,
    read_params,
)
from jaxspec.checkpoint.params import dummy
from jaxspec.checkpoint.pooling import Pooling
from jaxspec.checkpoint.shards import ModelFolder

__all__ = [
    "MTP",
    "CheckpointError",
    "GgufFile",
    "Model",
    "ModelFolder",
    "Pooling",
    "Source",
    "check_context",
    "dummy",
    "in_format",
    "kept_format",
    "load_model",
    "load_target",
    "locate",
    "may_be_model",
    "mtp_name",
    "outlined",
    "read_params",
    "resolve",
]
