"""The kernels of a small model's layer: interpreted against plain layers, lowered for CUDA, and where they serve."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.decoder.functions import centred_rms_norm, cos_sin, rms_norm, rope
from jaxspec.decoder.matmul import gate
from jaxspec.models.description import Attention
from jaxspec.models.rope_scaling import Rope
from jaxspec.models.weights import HALF
from jaxspec.pallas.attention.kv_write import stored
from jaxspec.pallas.dense import few_rows as op
from jaxspec.pallas.dense.few_rows import top
from jaxspec.pallas.dense.few_rows.share import share_out
from tests.support import drawn
from tests.support.kernels import assert_close, kernels
from tests.support.sample import one_in, rare

EPS, LAYERS, PAGE = 1e-5, 2, 16
INTERPRET = {"interpret": plgpu.InterpretGPUParams()}
SMOLLM2 = dict(d=576, heads=9, kv_heads=3, f=1536)
QWEN3 = dict(d=4096, heads=32, kv_heads=8, f=12288, width=128)
MIXTURE = dict(d=2048, heads=32, kv_heads=4, f=768, width=128)
GPT_OSS = dict(d=2880, heads=64, kv_heads=8, f=64 * 64)  # what is added has as many inputs as there are heads' columns


def normal(key, *shape):
    return drawn.normal(key, shape, jnp.bfloat16)


def rotating(width: int, columns: int | None = None) -> Attention:
    """The description that rope tables are made from."""
    return Attention(1, 1, width, Rope(1e4, columns=columns))


def operands(
    rows: int, d: int = 192, heads: int = 2, kv_heads: int = 1, f: int = 128, width: int = 64,
    rotated: int | None = None,
) -> dict[str, jax.Array]:  # fmt: skip
    """Operands of all operations. Rows have scattered KV slots, but for the third, which is padding. `rotated`: how
    many of a head's columns rotate."""
    keys = iter(jax.random.split(jax.random.key(rows), 10))
    position = jax.random.randint(next(keys), (rows,), 0, 500)
    cos, sin = cos_sin(position, rotating(width, rotated))
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
        kv_slots=(PAGE + jax.random.permutation(next(keys), rows)).at[2].set(-1).astype(jnp.int32),
        norms=1 + 0.1 * normal(next(keys), LAYERS, width),
        bias=normal(jax.random.key(rows + 1), (heads + 2 * kv_heads) * width),
        out_bias=normal(jax.random.key(rows + 2), d),
    )


def head_operands(given: dict[str, jax.Array], inputs: int, normed: bool) -> tuple:
    """Operands of `heads`: one or two inputs side by side, or only `Scaled` rows; queries and keys normed or not."""
    rows, scales = [given["x"], given["x"][::-1]][:inputs], [given["scale"], given["scale"][::-1]][:inputs]
    if not inputs:
        (rows, scales), inputs = ([each] for each in op.scale_rows(given["x"], given["scale"])), 1
    weight = jnp.concatenate([given["qkv"], given["qkv"][::-1]][:inputs]) * inputs**-0.5
    norms = list(given["norms"]) if normed else []
    return rows, scales, weight, given["cos"], given["sin"], given["kv"], jnp.int32(1), given["kv_slots"], norms


def check_heads(
    given: dict[str, jax.Array],
    inputs: int = 1,
    normed: bool = False,
    biased: bool = False,
    fp8: bool = False,
    **options,
):
    inverse_scales = None
    if fp8:  # some numbers saturate
        given = given | {"kv": given["kv"].astype(jnp.float8_e4m3fn)}
        inverse_scales = jnp.exp(jnp.linspace(0, 6, given["kv"].shape[3] * LAYERS * 2)).reshape(LAYERS, 2, -1)
    operands, bias = head_operands(given, inputs, normed), given["bias"] if biased else None
    q, kv = op.heads(*operands, [given["gate_up"]], bias, inverse_scales, eps=EPS, **options)
    rows, (kv_heads, _, width) = len(given["x"]), given["kv"].shape[3:]
    pairs = zip(*operands[:2], strict=True) if inputs else [(given["x"], given["scale"])]
    x = jnp.concatenate([rms_norm(*each, EPS) for each in pairs], axis=1)
    qkv = x @ operands[2]
    qkv = (qkv + bias if biased else qkv).reshape(rows, 1, -1, width)
    turned = qkv[:, :, :-kv_heads]
    if normed:
        turned = jnp.split(turned, [turned.shape[2] - kv_heads], axis=2)
        turned = jnp.concatenate([rms_norm(*each, EPS) for each in zip(turned, given["norms"], strict=True)], axis=2)
    turned = rope(turned, given["position"][:, None], rotating(width, 2 * given["cos"].shape[1]))[:, 0]
    assert_close(q, turned[:, :-kv_heads].reshape(rows, -1))
    new = jnp.stack([turned[:, -kv_heads:], qkv[:, 0, -kv_heads:]], axis=1)
    new = stored(new, kv.dtype, None if inverse_scales is None else inverse_scales[1, ..., None])
    assert_written(given, kv, [1], new[:, None], 0.1 if fp8 else 1e-2)


def check_keys_values(given: dict[str, jax.Array], biased: bool = False, **options):
    kv_heads, norm = given["kv"].shape[3], given["norms"][::-1]
    weight = jnp.concatenate([given["qkv"][:, -2 * kv_heads * 64 :], given["qkv"][::-1, -2 * kv_heads * 64 :]], axis=1)
    of = [given[name] for name in ("x", "scale")], [given[name] for name in ("cos", "sin", "kv", "kv_slots")]
    bias = jnp.tile(given["bias"][-2 * kv_heads * 64 :], LAYERS).at[:64].multiply(-1) if biased else None
    kv = op.keys_values(*of[0], weight, *of[1], norm, bias, eps=EPS, **options)
    both = rms_norm(given["x"], given["scale"], EPS) @ weight
    both = (both + bias if biased else both).reshape(-1, LAYERS, 2, kv_heads, 64)
    k = rms_norm(both[:, :, 0], norm[:, None], EPS)
    k = rope(k, given["position"][:, None], rotating(64))
    assert_written(given, kv, range(LAYERS), jnp.stack([k, both[:, :, 1]], axis=2))


def assert_written(given, kv, layers, new, tolerance=1e-2):
    """Check that the pages have these keys and values, [rows, layers, 2, heads, 64], and else what they had before."""
    valid = given["kv_slots"] >= 0
    page = jnp.where(valid, given["kv_slots"] // PAGE, len(given["kv"][0]))
    expected = given["kv"]
    for i, layer in enumerate(layers):
        expected = expected.at[layer, page, :, :, given["kv_slots"] % PAGE].set(new[:, i], mode="drop")
    kv, expected, before = (np.asarray(x.astype(jnp.float32)) for x in (kv, expected, given["kv"]))
    changed = (expected != before).any(axis=-1)
    np.testing.assert_array_equal(kv[~changed], expected[~changed])
    assert_close(kv[changed], expected[changed], tolerance)


def check_gated(given: dict[str, jax.Array], scaled: bool = False, **options):
    rows = op.scale_rows(given["x"], given["scale"]) if scaled else (given["x"], given["scale"])
    got = op.gated(*rows, given["gate_up"], [given["down"]], eps=EPS, **options)
    assert_close(got, gate(rms_norm(given["x"], given["scale"], EPS) @ given["gate_up"], HALF))


def check_router(given: dict[str, jax.Array], **options):
    """Logits of a mixture with a bias, of `Scaled` rows."""
    weight, bias = given["gate_up"][:, :128], given["bias"][:128]
    of = op.scale_rows(given["x"], given["scale"])
    got, rows = op.normed(*of, [weight], bias, eps=EPS, dtypes=("float32",), keep=True, **options)
    norm = rms_norm(given["x"], given["scale"], EPS)
    assert_close(rows, norm)
    assert_close(got, jnp.matmul(norm, weight, preferred_element_type="float32") + bias)


def check_normed(given: dict[str, jax.Array], centred: bool = False, scaled: bool = False, **options):
    """Products with weights of several widths, the last in float32, and the rows. Of `Scaled` rows it has a tile and a
    half."""
    weights = [given["gate_up"], given["qkv"], given["gate_up"][:, : 96 if scaled else 128]]
    scale = given["scale"] - 1 if centred else given["scale"]
    dtypes = ("bfloat16", "bfloat16", "float32")
    of = op.scale_rows(given["x"], scale, centred) if scaled else (given["x"], scale)
    *got, rows = op.normed(*of, weights, eps=EPS, dtypes=dtypes, centred=centred, keep=True, **options)
    norm = (centred_rms_norm if centred else rms_norm)(given["x"], scale, EPS)
    assert_close(rows, norm)
    for one, weight, dtype in zip(got, weights, dtypes, strict=True):
        assert_close(one, jnp.matmul(norm, weight, preferred_element_type=dtype))


def check_add(given: dict[str, jax.Array], biased: bool = False, **options):
    bias = given["out_bias"] if biased else None
    got = op.add_product(given["x"], given["hidden"], given["down"], None, bias, **options)
    product = given["hidden"] @ given["down"]
    assert_close(got, given["x"] + (product + bias if biased else product))


def check_scaled(given: dict[str, jax.Array], centred: bool = False, biased: bool = False, **options):
    """The sum is what it is alone, and the rest what `scale_rows` makes of it."""
    of, bias = (given["x"], given["hidden"], given["down"]), given["out_bias"] if biased else None
    got, scaled = op.add_product(*of, given["scale"], bias, centred=centred, **options)
    alone = op.add_product(*of, None, bias, **options)
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
    got, best = op.top_tokens(given["x"], given["scale"], weight, eps=EPS, **options)
    logits = jnp.einsum(
        "rd,vd->rv", rms_norm(given["x"], given["scale"], EPS), weight, preferred_element_type=jnp.float32
    )
    top = jnp.argmax(logits, axis=1)
    np.testing.assert_allclose(best, logits.max(1), atol=1e-3)
    assert ((got == top) | (logits.max(1) - jnp.take_along_axis(logits, got[:, None], 1)[:, 0] < 1e-3)).all()
    assert (got < vocab - 128).all() and (got < 128).any() and len(set(got.tolist())) > 2


@pytest.mark.parametrize("rows,inputs,normed,fp8", [
    rare(8, 1, False, False), (8, 1, True, True), rare(24, 1, True, True), rare(8, 2, False, False),
    rare(40, 2, True, False),
])  # fmt: skip
def test_heads(rows, inputs, normed, fp8):
    check_heads(operands(rows), inputs, normed, fp8=fp8, **INTERPRET)


@pytest.mark.exhaustive  # heads of which half rotates, below, have biases too
@pytest.mark.parametrize("inputs", [0, 1])
def test_heads_with_biases(inputs):
    """Before the norms of queries and keys, as plain layers add them."""
    check_heads(operands(8, d=1088), inputs, normed=inputs == 1, biased=True, **INTERPRET)


@pytest.mark.exhaustive  # heads of which half rotates, below, are as wide
@pytest.mark.parametrize("inputs", [0, 1])
def test_wide_heads_of_twice_the_width(inputs):
    check_heads(operands(8, d=2048, width=128), inputs, normed=True, **INTERPRET)


@pytest.mark.parametrize("inputs,normed,biased", [(0, True, True), rare(1, False, False)])
def test_heads_of_which_half_rotates(inputs, normed, biased):
    check_heads(operands(8, d=1088, width=128, rotated=64), inputs, normed, biased, **INTERPRET)


def test_top_tokens(monkeypatch):
    """Blocks that take several tiles, and not all as many."""
    monkeypatch.setattr(top, "BLOCKS", 4)
    check_top_tokens(operands(16), 64 * 15, **INTERPRET)


def test_product_of_rows_side_by_side():
    check_product(operands(16), **INTERPRET)


@pytest.mark.parametrize("centred,scaled", one_in(2, [True, False], [False, True]))
def test_products_of_one_norm(centred, scaled):
    check_normed(operands(8), centred, scaled, **INTERPRET)


@pytest.mark.parametrize("biased", [rare(False), True])
def test_keys_and_values_of_all_layers(biased):
    check_keys_values(operands(8, kv_heads=2), biased, **INTERPRET)


def test_a_routers_bias():
    check_router(operands(8, f=128), **INTERPRET)
    with pytest.raises(ValueError, match="a bias and a product in bfloat16"):
        of = operands(8)
        op.normed(of["x"], of["scale"], [of["gate_up"]], of["bias"], eps=EPS, dtypes=("bfloat16",))


@pytest.mark.parametrize("rows", [rare(8), 40])  # 40: more than are asked for at once; 8 are below, for a norm
def test_gated(rows):
    check_gated(operands(rows), **INTERPRET)


@pytest.mark.parametrize("scaled", [False, rare(True)])
def test_gated_with_more_weights_than_shared_memory_holds(scaled):
    share = share_out(8, [2048], 256, normed=not scaled, divided=False)
    assert share.slots < share.chunks
    check_gated(operands(8, d=2048), scaled, **INTERPRET)


@pytest.mark.parametrize("rows,biased", [rare(8, False), (24, False), (8, True)])
def test_product_added(rows, biased):
    check_add(operands(rows), biased, **INTERPRET)


@pytest.mark.parametrize(
    "d", [rare(192), rare(1024), 1088]
)  # of tiles far fewer than sums of squares, as many, and some fewer
def test_product_added_for_a_norm(d):
    check_scaled(operands(8, d=d), centred=d == 192, biased=d == 1088, **INTERPRET)
    check_gated(operands(8, d=d), scaled=True, **INTERPRET)


def test_product_added_with_more_weights_than_shared_memory_holds():
    check_add(operands(8, f=2048), **INTERPRET)


def adapters(rows: int, inputs: int, outputs: int) -> tuple[op.Adapters, jax.Array]:
    """Operands of which two of four runs of columns are present, and what they add; the others aren't numbers."""
    inner, b = normal(jax.random.key(4), rows, 256), normal(jax.random.key(5), 256, outputs) * 64**-0.5
    absent = (jnp.arange(256) // 64 % 3)[:, None] > 0
    given = op.Adapters(jnp.where(absent.T, jnp.nan, inner), jnp.where(absent, jnp.nan, b), jnp.array([2, 0, 3, 7, 7]))
    return given, jnp.where(absent.T, 0, inner) @ jnp.where(absent, 0, b)


def check_adapters(given: dict[str, jax.Array], **options):
    """Their products are added before all that is made of the base's."""
    (rows, d), f, width = given["x"].shape, given["hidden"].shape[1], given["kv"].shape[5]
    change, term = adapters(rows, f, d)
    got = op.add_product(given["x"], given["hidden"], given["down"], None, None, change, **options)
    assert_close(got, given["x"] + (given["hidden"] @ given["down"] + term))
    scaled = op.scale_rows(given["x"], given["scale"])
    factor = jax.lax.rsqrt(jnp.mean(jnp.square(given["x"].astype(jnp.float32)), axis=1, keepdims=True) + EPS)
    norm = rms_norm(given["x"], given["scale"], EPS)
    change, term = adapters(rows, d, 2 * f)
    got = op.gated(*scaled, given["gate_up"], (), change, eps=EPS, **options)
    expected = (norm.astype(jnp.float32) @ given["gate_up"] + factor * term).astype(jnp.bfloat16)
    assert_close(got, gate(expected, HALF), 1e-2)
    change, term = adapters(rows, d, given["qkv"].shape[1])
    q, _ = op.heads(*head_operands(given, 0, False), adapters=change, eps=EPS, **options)
    queries = q.shape[1] // width
    turned = (norm.astype(jnp.float32) @ given["qkv"] + factor * term).reshape(rows, 1, -1, width)[:, :, :queries]
    turned = rope(turned.astype(jnp.bfloat16), given["position"][:, None], rotating(width))
    assert_close(q, turned.reshape(rows, -1), 1e-2)


def check_shrink(given: dict[str, jax.Array], **options):
    own = (jnp.arange(len(given["x"]))[:, None] % 4 == jnp.arange(256) // 64).astype(jnp.bfloat16)
    a = jnp.tile(given["down"], (1, 2))[:, :256]
    assert_close(op.shrink(given["hidden"], a, own, **options), (given["hidden"] @ a) * own)


@pytest.mark.parametrize("rows,f", [(8, 128), rare(8, 2048), rare(24, 128)])  # 2,048: more than shared memory holds
def test_adapters(rows, f):
    check_adapters(operands(rows, d=1088, f=f, width=128), **INTERPRET)


def test_shrink_keeps_each_row_s_own_columns():
    check_shrink(operands(8), **INTERPRET)


KERNELS_OF = {
    "heads": lambda of: op.heads(*head_operands(of, 1, False), [of["gate_up"]], eps=EPS),
    "normed heads": lambda of: op.heads(*head_operands(of, 1, True), eps=EPS),
    "heads of two": lambda of: op.heads(*head_operands(of, 2, False), eps=EPS),
    "keys and values": lambda of: op.keys_values(
        of["x"], of["scale"], of["qkv"], of["cos"], of["sin"], of["kv"], of["kv_slots"], of["norms"], eps=EPS
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
    "biased heads": lambda of: op.heads(*head_operands(of, 0, False), bias=of["bias"], eps=EPS),
    "biased normed": lambda of: op.normed(
        *op.scale_rows(of["x"], of["scale"]),
        [of["gate_up"][:, :128]],
        of["bias"][:128],
        eps=EPS,
        keep=True,
        dtypes=("float32",),
    ),
    "biased add": lambda of: op.add_product(of["x"], of["hidden"], of["down"], of["scale"], of["out_bias"]),
    "product": lambda of: op.product([of["x"]] * 3, jnp.concatenate([of["gate_up"]] * 3)),
    "top tokens": lambda of: op.top_tokens(of["x"], of["scale"], jnp.zeros((49152, 576), jnp.bfloat16), eps=EPS),
    "add": lambda of: op.add_product(of["x"], of["hidden"], of["down"]),
    "adapted heads": lambda of: op.heads(
        *head_operands(of, 0, True), adapters=adapters(len(of["x"]), 0, of["qkv"].shape[1])[0], eps=EPS
    ),
    "adapted gated": lambda of: op.gated(
        *op.scale_rows(of["x"], of["scale"]),
        of["gate_up"],
        (),
        adapters(len(of["x"]), 0, of["gate_up"].shape[1])[0],
        eps=EPS,
    ),
    "adapted add": lambda of: op.add_product(
        of["x"], of["hidden"], of["down"], of["scale"], None, adapters(len(of["x"]), 0, of["x"].shape[1])[0]
    ),
    "shrink": lambda of: op.shrink(of["hidden"], of["down"][:, :256], normal(jax.random.key(0), len(of["x"]), 256)),
}


WIDE = ("normed heads", "normed", "gated", "add", "scaled heads", "scaled normed", "scaled gated", "scaled add")


def lowerings():
    """SmolLM2's sizes with the most rows, or the fewest where the most take jax seconds to lay out; gpt-oss' sizes for
    biases. One kernel of a kind: `make exhaustive` has all, and wide ones, which are lowered in FP8 here
    (test_few_rows_fp8.py)."""
    for kernel in KERNELS_OF:
        if "adapted" in kernel or kernel == "shrink":
            yield from (pytest.param(kernel, rows, QWEN3, marks=pytest.mark.exhaustive) for rows in (8, 32))
            continue
        if "biased" in kernel:
            yield pytest.param(kernel, 8, GPT_OSS, marks=() if kernel == "biased add" else pytest.mark.exhaustive)
            continue
        slow = "heads" in kernel or kernel == "keys and values"
        for rows, often in ((8, slow), (32 if "two" in kernel else 64, not slow)):
            often &= kernel in ("heads", "keys and values", "normed", "gated", "top tokens")
            yield pytest.param(kernel, rows, SMOLLM2, marks=() if often else pytest.mark.exhaustive)
    yield from (rare(kernel, 8, sizes) for kernel in WIDE for sizes in (QWEN3, MIXTURE))


@pytest.mark.parametrize("kernel,rows,sizes", list(lowerings()))
def test_lowers_for_cuda(kernel, rows, sizes):
    assert kernels(KERNELS_OF[kernel], jax.eval_shape(lambda: operands(rows, **sizes))) == 1
