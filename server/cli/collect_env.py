"""`jaxspec collect-env`: versions, devices and settings, as a bug report needs them. Keys and tokens are left out."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path

import jax

import jaxspec
from jaxspec.config.flags import CommandParser

PACKAGES = re.compile(
    r"(jax|jaxlib|jax-cuda.*|nvidia-.*|flax|numpy|transformers|tokenizers|llguidance|safetensors|fastapi|starlette"
    r"|uvicorn|pydantic|huggingface.hub|torch)"
)
VARIABLES = re.compile(r"(JAX|XLA|CUDA|NVIDIA|NCCL|HF|JAXSPEC|TF_CPP)_\w+|LD_LIBRARY_PATH")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")


def main(argv: Sequence[str] | None = None) -> int:
    """Print one fact a line."""
    CommandParser("jaxspec collect-env", description=__doc__).parse_args(argv)
    for name, value in facts():
        print(f"{name}: {value}")
    return 0


def facts() -> Iterator[tuple[str, str]]:
    """Name and value of all that is reported."""
    yield "jaxspec", f"{jaxspec.__version__} in {Path(jaxspec.__file__).parent}"
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "platform", platform.platform()
    yield "processors", str(os.cpu_count())
    yield "devices", _devices()
    if (smi := shutil.which("nvidia-smi")) is not None:
        query = [smi, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        asked = subprocess.run(query, capture_output=True, text=True, timeout=60)
        yield "nvidia-smi", "; ".join((asked.stdout or asked.stderr).splitlines())
    found = {each.metadata["Name"]: each.version for each in distributions()}
    for name in sorted(name for name in found if PACKAGES.fullmatch(name.lower())):
        yield name, found[name]
    for name in sorted(filter(VARIABLES.fullmatch, os.environ)):
        yield name, "(set)" if SECRET.search(name) else os.environ[name]


def _devices() -> str:
    try:
        return ", ".join(f"{device} ({device.device_kind})" for device in jax.devices())
    except RuntimeError as error:  # a GPU that jax can't open, which is what a report may be about
        return f"none: {error}"
