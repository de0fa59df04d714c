"""Lowering the portable kernels for GPUs that aren't here, and texts that they make."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh

from jaxspec import LLM, SamplingParams
from jaxspec.config.request import RequestOutput
from tests.support.engines import CROWDED, VOCAB
from tests.support.tiny import tiny_checkpoint

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


OPTIONS = CROWDED | {"page_size": 16, "disable_structured_output": True}


def outputs(family: str, draft: str, **options: Any) -> tuple[LLM, list[RequestOutput]]:
    """Generate greedily with a tiny model from prompts of several lengths, two of which begin alike."""
    llm = LLM(str(tiny_checkpoint(family, VOCAB, 1, tokenizer=True)), draft, **OPTIONS | options)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, n).tolist() for n in (1, 16, 33, 100)]
    prompts.append(prompts[-1][:70] + prompts[1])
    return llm, llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
