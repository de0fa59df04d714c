"""The kernels of a small model's layer: interpreted against plain layers, lowered for CUDA, and where they serve."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.cache import PageLayout, Rows
from jaxspec.checkpoint.params import dummy
from jaxspec.config import ModelConfig
from jaxspec.mixers import Cache, RoundRows, WholeTexts
from jaxspec.models import few_rows as layers
from jaxspec.models import llama
from jaxspec.models.layers import rms_norm, rope
from jaxspec.pallas import few_rows as op
from jaxspec.pallas import project, target
from jaxspec.pallas.target import KERNELS
from tests.test_weight_stream import assert_close
from tests.tiny import tiny_config

EPS, LAYERS, PAGE = 1e-5, 2, 16
INTERPRET = {"interpret": plgpu.InterpretGPUParams()}
SMOLLM2 = dict(d=576, heads=9, kv_heads=3, f=1536)


def normal(key, *shape):
    return jax.random.normal(key, shape).astype(jnp.bfloat16)


def operands(rows: int, d: int = 192, heads: int = 2, kv_heads: int = 1, f: int = 128) -> dict[str, jax.Array]:
    """Of all three operations; rows stand in scattered slots of pages, but for the third, which is padding."""
    keys = iter(jax.random.split(jax.random.key(rows), 9))
    frequencies = 1e4 ** (-jnp.arange(32) / 32)
    position = jax.random.randint(next(keys), (rows,), 0, 500)
    angle = position[:, None] * frequencies
    return dict(
        x=normal(next(keys), rows, d),
        scale=(1 + 0.1 * normal(next(keys), d)),
        qkv=normal(next(keys), d, (heads + 2 * kv_heads) * 64) * d**-0.5,
        gate_up=normal(next(keys), d, 2 * f) * d**-0.5,
        hidden=normal(next(keys), rows, f),
        down=normal(next(keys), f, d) * f**-0.5,
        cos=jnp.cos(angle),
        sin=jnp.sin(angle),
        position=position,
        frequencies=frequencies,
        kv=normal(next(keys), LAYERS, 2 + rows // PAGE, 2, kv_heads, PAGE, 64),
        place=(PAGE + jax.random.permutation(next(keys), rows)).at[2].set(-1).astype(jnp.int32),
    )


def check_heads(given: dict[str, jax.Array], **options):
    of = [given[name] for name in ("x", "scale", "qkv", "cos", "sin", "kv")]
    q, kv = op.heads(*of, jnp.int32(1), given["place"], [given["gate_up"]], eps=EPS, **options)
    rows, kv_heads = len(given["x"]), given["kv"].shape[3]
    qkv = (rms_norm(given["x"], given["scale"], EPS) @ given["qkv"]).reshape(rows, 1, -1, 64)
    turned = rope(qkv[:, :, :-kv_heads], given["position"][:, None], given["frequencies"])[:, 0]
    assert_close(q, turned[:, :-kv_heads].reshape(rows, -1))
    new = jnp.stack([turned[:, -kv_heads:], qkv[:, 0, -kv_heads:]], axis=1)
    real = given["place"] >= 0
    page = jnp.where(real, given["place"] // PAGE, len(given["kv"][0]))
    expected = given["kv"].at[1, page, :, :, given["place"] % PAGE].set(new, mode="drop")
    changed = np.asarray(expected != given["kv"]).any(axis=-1)
    np.testing.assert_array_equal(np.asarray(kv)[~changed], np.asarray(expected)[~changed])
    assert_close(np.asarray(kv)[changed], np.asarray(expected)[changed])


def check_gated(given: dict[str, jax.Array], **options):
    got = op.gated(given["x"], given["scale"], given["gate_up"], [given["down"]], eps=EPS, **options)
    assert_close(got, project.reference(rms_norm(given["x"], given["scale"], EPS), given["gate_up"], gated=True))


def check_add(given: dict[str, jax.Array], **options):
    got = op.add_product(given["x"], given["hidden"], given["down"], **options)
    assert_close(got, given["x"] + given["hidden"] @ given["down"])


@pytest.mark.parametrize("rows", [8, 24])
def test_heads(rows):
    check_heads(operands(rows), **INTERPRET)


@pytest.mark.parametrize("rows", [8, 40])  # 40: more than are asked for at once
def test_gated(rows):
    check_gated(operands(rows), **INTERPRET)


@pytest.mark.parametrize("rows", [8, 24])
def test_product_added(rows):
    check_add(operands(rows), splits=1, **INTERPRET)


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("widths", [{}, SMOLLM2], ids=["narrow", "smollm2"])
def test_lowers_for_cuda(rows, widths):
    given = jax.eval_shape(lambda: operands(rows, **widths))
    for check, kernel in ((check_heads, "heads"), (check_gated, "gated"), (check_add, "add")):
        text = jax.jit(partial(_result, check)).trace(given).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @mosaic_gpu") == 1, kernel


def _result(check, given):
    """What the kernel of a check gives."""
    if check is check_heads:
        of = [given[name] for name in ("x", "scale", "qkv", "cos", "sin", "kv")]
        return op.heads(*of, jnp.int32(1), given["place"], [given["gate_up"]], eps=EPS)
    if check is check_gated:
        return op.gated(given["x"], given["scale"], given["gate_up"], [given["down"]], eps=EPS)
    return op.add_product(given["x"], given["hidden"], given["down"])


def small_model(**overrides):
    """Config and parameters of a small llama with heads of 64."""
    given = dict(hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    config = ModelConfig.from_hf(tiny_config("llama", **(given | overrides)))
    return config, dummy(llama.parameters(config), "bfloat16", seed=0)


def rounds(tree: bool) -> Rows:
    """Three rows of each of three requests, the last of them idle and the second's last row padding."""
    rows = Rows(jnp.array([0, 15, 0]), jnp.array([3, 2, 0]), jnp.array([[1, 2], [3, 4], [0, 0]]))
    if not tree:
        return rows
    follows = jnp.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
    return rows.replace(depth=jnp.tile(jnp.array([0, 1, 1]), (3, 1)), mask=jnp.tile(follows, (3, 1, 1)))


def forward(config, params, rows: Rows):
    kv = 0.5 * jax.random.normal(jax.random.key(1), PageLayout(5, PAGE, "bfloat16").kv(config).shape)
    tokens = jnp.arange(9).reshape(3, 3)
    return llama.forward(params, config, tokens, rows.marked_positions(3), rows, kv.astype("bfloat16"), (0, 2))


def assert_same_forward(got, expected, rows: Rows, tolerance: float):
    """Of real rows, and of pages but the dummy."""
    real = np.arange(3) < np.asarray(rows.count)[:, None]
    for a, b in zip((got.last, *got.features), (expected.last, *expected.features), strict=True):
        assert_close(np.asarray(a)[real], np.asarray(b)[real], tolerance)
    assert_close(got.cache[:, 1:], expected.cache[:, 1:], tolerance)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_layers_are_those_of_the_model(monkeypatch, tree):
    config, params = small_model()
    expected = forward(config, params, rounds(tree))
    monkeypatch.setattr(llama, "chosen", lambda operation, reason, processors=1: operation == "few_rows")
    for name, options in (("heads", {}), ("gated", {}), ("add_product", {"splits": 1})):
        monkeypatch.setattr(op, name, partial(getattr(op, name), **options, **INTERPRET))
    assert_same_forward(forward(config, params, rounds(tree)), expected, rounds(tree), 2e-2)


def test_a_round_takes_them_where_there_are_kernels(monkeypatch):
    monkeypatch.setattr(target, "kernels_here", lambda: None)
    config, params = small_model()
    rows, layout = Rows(jnp.zeros(8, int), jnp.ones(8, int), jnp.zeros((8, 1), int)), PageLayout(2, 64, "bfloat16")
    cache, mixer = Cache(layout.kv(config)), RoundRows(rows, jnp.arange(8), jnp.zeros(8, int))

    def run(cache):
        return llama.forward(params, config, jnp.zeros((8, 1), int), rows.marked_positions(1), mixer, cache)

    before = KERNELS["few_rows"]
    text = jax.jit(run).trace(cache).lower(lowering_platforms=("cuda",)).as_text()
    assert KERNELS["few_rows"] == before + 1
    assert text.count("custom_call @mosaic_gpu") == 5  # attention's and four, however many layers


def test_what_cannot_run_is_named():
    bf16 = jnp.bfloat16
    assert op.supported(64, 64, (576, 576, 1536), bf16, bf16) is None
    assert op.supported(8, 64, (1024, 1024, 3072), bf16) is None
    assert "float8" in op.supported(8, 64, (576, 576, 1536), bf16, jnp.float8_e4m3fn)
    assert "heads of width 128" in op.supported(8, 128, (576, 576, 1536), bf16)
    assert "65 rows" in op.supported(65, 64, (576, 576, 1536), bf16)
    assert "2048 wide" in op.supported(8, 64, (2048, 2048, 8192), bf16)
    assert "width 96" in op.supported(8, 64, (576, 576, 96), bf16)
    assert "shared memory" in op.supported(64, 64, (1024, 1024, 3072), bf16)


def test_models_that_keep_the_plain_layers():
    config, params = small_model()
    rows = rounds(False)
    kv = PageLayout(5, PAGE, "bfloat16").kv(config)
    assert layers.supported(params, config, 9, rows, kv) is None
    assert "no pages" in layers.supported(params, config, 9, WholeTexts(), None)
    assert "float32" in layers.supported(params, config, 9, rows, kv.astype("float32"))
    biased, with_biases = small_model(attention_bias=True)
    assert "biases" in layers.supported(with_biases, biased, 9, rows, kv)
    narrow, other = small_model(intermediate_size=80)
    assert "80 wide" in layers.supported(other, narrow, 9, rows, kv)
