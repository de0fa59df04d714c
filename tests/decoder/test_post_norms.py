"""The path of few rows for layers with norms behind sub-layers: the plain layers' numbers, and what it refuses."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.mixers import AttentionRows, Cache
from jaxspec.cache.paged import PageLayout
from jaxspec.checkpoint.params import dummy
from jaxspec.decoder import forward as forward_module
from jaxspec.decoder import post_norms as path
from jaxspec.decoder.path import NO_HOPPER, Call
from jaxspec.decoder.post_norms import heads
from jaxspec.models.families import MODELS
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import Int4, Nvfp4, Weight
from jaxspec.pallas.attention import write_heads
from jaxspec.pallas.dense import few_rows, post_norm
from jaxspec.pallas.hopper import counting
from tests.decoder.test_few_rows_layers import in_fp8, packed, rounds, small_model, with_biases
from tests.pallas.dense.test_few_rows import INTERPRET, PAGE
from tests.support import drawn
from tests.support.kernels import assert_close
from tests.support.operations import anywhere
from tests.support.sample import rare
from tests.support.tiny import GEMMA4_ALL, tiny_config

SIZES = dict(hidden_size=128, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=128)
EXPERTS = dict(enable_moe_block=True, num_experts=8, top_k_experts=8, moe_intermediate_size=32)  # a near-tie: all
INPUTS = {name: value for name, value in GEMMA4_ALL.items() if name not in EXPERTS}
INPUTS |= dict(hidden_size_per_layer_input=64, vocab_size_per_layer_input=64)
GEMMA4 = dict(global_head_dim=256, num_global_key_value_heads=1)


def small(family: str, **overrides):
    """Config and parameters of a small model, whose norms and numbers aren't one."""
    config = ModelConfig.from_hf(tiny_config(family, **(SIZES | overrides)))
    params = with_biases(dummy(MODELS[family].tensors(config.decoder), "bfloat16", seed=0))
    for i, layer in enumerate(params["layers"]):
        for j, name in enumerate(name for name in sorted(layer) if name.endswith(("norm", "_scale"))):
            noise = drawn.normal(jax.random.key(50 * i + j), layer[name].shape, layer[name].dtype)
            layer[name] = layer[name] + 0.2 * noise
    return config, params


def forward(config, params, rows):
    """Three rows of each of three requests: the states of valid rows, and pages but the dummy."""
    empty = PageLayout(5, PAGE, "bfloat16").groups(config)
    cache = Cache(tuple(0.5 * drawn.normal(jax.random.key(i), kv.shape, kv.dtype) for i, kv in enumerate(empty)))
    tokens, positions = jnp.arange(9).reshape(3, 3), rows.marked_positions(3)
    hidden = forward_module.forward(config.decoder, params, tokens, positions, AttentionRows(rows), cache, (0, 1))
    valid = np.arange(3) < np.asarray(rows.count)[:, None]
    states = [np.asarray(each)[valid] for each in (hidden.last, *hidden.features)]
    return states, [kv[:, 1:] for kv in hidden.cache.kv]


def take_kernels(monkeypatch) -> None:
    """The path's kernels serve from here on, interpreted, and no other path does."""
    monkeypatch.setattr(forward_module, "PATHS", (dataclasses.replace(path.POST_NORMS, processors=0),))
    monkeypatch.setattr(heads, "HEADS", anywhere(heads.HEADS))
    interpreted = (few_rows, "gated"), (few_rows, "normed"), (few_rows, "product")
    for module, name in (*interpreted, (post_norm, "post_norm"), (write_heads, "write_heads")):
        monkeypatch.setattr(module, name, partial(getattr(module, name), **INTERPRET))


def check(monkeypatch, config, params, tree: bool = False, tolerance: float = 2e-2):
    """Compare the path with the plain one; returns how often it called each kernel."""
    rows = rounds(tree)
    expected = forward(config, params, rows)
    take_kernels(monkeypatch)
    with counting() as took:
        got = forward(config, params, rows)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_close(one, other, tolerance)
    return took


# Kernels of a layer; those that are alike are traced once. Not of all heads does `write_heads` take any.
LAYER = dict(few_rows_normed=1, write_heads=1, few_rows_product=2, post_norm=2, few_rows_gated=1)
BY_XLA = {name: count for name, count in LAYER.items() if name != "write_heads"}
DENSE = {name: 2 * count for name, count in LAYER.items()}
WITH_INPUTS = {**{name: 4 * count for name, count in LAYER.items()}, "few_rows_product": 16, "post_norm": 12}


@pytest.mark.parametrize("family,own,kernels,tree", [
    rare("gemma3", dict(head_dim=256, num_key_value_heads=1), DENSE, True),
    rare("gemma4", GEMMA4, DENSE, True),
    rare("gemma4", GEMMA4 | EXPERTS, DENSE | {"few_rows_normed": 4}, False),
    ("gemma4", INPUTS | {"global_head_dim": 128}, WITH_INPUTS | {"write_heads": 2}, False),  # of four, two share theirs
    ("olmo2", {}, BY_XLA, False),
    rare("olmo3", {}, BY_XLA, False),
    rare("exaone4", {}, DENSE, False),
    rare("glm4", dict(partial_rotary_factor=0.5, attention_bias=True), BY_XLA, True),
])  # fmt: skip
def test_layers_are_those_of_the_model(monkeypatch, family, own, kernels, tree):
    config, params = small(family, **own)
    assert check(monkeypatch, config, params, tree, 3e-2 if "num_kv_shared_layers" in own else 2e-2) == kernels


@pytest.mark.parametrize("kind", [rare("fp8"), rare("fp8 rows"), Int4(128), rare(Nvfp4())])
def test_a_layer_with_quantised_weights_is_the_models(monkeypatch, kind):
    config, params = small("gemma4", num_hidden_layers=1, hidden_size=256, intermediate_size=256, global_head_dim=128)
    (layer,), tolerance = params["layers"], 2e-2
    if isinstance(kind, str):
        params["layers"] = in_fp8([layer], activations="rows" in kind)
        tolerance = 1e-1 if "rows" in kind else tolerance  # a last bit may round a row to another e4m3 number
    else:
        dense = ("qkv", "out", "gate_up", "down")
        params["layers"] = [layer | {name: packed(layer[name], kind) for name in dense}]
    assert check(monkeypatch, config, params, tolerance=tolerance) == LAYER


def refusal(config, params, **call):
    given = dict(requests=1, rows=1, pages="bfloat16", processors=132) | call
    return path.POST_NORMS.refuses(config.decoder, params["layers"], Call(**given))


def test_what_it_cannot_run_is_named():
    config, params = small("gemma4", **GEMMA4)
    assert refusal(config, params) is None is refusal(config, params, requests=8)
    assert refusal(config, params, processors=0) == NO_HOPPER
    assert "divided among 2 devices" in refusal(config, params, devices=2)
    assert "rows with adapters" in refusal(config, params, adapters=True)
    assert "64 rows of a request" in refusal(config, params, rows=64)
    assert "a layer by itself" in refusal(config, params, inputs=(128,))
    assert "40 rows" in refusal(config, params, requests=40)
    wide = small("gemma3", hidden_size=1152, num_hidden_layers=2)
    assert refusal(*wide, requests=8) is None
    assert "16 rows for 1152 columns; supported: up to 8" in refusal(*wide, requests=16)
    assert "rows of 192" in refusal(*small("gemma3", hidden_size=192))
    assert "an MLP 80 wide" in refusal(*small("gemma3", intermediate_size=80))
    assert "Mlp.bias=True" in refusal(*small_model(mlp_bias=True))
    assert refusal(*small_model()) == "layers without norms behind their sub-layers"
    last = lambda config, **fields: dataclasses.replace(config.decoder, layers=(  # noqa: E731
        *config.decoder.layers[:-1], dataclasses.replace(config.decoder.layers[-1], **fields)
    ))  # fmt: skip
    changed = lambda config, **fields: dataclasses.replace(config, decoder=last(config, **fields))  # noqa: E731
    norm = dataclasses.replace(config.decoder.norm, eps=1.0)
    assert refusal(changed(config, norm=norm), params) == "layers whose norms differ"
    assert refusal(changed(config, pre_norm=False), params) == "norms before some layers alone"
    experts, weights = small("gemma4", **GEMMA4 | EXPERTS)
    alone = dataclasses.replace(experts.decoder.layers[-1].feed, beside=None)
    assert refusal(changed(experts, feed=alone), weights) == "a mixture without an MLP beside it"


def test_every_norm_and_the_router_are_those_that_kernels_take():
    experts, inputs = small("gemma4", **GEMMA4 | EXPERTS), small("gemma4", **INPUTS)
    assert refusal(*experts) is None is refusal(*inputs)

    def refused(config, params, name, change):
        first, *rest = params["layers"]
        return refusal(config, {"layers": [first | {name: change(first[name])}, *rest]})

    first, wider = experts[1]["layers"][0], lambda array: array.astype("float32")
    norms = [name for name in first if name.endswith("norm") and name not in ("q_norm", "k_norm")]
    assert len(norms) == 8
    for case in [(*experts, name) for name in norms] + [(*inputs, name) for name in ("input_norm", "layer_scale")]:
        assert refused(*case, wider) == "rows or norms in float32; supported: bfloat16"
    assert "weights in float32" in refused(*experts, "router", lambda router: jax.tree.map(wider, router))
    many = Weight(jax.ShapeDtypeStruct((128, 2**17), jnp.bfloat16))
    assert "131072 columns" in refused(*experts, "router", lambda _: many)
