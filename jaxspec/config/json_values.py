"""Values of a config.json: each is read with a check, and an error names its key and shows what stood there.

The file is a stranger's, so a value may be anything that JSON can hold, of any size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.config.options import ConfigError

FLOAT32_MAX = 3.4e38

# The largest sizes that a config.json may name: far above any model's, low enough that nothing made of them in passing
# (a declaration for each layer and expert, a table of rotary frequencies) takes long.
LARGEST = {
    "num_hidden_layers": 4096,
    "num_experts": 2**14,
    "num_local_experts": 2**14,
    "head_dim": 2**16,
    "linear_conv_kernel_dim": 2**10,
    "max_position_embeddings": 2**27,
    "vocab_size": 2**28,
}


def shown(value: Any) -> str:
    """A value in an error message, cut short: a file may hold megabytes where a number belongs."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def positive(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A size of config.json. **Raises:** `ConfigError` naming the key."""
    value = hf.get(key)
    value = default if value is None else value
    most = LARGEST.get(key, 2**31 - 1)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        bound = f" of at most {most}" if isinstance(value, int) and value > most else ""
        raise ConfigError(f"config.json: {key} must be a positive integer{bound}, got {shown(value)}")
    return value


def positive_float(mapping: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number of config.json. **Raises:** `ConfigError` naming the key."""
    value = mapping.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= FLOAT32_MAX:
        raise ConfigError(f"config.json: {key} must be a positive number within float32, got {shown(value)}")
    return float(value)
