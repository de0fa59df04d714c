"""The kernels of a small model's layer: interpreted against plain layers, lowered for CUDA, and where they serve."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.batch import empty_slots
from jaxspec.cache import PageLayout, Rows
from jaxspec.checkpoint.params import dummy
from jaxspec.config import ModelConfig
from jaxspec.decoder import forward as forward_module
from jaxspec.decoder import layer as equations
from jaxspec.decoder import matmul as matmul_module
from jaxspec.decoder.few_rows import FEW_ROWS
from jaxspec.decoder.functions import centred_rms_norm, cos_sin, rms_norm, rope
from jaxspec.decoder.fused_norms import FUSED_NORMS
from jaxspec.decoder.matmul import gate
from jaxspec.decoder.path import Call
from jaxspec.decoder.spec import Attention, Rope
from jaxspec.draft import DraftBatch, Verified
from jaxspec.drafters import dflash, eagle, mtp
from jaxspec.mixers import Cache, RoundRows, empty_cache
from jaxspec.models import MODELS, llama
from jaxspec.pallas import few_rows as op
from jaxspec.pallas import hopper
from jaxspec.pallas.few_rows import top
from jaxspec.pallas.few_rows.share import share_out
from jaxspec.pallas.hopper import KERNELS
from jaxspec.weights import HALF, Weight
from tests.test_weight_stream import assert_close
from tests.tiny import tiny_config

EPS, LAYERS, PAGE = 1e-5, 2, 16
INTERPRET = {"interpret": plgpu.InterpretGPUParams()}
SMOLLM2 = dict(d=576, heads=9, kv_heads=3, f=1536)
QWEN3 = dict(d=4096, heads=32, kv_heads=8, f=12288, width=128)
MIXTURE = dict(d=2048, heads=32, kv_heads=4, f=768, width=128)


def normal(key, *shape):
    return jax.random.normal(key, shape).astype(jnp.bfloat16)


def rotating(width: int) -> Attention:
    """The description that rope tables are made from."""
    return Attention(1, 1, width, Rope(1e4))


def operands(
    rows: int, d: int = 192, heads: int = 2, kv_heads: int = 1, f: int = 128, width: int = 64
) -> dict[str, jax.Array]:
    """Of all operations; rows stand in scattered slots of pages, but for the third, which is padding."""
    keys = iter(jax.random.split(jax.random.key(rows), 10))
    position = jax.random.randint(next(keys), (rows,), 0, 500)
    cos, sin = cos_sin(position, rotating(width))
    return dict(
        x=normal(next(keys), rows, d),
        scale=(1 + 0.1 * normal(next(keys), d)),
        qkv=normal(next(keys), d, (heads + 2 * kv_heads) * width) * d**-0.5,
        gate_up=normal(next(keys), d, 2 * f) * d**-0.5,
        hidden=normal(next(keys), rows, f),
        down=normal(next(keys), f, d) * f**-0.5,
        cos=cos,
        sin=sin,
        position=position,
        kv=normal(next(keys), LAYERS, 2 + rows // PAGE, 2, kv_heads, PAGE, width),
        place=(PAGE + jax.random.permutation(next(keys), rows)).at[2].set(-1).astype(jnp.int32),
        norms=1 + 0.1 * normal(next(keys), LAYERS, width),
    )


def head_operands(given: dict[str, jax.Array], inputs: int, normed: bool) -> tuple:
    """Of `heads`: one or two inputs side by side, or none but what is `Scaled`; norms of queries and keys, or none."""
    rows, scales = [given["x"], given["x"][::-1]][:inputs], [given["scale"], given["scale"][::-1]][:inputs]
    if not inputs:
        (rows, scales), inputs = ([each] for each in op.scale_rows(given["x"], given["scale"])), 1
    weight = jnp.concatenate([given["qkv"], given["qkv"][::-1]][:inputs]) * inputs**-0.5
    norms = list(given["norms"]) if normed else []
    return rows, scales, weight, given["cos"], given["sin"], given["kv"], jnp.int32(1), given["place"], norms


def check_heads(given: dict[str, jax.Array], inputs: int = 1, normed: bool = False, **options):
    operands = head_operands(given, inputs, normed)
    q, kv = op.heads(*operands, [given["gate_up"]], eps=EPS, **options)
    rows, (kv_heads, _, width) = len(given["x"]), given["kv"].shape[3:]
    pairs = zip(*operands[:2], strict=True) if inputs else [(given["x"], given["scale"])]
    x = jnp.concatenate([rms_norm(*each, EPS) for each in pairs], axis=1)
    qkv = (x @ operands[2]).reshape(rows, 1, -1, width)
    turned = qkv[:, :, :-kv_heads]
    if normed:
        turned = jnp.split(turned, [turned.shape[2] - kv_heads], axis=2)
        turned = jnp.concatenate([rms_norm(*each, EPS) for each in zip(turned, given["norms"], strict=True)], axis=2)
    turned = rope(turned, given["position"][:, None], rotating(width))[:, 0]
    assert_close(q, turned[:, :-kv_heads].reshape(rows, -1))
    new = jnp.stack([turned[:, -kv_heads:], qkv[:, 0, -kv_heads:]], axis=1)
    assert_written(given, kv, [1], new[:, None])


def check_keys_values(given: dict[str, jax.Array], **options):
    kv_heads, norm = given["kv"].shape[3], given["norms"][::-1]
    weight = jnp.concatenate([given["qkv"][:, -2 * kv_heads * 64 :], given["qkv"][::-1, -2 * kv_heads * 64 :]], axis=1)
    of = [given[name] for name in ("x", "scale")], [given[name] for name in ("cos", "sin", "kv", "place")]
    kv = op.keys_values(*of[0], weight, *of[1], norm, eps=EPS, **options)
    both = (rms_norm(given["x"], given["scale"], EPS) @ weight).reshape(-1, LAYERS, 2, kv_heads, 64)
    k = rms_norm(both[:, :, 0], norm[:, None], EPS)
    k = rope(k, given["position"][:, None], rotating(64))
    assert_written(given, kv, range(LAYERS), jnp.stack([k, both[:, :, 1]], axis=2))


def assert_written(given, kv, layers, new):
    """That the pages have these keys and values, [rows, layers, 2, heads, 64], and what they had before."""
    real = given["place"] >= 0
    page = jnp.where(real, given["place"] // PAGE, len(given["kv"][0]))
    expected = given["kv"]
    for i, layer in enumerate(layers):
        expected = expected.at[layer, page, :, :, given["place"] % PAGE].set(new[:, i], mode="drop")
    changed = np.asarray(expected != given["kv"]).any(axis=-1)
    np.testing.assert_array_equal(np.asarray(kv)[~changed], np.asarray(expected)[~changed])
    assert_close(np.asarray(kv)[changed], np.asarray(expected)[changed])


def check_gated(given: dict[str, jax.Array], scaled: bool = False, **options):
    rows = op.scale_rows(given["x"], given["scale"]) if scaled else (given["x"], given["scale"])
    got = op.gated(*rows, given["gate_up"], [given["down"]], eps=EPS, **options)
    assert_close(got, gate(rms_norm(given["x"], given["scale"], EPS) @ given["gate_up"], HALF))


def check_normed(given: dict[str, jax.Array], centred: bool = False, scaled: bool = False, **options):
    """Products with weights of several widths, one of them in float32, and the rows themselves."""
    weights = [given["gate_up"], given["qkv"], given["gate_up"][:, :64]]
    scale = given["scale"] - 1 if centred else given["scale"]
    dtypes = ("bfloat16", "bfloat16", "float32")
    of = op.scale_rows(given["x"], scale, centred) if scaled else (given["x"], scale)
    *got, rows = op.normed(*of, weights, eps=EPS, dtypes=dtypes, centred=centred, keep=True, **options)
    norm = (centred_rms_norm if centred else rms_norm)(given["x"], scale, EPS)
    assert_close(rows, norm)
    for one, weight, dtype in zip(got, weights, dtypes, strict=True):
        assert_close(one, jnp.matmul(norm, weight, preferred_element_type=dtype))


def check_add(given: dict[str, jax.Array], **options):
    got = op.add_product(given["x"], given["hidden"], given["down"], **options)
    assert_close(got, given["x"] + given["hidden"] @ given["down"])


def check_scaled(given: dict[str, jax.Array], centred: bool = False, **options):
    """The sum is what it is alone, and the rest what `scale_rows` makes of it."""
    of = given["x"], given["hidden"], given["down"], given["scale"]
    got, scaled = op.add_product(*of, centred=centred, **options)
    alone = op.add_product(given["x"], given["hidden"], given["down"], **options)
    np.testing.assert_array_equal(got, alone)
    expected = op.scale_rows(got, given["scale"], centred)
    np.testing.assert_array_equal(scaled.rows, expected.rows)
    np.testing.assert_allclose(scaled.squares, expected.squares, rtol=1e-5)


def check_product(given: dict[str, jax.Array], **options):
    rows = [given["x"], given["x"][::-1], given["x"] ** 2]
    weight = jnp.concatenate([given["gate_up"], given["gate_up"][::-1], -given["gate_up"]])
    got = op.product(rows, weight, **options)
    assert_close(got, jnp.concatenate(rows, axis=1) @ weight)


def check_top_tokens(given: dict[str, jax.Array], vocab: int, **options):
    """Where tokens share a row of the head, the first of them counts."""
    weight = normal(jax.random.key(3), vocab, given["x"].shape[1])
    weight = weight.at[:128].multiply(1.8)
    weight = weight.at[-128:].set(weight[:128])  # two tiles
    got = op.top_tokens(given["x"], given["scale"], weight, eps=EPS, **options)
    logits = jnp.einsum(
        "rd,vd->rv", rms_norm(given["x"], given["scale"], EPS), weight, preferred_element_type=jnp.float32
    )
    top = jnp.argmax(logits, axis=1)
    assert ((got == top) | (logits.max(1) - jnp.take_along_axis(logits, got[:, None], 1)[:, 0] < 1e-3)).all()
    assert (got < vocab - 128).all() and (got < 128).any() and len(set(got.tolist())) > 2


@pytest.mark.parametrize("rows,inputs,normed", [(8, 1, False), (24, 1, True), (8, 2, False), (40, 2, True)])
def test_heads(rows, inputs, normed):
    check_heads(operands(rows), inputs, normed, **INTERPRET)


@pytest.mark.parametrize("inputs", [0, 1])
def test_wide_heads_of_twice_the_width(inputs):
    check_heads(operands(8, d=2048, width=128), inputs, normed=True, splits=1, **INTERPRET)


def test_top_tokens(monkeypatch):
    """Blocks that take several tiles, and not all as many."""
    monkeypatch.setattr(top, "BLOCKS", 4)
    check_top_tokens(operands(16), 64 * 15, **INTERPRET)


def test_product_of_rows_side_by_side():
    check_product(operands(16), splits=1, **INTERPRET)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("centred", [False, True])
def test_products_of_one_norm(centred, scaled):
    check_normed(operands(8), centred, scaled, splits=1, **INTERPRET)


def test_keys_and_values_of_all_layers():
    check_keys_values(operands(8, kv_heads=2), **INTERPRET)


@pytest.mark.parametrize("rows", [8, 40])  # 40: more than are asked for at once
def test_gated(rows):
    check_gated(operands(rows), **INTERPRET)


@pytest.mark.parametrize("scaled", [False, True])
def test_gated_with_more_weights_than_shared_memory_holds(scaled):
    share = dataclasses.replace(share_out(8, [2048], 256, normed=not scaled), splits=1)
    assert share.slots < share.chunks
    check_gated(operands(8, d=2048), scaled, splits=1, **INTERPRET)


@pytest.mark.parametrize("rows", [8, 24])
def test_product_added(rows):
    check_add(operands(rows), splits=1, **INTERPRET)


@pytest.mark.parametrize("d", [192, 1024, 1088])  # of tiles far fewer than sums of squares, as many, and some fewer
def test_product_added_for_a_norm(d):
    check_scaled(operands(8, d=d), centred=d == 192, splits=1, **INTERPRET)
    check_gated(operands(8, d=d), scaled=True, splits=1, **INTERPRET)


def test_product_added_with_more_weights_than_shared_memory_holds():
    check_add(operands(8, f=2048), splits=1, **INTERPRET)


KERNELS_OF = {
    "heads": lambda of: op.heads(*head_operands(of, 1, False), [of["gate_up"]], eps=EPS),
    "normed heads": lambda of: op.heads(*head_operands(of, 1, True), eps=EPS),
    "heads of two": lambda of: op.heads(*head_operands(of, 2, False), eps=EPS),
    "keys and values": lambda of: op.keys_values(
        of["x"], of["scale"], of["qkv"], of["cos"], of["sin"], of["kv"], of["place"], of["norms"], eps=EPS
    ),
    "normed": lambda of: op.normed(
        of["x"],
        of["scale"],
        [of["gate_up"], of["qkv"], of["gate_up"][:, :64]],
        eps=EPS,
        keep=True,
        dtypes=("bfloat16", "bfloat16", "float32"),
    ),
    "gated": lambda of: op.gated(of["x"], of["scale"], of["gate_up"], [of["down"]], eps=EPS),
    "scaled heads": lambda of: op.heads(*head_operands(of, 0, True), eps=EPS),
    "scaled gated": lambda of: op.gated(*op.scale_rows(of["x"], of["scale"]), of["gate_up"], eps=EPS),
    "scaled normed": lambda of: op.normed(
        *op.scale_rows(of["x"], of["scale"]), [of["gate_up"][:, :128]], eps=EPS, keep=True, dtypes=("float32",)
    ),
    "scaled add": lambda of: op.add_product(of["x"], of["hidden"], of["down"], of["scale"]),
    "product": lambda of: op.product([of["x"]] * 3, jnp.concatenate([of["gate_up"]] * 3)),
    "top tokens": lambda of: op.top_tokens(of["x"], of["scale"], jnp.zeros((49152, 576), jnp.bfloat16), eps=EPS),
    "add": lambda of: op.add_product(of["x"], of["hidden"], of["down"]),
}


def lowered_kernels():
    """Each with the fewest and the most rows; of the most, heads take jax seconds to lay out, which two of them do."""
    for kernel in KERNELS_OF:
        yield kernel, 8
        slow = kernel in ("heads", "scaled heads", "heads of two")  # like "normed heads" and "keys and values"
        yield pytest.param(kernel, 32 if "two" in kernel else 64, marks=pytest.mark.exhaustive if slow else ())


@pytest.mark.parametrize("kernel,rows", list(lowered_kernels()))
def test_lowers_for_cuda(rows, kernel):
    """Of SmolLM2's sizes."""
    given = jax.eval_shape(lambda: operands(rows, **SMOLLM2))
    text = jax.jit(KERNELS_OF[kernel]).trace(given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
    "kernel",
    ["normed heads", "normed", "gated", "add", "scaled heads", "scaled normed", "scaled gated", "scaled add"],
)
@pytest.mark.parametrize("sizes", [QWEN3, MIXTURE], ids=["qwen3-8b", "qwen3-30b-a3b"])
def test_wide_layers_lower_for_cuda(sizes, kernel):
    given = jax.eval_shape(lambda: operands(8, **sizes))
    text = jax.jit(KERNELS_OF[kernel]).trace(given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


def small_model(family="llama", **overrides):
    """Config and parameters of a small model with heads of 64."""
    given = dict(hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    config = ModelConfig.from_hf(tiny_config(family, **(given | overrides)))
    return config, dummy(llama.tensors(config.decoder), "bfloat16", seed=0)


def rounds(tree: bool) -> Rows:
    """Three rows of each of three requests, the last of them idle and the second's last row padding."""
    rows = Rows(jnp.array([0, 15, 0]), jnp.array([3, 2, 0]), jnp.array([[1, 2], [3, 4], [0, 0]]))
    if not tree:
        return rows
    follows = jnp.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
    return rows.replace(depth=jnp.tile(jnp.array([0, 1, 1]), (3, 1)), mask=jnp.tile(follows, (3, 1, 1)))


def forward(config, params, rows: Rows):
    """Of three rows of each request, or four each of two."""
    kv = 0.5 * jax.random.normal(jax.random.key(1), PageLayout(5, PAGE, "bfloat16").kv(config).shape)
    tokens = jnp.arange(9).reshape(3, 3) if len(rows.count) == 3 else jnp.arange(8).reshape(2, 4)
    positions = rows.marked_positions(tokens.shape[1])
    return forward_module.forward(config.decoder, params, tokens, positions, rows, kv.astype("bfloat16"), (0, 2))


def assert_same_forward(got, expected, rows: Rows, tolerance: float):
    """Of real rows, and of pages but the dummy."""
    real = np.arange(got.last.shape[1]) < np.asarray(rows.count)[:, None]
    for a, b in zip((got.last, *got.features), (expected.last, *expected.features), strict=True):
        assert_close(np.asarray(a)[real], np.asarray(b)[real], tolerance)
    assert_close(got.cache[:, 1:], expected.cache[:, 1:], tolerance)


def take_few_rows(monkeypatch):
    """The kernels serve from here on, interpreted."""

    def chosen(reason, *_):
        assert reason is None, reason
        return True

    monkeypatch.setattr(forward_module, "hopper", SimpleNamespace(chosen=chosen, multiprocessors=lambda: 132))
    monkeypatch.setattr(matmul_module, "chosen", lambda reason, *_: reason is None)
    few = [dataclasses.replace(path, processors=0) for path in (FEW_ROWS, FUSED_NORMS)]
    monkeypatch.setattr(forward_module, "PATHS", few)
    monkeypatch.setattr(forward_module, "FEW_ROWS", few[0])
    whole = dict(heads={}, keys_values={}, gated={}, normed={}, top_tokens={})
    options = whole | dict(add_product={"splits": 1}, product={"splits": 1})
    for name, given in options.items():
        monkeypatch.setattr(op, name, partial(getattr(op, name), **given, **INTERPRET))


@pytest.mark.parametrize("family,tree", [("llama", False), ("llama", True), ("qwen3", False)])
def test_layers_are_those_of_the_model(monkeypatch, family, tree):
    config, params = small_model(family)
    expected = forward(config, params, rounds(tree))
    take_few_rows(monkeypatch)
    assert_same_forward(forward(config, params, rounds(tree)), expected, rounds(tree), 2e-2)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_wide_layers_are_those_of_the_model(monkeypatch, family):
    """Their rows come scaled from one kernel to the next; of a width whose inputs nothing divides."""
    experts = dict(num_experts=64, num_experts_per_tok=4, moe_intermediate_size=64) if family == "qwen3_moe" else {}
    config, params = small_model(family, hidden_size=17 * 64, num_hidden_layers=3, **experts)
    rows = Rows(jnp.array([0, 15]), jnp.array([4, 3]), jnp.array([[1, 2], [3, 4]]))
    expected = forward(config, params, rows)
    take_few_rows(monkeypatch)
    assert_same_forward(forward(config, params, rows), expected, rows, 2e-2)


def small_hybrid(family: str, hidden_size: int = 64):
    """Config and parameters of a small hybrid whose products the kernels take: columns are multiples of 64."""
    given = dict(
        hidden_size=hidden_size, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=64
    )
    given |= dict(linear_num_key_heads=8, linear_key_head_dim=8, linear_num_value_heads=32, linear_value_head_dim=8)
    if family == "qwen3_5_moe":
        given |= dict(num_experts=64, num_experts_per_tok=4)
    config = ModelConfig.from_hf(tiny_config(family, **given))
    return config, dummy(MODELS[family].tensors(config.decoder), "bfloat16", seed=0)


def hybrid_round(config, params, t: int, requests: int):
    """A round of `t` rows of one request, after one of as many of which one was accepted; of `requests`, all others
    idle: the last hidden states, keys and values, and states of the one."""
    table = jnp.zeros((requests, 2), jnp.int32).at[0].set(jnp.array([1, 2]))
    cache = empty_cache(config, PageLayout(3, PAGE, "bfloat16"), 2, t, "bfloat16")
    slots, first = jnp.ones(requests, jnp.int32).at[0].set(0), jnp.arange(requests) == 0

    @jax.jit
    def run(cache, tokens, start, replay):
        rows = Rows(jnp.where(first, start, 0), jnp.where(first, t, 0), table)
        mixer, tokens = RoundRows(rows, slots, jnp.where(first, replay, 0)), jnp.where(first[:, None], tokens, 0)
        return forward_module.forward(config.decoder, params, tokens, rows.marked_positions(t), mixer, cache, (1,))

    for i in range(2):
        hidden = jax.block_until_ready(run(cache, 7 + 5 * i + np.arange(t), 3 + i, i))  # before more is queued behind
        cache = hidden.cache
    states = [leaf[:, 0] for leaf in jax.tree.leaves(cache.states)]
    return hidden.last[0], hidden.features[0][0], cache.kv[:, 1:], *states


@pytest.mark.parametrize("family,t", [
    pytest.param("qwen3_5", 1, marks=pytest.mark.exhaustive), ("qwen3_5", 3), ("qwen3_5_moe", 1), ("qwen3_5_moe", 4)
])  # fmt: skip
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
    mixed = equations.experts_mlp
    monkeypatch.setattr(equations, "experts_mlp", lambda rows, *rest: counted.append(len(rows)) or mixed(rows, *rest))
    alone, among = (hybrid_round(config, params, t, requests) for requests in (1, 8 // t))
    assert set(counted) == ({t, 8 // t * t} if family == "qwen3_5_moe" else set())
    for got, padded, expected in zip(alone, among, plain, strict=True):
        assert got.shape == expected.shape
        assert_close(got, padded, 1e-5)
        assert_close(got, expected, 2e-2)


def test_a_wide_hybrids_router_takes_scaled_rows(monkeypatch):
    config, params = small_hybrid("qwen3_5_moe", 17 * 64)
    expected = hybrid_round(config, params, 4, 1)
    take_few_rows(monkeypatch)
    for one, other in zip(hybrid_round(config, params, 4, 1), expected, strict=True):
        assert_close(one, other, 2e-2)


def small_drafter(method: str):
    """An EAGLE-3 or a DFlash drafter with heads of 64, or an MTP module, and its parameters."""
    if method == "mtp":
        target, _ = small_hybrid("qwen3_5")
        config = mtp.module_config(target)
        own = dummy(mtp.parameters(config), "bfloat16", seed=0)
        embed = normal(jax.random.key(6), config.vocab_size, config.hidden_size)
        return mtp.Mtp(config, "bfloat16", (2,), 3), own | {"embed": embed, "head": {"embed": embed}}
    config, params = small_model("qwen3" if method == "dflash" else "llama", num_key_value_heads=2)
    d = config.hidden_size
    fc = Weight(0.05 * normal(jax.random.key(5), 3 * d, d))
    head = {"embed": normal(jax.random.key(6), config.vocab_size, d)}
    if method == "dflash":
        context = dflash._context_projection(config, params["layers"])
        return dflash.DFlash(config, 3, 5, (False, True), 4), {
            **params, **head, **context, "fc": fc, "hidden_norm": 1 + 0.1 * normal(jax.random.key(7), d)
        }  # fmt: skip
    layer = params["layers"][0] | {"hidden_norm": 1 + 0.1 * normal(jax.random.key(7), d)}
    layer["qkv"] = jax.tree.map(lambda values: jnp.concatenate([values, values[::-1]]), layer["qkv"])
    own = {"fc": fc, "layer": layer, "norm": params["norm"], "head": head, **head}
    return eagle.Eagle3(config, "bfloat16"), own


def drafted(drafter, params):
    """What is drafted for two requests after a commit of a few tokens, and the pages then."""
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


@pytest.mark.parametrize("method", ["eagle3", "dflash", "mtp"])
def test_drafts_are_those_of_plain_layers(monkeypatch, method):
    """Of two requests: chains' with one row each and four after a round, DFlash's with blocks of five."""
    drafter, params = small_drafter(method)
    expected, state = jax.jit(partial(drafted, drafter))(params)
    take_few_rows(monkeypatch)
    got = jax.jit(partial(drafted, drafter))(params)  # traced anew; one program: on two cores its parts once got stuck
    assert_same_drafts(*got, expected, state)


def test_a_round_takes_them_where_there_are_kernels(monkeypatch):
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    config, params = small_model()
    rows, layout = Rows(jnp.zeros(8, int), jnp.ones(8, int), jnp.zeros((8, 1), int)), PageLayout(2, 64, "bfloat16")
    cache, mixer = Cache(layout.kv(config)), RoundRows(rows, jnp.arange(8), jnp.zeros(8, int))

    def run(cache):
        return forward_module.forward(
            config.decoder, params, jnp.zeros((8, 1), int), rows.marked_positions(1), mixer, cache
        )

    before = KERNELS["few_rows_heads"]
    text = jax.jit(run).trace(cache).lower(lowering_platforms=("cuda",)).as_text()
    assert KERNELS["few_rows_heads"] == before + 1
    assert text.count("custom_call @mosaic_gpu") == 5  # attention's and four, however many layers


def test_what_cannot_run_is_named():
    bf16 = jnp.bfloat16
    assert op.supported(64, 64, (576, 576, 1536), bf16, bf16) is None
    assert op.supported(8, 64, (1024, 1024, 3072), bf16) is None
    assert "float8" in op.supported(8, 64, (576, 576, 1536), bf16, jnp.float8_e4m3fn)
    assert op.supported(8, 128, (4096, 4096, 12288), bf16) is None
    assert op.supported(8, 128, (2048, 4096), bf16) is None
    assert "for shared memory" in op.supported(8, 128, (5120, 5120, 17408), bf16)  # groups of eight, no ring of them
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
    assert "0 Hopper multiprocessors" in refuses(config, params, dataclasses.replace(call, processors=0))
    assert "64 rows of a request" in refuses(config, params, dataclasses.replace(call, rows=64))
    assert "Attention.bias=True" in refuses(*small_model(attention_bias=True), call)
    assert "80 wide" in refuses(*small_model(intermediate_size=80), call)
