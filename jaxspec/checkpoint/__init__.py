"""Finding models and streaming them, one shard at a time, into params pytrees."""

from jaxspec.checkpoint.check import CheckpointError
from jaxspec.checkpoint.find import Source, resolve
from jaxspec.checkpoint.load import Model, load_model

__all__ = ["CheckpointError", "Model", "Source", "load_model", "resolve"]
