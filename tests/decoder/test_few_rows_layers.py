"""The few-rows path: its layers are the plain ones, of models and drafters, and what it can't run is named."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.mixers import Cache, RoundRows, empty_cache
from jaxspec.cache.paged import PageLayout, Rows
from jaxspec.checkpoint.params import dummy
from jaxspec.decoder import feed, mixture_rows
from jaxspec.decoder import forward as forward_module
from jaxspec.decoder import matmul as matmul_module
from jaxspec.decoder.few_rows import FEW_ROWS
from jaxspec.decoder.fused_norms import FUSED_NORMS
from jaxspec.decoder.low_rank import attached
from jaxspec.decoder.mixings import mamba2
from jaxspec.decoder.padding import untimed
from jaxspec.decoder.path import NO_HOPPER, Call
from jaxspec.drafters import dflash, eagle, mtp
from jaxspec.drafters.base import DraftBatch, Verified
from jaxspec.models import fp8, mxfp4
from jaxspec.models.families import MODELS, llama
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import Fp8, Int4, LowRank, Mxfp4, Nvfp4, Weight
from jaxspec.pallas import hopper
from jaxspec.pallas.dense import few_rows as op
from jaxspec.pallas.experts import expert_add, router
from jaxspec.pallas.hopper import KERNELS
from jaxspec.pallas.operation import ANY
from jaxspec.rounds.packing import empty_slots
from tests.pallas.dense.test_few_rows import INTERPRET, PAGE, normal
from tests.support import drawn
from tests.support.kernels import assert_close, kernels
from tests.support.operations import anywhere
from tests.support.sample import rare
from tests.support.tiny import tiny_config


def small_model(family="llama", **overrides):
    """Config and parameters of a small model with heads of 64."""
    given = dict(hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    config = ModelConfig.from_hf(tiny_config(family, **(given | overrides)))
    tensors = MODELS[family].tensors if family in MODELS else llama.tensors
    return config, with_biases(dummy(tensors(config.decoder), "bfloat16", seed=0))


def with_biases(params):
    """Biases of made-up weights are zero, which would hide one that is left out."""
    for at, layer in enumerate(params["layers"]):
        for i, name in enumerate(name for name in layer if name.endswith("bias") and name != "decay_bias"):
            layer[name] = 0.5 * drawn.normal(jax.random.key(9 * at + i), layer[name].shape, layer[name].dtype)
    return params


def rounds(tree: bool) -> Rows:
    """Three rows of each of three requests, the last of them idle and the second's last row padding."""
    rows = Rows(jnp.array([0, 15, 0]), jnp.array([3, 2, 0]), jnp.array([[1, 2], [3, 4], [0, 0]]))
    if not tree:
        return rows
    follows = jnp.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
    return rows.replace(depth=jnp.tile(jnp.array([0, 1, 1]), (3, 1)), mask=jnp.tile(follows, (3, 1, 1)))


def forward(config, params, rows: Rows, adapters=None):
    """Run three rows of each request, four each of two, or one of one."""
    kv = 0.5 * drawn.normal(jax.random.key(1), PageLayout(5, PAGE, "bfloat16").kv(config).shape)
    tokens = {3: jnp.arange(9).reshape(3, 3), 2: jnp.arange(8).reshape(2, 4), 1: jnp.ones((1, 1), int)}[len(rows.count)]
    positions = rows.marked_positions(tokens.shape[1])
    of = config.decoder, params, tokens, positions, rows, kv.astype("bfloat16"), (0, 2)
    return forward_module.forward(*of, adapters=adapters)


def assert_same_forward(got, expected, rows: Rows, tolerance: float):
    """Compare valid rows, and pages but the dummy."""
    real = np.arange(got.last.shape[1]) < np.asarray(rows.count)[:, None]
    for a, b in zip((got.last, *got.features), (expected.last, *expected.features), strict=True):
        assert_close(np.asarray(a)[real], np.asarray(b)[real], tolerance)
    assert_close(got.cache[:, 1:], expected.cache[:, 1:], tolerance)


def take_few_rows(monkeypatch):
    """The kernels serve from here on, interpreted."""
    monkeypatch.setattr(forward_module, "hopper", SimpleNamespace(multiprocessors=lambda: 132))
    monkeypatch.setattr(forward_module, "CONTEXT", anywhere(forward_module.CONTEXT)[:1])
    monkeypatch.setattr(forward_module, "BEST", dataclasses.replace(forward_module.BEST, device=ANY))
    monkeypatch.setattr(matmul_module, "PRODUCTS", anywhere(matmul_module.PRODUCTS))
    few = [dataclasses.replace(path, processors=0) for path in (FEW_ROWS, FUSED_NORMS)]
    monkeypatch.setattr(forward_module, "PATHS", few)
    monkeypatch.setattr(forward_module, "FEW_ROWS", few[0])
    for name in ("heads", "keys_values", "gated", "normed", "top_tokens", "add_product", "product", "shrink"):
        monkeypatch.setattr(op, name, partial(getattr(op, name), **INTERPRET))


@pytest.mark.parametrize("family,tree", [
    rare("llama", False), rare("llama", True), rare("qwen2", False), rare("smollm3", False),
    ("smollm3", True),  # some layers of which don't rotate
])  # fmt: skip
def test_layers_are_those_of_the_model(monkeypatch, family, tree):
    config, params = small_model(family)
    expected = forward(config, params, rounds(tree))
    take_few_rows(monkeypatch)
    assert_same_forward(forward(config, params, rounds(tree)), expected, rounds(tree), 2e-2)


EXPERTS = {
    "qwen3_moe": dict(num_experts=64, num_experts_per_tok=4, moe_intermediate_size=8),
    "gpt_oss": dict(num_local_experts=32, num_experts_per_tok=4, intermediate_size=8),  # padded for the router
}


def small_gpt_oss(width: int):
    """With experts in MXFP4, and wide enough for sums that come scaled."""
    sizes = dict(hidden_size=width, intermediate_size=576, num_local_experts=8, num_experts_per_tok=2)
    config, params = small_model("gpt_oss", num_hidden_layers=2, **sizes)
    for layer in params["layers"]:
        for name in ("experts_gate_up", "experts_down"):
            values, scales = mxfp4.quantise(8 * layer[name].values)
            layer[name] = layer[name].replace(values=values, scales=scales, format=Mxfp4())
    return config, params


def take_mixtures(monkeypatch) -> list[str]:
    """The kernels around a mixture's experts serve, too, interpreted; the names of those that have been called."""
    calls = []

    def note(name, function):
        return lambda *given, **named: calls.append(name) or function(*given, **named, **INTERPRET)

    monkeypatch.setattr(mixture_rows, "ROUTER", anywhere(mixture_rows.ROUTER))
    monkeypatch.setattr(mixture_rows, "experts_scaled", lambda x, each: True)
    monkeypatch.setattr(expert_add, "add_scaled", note("add", expert_add.add_scaled))
    monkeypatch.setattr(router, "router", note("router", router.router))
    return calls


@pytest.mark.parametrize("family", [rare("gpt_oss"), rare("qwen3_moe")])  # over two devices: test_peer_sum.py
def test_norm_router_and_choice_are_one_kernel_and_sums_come_scaled(monkeypatch, family):
    width = 17 * 64  # which nothing divides
    config, params = small_gpt_oss(width) if family == "gpt_oss" else small_model(
        family, hidden_size=width, num_hidden_layers=2, **EXPERTS[family]
    )  # fmt: skip
    expected = forward(config, params, two_requests())
    take_few_rows(monkeypatch)
    calls = take_mixtures(monkeypatch)
    assert_same_forward(forward(config, params, two_requests()), expected, two_requests(), 2e-2)
    assert set(calls) == {"add", "router"}


def one_request() -> Rows:
    return Rows(jnp.array([15]), jnp.array([1]), jnp.array([[1, 2]]))


def two_requests() -> Rows:
    return Rows(jnp.array([0, 15]), jnp.array([4, 3]), jnp.array([[1, 2], [3, 4]]))


@pytest.mark.parametrize("family", [rare("qwen3"), rare("qwen3_moe"), rare("gpt_oss")])
def test_wide_layers_are_those_of_the_model(monkeypatch, family):
    """Their rows come scaled from one kernel to the next; of a width whose inputs nothing divides."""
    experts = EXPERTS.get(family, {})
    config, params = small_model(family, hidden_size=17 * 64, num_hidden_layers=2, **experts)
    rows = two_requests()
    expected = forward(config, params, rows)
    take_few_rows(monkeypatch)
    assert_same_forward(forward(config, params, rows), expected, rows, 2e-2)


def with_adapters(params, places: int, rank: int):
    """The params with random adapters of all dense weights, but of one layer's `out`."""
    key, stacks = jax.random.key(5), []
    for layer in params["layers"]:
        stacks.append({})
        for name in (name for name in ("qkv", "out", "gate_up", "down") if stacks[1:] or name != "out"):
            key, a, b = jax.random.split(key, 3)
            (k, n), wide = layer[name].values.shape, rank * {"qkv": 3, "gate_up": 2}.get(name, 1)
            made = normal(a, k, places, wide) * k**-0.5, normal(b, places, wide, n) * wide**-0.5
            stacks[-1][name] = LowRank(*made)
    return params | {"adapters": stacks}


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_rows_with_adapters_go_through_the_same_kernels(monkeypatch, family):
    """The first of two requests has the last of eight adapters; then the other has the second, and none has any."""
    config, params = small_model(family, hidden_size=17 * 64, num_hidden_layers=2)
    params, rows = with_adapters(params, 8, 16), two_requests()
    cases = [jnp.array([7, -1]), jnp.array([-1, 1]), jnp.array([-1, -1])]
    expected = [forward(config, params, rows, places) for places in cases]
    base = forward(config, params, rows)
    take_few_rows(monkeypatch)
    monkeypatch.setattr(forward_module, "PATHS", forward_module.PATHS[:1])
    for places, each in zip(cases, expected, strict=True):
        assert_same_forward(forward(config, params, rows, places), each, rows, 2e-2)
    assert_same_forward(forward(config, params, rows, cases[2]), base, rows, 2e-2)
    assert np.linalg.norm(expected[0].last[0] - base.last[0]) > 0.1 * np.linalg.norm(base.last[0])


def test_rows_with_adapters_that_the_kernels_cannot_take_are_named():
    config, params = small_model("qwen3", hidden_size=17 * 64, num_hidden_layers=2)
    call = Call(1, 4, "bfloat16", processors=132, adapters=True)

    def layers(*of):
        return attached(params["layers"], jax.eval_shape(lambda: with_adapters(params, *of)["adapters"]), None)

    refuses = lambda layers, **more: FEW_ROWS.refuses(config.decoder, layers, dataclasses.replace(call, **more))  # noqa: E731
    assert refuses(layers(4, 16)) is None is refuses(layers(4, 16), requests=8)
    assert "40 rows of 1088; supported: up to 32" in refuses(layers(4, 16), requests=10)
    assert "16 rows of 1088; supported: up to 8" in refuses(params["layers"], requests=4, adapters=False)
    assert "adapters of rank 24 in 3 places" in refuses(layers(3, 8))
    assert "with adapters divided among 2 devices" in refuses(layers(4, 16), devices=2)


_quantise_blocks, _quantise_stack = jax.jit(fp8.quantise_blocks), jax.jit(jax.vmap(fp8.quantise_blocks))
_quantise_outputs = jax.jit(jax.vmap(fp8.quantise_outputs))


def in_fp8(layers, by_output: bool = False, activations: bool = False):
    """The layers with all dense weights in FP8, and experts' if there are any, with scales in blocks or of outputs;
    `activations`: dense ones quantise rows, too."""

    def quantised(weight):
        if by_output:
            outputs = weight.values.T.astype(jnp.float32)
            scales = jnp.max(jnp.abs(outputs), axis=1, keepdims=True) / 448
            return Weight((outputs / scales).astype(fp8.E4M3), Fp8(None, activations), weight.layout, scales)
        values, scales = _quantise_blocks(weight.values.T)
        unit = min(fp8.BLOCK, weight.layout.interleave or fp8.BLOCK)
        return Weight(values, Fp8(fp8.BLOCK, activations), weight.layout, fp8.finer(scales, len(values), unit))

    def stack(weight):
        values, scales = (_quantise_outputs if by_output else _quantise_stack)(weight.values)
        return weight.replace(values=values, scales=scales, format=Fp8(None if by_output else fp8.BLOCK))

    of = {name: quantised for name in ("qkv", "qkvz", "latents", "out", "gate_up", "down")}
    of |= {f"{name}_{part}": stack for name in ("experts", "shared") for part in ("gate_up", "down")}
    return [layer | {name: of[name](layer[name]) for name in of if name in layer} for layer in layers]


@pytest.mark.parametrize(
    "family,width,by_output,activations",
    [
        rare("qwen3", 1408, False, False),
        rare("llama", 256, False, False),
        rare("llama", 256, True, False),
        rare("qwen3_moe", 1408, False, False),
        rare("qwen3", 1152, False, True),
        ("llama", 256, False, True),
        rare("llama", 256, True, True),
        rare("qwen3_moe", 1408, False, True),
    ],
)
def test_layers_in_fp8_are_those_of_the_model(monkeypatch, family, width, by_output, activations):
    sizes = dict(hidden_size=width, intermediate_size=128, num_hidden_layers=2) | EXPERTS.get(family, {})
    if family == "qwen3_moe":
        sizes["num_experts_per_tok"] = sizes["num_experts"]  # a near-tie would have a row choose others
    config, params = small_model(family, **sizes)
    params["layers"] = in_fp8(params["layers"], by_output, activations)
    tolerance = 5e-2 if activations else 2e-2  # a last bit of a row may round it to another e4m3 number
    rows = two_requests()
    expected = forward(config, params, rows)
    take_few_rows(monkeypatch)
    calls = take_mixtures(monkeypatch)
    assert_same_forward(forward(config, params, rows), expected, rows, tolerance)
    assert set(calls) == ({"add", "router"} if family == "qwen3_moe" else set())


GLM = dict(
    hidden_size=1152, intermediate_size=192, head_dim=128, num_hidden_layers=2, attention_bias=True,
    n_routed_experts=8, num_experts_per_tok=8, moe_intermediate_size=64, n_group=1, topk_group=1,
)  # fmt: skip


@pytest.mark.exhaustive  # Llama's layers in FP8, above, and heads of which half rotates, in test_few_rows*.py
@pytest.mark.parametrize("qk_norm,activations", [(True, False), (True, True), (False, True), (False, None)])
def test_layers_of_glm_are_those_of_the_model(monkeypatch, qk_norm, activations):
    """Half of each head rotates. In FP8 the first layer's MLP, of half a block of inputs more, stays the plain layer's;
    `activations` None: unquantised."""
    config, params = small_model("glm4_moe", **GLM, use_qk_norm=qk_norm)
    if activations is not None:
        params["layers"] = in_fp8(params["layers"], True, activations)
    rows, products = two_requests(), matmul_module.PRODUCTS
    expected = forward(config, params, rows)
    take_few_rows(monkeypatch)
    monkeypatch.setattr(matmul_module, "PRODUCTS", products)
    monkeypatch.setattr(forward_module, "PATHS", forward_module.PATHS[:1])
    calls = take_mixtures(monkeypatch)
    assert_same_forward(forward(config, params, rows), expected, rows, 5e-2 if activations else 2e-2)
    assert calls == ["add"]


def test_an_mlp_that_kernels_cannot_take_is_plain_beside_mixtures_alone():
    call = Call(1, 1, "bfloat16", processors=132)
    config, params = small_model("glm4_moe", **GLM)
    layers = in_fp8(params["layers"], by_output=True)
    refuses = lambda layers, **more: FEW_ROWS.refuses(config.decoder, layers, dataclasses.replace(call, **more))  # noqa: E731
    assert refuses(layers) is None is refuses(layers, requests=32) is refuses(params["layers"])
    assert "40 rows of 1152" in refuses(layers, requests=40)
    config, params = small_model(hidden_size=1152, intermediate_size=192)
    assert "192" in refuses(in_fp8(params["layers"], by_output=True))
    config, params = small_model("glm4_moe", **GLM | {"partial_rotary_factor": 0.25})
    assert "32 of 128 columns rotated; supported: 64 and 128" in refuses(params["layers"])


def packed(weight, kind):
    """A weight in four bits."""
    values, scales, *factors = kind.quantise(weight.values.T.astype(jnp.float32))
    return Weight(values, kind, weight.layout, scales, factors[0] if factors else None)


@pytest.mark.parametrize("kind", [Int4(128), rare(Int4(32)), Nvfp4()])
def test_layers_in_four_bits_fit(kind):
    """But none whose inputs are in an order of their own."""
    config, params = small_model(hidden_size=256, intermediate_size=256, num_attention_heads=4)
    layers = [
        {name: packed(each, kind) if isinstance(each, Weight) else each for name, each in layer.items()}
        for layer in params["layers"]
    ]
    call = Call(2, 4, "bfloat16", processors=132)
    refuses = lambda layers, call: FEW_ROWS.refuses(config.decoder, layers, call)  # noqa: E731
    assert refuses(layers, call) is None and refuses(layers, dataclasses.replace(call, requests=8)) is None
    assert "40 rows of 256" in refuses(layers, dataclasses.replace(call, requests=10))
    ordered = layers[0] | {"out": layers[0]["out"].replace(order=jnp.arange(256))}
    assert "inputs in an order of their own" in refuses([ordered, *layers[1:]], call)


def in_several_formats(width: int):
    """A small model with some weights of four bits beside dequantised ones, as GGUF's Q4_K_M, and beside FP8."""
    config, params = small_model(hidden_size=width, intermediate_size=256, num_attention_heads=4, num_hidden_layers=1)
    (layer,) = params["layers"]
    layer |= {"out": packed(layer["out"], Int4(32)), "gate_up": packed(layer["gate_up"], Nvfp4())}
    layer["down"] = in_fp8([{"down": layer["down"]}], activations=True)[0]["down"]
    return config, params


@pytest.mark.parametrize("width", [256, rare(1280)])
def test_weights_of_a_stack_may_be_in_several_formats(monkeypatch, width):
    config, params = in_several_formats(width)
    expected = forward(config, params, one_request())
    take_few_rows(monkeypatch)
    monkeypatch.setattr(forward_module, "PATHS", forward_module.PATHS[:1])
    assert_same_forward(forward(config, params, one_request()), expected, one_request(), 3e-2)


def test_fp8_layers_that_do_not_fit_are_named():
    config, params = small_model(hidden_size=256, intermediate_size=128)
    call = Call(2, 4, "bfloat16", processors=132)
    refuses = lambda layers, call: FEW_ROWS.refuses(config.decoder, layers, call)  # noqa: E731
    layers = in_fp8(params["layers"])
    assert refuses(layers, call) is None
    assert refuses(layers, dataclasses.replace(call, requests=8)) is None
    assert "40 rows of 256; supported: up to 32" in refuses(layers, dataclasses.replace(call, requests=10))
    assert "rows of 256 divided" in refuses(layers, dataclasses.replace(call, devices=2))
    assert "16 rows over 2 devices; supported: up to 8" in untimed(16, 2)
    assert untimed(8, 2) is None is untimed(16, 1)
    by_tensor = [layers[0] | {"out": layers[0]["out"].replace(format=Fp8(None))}, *layers[1:]]
    assert "128 outputs and all inputs" in refuses(by_tensor, call)
    assert refuses(in_fp8(params["layers"], by_output=True), call) is None


def small_hybrid(family: str, hidden_size: int = 64, **sizes):
    """Config and parameters of a small hybrid whose products the kernels take: columns are multiples of 64."""
    given = dict(
        hidden_size=hidden_size, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=64
    )
    given |= dict(linear_num_key_heads=8, linear_key_head_dim=8, linear_num_value_heads=32, linear_value_head_dim=8)
    if family == "qwen3_5_moe":
        given |= dict(num_experts=64, num_experts_per_tok=4, moe_intermediate_size=8)
    config = ModelConfig.from_hf(tiny_config(family, **(given | sizes)))
    return config, dummy(MODELS[family].tensors(config.decoder), "bfloat16", seed=0)


def hybrid_round(config, params, t: int, requests: int, jit: bool = True):
    """A round of `t` rows of one request, after one of as many of which one was accepted; of `requests`, all others
    idle: the last hidden states, keys and values, and states of the one."""
    table = jnp.zeros((requests, 2), jnp.int32).at[0].set(jnp.array([1, 2]))
    cache = empty_cache(config, PageLayout(3, PAGE, "bfloat16"), 2, t, "bfloat16")
    slots, first = jnp.ones(requests, jnp.int32).at[0].set(0), jnp.arange(requests) == 0

    def run(params, cache, tokens, start, replay):
        rows = Rows(jnp.where(first, start, 0), jnp.where(first, t, 0), table)
        mixer, tokens = RoundRows(rows, slots, jnp.where(first, replay, 0)), jnp.where(first[:, None], tokens, 0)
        return forward_module.forward(config.decoder, params, tokens, rows.marked_positions(t), mixer, cache, (1,))

    run = jax.jit(run) if jit else run  # params aren't constants, which take longer to compile
    for i in range(2):
        hidden = run(params, cache, 7 + 5 * i + np.arange(t), 3 + i, i)
        jax.block_until_ready(hidden)  # before more is queued behind
        cache = hidden.cache
    states = [leaf[:, 0] for leaf in jax.tree.leaves(cache.states)]
    return hidden.last[0], hidden.features[0][0], cache.kv[0][:, 1:], *states


@pytest.mark.exhaustive
@pytest.mark.parametrize("family,t", [("qwen3_5", 1), ("qwen3_5", 3), ("qwen3_5_moe", 1), ("qwen3_5_moe", 4)])
def test_a_hybrids_single_request_is_what_it_is_among_idle_ones(monkeypatch, family, t):
    """Rows that fill up a request's to eight are seen by nobody. Of a mixture, they are left out before its experts."""
    config, params = small_hybrid(family)
    plain = hybrid_round(config, params, t, 1)
    take_few_rows(monkeypatch)
    counted, recur = [], RoundRows.recur

    def anything(*given):  # in rows that fill up
        read, cache = recur(*given)
        return read.at[:, t:].set(jnp.nan), cache

    monkeypatch.setattr(RoundRows, "recur", anything)
    mixed = feed.experts_mlp

    def count(rows, *rest, tokens, **named):
        counted.append(len(rows[:tokens]))
        return mixed(rows, *rest, tokens=tokens, **named)

    monkeypatch.setattr(feed, "experts_mlp", count)
    alone, among = (hybrid_round(config, params, t, requests) for requests in (1, 8 // t))
    assert set(counted) == ({t, 8 // t * t} if family == "qwen3_5_moe" else set())
    for got, padded, expected in zip(alone, among, plain, strict=True):
        assert got.shape == expected.shape
        assert_close(got, padded, 1e-5)
        assert_close(got, expected, 2e-2)


NEMOTRON = dict(
    hybrid_override_pattern="M-EM*", n_groups=8, ssm_state_size=16, mamba_num_heads=64, mamba_head_dim=8,
    n_routed_experts=64, num_experts_per_tok=4, moe_intermediate_size=64, moe_shared_expert_intermediate_size=128,
    moe_latent_size=None,
)  # fmt: skip


@pytest.mark.parametrize("width,t", [(64, 1), rare(17 * 64, 1), rare(64, 4), rare(17 * 64, 3)])
def test_layers_that_only_mix_or_only_feed_are_those_of_the_model(monkeypatch, width, t):
    """Nemotron's: a norm is in one kernel with the products after it, whichever layer they are in."""
    config, params = small_hybrid("nemotron_h", width, **NEMOTRON)
    expected = hybrid_round(config, params, t, 1)
    take_few_rows(monkeypatch)
    run = mamba2.NORM[-1].run

    def anything(m, read, *rest):  # in rows that fill up
        return run(m, read, *rest).at[:, read.shape[1] :].set(jnp.nan)

    monkeypatch.setattr(mamba2, "NORM", (dataclasses.replace(mamba2.NORM[-1], run=anything),))
    before = KERNELS["few_rows_normed"], KERNELS["few_rows_add"]
    got = hybrid_round(config, params, t, 1)
    assert KERNELS["few_rows_normed"] > before[0]
    for one, other in zip(got, expected, strict=True):
        assert_close(one, other, 2e-2)


@pytest.mark.exhaustive  # scaled rows and a hybrid's layers by themselves are in the tests above
def test_a_wide_hybrids_router_takes_scaled_rows(monkeypatch):
    config, params = small_hybrid("qwen3_5_moe", 17 * 64)
    expected = hybrid_round(config, params, 4, 1)
    take_few_rows(monkeypatch)
    for one, other in zip(hybrid_round(config, params, 4, 1), expected, strict=True):
        assert_close(one, other, 2e-2)


@pytest.mark.parametrize(
    "family,t,requests",
    [rare("qwen3_5", 3, 1), rare("qwen3_5_moe", 3, 1), rare("qwen3_5", 4, 6), rare("qwen3_5_moe", 4, 8)],
)
def test_a_hybrid_in_fp8_is_the_model(monkeypatch, family, t, requests):
    """Its rows come scaled from one kernel to the next, up to 32 of them."""
    config, params = small_hybrid(family, 1408, intermediate_size=128)
    params["layers"] = in_fp8(params["layers"])
    expected = hybrid_round(config, params, t, requests)
    take_few_rows(monkeypatch)
    for one, other in zip(hybrid_round(config, params, t, requests), expected, strict=True):
        assert_close(one, other, 2e-2)


def test_a_hybrid_in_fp8_that_does_not_fit_is_named():
    config, params = small_hybrid("qwen3_5", 256, intermediate_size=128)
    layers, call = in_fp8(params["layers"]), Call(1, 3, "bfloat16", processors=132)
    assert FUSED_NORMS.refuses(config.decoder, params["layers"], call) is None
    assert FUSED_NORMS.refuses(config.decoder, layers, call) == "an MLP 128 wide, of rows of 256"


def small_drafter(method: str, **sizes):
    """An EAGLE-3 or a DFlash drafter with heads of 64, or an MTP module, and its parameters."""
    if method == "mtp":
        target, _ = small_hybrid("qwen3_5")
        config = mtp.module_config(target)
        own = dummy(mtp.parameters(config), "bfloat16", seed=0)
        embed = normal(jax.random.key(6), config.vocab_size, config.hidden_size)
        return mtp.Mtp(config, "bfloat16", (2,), 3), own | {"embed": embed, "head": {"embed": embed}}
    config, params = small_model("qwen3" if method == "dflash" else "llama", num_key_value_heads=2, **sizes)
    d = config.hidden_size
    fc = Weight(0.05 * normal(jax.random.key(5), 3 * d, d))
    head = {"embed": normal(jax.random.key(6), config.vocab_size, d)}
    if method == "dflash":
        context = dflash.context_projection(config, params["layers"])
        return dflash.DFlash(config, 3, 5, (False, True), 4), {
            **params, **head, **context, "fc": fc, "hidden_norm": 1 + 0.1 * normal(jax.random.key(7), d)
        }  # fmt: skip
    layer = params["layers"][0] | {"hidden_norm": 1 + 0.1 * normal(jax.random.key(7), d)}
    layer["qkv"] = jax.tree.map(lambda values: jnp.concatenate([values, values[::-1]]), layer["qkv"])
    own = {"fc": fc, "layer": layer, "norm": params["norm"], "head": head, **head}
    return eagle.Eagle3(config, "bfloat16"), own


def drafted(drafter, params):
    """Draft for two requests after a commit of a few tokens; also the pages then."""
    width, history = drafter.num_draft_tokens + 1, jnp.arange(64).reshape(2, 32)
    slots = empty_slots(2, 32).replace(length=jnp.array([4, 18, 1]), done=jnp.array([False, False, True]))
    slots = jax.tree.map(lambda x: x[:2], slots)
    table = jnp.array([[1, 2], [3, 4]])
    batch = DraftBatch(jnp.arange(2), slots.length, history, table, ~slots.done, slots.sampling, greedy=True)
    features = tuple(normal(jax.random.key(i), 2, width, drafter.config.hidden_size) for i in range(3))
    state = drafter.init_state(PageLayout(5, PAGE, "bfloat16"), 3)
    known, accepted = jnp.arange(2 * width).reshape(2, width), jnp.array([2, width])
    state = drafter.commit(params, state, batch, Verified(known, known + 1, accepted, features))
    proposal, state = drafter.propose(params, state, batch.replace(length=batch.length + accepted))
    return proposal, jax.tree.leaves(state)


def assert_same_drafts(got, few, expected, plain):
    """Proposals, and the drafter's state, but for the dummy page."""
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    assert_close(got.logits, expected.logits, 2e-2)
    for a, b in zip(few, plain, strict=True):
        assert_close(a[:, 1:] if a.ndim == 6 else a, b[:, 1:] if b.ndim == 6 else b, 2e-2)


def narrow_eagle_in_fp8():
    """Its two inputs side by side are wider than rows that come scaled, though neither is."""
    drafter, params = small_drafter("eagle3", hidden_size=640, intermediate_size=128)
    return drafter, params | {"layer": in_fp8([params["layer"]])[0]}


def test_a_narrow_eagle_in_fp8_takes_few_rows(monkeypatch):
    (drafter, params), before = narrow_eagle_in_fp8(), KERNELS["few_rows_heads"]
    take_few_rows(monkeypatch)
    jax.eval_shape(partial(drafted, drafter), params)
    assert KERNELS["few_rows_heads"] > before


@pytest.mark.parametrize("method", [rare("eagle3"), rare("eagle3 in FP8"), rare("dflash"), rare("mtp")])
def test_drafts_are_those_of_plain_layers(monkeypatch, method):
    """Draft for two requests: chains with one row each and four after a round, DFlash with blocks of five."""
    drafter, params = narrow_eagle_in_fp8() if method == "eagle3 in FP8" else small_drafter(method)
    expected, state = jax.jit(partial(drafted, drafter))(params)
    take_few_rows(monkeypatch)
    got = jax.jit(partial(drafted, drafter))(params)  # traced anew; one program: on two cores its parts once got stuck
    assert_same_drafts(*got, expected, state)


def test_a_round_takes_them_where_there_are_kernels(monkeypatch):
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    config, params = small_model()
    rows, layout = Rows(jnp.zeros(8, int), jnp.ones(8, int), jnp.zeros((8, 1), int)), PageLayout(2, 64, "bfloat16")
    cache, mixer = Cache(layout.groups(config)), RoundRows(rows, jnp.arange(8), jnp.zeros(8, int))

    def run(cache):
        return forward_module.forward(
            config.decoder, params, jnp.zeros((8, 1), int), rows.marked_positions(1), mixer, cache
        )

    before = KERNELS["few_rows_heads"]
    assert kernels(run, cache) == 5  # attention's and four, however many layers
    assert KERNELS["few_rows_heads"] == before + 1


def test_what_cannot_run_is_named():
    bf16 = jnp.bfloat16
    assert op.supported(64, 64, (576, 576, 1536), bf16, bf16) is None
    assert op.supported(8, 64, (1024, 1024, 3072), bf16) is None
    assert op.supported(8, 64, (576, 576, 1536), bf16, "float8_e4m3fn") is None
    assert "pages in float32" in op.supported(8, 64, (576, 576, 1536), bf16, "float32")
    assert op.supported(8, 128, (4096, 4096, 12288), bf16) is None
    assert op.supported(8, 128, (2048, 4096), bf16) is None
    assert "for shared memory" in op.supported(8, 128, (5120, 5120, 17408), bf16)  # groups of eight, no ring of them
    assert op.supported(8, 128, (5120, 5120, 17408), bf16, fp8=True) is None
    assert op.supported(32, 128, (4096, 8192), bf16, fp8=True) is None  # a mixture's rows come scaled as well
    assert "heads of width 256" in op.supported(8, 256, (576, 576, 1536), bf16)
    assert "65 rows" in op.supported(65, 64, (576, 576, 1536), bf16)
    assert "16 rows of 2048" in op.supported(16, 64, (2048, 2048, 8192), bf16)
    assert "width 96" in op.supported(8, 64, (576, 576, 96), bf16)
    assert "shared memory" in op.supported(64, 64, (1024, 1024, 3072), bf16)


def test_models_that_keep_the_plain_layers():
    config, params = small_model()
    refuses = lambda config, params, call: FEW_ROWS.refuses(config.decoder, params["layers"], call)  # noqa: E731
    call = Call(3, 3, "bfloat16", processors=132)
    assert refuses(config, params, call) is None
    assert "no pages" in refuses(config, params, dataclasses.replace(call, pages=None))
    assert "float32" in refuses(config, params, dataclasses.replace(call, pages="float32"))
    assert refuses(config, params, dataclasses.replace(call, processors=0)) == NO_HOPPER
    assert "64 rows of a request" in refuses(config, params, dataclasses.replace(call, rows=64))
    assert refuses(*small_model(attention_bias=True), call) is None
    assert "Mlp.bias=True" in refuses(*small_model(mlp_bias=True), call)
    assert "80 wide" in refuses(*small_model(intermediate_size=80), call)
