"""jaxspec: speculative decoding for large language models on NVIDIA GPUs, in JAX and Pallas."""

import sys

from jaxspec.checkpoint import CheckpointError, Model, load_model
from jaxspec.config import options
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.options import ConfigError
from jaxspec.config.request import (
    Completion,
    Delta,
    RequestError,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    StructuredOutput,
    TokenLogprobs,
)
from jaxspec.drafters import base as draft
from jaxspec.drafters import load_drafter
from jaxspec.engine.async_llm import AsyncLLM, EngineDead
from jaxspec.engine.functional import hidden_states, logits, propose
from jaxspec.engine.llm import LLM
from jaxspec.models.model_config import ModelConfig

# A user's drafter imports from `jaxspec.draft` and `jaxspec.options`, wherever these stand.
sys.modules |= {f"{__name__}.draft": draft, f"{__name__}.options": options}

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "Delta",
    "EngineConfig",
    "EngineDead",
    "Model",
    "ModelConfig",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "TokenLogprobs",
    "hidden_states",
    "load_drafter",
    "load_model",
    "logits",
    "propose",
]
