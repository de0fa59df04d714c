"""Layers with FP8 weights at few rows: what the plain path gives, by interpreted kernels; and the norm's kernel."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.cache.mixers import WholeTexts
from jaxspec.checkpoint import dummy, in_format
from jaxspec.decoder import forward as forward_module
from jaxspec.decoder import fp8_rows
from jaxspec.decoder.fp8_rows import FP8_ROWS
from jaxspec.decoder.functions import normed
from jaxspec.decoder.path import Call, Path
from jaxspec.models.description import Norm
from jaxspec.models.families import MODELS
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import is_param
from jaxspec.pallas.dense import add_norm as norm_module
from jaxspec.pallas.dense.add_norm import add_norm, supported
from tests.support import drawn
from tests.support.kernels import kernels
from tests.support.sample import rare
from tests.support.tiny import tiny_config

INTERPRET = {"interpret": plgpu.InterpretGPUParams()}
SIZES = dict(hidden_size=512, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, shared_expert_intermediate_size=128)
LINEAR = dict(linear_num_key_heads=2, linear_key_head_dim=64, linear_num_value_heads=4, linear_value_head_dim=64)


def declared(family: str, **more):
    """The config, and its weights as declarations in FP8."""
    config = ModelConfig.from_hf(tiny_config(family, **SIZES | EXPERTS | LINEAR | more))
    return config, in_format(MODELS[family].tensors(config.decoder), None, "fp8", "dummy", False)


def check_layers(monkeypatch, family: str, path: Path, requests: int = 2, rows: int = 3, **sizes) -> None:
    """Check that a path matches the plain one on some tokens a request; its kernels are interpreted already."""
    config, tensors = declared(family, **sizes)
    params = dummy(tensors, "bfloat16", 0)
    tokens = jnp.arange(rows * requests).reshape(requests, rows) % config.vocab_size
    positions = jnp.broadcast_to(jnp.arange(rows), tokens.shape)

    def run():
        return jax.jit(
            lambda params: forward_module.forward(config.decoder, params, tokens, positions, WholeTexts(), None, (0, 1))
        )(params)

    expected = run()
    monkeypatch.setattr(forward_module, "hopper", SimpleNamespace(multiprocessors=lambda: 132))
    monkeypatch.setattr(forward_module, "PATHS", (dataclasses.replace(path, processors=0),))
    found = run()
    for ours, theirs in zip((*found.features, found.last), (*expected.features, expected.last), strict=True):
        ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, atol=3e-2 * np.abs(theirs).max())


@pytest.mark.parametrize("family", [
    "qwen3_5_moe", *map(rare, ("llama", "qwen3", "qwen3_moe")),
])  # fmt: skip
def test_layers_are_those_of_the_plain_path(monkeypatch, family):
    monkeypatch.setattr(fp8_rows, "add_norm", partial(add_norm, **INTERPRET))
    monkeypatch.setattr(fp8_rows.fp8_rows, "parts", partial(fp8_rows.fp8_rows.parts, **INTERPRET))
    check_layers(monkeypatch, family, FP8_ROWS)


@pytest.mark.parametrize("rows,width,splits", [(1, 512, 3), (9, 1024, 1), (2, 512, None)])
@pytest.mark.parametrize("centred", [False, True])
def test_sum_and_norm_are_rounded_as_plain_ones(rows, width, splits, centred):
    keys = jax.random.split(jax.random.key(rows), 3)
    x, scale = (
        drawn.normal(key, shape, jnp.bfloat16) for key, shape in ((keys[0], (rows, width)), (keys[1], (width,)))
    )
    parts = None if splits is None else drawn.normal(keys[2], (splits, -(-rows // 8) * 8, width))
    added, out = add_norm(x, parts, scale, eps=1e-6, centred=centred, **INTERPRET)
    expected = x if parts is None else x + parts.sum(0)[:rows].astype(x.dtype)
    np.testing.assert_array_equal(added, expected)
    assert len(out) % norm_module.GROUP == 0
    np.testing.assert_array_equal(out[:rows], normed(expected, scale, Norm(1e-6, centred)))


@pytest.mark.parametrize("width", [512, 2048, 8192])
def test_the_norm_lowers_for_cuda(width):
    shapes = ((128, width), jnp.bfloat16), ((4, 128, width), jnp.float32), ((width,), jnp.bfloat16)
    given = [jax.ShapeDtypeStruct(*each) for each in shapes]
    assert kernels(partial(add_norm, eps=1e-6), *given) == 1


def test_what_is_not_for_it_is_named():
    assert supported(4096, jnp.bfloat16) is None
    assert "rows of 2880" in supported(2880, jnp.bfloat16) and "float32" in supported(4096, jnp.float32)
    config, tensors = declared("qwen3")
    shape = lambda param: jax.eval_shape(lambda: dummy(param, "bfloat16", 0))  # noqa: E731
    layers = jax.tree.map(shape, tensors["layers"], is_leaf=is_param)
    call = Call(8, 1, "bfloat16", processors=132)
    assert FP8_ROWS.refuses(config.decoder, layers, call) is None
    assert "136 rows" in FP8_ROWS.refuses(config.decoder, layers, dataclasses.replace(call, requests=136))
    assert FP8_ROWS.refuses(config.decoder, layers, dataclasses.replace(call, inputs=(512,))) == "a layer by itself"
    plain = MODELS["qwen3"].tensors(config.decoder)["layers"]
    plain = jax.tree.map(shape, plain, is_leaf=is_param)
    assert FP8_ROWS.refuses(config.decoder, plain, call) == "weights that aren't FP8"
