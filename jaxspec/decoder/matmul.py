"""Products of rows with weights. Here alone it is decided what computes one: a kernel of ours, or XLA."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.decoder.functions import normed, weighted
from jaxspec.decoder.low_rank import low_rank
from jaxspec.decoder.padding import flat, padded
from jaxspec.models import fp8
from jaxspec.models.description import ClampedSwiglu, Norm, Table, beyond
from jaxspec.models.weights import Format, FourBits, Fp8, Unquantised, Weight, matmul
from jaxspec.pallas import hopper
from jaxspec.pallas.dense import few_rows, four_wide, fp8_quantise, fp8_rows, fp8_tiles, fp8_wide, tile_matmul
from jaxspec.pallas.operation import ANY, HOPPER, PORTABLE, Implementation, choose, nothing, warn
from jaxspec.pallas.portable import four_bits as portable_four_bits
from jaxspec.pallas.portable import fp8 as portable_fp8

MOST_HEAD_ROWS = 128  # that a head in four bits multiplies in parts; more are worth dequantising it
MOST_ROUNDED = 32  # rows that `fp8_rows` multiplies where they are quantised; `fp8_tiles` takes more


@flax.struct.dataclass
class Quantised:
    """Rows of a norm as e4m3, and their scales for each 128 inputs, the norm's factor among them. Padding may follow.

    `shape`: of the rows, unpadded.
    """

    values: Float[Array, "p k"]
    scales: Float[Array, "p g"]
    shape: tuple[int, ...] = flax.struct.field(pytree_node=False)


class Weighted(NamedTuple):
    """Rows of a norm that are to be quantised: times the norm's weight, and the norm's factor of each."""

    rows: Float[Array, "*b k"]
    factor: Float[Array, "*b"]


def normed_for(
    weights: Sequence[Weight], x: Float[Array, "*b k"], scale: Float[Array, " k"], norm: Norm
) -> Float[Array, "*b k"] | Quantised | Weighted:
    """The norm of x as `project` takes it, for one weight that quantises rows, or for any that don't."""
    return choose("a norm", NORMS, weights, x, scale, norm).run(weights, x, scale, norm)


def quantises_rows(weight: Weight) -> bool:
    """Whether the rows that a weight multiplies are quantised, too."""
    return isinstance(weight.format, Fp8) and weight.format.activations


def project(
    x: Float[Array, "*b k"] | Quantised | Weighted,
    weight: Weight,
    valid: Int[Array, "1"],
    residual: Float[Array, "*b n"] | None = None,
    gated: bool = False,
) -> Float[Array, "*b o"]:
    """Multiply as `multiply`, and add what the rows' adapters do. These come in as the residual stream, so the kernels
    of weights know nothing of them; the gate comes behind them then."""
    if weight.adapters is None:
        return multiply(x, weight, valid, residual, gated)
    change, layout = low_rank(x, weight.adapters), weight.layout
    change = change if residual is None else residual + change
    out = multiply(x, weight.replace(adapters=None), valid, change, False)
    return gate(out, layout.interleave) if gated else out


def exact(x: Float[Array, "*b k"], weight: Weight) -> Float[Array, "*b n"]:
    """The product in float32, in plain jnp, with what the rows' adapters add."""
    product = matmul(x, weight, jnp.float32)
    return product if weight.adapters is None else product + low_rank(x, weight.adapters)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def multiply(
    x: Float[Array, "*b k"] | Quantised | Weighted,
    weight: Weight,
    valid: Int[Array, "1"],
    residual: Float[Array, "*b n"] | None = None,
    gated: bool = False,
) -> Float[Array, "*b o"]:
    """`residual + x @ weight`; `gated`, without a residual, silu(gate) * up of the product, half as wide.

    Rows from `valid` on are padding, and may be anything finite. x is `Quantised` or `Weighted` where `normed_for` made
    it so.
    """
    if isinstance(x, Quantised):
        return _tiled_fp8(Product(x, weight, valid, residual, gated), x.values, x.scales)
    call = Product.of(x, weight, valid, residual, gated)
    return choose("a product", PRODUCTS, call).run(call)


def reference(
    x: Float[Array, "*b k"] | Weighted,
    weight: Weight,
    residual: Float[Array, "*b n"] | None = None,
    gated: bool = False,
) -> Float[Array, "*b o"]:
    """Multiply as `multiply` in plain jnp, all rows."""
    return _plain(Product.of(x, weight, None, residual, gated))


def _forward(x, weight, valid, residual, gated):
    return multiply(x, weight, valid, residual, gated), (x, weight, residual)


def _backward(gated, kept, gradient):
    x, weight, residual = jax.vjp(partial(reference, gated=gated), *kept)[1](gradient)
    return x, weight, None, residual


multiply.defvjp(_forward, _backward)


ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu2": lambda x: jnp.square(jnp.maximum(x, 0)),
}


@functools.cache  # so that what is traced and lowered for it is found again
def gating(activation: str | ClampedSwiglu) -> Callable[[Array, Array], Array]:
    """The function of gate and up that an MLP's or an expert's activation is."""
    if isinstance(activation, ClampedSwiglu):
        return partial(clamped_swiglu, alpha=activation.alpha, limit=activation.limit)
    return lambda gate, up: ACTIVATIONS[activation](gate) * up


def clamped_swiglu(
    gate: Float[Array, "*b n"], up: Float[Array, "*b n"], *, alpha: float, limit: float
) -> Float[Array, "*b n"]:
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


def gate(gate_up: Float[Array, "*b n"], run: int, activation: str = "silu") -> Float[Array, "*b o"]:
    """activation(gate) * up of columns that alternate in runs of both."""
    *batch, width = gate_up.shape
    runs = gate_up.reshape(*batch, -1, 2, run)
    return gating(activation)(runs[..., 0, :], runs[..., 1, :]).reshape(*batch, width // 2)


def product(rows: Sequence[Float[Array, "b _ _"]], weight: Weight, keep_padding: bool = False) -> Float[Array, "b _ n"]:
    """The product of rows side by side, by a kernel where it serves. Some may have padding rows, and others none.

    `keep_padding`: leave the kernel's in the result, for `forward.run_layer`.
    """
    t = min(x.shape[1] for x in rows)
    call = Product(jnp.concatenate([x[:, :t] for x in rows], axis=-1), weight, parts=tuple(rows))
    out = choose("a product", PRODUCTS, call).run(call)
    return out if keep_padding else out[:, :t]


def logits(x: Float[Array, "*b d"], head: Weight) -> Float[Array, "*b v"]:
    """`x @ head` in float32."""
    call = Product(x, head, dtype=jnp.float32)
    return choose("a product", PRODUCTS, call).run(call)


class Product(NamedTuple):
    """A product of rows with a weight, and what is made of it.

    - `valid`: rows from there on are padding, and may be anything finite; None: all are valid.
    - `residual`: what it is added to. `gated`: silu(gate) * up of it, half as wide, without a residual.
    - `dtype`: of the result, if not that of x.
    - `parts`: what x consists of, side by side, each with the padding rows that it comes with.
    - `factor`: of each row, as in `Weighted`.
    """

    x: Float[Array, "*b k"] | Quantised
    weight: Weight
    valid: Int[Array, "1"] | None = None
    residual: Float[Array, "*b n"] | None = None
    gated: bool = False
    dtype: Any = None
    parts: tuple[Float[Array, "b _ _"], ...] = ()
    factor: Float[Array, "*b"] | None = None

    @classmethod
    def of(cls, x: Float[Array, "*b k"] | Weighted, *further: Any) -> Product:
        return cls(x.rows, *further, factor=x.factor) if isinstance(x, Weighted) else cls(x, *further)

    @property
    def rows(self) -> Float[Array, "r k"]:
        return self.x.reshape(-1, self.x.shape[-1])

    @property
    def ordered(self) -> Float[Array, "r k"]:
        """The rows, their inputs in the order of the weight's."""
        order = self.weight.order
        return self.rows if order is None else jnp.take(self.rows, order, axis=1)

    @property
    def tiles(self) -> tuple[Array, Array | None]:
        """Last operands of kernels of many rows: how many are valid, and the residual stream's."""
        rows = math.prod(self.x.shape[:-1])
        valid = jnp.array([rows], jnp.int32) if self.valid is None else self.valid
        return valid, None if self.residual is None else self.residual.reshape(-1, self.residual.shape[-1])

    @property
    def scaled(self) -> tuple[int | None, int, int, int]:
        """Sizes of an FP8 weight for kernels: inputs that share a scale, outputs, inputs, and outputs that do."""
        weight = self.weight
        return weight.format.block, weight.outputs, weight.inputs, weight.outputs // len(weight.scales)

    def like_x(self, rows: Float[Array, "r o"]) -> Float[Array, "*b o"]:
        return rows.reshape(*self.x.shape[:-1], -1)

    def finished(self, product: Float[Array, "*b n"]) -> Float[Array, "*b o"]:
        """Finish the product."""
        if self.gated:
            product = gate(product, self.weight.layout.interleave)
        return product if self.residual is None else self.residual + product


def _plain(call: Product) -> Float[Array, "*b o"]:
    if call.factor is None:
        return call.finished(matmul(call.x, call.weight, call.dtype))
    weight = call.weight
    out = fp8.product(call.x, weight.values, weight.scales, weight.format.block, call.factor)
    return call.finished(out.astype(call.dtype or call.x.dtype))


def _not_in(kind: type[Format], call: Product) -> str | None:
    return None if isinstance(call.weight.format, kind) else f"a weight in {call.weight.format}"


def _rounded_refused(call: Product) -> str | None:
    return _not_in(Fp8, call) or (None if quantises_rows(call.weight) else "rows that aren't quantised")


def _rounded(call: Product) -> Float[Array, "*b o"]:
    """Multiply rows that are quantised, and then in their own dtype again, in one product. Plain jnp takes one group of
    inputs after the other: on a GPU that is a loop with several kernels for each."""
    rows, weight, by_output = fp8.rounded(call.x, call.factor), call.weight, 1.0
    if weight.format.block:
        whole = weight.dequantised(rows.dtype)
    else:  # scales come last, so that XLA converts the values where it multiplies them
        whole, by_output = weight.values.astype(rows.dtype).T, _by_output(weight)
    out = jnp.matmul(rows, whole, preferred_element_type=jnp.float32) * by_output
    return call.finished(out.astype(call.dtype or rows.dtype))


def _xla(call: Product) -> Float[Array, "*b o"]:
    """Multiply in plain jnp. A weight of four bits is dequantised for it each time, which the log tells on a GPU."""
    if isinstance(call.weight.format, FourBits) and jax.default_backend() != "cpu":
        warn("a product of a weight in four bits", f"four_wide: {_four_wide_refused(call) or hopper.kernels_here()}")
    return _plain(call)


def _few_refused(call: Product) -> str | None:
    if reason := _not_in(Unquantised, call):
        return reason
    if not call.parts:
        return "rows without their padding"
    (b, t, _), widths = call.x.shape, [x.shape[2] for x in call.parts]
    shape = call.weight.inputs, call.weight.outputs
    return few_rows.product_supported(b * padded(b, t), widths, shape, call.weight.dtype)


def _few(call: Product) -> Float[Array, "b _ n"]:
    out = few_rows.product([flat(x) for x in call.parts], call.weight.unquantised)
    return out.reshape(len(call.x), -1, out.shape[1])


def _tiled_refused(call: Product) -> str | None:
    if reason := _not_in(Unquantised, call):
        return reason
    if call.valid is None:
        return "rows that are all valid, which XLA multiplies"
    return tile_matmul.supported(len(call.rows), call.weight.dtype, call.weight.inputs, call.weight.outputs)


def _tiled(call: Product) -> Float[Array, "*b o"]:
    return call.like_x(tile_matmul.matmul(call.rows, call.weight.unquantised, *call.tiles, gated=call.gated))


def _fp8_rows_refused(by: ModuleType, call: Product) -> str | None:
    if reason := _not_in(Fp8, call):
        return reason
    block, outputs, inputs, unit = call.scaled
    if block is None:
        block, unit = fp8.BLOCK, outputs
    if quantises_rows(call.weight) and len(call.rows) > MOST_ROUNDED:
        return f"{len(call.rows)} rows that are quantised, too; supported: up to {MOST_ROUNDED}"
    return by.supported(len(call.rows), call.x.dtype, block, outputs, inputs, unit)


def _fp8_rows(by: ModuleType, call: Product) -> Float[Array, "*b o"]:
    """Multiply by `fp8_rows` or the portable one. Scales for all inputs come last."""
    rows, weight, scales, by_output = call.rows, call.weight, call.weight.scales, 1.0
    if weight.format.block is None:
        by_output = _by_output(weight)
        scales = jnp.ones((1, weight.inputs // fp8.BLOCK), jnp.float32)
    if quantises_rows(weight):
        rows = fp8.rounded(rows, None if call.factor is None else call.factor.reshape(-1))
    out = by.product(rows, weight.values, scales) * by_output
    return call.finished(call.like_x(out.astype(call.dtype or call.x.dtype)))


def _by_output(weight: Weight) -> Float[Array, " n"]:
    """Scales for all inputs, one for each output."""
    return jnp.repeat(weight.scales[:, 0], weight.outputs // len(weight.scales))


def _fp8_many_refused(call: Product, activations: bool) -> str | None:
    """Reason why no kernel of many rows and FP8 weights serves."""
    if reason := _not_in(Fp8, call):
        return reason
    if call.weight.format.activations != activations:
        return "rows that are quantised, too" if call.weight.format.activations else "rows that aren't quantised"
    return None if call.dtype is None else f"results in {jnp.dtype(call.dtype).name}"


def _fp8_tiles_refused(call: Product) -> str | None:
    return _fp8_many_refused(call, activations=True) or fp8_tiles.supported(call.x.dtype, *call.scaled)


def _fp8_tiles(call: Product) -> Float[Array, "*b o"]:
    values, scales = choose("quantising rows", QUANTISED_ROWS, call.rows).run(call.rows)
    if call.factor is not None:
        scales = scales * jnp.pad(call.factor.reshape(-1, 1), ((0, len(scales) - len(call.rows)), (0, 0)))
    return _tiled_fp8(call, values, scales)


def _tiled_fp8(call: Product, values: Float[Array, "p k"], scales: Float[Array, "p g"]) -> Float[Array, "*b o"]:
    """Multiply rows that are quantised, which padding may follow."""
    weight, rows = call.weight, math.prod(call.x.shape[:-1])
    of = values, scales, weight.values, weight.scales, *call.tiles
    return call.like_x(fp8_tiles.matmul(*of, block=weight.format.block, gated=call.gated, rows=rows))


def _fp8_wide_refused(call: Product) -> str | None:
    reason = _fp8_many_refused(call, activations=False)
    return reason or fp8_wide.supported(len(call.rows), call.x.dtype, *call.scaled)


def _fp8_wide(call: Product) -> Float[Array, "*b o"]:
    of = call.rows, call.weight.values, call.weight.scales, *call.tiles
    return call.like_x(fp8_wide.matmul(*of, block=call.weight.format.block, gated=call.gated))


def _dequantised_refused(call: Product) -> str | None:
    if isinstance(call.weight.format, FourBits):
        reason = None if call.dtype is None else f"results in {jnp.dtype(call.dtype).name}"
    else:
        reason = _fp8_many_refused(call, activations=False)
    return reason or tile_matmul.supported(len(call.rows), call.x.dtype, call.weight.inputs, call.weight.outputs)


def _dequantised(call: Product) -> Float[Array, "*b o"]:
    weight = call.weight.dequantised(call.x.dtype)
    return call.like_x(tile_matmul.matmul(call.rows, weight, *call.tiles, gated=call.gated))


def _four_wide_refused(call: Product) -> str | None:
    if reason := _not_in(FourBits, call):
        return reason
    if call.dtype is not None:
        return f"results in {jnp.dtype(call.dtype).name}"
    return four_wide.supported(len(call.rows), call.x.dtype, call.weight)


def _four_wide(call: Product) -> Float[Array, "*b o"]:
    return call.like_x(four_wide.matmul(call.ordered, call.weight, *call.tiles, gated=call.gated))


def _four_few_refused(call: Product) -> str | None:
    if reason := _not_in(FourBits, call) or four_wide.supported(len(call.rows), call.x.dtype, call.weight):
        return reason
    if call.dtype not in (None, jnp.float32):
        return f"results in {jnp.dtype(call.dtype).name}"
    rows = len(call.rows)
    if call.dtype is not None and rows <= MOST_HEAD_ROWS:
        rows = min(rows, few_rows.FP8_ROWS)
    shape, four = (call.weight.inputs, call.weight.outputs), few_rows.four_bits_of(call.weight)
    return few_rows.product_supported(rows, [call.weight.inputs], shape, call.x.dtype, four=four)


def _four_few(call: Product) -> Float[Array, "*b o"]:
    """Multiply by `few_rows`. No kernel of more rows has results in float32, so more of a head's come in parts."""
    rows, most = jnp.pad(call.ordered, ((0, -len(call.rows) % few_rows.GROUP), (0, 0))), few_rows.FP8_ROWS
    made = [few_rows.product([rows[i : i + most]], call.weight, dtype=call.dtype) for i in range(0, len(rows), most)]
    return call.finished(call.like_x(jnp.concatenate(made)[: len(call.rows)]))


def _portable_four_refused(call: Product) -> str | None:
    if reason := _not_in(FourBits, call):
        return reason
    if len(call.rows) > portable_four_bits.MOST_ROWS:
        return f"{len(call.rows)} rows; supported: up to {portable_four_bits.MOST_ROWS}"
    return portable_four_bits.supported(call.x.dtype, [[call.weight]])


def _portable_four(call: Product) -> Float[Array, "*b o"]:
    out = portable_four_bits.product(call.ordered, call.weight)
    return call.finished(call.like_x(out.astype(call.dtype or call.x.dtype)))


_FP8_ROWS, _PORTABLE_FP8 = ((partial(_fp8_rows_refused, by), partial(_fp8_rows, by)) for by in (fp8_rows, portable_fp8))

PRODUCTS = (
    Implementation("few_rows", HOPPER, _few_refused, _few),
    Implementation("tile_matmul", HOPPER, _tiled_refused, _tiled),
    Implementation("fp8_rows", HOPPER, *_FP8_ROWS),
    Implementation("four_few", HOPPER, _four_few_refused, _four_few),
    Implementation("four_wide", HOPPER, _four_wide_refused, _four_wide),
    Implementation("fp8_tiles", HOPPER, _fp8_tiles_refused, _fp8_tiles),
    Implementation("fp8_wide", HOPPER, _fp8_wide_refused, _fp8_wide),
    Implementation("dequantised", HOPPER, _dequantised_refused, _dequantised),
    Implementation("rounded", HOPPER, _rounded_refused, _rounded),
    Implementation("portable_fp8", PORTABLE, *_PORTABLE_FP8, requested=True),
    Implementation("portable_four_bits", PORTABLE, _portable_four_refused, _portable_four, requested=True),
    Implementation("plain", ANY, nothing, _xla),
)


ROOT_MEAN_SQUARE: Table = {Norm: frozenset({"eps", "centred"})}  # norms that are made in one with what quantises them


def _not_quantised(weights: Sequence[Weight], x: Array, scale: Array, norm: Norm) -> str | None:
    if len(weights) != 1:
        return f"{len(weights)} readers"
    if reason := beyond(norm, ROOT_MEAN_SQUARE):
        return reason
    if weights[0].adapters is not None:
        return "rows with adapters, which read them unquantised"
    return None if quantises_rows(weights[0]) else f"a weight in {weights[0].format}"


def _norm_refused(weights: Sequence[Weight], x: Array, scale: Array, norm: Norm) -> str | None:
    if reason := _not_quantised(weights, x, scale, norm):
        return reason
    rows, (weight,) = x.reshape(-1, x.shape[-1]), weights
    return _fp8_tiles_refused(Product(x, weight)) or fp8_quantise.norm_supported(*rows.shape, rows.dtype)


def _norm_and_quantise(weights: Sequence[Weight], x: Array, scale: Array, norm: Norm) -> Quantised:
    rows = x.reshape(-1, x.shape[-1])
    made = fp8_quantise.norm(rows, scale, eps=norm.eps, centred=norm.centred)
    return Quantised(*made.quantised, x.shape)


NORMS = (
    Implementation("fp8_norm_quantise", HOPPER, _norm_refused, _norm_and_quantise),
    Implementation("weighted", ANY, _not_quantised, lambda _, x, scale, norm: Weighted(*weighted(x, scale, norm))),
    Implementation("plain", ANY, nothing, lambda weights, x, scale, norm: normed(x, scale, norm)),
)
QUANTISED_ROWS = (
    Implementation(
        "fp8_quantise",
        HOPPER,
        lambda rows: fp8_quantise.supported(len(rows), rows.dtype),
        lambda rows: fp8_quantise.quantise_rows(rows),
    ),
    Implementation("plain", ANY, nothing, fp8.quantise_rows),
)


def valid_count(positions: Int[Array, "b t"]) -> Int[Array, "1"]:
    """How many rows there are up to the last that isn't padding, which has a negative position."""
    row = jnp.arange(1, positions.size + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(positions.reshape(-1) >= 0, row, 0), keepdims=True)
