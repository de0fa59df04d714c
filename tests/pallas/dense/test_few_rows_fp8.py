"""The few rows' kernels with FP8 weights: interpreted against the plain form of the weights they stand for."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoder.functions import centred_rms_norm, rms_norm, rope, weighted
from jaxspec.decoder.matmul import gate
from jaxspec.models import fp8
from jaxspec.models.description import Norm
from jaxspec.models.weights import HALF
from jaxspec.pallas.dense import few_rows as op
from jaxspec.pallas.dense.few_rows import Fp8Weight, Fp8WeightAndRows
from jaxspec.pallas.dense.few_rows import share as share_module
from jaxspec.pallas.dense.few_rows.share import share_out
from tests.pallas.dense.test_few_rows import EPS, INTERPRET, MIXTURE, QWEN3, assert_written, rotating
from tests.pallas.dense.test_few_rows import operands as unquantised
from tests.support import drawn
from tests.support.kernels import assert_close, kernels
from tests.support.sample import rare, some

SIZES = dict(d=256, heads=2, kv_heads=1, f=128, width=64)
WIDE = dict(d=1152, heads=2, kv_heads=1, f=128, width=128)
GLM = dict(d=4096, heads=96, kv_heads=8, f=1408, width=128, rotated=64)  # GLM-4.5-Air's; its MLP is an expert's
HYBRID = dict(d=5120, heads=120, kv_heads=4, f=17408, width=128)  # Qwen3.8-27B's; q, k and v have qkvz's columns


dequantise = jax.jit(fp8.dequantise, static_argnums=2)


def quantised(weight: jax.Array, unit: int = fp8.BLOCK) -> tuple[Fp8Weight, jax.Array]:
    """A weight [inputs, outputs] in blocks, and the float32 one that it stands for; scales differ between blocks.

    `unit` 1: each output has one scale, and they differ.
    """
    k, n = weight.shape
    if unit == 1:
        outputs = weight.T.astype(jnp.float32) * jnp.exp(drawn.normal(jax.random.key(k + n), (n, 1)) / 2)
        scales = jnp.max(jnp.abs(outputs), axis=1, keepdims=True) / 448
        values = (outputs / scales).astype(fp8.E4M3)
        return Fp8Weight(values, scales), dequantise(values, scales, None).T
    blocks = jnp.exp(drawn.normal(jax.random.key(k + n), (-(-k // fp8.BLOCK), 1, -(-n // unit), 1)))
    weight = weight.astype(jnp.float32) * jnp.repeat(jnp.repeat(blocks[:, 0, :, 0], fp8.BLOCK, 0), unit, 1)[:k, :n]
    if unit < fp8.BLOCK:  # a block's outputs stand in several places: here each part has scales of its own
        parts = [fp8.quantise_blocks(weight[:, i : i + unit].T) for i in range(0, n, unit)]
        values, scales = (jnp.concatenate(each) for each in zip(*parts, strict=True))
    else:
        values, scales = fp8.quantise_blocks(weight.T)
    return Fp8Weight(values, scales), dequantise(values, scales, fp8.BLOCK).T


def operands(rows: int = 8, by_output: bool = False, **sizes) -> dict:
    """Operands of unquantised layers, with each weight quantised."""
    given = unquantised(rows, **SIZES | sizes)
    units = {"qkv": fp8.BLOCK, "gate_up": HALF, "down": fp8.BLOCK}
    units = dict.fromkeys(units, 1) if by_output else units
    return given | {name: quantised(given[name], unit) for name, unit in units.items()}


def multiplied(rows, weight):
    return jnp.matmul(rows, weight, precision="highest", preferred_element_type=jnp.float32).astype(jnp.bfloat16)


def rounded(rows):
    """Quantised rows times their scales, in float32."""
    return fp8.rounded(rows.astype(jnp.float32))


def of_norm(given: dict, rounds: bool = False, centred: bool = False):
    """The normed rows; `rounds`: in float32, quantised before the norm's factor."""
    scale = given["scale"] - 1 if centred else given["scale"]
    if not rounds:
        return (centred_rms_norm if centred else rms_norm)(given["x"], scale, EPS)
    rows, factor = weighted(given["x"], scale, Norm(EPS, centred))
    return rounded(rows) * factor[:, None]


def operand(given: dict, name: str, rounds: bool):
    """A weight that may quantise its rows, and the float32 one that it stands for."""
    weight, whole = given[name]
    return Fp8WeightAndRows(*weight) if rounds else weight, whole


def check_gated(given: dict, scaled: bool = True, rounds: bool = False, **options):
    weight, whole = operand(given, "gate_up", rounds)
    rows = op.scale_rows(given["x"], given["scale"]) if scaled else (given["x"], given["scale"])
    got = op.gated(*rows, weight, eps=EPS, **options)
    assert_close(got, gate(multiplied(of_norm(given, rounds), whole), HALF))


def check_add(given: dict, biased: bool = False, scaled: bool = True, rounds: bool = False, **options):
    (weight, whole), bias = operand(given, "down", rounds), given["out_bias"] if biased else None
    got = op.add_product(given["x"], given["hidden"], weight, given["scale"] if scaled else None, bias, **options)
    if scaled:
        got, made = got
        expected = op.scale_rows(got, given["scale"])
        np.testing.assert_array_equal(made.rows, expected.rows)
        np.testing.assert_allclose(made.squares, expected.squares, rtol=1e-5)
    product = multiplied(rounded(given["hidden"]) if rounds else given["hidden"], whole)
    assert_close(got, given["x"] + (product + bias if biased else product))


def check_normed(given: dict, centred: bool = False, scaled: bool = True, rounds: bool = False, **options):
    """The products, and the rows themselves."""
    weight, whole = operand(given, "qkv", rounds)
    scale = given["scale"] - 1 if centred else given["scale"]
    of = op.scale_rows(given["x"], scale, centred) if scaled else (given["x"], scale)
    got, rows = op.normed(*of, [weight], eps=EPS, dtypes=("bfloat16",), centred=centred, keep=True, **options)
    assert_close(rows, of_norm(given, centred=centred))
    assert_close(got, multiplied(of_norm(given, rounds, centred), whole))


def check_product(given: dict, rounds: bool = False, **options):
    weight, whole = operand(given, "gate_up", rounds)
    rows, x = jnp.split(given["x"], 2, axis=1), given["x"]
    x = rounded(x) if rounds else x
    assert_close(op.product(rows, weight, **options), multiplied(x, whole))


def check_heads(
    given: dict, scaled: bool = True, normed: bool = True, rounds: bool = False, biased: bool = False, **options
):
    (weight, whole), bias = operand(given, "qkv", rounds), given["bias"] if biased else None
    rows, scale = op.scale_rows(given["x"], given["scale"]) if scaled else (given["x"], given["scale"])
    norms = list(given["norms"]) if normed else []
    of = given["cos"], given["sin"], given["kv"], jnp.int32(1), given["kv_slots"]
    q, kv = op.heads([rows], [scale], weight, *of, norms, (), bias, eps=EPS, **options)
    kv_heads, _, width = given["kv"].shape[3:]
    qkv = multiplied(of_norm(given, rounds), whole)
    qkv = (qkv + bias if biased else qkv).reshape(len(rows), 1, -1, width)
    turned = qkv[:, :, :-kv_heads]
    if normed:
        parts = jnp.split(turned, [turned.shape[2] - kv_heads], axis=2)
        turned = jnp.concatenate([rms_norm(*each, EPS) for each in zip(parts, norms, strict=True)], axis=2)
    turned = rope(turned, given["position"][:, None], rotating(width, 2 * given["cos"].shape[1]))[:, 0]
    assert_close(q, turned[:, :-kv_heads].reshape(len(rows), -1))
    new = jnp.stack([turned[:, -kv_heads:], qkv[:, 0, -kv_heads:]], axis=1)
    assert_written(given, kv, [1], new[:, None])


@pytest.mark.parametrize(
    "by_output,scaled,sizes", [rare(False, False, SIZES), rare(False, True, WIDE), (True, True, WIDE)]
)
def test_gated(by_output, scaled, sizes):
    """Gate and up of a group have scales of their own."""
    check_gated(operands(by_output=by_output, **sizes), scaled, **INTERPRET)


def test_a_last_tile_makes_again_what_it_has_no_columns_for(monkeypatch):
    monkeypatch.setattr(share_module, "BLOCKS", 2)
    share = share_out(8, [256], 320, fp8=True)
    assert (share.tiles, share.groups) == (2, 3)
    check_gated(operands(f=160), **INTERPRET)


@pytest.mark.parametrize(
    "by_output,biased,scaled", [rare(False, False, True), (False, True, False), (True, True, True)]
)
def test_product_added(by_output, biased, scaled):
    check_add(operands(by_output=by_output), biased, scaled, **INTERPRET)


@pytest.mark.exhaustive  # of bfloat16 in test_few_rows.py
@pytest.mark.parametrize("by_output", [False, True])
def test_product_added_with_more_weights_than_shared_memory_holds(by_output):
    share = share_out(8, [3072], 256, 1, normed=False, fp8=True, divided=False)
    assert share.slots < share.chunks
    check_add(operands(f=3072, by_output=by_output), **INTERPRET)


@pytest.mark.parametrize("centred,scaled,sizes", [rare(False, False, SIZES), (True, True, WIDE)])
def test_normed(centred, scaled, sizes):
    check_normed(operands(**sizes), centred, scaled, **INTERPRET)


def test_interpreted_products_are_not_divided_among_blocks():
    """One block takes 1,152 inputs, of which three would each have a part."""
    share = partial(share_out, 8, [WIDE["d"]], 256, normed=False, fp8=True)
    assert share().splits == 3 and share(divided=False).splits == 1


def test_an_fp8_weight_is_normed_for_alone():
    given = operands()
    with pytest.raises(ValueError, match="2 weights, of which the first is quantised; supported: one such weight"):
        op.normed(given["x"], given["scale"], [given["qkv"][0]] * 2, eps=EPS, dtypes=("bfloat16",) * 2)


@pytest.mark.parametrize("by_output", [False, rare(True)])
def test_product_of_rows_side_by_side(by_output):
    check_product(operands(by_output=by_output), **INTERPRET)


@pytest.mark.parametrize(
    "by_output,scaled,normed,sizes",
    [(False, True, True, WIDE), rare(True, True, True, WIDE), rare(False, False, False, SIZES)],
)
def test_heads(by_output, scaled, normed, sizes):
    check_heads(operands(by_output=by_output, **sizes), scaled, normed, **INTERPRET)


@pytest.mark.parametrize("normed,rounds", [rare(False, False), (True, True)])
def test_heads_of_which_half_rotates_with_biases(normed, rounds):
    given = operands(by_output=True, **WIDE | {"rotated": 64})
    check_heads(given, normed=normed, rounds=rounds, biased=True, **INTERPRET)


CHECKS = {
    "gated": check_gated, "add": check_add, "normed": check_normed, "product": check_product, "heads": check_heads
}  # fmt: skip


@pytest.mark.parametrize("kernel", ["gated", "add", rare("normed"), "product", rare("heads")])
def test_rows_are_quantised_before_their_norms_factor(kernel):
    """Products differ from those of rows that aren't by several times what is allowed here."""
    CHECKS[kernel](operands(**SIZES), rounds=True, **INTERPRET)


def check_numbers(**options):
    """Multiply by one: rows come out as their quantised numbers times their scales, of all sizes, zeros among them.

    A GPU's quotient has another last bit, so that one just between two numbers may be either.
    """
    sizes = jnp.exp2(jnp.arange(-40, 40, 5, jnp.bfloat16))
    x = drawn.normal(jax.random.key(3), (16, 256), jnp.bfloat16) * sizes[:, None]
    x = x.at[3, 128:].set(0).at[:, :20].multiply(2**-14).at[5, 200].set(1e30)
    weight = Fp8WeightAndRows(jnp.eye(256, dtype=fp8.E4M3), jnp.ones((2, 2)))
    got, expected = (np.asarray(each, np.float32) for each in (op.product([x], weight, **options), fp8.rounded(x)))
    np.testing.assert_allclose(got, expected, rtol=0.13)
    assert (got != expected).mean() < (0.005 if not options else 1e-9)


def test_quantised_rows_are_those_of_plain_jnp():
    check_numbers(**INTERPRET)


def test_rows_that_a_block_norms_are_not_quantised():
    with pytest.raises(ValueError, match="can't be quantised; give them as `Scaled`"):
        check_gated(operands(), scaled=False, rounds=True, **INTERPRET)


# 24 rows gated and of heads are a hybrid's (test_few_rows_layers.py).
TALL = {("normed", 24)}


@pytest.mark.parametrize("kernel,rows", some(TALL, CHECKS, (16, 24, 32)))
def test_up_to_32_rows(kernel, rows):
    CHECKS[kernel](operands(rows, **WIDE | {"d": 1280}), **INTERPRET)


def test_blocks_of_a_cluster_finish_rows_of_their_own():
    """Use as many blocks as have eight rows each."""
    shares = [share_out(rows, [1024], 1024, 1, normed=False, fp8=True) for rows in (8, 16, 24, 32)]
    assert [share.splits for share in shares] == [4] * 4
    assert [(share.finishers, share.finished) for share in shares] == [(1, 8), (2, 8), (3, 8), (4, 8)]


def test_clusters_of_four_have_few_blocks():
    """Keep clusters of four below 128 blocks, of which some would wait for others to end."""
    shares = [share_out(8, [4096], columns, 1, normed=False, fp8=True) for columns in (1024, 2048, 4096, 5120)]
    assert [(share.tiles, share.splits) for share in shares] == [(16, 4), (32, 2), (64, 2), (80, 1)]


def test_weights_that_do_not_fit_are_named():
    assert op.fp8_supported(128, 4096, 4096, 32) is None and op.fp8_supported(None, 4096, 4096, 1) is None
    assert "64 outputs and all inputs" in op.fp8_supported(None, 4096, 4096, 64)
    assert "100 x 4096" in op.fp8_supported(None, 4096, 100, 1)
    assert "16 outputs" in op.fp8_supported(128, 4096, 4096, 16)
    assert "multiples of 128" in op.product_supported(8, [576, 576], (1152, 256), jnp.bfloat16, fp8=True)
    assert "multiples of 128" in op.normed_supported(8, 576, [256], jnp.bfloat16, fp8=True)
    assert "96 columns; supported: multiples of 64" in op.normed_supported(8, 576, [640, 96], jnp.bfloat16)
    assert op.normed_supported(3, 576, [640], jnp.bfloat16) == "3 rows; supported: multiples of 8 up to 8"
    assert op.normed_supported(8, 576, [640, 96], jnp.bfloat16, scaled=True) is None


KERNELS_OF = {
    "gated": lambda of: op.gated(*op.scale_rows(of["x"], of["scale"]), of["gate_up"][0], eps=EPS),
    "add": lambda of: op.add_product(of["x"], of["hidden"], of["down"][0], of["scale"]),
    "product": lambda of: op.product([of["hidden"]], of["down"][0]),
    "normed": lambda of: op.normed(
        *op.scale_rows(of["x"], of["scale"]), [of["qkv"][0]], eps=EPS, dtypes=("bfloat16",), centred=True
    ),
    "heads": lambda of: op.heads(
        *([each] for each in op.scale_rows(of["x"], of["scale"])), of["qkv"][0], of["cos"], of["sin"], of["kv"],
        jnp.int32(1), of["kv_slots"], list(of["norms"]), (), of["bias"] if of["cos"].shape[1] == 32 else None, eps=EPS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kernel,by_output,rows", [
    *some({("add", True, 8), ("normed", True, 8)}, KERNELS_OF, (False, True), [8]),
    *some((), KERNELS_OF, [False], (16, 24, 32)),
])  # fmt: skip
def test_lowers_for_cuda(kernel, by_output, rows, sizes=QWEN3):
    assert kernels(KERNELS_OF[kernel], jax.eval_shape(lambda: operands(rows, by_output, **sizes))) == 1


@pytest.mark.parametrize(
    "kernel,by_output,rows", some({("gated", False, 32), ("add", True, 8)}, KERNELS_OF, (False, True), (8, 32))
)
def test_quantising_rows_lowers_for_cuda(kernel, by_output, rows, sizes=QWEN3):
    def given():
        made = operands(rows, by_output, **sizes)
        return made | {name: operand(made, name, rounds=True) for name in ("qkv", "gate_up", "down")}

    assert kernels(KERNELS_OF[kernel], jax.eval_shape(given)) == 1


@pytest.mark.exhaustive  # interpreted above; heads of which all rotate are lowered in test_few_rows.py
def test_heads_of_which_half_rotates_lower_for_cuda():
    """With biases, and norms as GLM-4.5 has and GLM-4.5-Air doesn't; quantising rows or not."""
    test_lowers_for_cuda("heads", True, 8, GLM)
    test_quantising_rows_lowers_for_cuda("heads", True, 32, GLM)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", KERNELS_OF)
@pytest.mark.parametrize("sizes", [WIDE, MIXTURE, HYBRID, GLM])
@pytest.mark.parametrize("rows", [8, 32])
def test_other_sizes_lower_for_cuda(kernel, sizes, rows):
    test_lowers_for_cuda(kernel, False, rows, sizes)
    test_quantising_rows_lowers_for_cuda(kernel, False, rows, sizes)
