"""Layers with FP8 weights on the device: the path of few rows against the plain one, kernels and all."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint import dummy
from jaxspec.decoder import forward as forward_module
from jaxspec.decoder.fp8_layers import FP8_ROWS
from jaxspec.decoder.plain import PLAIN
from jaxspec.mixers import WholeTexts
from tests.test_fp8_layers import declared


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_5_moe"])
@pytest.mark.parametrize("requests,rows", [(1, 1), (3, 4), (16, 1), (32, 4)])
def test_layers_are_those_of_the_plain_path(monkeypatch, family, requests, rows):
    config, tensors = declared(family, num_attention_heads=8, num_key_value_heads=2)
    params = dummy(tensors, "bfloat16", 0)
    tokens = jax.random.randint(jax.random.key(1), (requests, rows), 0, config.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(rows), tokens.shape)

    def run(path):
        monkeypatch.setattr(forward_module, "PATHS", (path,))
        forward = lambda params: forward_module.forward(  # noqa: E731
            config.decoder, params, tokens, positions, WholeTexts(), None, (0, 1)
        )
        return jax.jit(forward)(params)

    found, expected = run(FP8_ROWS), run(PLAIN)
    for ours, theirs in zip((*found.features, found.last), (*expected.features, expected.last), strict=True):
        ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, atol=3e-2 * np.abs(theirs).max())
