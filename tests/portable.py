"""Lowering for GPUs that aren't here."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh

KINDS = {  # compute capability by a card of it
    "8.0": "NVIDIA A100-SXM4-80GB",
    "8.9": "NVIDIA GeForce RTX 4090",
    "9.0": "NVIDIA H200",
    "10.0": "NVIDIA B200",
    "12.0": "NVIDIA RTX PRO 6000",
}


def lowered(f: Callable, *args: Any, capability: str) -> str:
    """The text of a function's program for such a GPU."""
    device = AbstractDevice(device_kind=KINDS[capability], num_cores=None, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
