"""The sum over devices, fused with what follows it; and the fast paths that end in it.

Interpret mode has no peers. Here the kernel is lowered for CUDA; `tests/gpu/test_peer_sum.py` compares it with
`reference`. The paths run with their kernels interpreted, a thread for each rank, and sums between the threads.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.cache.paged import PageLayout, Rows
from jaxspec.checkpoint import params as loading
from jaxspec.checkpoint.quantization import quantised_on_load
from jaxspec.decoder import feed, matmul, mixture_rows, path, plain, stack
from jaxspec.decoder import few_rows as few_rows_path
from jaxspec.decoder import weight_stream as streamed
from jaxspec.models.families import MODELS
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import Weight, is_param
from jaxspec.pallas.collectives import peer_sum
from jaxspec.pallas.dense import few_rows, weight_stream
from jaxspec.pallas.dense.weight_stream import fp8 as fp8_chain
from jaxspec.pallas.dense.weight_stream import unquantised
from jaxspec.pallas.experts import expert_add, router
from jaxspec.pallas.hopper import KERNELS
from jaxspec.parallel import peers, sharding
from tests.decoder import test_few_rows_layers as layers
from tests.decoder.test_kimi_layers import LATENT
from tests.support import drawn
from tests.support.tiny import tiny_config

ROOT = Path(__file__).resolve().parents[3]
bf16 = jnp.bfloat16


def shapes(ranks: int, rows: int, width: int):
    of = lambda shape, dtype=bf16: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    table, first = of((ranks, 2), jnp.int32), of((1,), jnp.int32)
    return of((rows, width)), table, first, of((rows, width)), of((width,))


@pytest.mark.parametrize("ranks,rows,width", [(2, 8, 4096), (8, 8, 5120), (4, 1, 1024), (4, 128, 4096)])
def test_it_lowers_for_cuda(ranks, rows, width):
    part, table, first, x, scale = shapes(ranks, rows, width)
    weights = jax.ShapeDtypeStruct((4096, 3072), bf16)
    for given in ((), (x,), (x, scale), (x, scale, weights), (None, None, weights)):
        run = jax.jit(lambda *of: peer_sum.peer_sum.__wrapped__(*of, centred=True))
        text = run.trace(part, table, first, *given).lower(lowering_platforms=("cuda",)).as_text()
        assert "mosaic_gpu" in text and "multimem" not in text
    part = jax.ShapeDtypeStruct((3, rows, width), jnp.float32)  # a product's partials
    text = jax.jit(peer_sum.peer_sum.__wrapped__).trace(part, table, first, x).lower(lowering_platforms=("cuda",))
    assert f"tensor<{rows}x{width}xbf16>" in text.as_text()
    jax.jit(lambda table: peer_sum.words_at(table, 64)).trace(table).lower(lowering_platforms=("cuda",))


def test_it_is_the_sum_that_few_rows_would_scale():
    keys = jax.random.split(jax.random.key(0), 3)
    parts = drawn.normal(keys[0], (4, 8, 1088), bf16)
    x, scale = drawn.normal(keys[1], (8, 1088), bf16), drawn.normal(keys[2], (1088,), bf16)
    out, scaled = peer_sum.reference(x, parts, scale, centred=True)
    exact = np.asarray(x, np.float64) + np.asarray(parts, np.float64).sum(0)
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=2**-8)
    for a, b in zip(scaled, few_rows.scale_rows(out, scale, centred=True), strict=True):
        np.testing.assert_array_equal(a, b)
    plain = peer_sum.reference(None, parts)
    np.testing.assert_allclose(
        np.asarray(plain, np.float64), np.asarray(parts, np.float64).sum(0), rtol=2**-8, atol=1e-3
    )


def test_what_it_cannot_sum_is_named():
    assert peer_sum.supported(8, 4096, bf16) is None
    for rows, width, dtype, words in (
        (8, 4096, jnp.float32, "float32; supported: bfloat16"),
        (1, 4160, bf16, "1 rows of 4160"),
        (512, 4096, bf16, f"supported: {1024 * 1024} numbers"),
    ):
        assert words in peer_sum.supported(rows, width, dtype)
    with pytest.raises(NotImplementedError, match="other devices' memory"):
        peer_sum.peer_sum(*shapes(2, 8, 1024)[:3], interpret=True)


def test_two_exchanges_serve_where_they_send_less():
    """Two ranks send as many bytes either way, and so do few rows as soon."""
    sizes = 2**10 * np.array([32, 128, 256, 512, 1024])
    served = {ranks: [peer_sum.two_shots(ranks, int(size)) for size in sizes] for ranks in (2, 4, 8)}
    assert served == {
        2: [False] * 5,
        4: [False, False, True, True, True],
        8: [False, True, True, True, True],
    }
    assert not peer_sum.two_shots(8, 512 * 1024 + 1024), "shares that aren't whole"


def test_without_gpus_sums_are_psums():
    opened, reason = peers.open_peers(jax.sharding.Mesh(np.array(jax.devices()[:1]), (sharding.AXIS,)))
    assert opened is None and reason == "the device is a CPU"


def test_nothing_uses_multicast():
    """NVLS and multimem hang machines whose fabric isn't set up for them."""
    sources = [f"{folder}/**/*.{kind}" for folder in ("jaxspec", "server", "scripts") for kind in ("py", "sh")]
    files = [file for pattern in sources for file in ROOT.glob(pattern)]
    assert len(files) > 100
    for file in files:
        text = file.read_text()
        assert "multimem" not in text and "symmetric_buffers" not in text, file
        assert set(re.findall(r"NCCL_NVLS_ENABLE\W+(\w+)", text)) <= {"0"}, file


class Ranks:
    """Threads that each run a rank. What `summed` is given by all of them is summed; kernels run one at a time, since
    the interpreter knows one device."""

    def __init__(self, count: int):
        self.count, self._barrier, self._parts = count, threading.Barrier(count, timeout=120), [None] * count
        self.rank, self.sums = threading.local(), 0
        self.running = threading.RLock()

    def run(self, of):
        def one(rank):
            self.rank.here = rank
            try:
                return jax.tree.map(np.asarray, of(rank))
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(one, range(self.count)))

    def summed(self, part, x=None, scale=None, prefetch=None, *, centred=False):
        here = self.rank.here
        part = part.sum(0).astype(bf16) if part.ndim == 3 else part
        self._parts[here] = jax.block_until_ready(part)
        self._barrier.wait()
        parts = jnp.stack(self._parts)
        self.sums += here == 0
        self._barrier.wait()
        return peer_sum.reference(x, parts, scale, centred)

    def one_at_a_time(self, kernel):
        def call(*args, **named):
            with self.running:
                return jax.block_until_ready(kernel(*args, **named))

        return call


def take_ranks(monkeypatch, count: int) -> Ranks:
    """From here on layers are run by so many ranks, and their kernels interpreted."""
    ranks = Ranks(count)
    for module in (mixture_rows, feed, plain, path, streamed):
        monkeypatch.setattr(module, "devices", lambda: count)
    for module in (mixture_rows, plain, streamed):
        monkeypatch.setattr(module, "summed", ranks.summed)
    monkeypatch.setattr(stack, "jax", SimpleNamespace(jit=lambda f, **_: f))
    for name in ("stream_part", "stream_part_fp8"):
        monkeypatch.setattr(weight_stream, name, ranks.one_at_a_time(getattr(weight_stream, name)))
    for name in ("heads", "gated", "normed", "product"):
        monkeypatch.setattr(few_rows, name, ranks.one_at_a_time(getattr(few_rows, name)))
    for module, name in ((router, "router"), (expert_add, "add_scaled")):
        monkeypatch.setattr(module, name, ranks.one_at_a_time(getattr(module, name)))
    return ranks


def in_float32(params):
    """Cast to float32 as the sums' reference: one in bfloat16 is further from it than the kernels are."""
    wide = lambda x: x.astype("float32") if x.dtype == bf16 else x  # noqa: E731
    return jax.tree.map(wide, params)


def over_two_devices(monkeypatch, family: str, take, fp8=False, **more) -> tuple[Ranks, int]:
    """Each rank has half of the heads and of the MLP's columns, and both have the same bits after the last layer.

    `take`: makes kernels serve. `fp8`: weights are in FP8. Returns the ranks, and how many layers there are.
    """
    given = dict(hidden_size=17 * 64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    config = ModelConfig.from_hf(tiny_config(family, **given | more))
    declared = MODELS[family].tensors(config.decoder)
    params, own = loading.dummy(declared, "bfloat16", seed=0), config.on_one_of(2)
    if fp8:  # numbers that FP8 has, in blocks that no device has a part of: each quantises its own alike
        whole = lambda weight: Weight(weight.dequantised("float32"), layout=weight.layout)  # noqa: E731
        is_weight = lambda leaf: isinstance(leaf, Weight)  # noqa: E731
        params["layers"] = jax.tree.map(
            lambda leaf: whole(leaf) if is_weight(leaf) else leaf, layers.in_fp8(params["layers"]), is_leaf=is_weight
        )
    rows = Rows(jnp.array([0, 15]), jnp.array([4, 3]), jnp.array([[1, 2], [3, 4]]))
    expected = layers.forward(config, in_float32(params), rows)
    halves = [half(declared, params, rank) for rank in range(2)]
    if fp8:
        halves = [each | {"layers": layers.in_fp8(each["layers"])} for each in halves]
    kv = 0.5 * drawn.normal(jax.random.key(1), PageLayout(5, layers.PAGE, "bfloat16").kv(config).shape)
    kv, tokens, positions = kv.astype("bfloat16"), jnp.arange(8).reshape(2, 4), rows.marked_positions(4)
    pages = np.split(kv, 2, axis=3) if kv.shape[3] > 1 else [kv, kv]  # both have a token's latent
    take(monkeypatch)
    ranks = take_ranks(monkeypatch, 2)

    def forward(rank):
        of = own.decoder, halves[rank], tokens, positions, rows, pages[rank], (0, 2)
        return layers.forward_module.forward(*of)

    made = ranks.run(forward)
    np.testing.assert_array_equal(made[0].last, made[1].last)
    whole = made[0].replace(cache=np.concatenate([each.cache for each in made], axis=3)[:, :, :, : kv.shape[3]])
    layers.assert_same_forward(whole, expected, rows, 2e-2)
    return ranks, len(config.decoder.layers)


def test_few_rows_over_two_devices_are_the_models(monkeypatch):
    ranks, count = over_two_devices(monkeypatch, "qwen3", layers.take_few_rows, num_hidden_layers=1)
    assert ranks.sums == 2 * count


@pytest.mark.exhaustive
def test_few_rows_in_fp8_over_two_devices_are_the_models(monkeypatch):
    sizes = dict(hidden_size=1408, intermediate_size=256, num_key_value_heads=4)
    ranks, count = over_two_devices(monkeypatch, "qwen3", layers.take_few_rows, fp8=True, **sizes)
    assert ranks.sums == 2 * count


@pytest.mark.exhaustive  # sums of few rows are above; a mixture's kernels have tests of their own
@pytest.mark.parametrize("kernels", ["plain experts", "router and sum"])
def test_mixtures_over_two_devices_are_the_models(monkeypatch, kernels):
    """Each rank has half of every expert's columns, and all of the router."""

    def take(monkeypatch):
        layers.take_few_rows(monkeypatch)
        if kernels != "plain experts":
            layers.take_mixtures(monkeypatch)

    sizes = dict(num_experts=64, num_experts_per_tok=4, moe_intermediate_size=16)
    ranks, count = over_two_devices(monkeypatch, "qwen3_moe", take, **sizes)
    assert ranks.sums == 2 * count


@pytest.mark.exhaustive
@pytest.mark.parametrize("fp8", [False, True])
def test_glms_layers_over_two_devices_are_the_models(monkeypatch, fp8):
    """In FP8 the first layer's MLP, of a block and a half of inputs a device, is the plain layer's."""
    products = matmul.PRODUCTS

    def take(monkeypatch):
        layers.take_few_rows(monkeypatch)
        monkeypatch.setattr(matmul, "PRODUCTS", products)
        layers.take_mixtures(monkeypatch)

    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    sizes = layers.GLM | heads | dict(intermediate_size=384, moe_intermediate_size=256)
    ranks, count = over_two_devices(monkeypatch, "glm4_moe", take, fp8=fp8, **sizes)
    assert ranks.sums == 2 * count


@pytest.mark.exhaustive
@pytest.mark.parametrize("fp8", [False, True])
def test_latent_attention_over_two_devices_is_the_models(monkeypatch, fp8):
    """Each rank has half of the heads, and all latents."""

    def take(monkeypatch):
        layers.take_few_rows(monkeypatch)
        layers.take_mixtures(monkeypatch)

    heads = dict(num_attention_heads=4, num_key_value_heads=4)
    sizes = LATENT | heads | dict(intermediate_size=256, moe_intermediate_size=256)
    before = KERNELS["few_rows_normed"]
    ranks, count = over_two_devices(monkeypatch, "mistral4", take, fp8=fp8, **sizes)
    assert ranks.sums == 2 * count and KERNELS["few_rows_normed"] > before


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_hybrids_over_two_devices_are_the_models(monkeypatch, family):
    """Each rank has half of the heads of both kinds, and their states."""
    sizes = dict(linear_num_key_heads=8, linear_num_value_heads=32, num_attention_heads=4, num_key_value_heads=2)
    config, params = layers.small_hybrid(family, 17 * 64, shared_expert_intermediate_size=64, **sizes)
    expected, rounded = (layers.hybrid_round(config, each, 3, 2) for each in (in_float32(params), params))
    declared, own = MODELS[family].tensors(config.decoder), config.on_one_of(2)
    halves = [half(declared, params, rank) for rank in range(2)]
    layers.take_few_rows(monkeypatch)
    ranks = take_ranks(monkeypatch, 2)
    made = ranks.run(lambda rank: layers.hybrid_round(own, halves[rank], 3, 2, jit=False))
    pages = np.concatenate([each[2] for each in made], axis=3)
    for one, other in zip(made[0][:2], made[1][:2], strict=True):
        np.testing.assert_array_equal(one, other)
    for got, one, exact in zip((*made[0][:2], pages), rounded, expected[:3], strict=False):
        got, one, exact = (np.asarray(each, np.float64) for each in (got, one, exact))
        off = np.linalg.norm(got - exact)
        assert off <= 1.2 * np.linalg.norm(one - exact) and off <= 3e-2 * np.linalg.norm(exact)
    assert ranks.sums == 2 * 2 * len(config.decoder.layers), "of two rounds"


@pytest.mark.exhaustive
@pytest.mark.parametrize("fp8", [False, True])  # FP8 layers aren't served so (`FP8_DEVICES`)
def test_streamed_layers_over_two_devices_are_the_models(monkeypatch, fp8):
    served, module = (streamed.FP8_STREAM, fp8_chain) if fp8 else (streamed.WEIGHT_STREAM, unquantised)

    def take(monkeypatch):
        monkeypatch.setattr(streamed, "FP8_DEVICES", 2)
        monkeypatch.setattr(layers.forward_module, "PATHS", [dataclasses.replace(served, processors=0)])
        monkeypatch.setattr(weight_stream.chain, "BLOCKS", 3)
        monkeypatch.setattr(module, "MIN_ROWS", 1)
        name = "stream_part_fp8" if fp8 else "stream_part"
        stream = partial(getattr(weight_stream, name), interpret=plgpu.InterpretGPUParams())
        monkeypatch.setattr(weight_stream, name, stream)

    given = dict(hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4)
    ranks, count = over_two_devices(monkeypatch, "qwen3", take, fp8=fp8, **given)
    assert ranks.sums == 2 * count


def half(declared, params, rank: int):
    """One of two devices' part of unquantised params, with the embedding whole."""

    def part(path, param, made):
        if path[-1].key == "embed":
            return made
        param, sources = loading._sources(param, getattr(made, "values", made))
        own = [sharding.cut(param, i, source, rank, 2) for i, source in enumerate(sources)]
        return loading._placed(sharding.local_param(param, 2, rank), own, {}, "bfloat16")

    return jax.tree_util.tree_map_with_path(part, declared, params, is_leaf=is_param)


@pytest.mark.parametrize("width,most,activations", [(2048, 32, False), (8192, 32, True), (8320, 8, True)])
def test_rows_of_fp8_weights_over_several_devices(width, most, activations):
    """Llama-70B's width, on each of two devices, takes as many rows as Qwen3-8B's. Other weights keep to eight."""
    call = path.Call(1, 1, "bfloat16", 132, devices=2)
    sizes = dict(intermediate_size=14336, num_attention_heads=32, num_key_value_heads=4, head_dim=128)
    config = ModelConfig.from_hf(tiny_config("llama", hidden_size=width, num_hidden_layers=1, **sizes))
    declared = MODELS["llama"].tensors(config.decoder)
    in_fp8 = jax.tree.map(lambda param: quantised_on_load(param, activations), declared, is_leaf=is_param)
    for of, up_to in ((in_fp8, most), (declared, 8)):
        made = jax.eval_shape(lambda of=of: loading.dummy(of, "bfloat16", seed=0))["layers"]
        for rows in (8, 16, 32, 40):
            requested = dataclasses.replace(call, requests=rows)
            reason = few_rows_path.FEW_ROWS.refuses(config.decoder, made, requested)
            if rows > up_to:
                assert "supported: up to" in reason
            elif of is in_fp8:
                assert reason is None, reason


def test_what_does_not_run_over_several_devices_is_refused(monkeypatch):
    call = path.Call(1, 1, "bfloat16", 132, devices=2)
    for family, more, words in (
        ("qwen3", {}, None),
        ("qwen3", {"hidden_size": 1024}, "rows of 1024 divided among 2 devices"),
        ("qwen3_moe", dict(num_experts=64, num_experts_per_tok=4, moe_intermediate_size=64), None),
    ):
        given = dict(hidden_size=2048, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
        config = ModelConfig.from_hf(tiny_config(family, **given | more))
        declared = MODELS[family].tensors(config.decoder)
        made = jax.eval_shape(lambda declared=declared: loading.dummy(declared, "bfloat16", seed=0))
        reason = few_rows_path.FEW_ROWS.refuses(config.decoder, made["layers"], call)
        assert reason is None if words is None else words in reason
    more = dataclasses.replace(call, requests=16)
    assert "16 rows over 2 devices" in few_rows_path.FEW_ROWS.refuses(config.decoder, made["layers"], more), "a mixture"
    alone = dataclasses.replace(call, inputs=(2048,))
    assert "a layer by itself divided" in few_rows_path.fits(config.decoder, made["layers"], alone)
    monkeypatch.setattr(few_rows_path, "ALONE_DEVICES", 2)  # as a GPU may show
    assert few_rows_path.FEW_ROWS.refuses(config.decoder, made["layers"], alone) is None
