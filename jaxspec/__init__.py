"""jaxspec: speculative decoding for large language models on NVIDIA GPUs, in JAX and Pallas.

Each name is imported when it is first used, so that a command such as `jaxspec --help` needs no jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxspec.checkpoint import CheckpointError, Model, load_model
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
    from jaxspec.drafters import load_drafter
    from jaxspec.engine.async_llm import AsyncLLM, EngineDead
    from jaxspec.engine.functional import hidden_states, logits, propose
    from jaxspec.engine.llm import LLM
    from jaxspec.models.model_config import ModelConfig

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
_MODULES = {
    "jaxspec.checkpoint": ("CheckpointError", "Model", "load_model"),
    "jaxspec.config.engine_config": ("EngineConfig",),
    "jaxspec.config.options": ("ConfigError",),
    "jaxspec.config.request": (
        *("Completion", "Delta", "RequestError", "RequestMetrics", "RequestOutput", "SamplingParams"),
        *("StructuredOutput", "TokenLogprobs"),
    ),
    "jaxspec.drafters": ("load_drafter",),
    "jaxspec.engine.async_llm": ("AsyncLLM", "EngineDead"),
    "jaxspec.engine.functional": ("hidden_states", "logits", "propose"),
    "jaxspec.engine.llm": ("LLM",),
    "jaxspec.models.model_config": ("ModelConfig",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in ("draft", "options"):  # which a user's drafter imports
        return import_module(f"jaxspec.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
