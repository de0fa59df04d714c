"""Layers with FP8 weights at up to 128 rows: what the plain path gives; and the norm's kernel."""

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
from jaxspec.decoder import fp8_rows, mixture_rows
from jaxspec.decoder.fp8_rows import FP8_ROWS
from jaxspec.decoder.fp8_tiles import FP8_TILES
from jaxspec.decoder.functions import normed, weighted
from jaxspec.decoder.matmul import PRODUCTS, Product, gate
from jaxspec.decoder.path import Call, Path
from jaxspec.models import fp8
from jaxspec.models.description import Norm
from jaxspec.models.families import MODELS
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import HALF, Fp8, Layout, Weight, is_param
from jaxspec.pallas.dense import add_norm as norm_module
from jaxspec.pallas.dense import few_rows, fp8_quantise, fp8_tiles
from jaxspec.pallas.dense.add_norm import add_norm, supported
from jaxspec.pallas.operation import choose
from tests.support import drawn
from tests.support.kernels import assert_close, kernels
from tests.support.operations import anywhere
from tests.support.sample import rare
from tests.support.tiny import tiny_config

INTERPRET = {"interpret": plgpu.InterpretGPUParams()}
SIZES = dict(hidden_size=512, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, shared_expert_intermediate_size=128)
LINEAR = dict(linear_num_key_heads=2, linear_key_head_dim=64, linear_num_value_heads=4, linear_value_head_dim=64)


def declared(family: str, activations: bool = False, **more):
    """The config, and its weights as declarations in FP8. `activations`: rows are quantised, too."""
    config = ModelConfig.from_hf(tiny_config(family, **SIZES | EXPERTS | LINEAR | more))
    return config, in_format(MODELS[family].tensors(config.decoder), None, "fp8", "dummy", activations)


def check_layers(
    monkeypatch, family: str, path: Path, requests: int = 2, rows: int = 3, ties: float = 0, **sizes
) -> None:
    """Check that a path matches the plain one on some tokens a request; its kernels are interpreted already. `ties`:
    the share of tokens for which a router may choose another expert, whose scores are as good as equal."""
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
        off = (np.abs(ours - theirs) > 3e-2 * np.abs(theirs).max()).any(axis=-1)
        assert off.mean() <= ties


@pytest.mark.parametrize("family", [
    "qwen3", *map(rare, ("llama", "minimax_m2", "qwen3_5_moe", "qwen3_moe")),
])  # fmt: skip
def test_layers_are_those_of_the_plain_path(monkeypatch, family):
    """With plain jnp in place of kernels, which have tests of their own."""

    def added(x, parts, scale, *, eps, centred):
        x = x if parts is None else x + parts.sum(0)[: len(x)].astype(x.dtype)
        return x, jnp.pad(normed(x, scale, Norm(eps, centred)), ((0, -len(x) % 8), (0, 0)))

    def parts(rows, values, scales):
        rows = jnp.pad(rows, ((0, -len(rows) % 8), (0, 0))).astype(jnp.float32)
        out = rows @ fp8.dequantise(values, scales, fp8.BLOCK).T
        return jnp.stack([out / 4, out * 3 / 4])

    monkeypatch.setattr(fp8_rows, "add_norm", added)
    monkeypatch.setattr(fp8_rows.fp8_rows, "parts", parts)
    check_layers(monkeypatch, family, FP8_ROWS)


def references(monkeypatch) -> list[str]:
    """Put plain jnp in place of the kernels of `fp8_tiles`, which have tests of their own. Returns what was called."""
    called = []

    def norm(x, scale, parts=None, *, eps, centred, keep=False, quantise=True):
        called.append(f"norm{' of parts' * (parts is not None)}{' kept' * keep}")
        x = x if parts is None else x + parts[: len(x)].sum(1).astype(x.dtype)
        rows, factor = weighted(x, scale, Norm(eps, centred))
        values, scales = fp8.quantise_rows(rows)
        kept = normed(x, scale, Norm(eps, centred)) if keep else None
        return fp8_quantise.Normed(x, kept, (values, scales * factor[:, None]) if quantise else None)

    def matmul(values, by, weight, scales, valid, residual=None, *, block, rows, gated=False):
        rows = fp8.dequantise(values, by, fp8.BLOCK)
        out = (rows @ fp8.dequantise(weight, scales, block).T).astype(jnp.bfloat16)
        return gate(out, HALF) if gated else out

    def parts(*of, **options):
        called.append("parts")
        out = matmul(*of, **options).astype(jnp.float32)
        return jnp.stack([out / 4, out * 3 / 4], axis=1)

    for name, kernel in (("norm", norm), ("quantise_rows", fp8.quantise_rows)):
        monkeypatch.setattr(fp8_quantise, name, kernel)
    for kernel in (matmul, parts):
        monkeypatch.setattr(fp8_tiles, kernel.__name__, kernel)
    return called


@pytest.mark.parametrize("family,ties,norms", [
    ("qwen3", 0, {"norm", "norm of parts"}), rare("qwen3_5_moe", 0.06, {"norm kept", "norm of parts kept"}),
    ("minimax_m2", 0.06, {"norm", "norm of parts kept"}),
])  # fmt: skip
def test_quantised_layers_are_those_of_the_plain_path(monkeypatch, family, ties, norms):
    """Mixtures and linear attention read normed rows that aren't quantised, too."""
    called = references(monkeypatch)
    check_layers(monkeypatch, family, FP8_TILES, 12, 3, ties, activations=True, hidden_size=1024)
    assert set(called) == {"parts", *norms}


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


@pytest.mark.parametrize("block,added", [(None, True), (fp8.BLOCK, False)])
def test_a_last_part_of_a_block_is_multiplied_with_the_others(block, added):
    """Plain jnp's loop over groups of inputs has several kernels for each on a GPU: GLM-4.5-Air's first MLP has 86."""
    x, factor = drawn.normal(jax.random.key(1), (3, 192), jnp.bfloat16), jnp.array([0.5, 1.0, 2.0])
    made = (fp8.quantise_blocks if block else fp8.quantise_outputs)(drawn.normal(jax.random.key(2), (256, 192)))
    weight = Weight(made[0], Fp8(block, True), Layout((128, 128), HALF), made[1])
    more = {"residual": drawn.normal(jax.random.key(3), (3, 256), jnp.bfloat16)} if added else {"gated": True}
    call = Product(x, weight, factor=factor, **more)
    chosen, other = (
        choose("a product", anywhere(PRODUCTS), call._replace(weight=weight.replace(format=Fp8(block, each))))
        for each in (True, False)
    )
    assert chosen.name == "rounded" and other.name == "plain"
    assert "scan" not in str(jax.make_jaxpr(lambda x: chosen.run(call._replace(x=x)))(x))
    assert_close(chosen.run(call), PRODUCTS[-1].run(call), 2e-2)


@pytest.mark.parametrize("width,activations,scaled", [
    (1152, False, True), (256, False, False), (256, True, True), (1152, None, False),
])  # fmt: skip
def test_wide_rows_and_quantised_ones_come_scaled_to_kernels_of_few(width, activations, scaled):
    """Shared memory has no room for 32 wide ones, of a mixture neither. `activations` None: an unquantised weight."""
    values, scales = fp8.quantise_blocks(drawn.normal(jax.random.key(1), (128, width)))
    weight = Weight(values, Fp8(fp8.BLOCK, bool(activations)), scales=scales)
    weight = Weight(weight.dequantised("bfloat16")) if activations is None else weight
    given = mixture_rows.given_to(weight, (jnp.ones((8, width), "bfloat16"), jnp.ones(width)), False)
    assert isinstance(given, few_rows.Scaled) == scaled


def test_which_quantised_layers_have_a_path_is_named():
    config, tensors = declared("qwen3", True, hidden_size=1024)
    shape = lambda param: jax.eval_shape(lambda: dummy(param, "bfloat16", 0))  # noqa: E731
    layers = jax.tree.map(shape, tensors["layers"], is_leaf=is_param)
    call = Call(32, 4, "bfloat16", processors=132)

    def refuses(layers=layers, **other):
        return FP8_TILES.refuses(config.decoder, layers, dataclasses.replace(call, **other))

    assert refuses() is refuses(requests=11, rows=3) is None
    assert "132 rows" in refuses(requests=33) and "32 rows" in refuses(requests=8)
    assert "divided among 2" in refuses(devices=2) and "adapters" in refuses(adapters=True)
    _, tensors = declared("qwen3", hidden_size=1024)
    assert "don't quantise rows" in refuses(jax.tree.map(shape, tensors["layers"], is_leaf=is_param))
