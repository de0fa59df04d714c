"""jaxspec: speculative decoding for large language models on NVIDIA GPUs, in JAX and Pallas.

Each name is imported when it is first used, so that a command such as `jaxspec --help` needs no jax.
"""

import sys
from functools import partial
from importlib import import_module
from types import ModuleType
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
    from jaxspec.drafters import LoadedDrafter, load_drafter
    from jaxspec.engine.async_llm import AsyncLLM, EngineDead
    from jaxspec.engine.functional import hidden_states, logits, propose, propose_along
    from jaxspec.engine.llm import LLM
    from jaxspec.engine.scoring import logprobs
    from jaxspec.engine.texts import keep, prefill, step
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
    "LoadedDrafter",
    "Model",
    "ModelConfig",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "TokenLogprobs",
    "hidden_states",
    "keep",
    "load_drafter",
    "load_model",
    "logits",
    "logprobs",
    "prefill",
    "propose",
    "propose_along",
    "step",
]
_MODULES = {
    "jaxspec.checkpoint": ("CheckpointError", "Model", "load_model"),
    "jaxspec.config.engine_config": ("EngineConfig",),
    "jaxspec.config.options": ("ConfigError",),
    "jaxspec.config.request": (
        *("Completion", "Delta", "RequestError", "RequestMetrics", "RequestOutput", "SamplingParams"),
        *("StructuredOutput", "TokenLogprobs"),
    ),
    "jaxspec.drafters": ("LoadedDrafter", "load_drafter"),
    "jaxspec.engine.async_llm": ("AsyncLLM", "EngineDead"),
    "jaxspec.engine.functional": ("hidden_states", "logits", "propose", "propose_along"),
    "jaxspec.engine.llm": ("LLM",),
    "jaxspec.engine.scoring": ("logprobs",),
    "jaxspec.engine.texts": ("keep", "prefill", "step"),
    "jaxspec.models.model_config": ("ModelConfig",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _attribute(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def _names(module: str) -> list[str]:
    """For a notebook's completion and `help`."""
    return dir(import_module(module))


# Names under which a user's drafter, or an experiment, imports these.
for _name, _home in (
    ("jaxspec.draft", "jaxspec.drafters.base"),
    ("jaxspec.options", "jaxspec.config.options"),
    ("jaxspec.verify", "jaxspec.sampling.acceptance"),
):
    sys.modules[_name] = ModuleType(_name, f"`{_home}` by the name under which a user imports it.")
    sys.modules[_name].__getattr__, sys.modules[_name].__dir__ = partial(_attribute, _home), partial(_names, _home)
draft, options, verify = sys.modules["jaxspec.draft"], sys.modules["jaxspec.options"], sys.modules["jaxspec.verify"]
