"""Parts of params pytrees: weights of matmuls with their format and layout, and declarations of every array.

The weight of a matmul is a `Weight`, wherever it is kept; norms' scales, biases and embeddings are plain arrays. A
kernel reads a weight through `Weight.unquantised`, which raises for any other format, so that no kernel ever takes
quantised values for numbers. `Param` declares one array or weight: checkpoints are read, checked and written by it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from jaxspec.models import fp8, int4, mxfp4, nvfp4

LEAST = 64  # outputs of a weight that kernels of few rows take
HALF = 32  # columns of gate, then as many of up, in the weight of a gated MLP: so a tile of columns holds both


class Format:
    """How the values of a weight are to be read; frozen, static under jit. One outside of this file is a frozen
    dataclass that has `quantise` and `dequantise`, and names the paths that multiply by it.

    - `quantised`: whether the values are something else than the weight's numbers.
    - `inputs_per_value`: how many numbers a value holds.
    - `bytes_each`: that a number takes, about; None: those of the activations' dtype.
    - `inputs_per_entry`: how many inputs an entry stands for, along that axis of a checkpoint's tensor.
    - `inputs_together`: how many inputs are arranged together, so that devices can't divide them.
    - `scales_by_input`: whether scales are [inputs, outputs], not [outputs, inputs] as the values.
    - `implements`: by name of a path, the fields of the format that hold there. Other paths refuse it, but for weights
      that aren't quantised, which all take.
    - `made_on_load`: whether unquantised weights become it, when they are loaded or updated.
    """

    quantised: ClassVar[bool] = True
    inputs_per_value: ClassVar[int] = 1
    bytes_each: ClassVar[float | None] = None
    inputs_per_entry: ClassVar[int] = 1
    inputs_together: ClassVar[int] = 1
    scales_by_input: ClassVar[bool] = False
    implements: ClassVar[Mapping[str, frozenset[str]]] = {}
    made_on_load: ClassVar[bool] = True

    def per_scale(self, along: str) -> int | None:
        """How many neighbouring "outputs" or "inputs" share a scale; None: all of them."""
        return 1

    def needs_whole(self, along: str) -> bool:
        """Whether the "outputs" or "inputs" that one of several devices has can't be quantised by themselves."""
        return self.per_scale(along) is None

    def quantise(
        self, rows: Float[Array, "n k"], largest: Float[Array, " m"] | None = None
    ) -> tuple[Array | None, ...]:
        """Values and scales of outputs, as `Weight` has them; what a checkpoint's numbers become on load.

        `largest`: the largest magnitude in each output of the whole matrix, where rows are one device's part of it that
        `needs_whole`. Others aren't given it.
        """
        raise NotImplementedError

    def dequantise(self, values: Array, scales: Array | None, *more: Array) -> Float[Array, "*e n k"]:
        """The outputs in float32. `more`: a weight's factors, if it has any."""
        raise NotImplementedError


@dataclass(frozen=True)
class Unquantised(Format):
    """The values are the weight itself, in a floating-point dtype."""

    quantised: ClassVar[bool] = False


@dataclass(frozen=True)
class Fp8(Format):
    """e4m3 values and their scales, as `fp8` defines them: one for each `block` inputs, or for all of them.

    `activations`: rows are quantised as well before they are multiplied. Otherwise the weight is dequantised.
    """

    block: int | None
    activations: bool = False

    bytes_each: ClassVar[float | None] = 1
    implements: ClassVar = {
        **dict.fromkeys(
            ("plain", "few_rows", "fused_norms", "post_norms", "fp8_tiles"), frozenset({"block", "activations"})
        ),
        **dict.fromkeys(("fp8_rows", "fp8_stream"), frozenset({"block"})),
    }

    def per_scale(self, along):
        return self.block if self.block or along == "inputs" else 1

    def quantise(self, rows, largest=None):
        return fp8.quantise_blocks(rows) if self.block else fp8.quantise_outputs(rows, largest)

    def dequantise(self, values, scales):
        return fp8.dequantise(values, scales, self.block)


@dataclass(frozen=True)
class Mxfp4(Format):
    """Packed E2M1 numbers, two a byte, and the scales of each 32 inputs, as `jaxspec.models.mxfp4` arranges them."""

    inputs_per_value: ClassVar[int] = 2
    bytes_each: ClassVar[float | None] = 17 / 32
    inputs_per_entry: ClassVar[int] = mxfp4.BLOCK
    scales_by_input: ClassVar[bool] = True
    implements: ClassVar = dict.fromkeys(("plain", "few_rows"), frozenset())  # of experts
    made_on_load: ClassVar[bool] = False

    def per_scale(self, along):
        return mxfp4.BLOCK if along == "inputs" else 1

    def dequantise(self, values, scales):
        return mxfp4.dequantise(values, scales)


class FourBits(Format):
    """Numbers of four bits, two a byte, with scales `[groups, outputs]` or several rows a group.

    A checkpoint's tensors are read as bytes [outputs, inputs / 2], the first number in the low half, and as scales
    [outputs, groups, n], of what `checkpoint.packed` puts there. `placed` makes the device's arrays of them.
    """

    inputs_per_value: ClassVar[int] = 2
    inputs_per_entry: ClassVar[int] = 2
    inputs_together: ClassVar[int] = mxfp4.BLOCK
    scales_by_input: ClassVar[bool] = True

    def placed(self, values: UInt8[Array, "*e n k2"], scales: Float[Array, "*e n s c"]) -> tuple[Array, ...]:
        """Values, scales and factors as the device has them, of what a checkpoint has."""
        raise NotImplementedError


@dataclass(frozen=True)
class Int4(FourBits):
    """Integers as `jaxspec.models.int4` arranges them. `group` inputs share a scale; None: all of them.

    `zeros`: each scale has a zero point. `ordered`: inputs stand in another order than rows have them, sorted by their
    group, which `Weight.order` says (GPTQ's `desc_act`).
    """

    group: int | None
    zeros: bool = False
    ordered: bool = False

    bytes_each: ClassVar[float | None] = 33 / 64
    implements: ClassVar = {
        "plain": frozenset({"group", "zeros", "ordered"}),
        **dict.fromkeys(("few_rows", "fused_norms", "post_norms"), frozenset({"group", "zeros"})),
    }

    @property
    def made_on_load(self) -> bool:
        """One of a checkpoint's zero points and orders isn't."""
        return not self.zeros and not self.ordered

    def per_scale(self, along):
        return self.group if along == "inputs" else 1

    def quantise(self, rows, largest=None):
        return int4.quantise(rows, self.group or rows.shape[-1], largest)

    def placed(self, values, scales):
        by_input = jnp.moveaxis(scales, -3, -1)  # [groups, n, outputs]
        return int4.arrange(values), by_input.reshape(*by_input.shape[:-3], -1, by_input.shape[-1])

    def dequantise(self, values, scales):
        return int4.dequantise(values, scales, self.zeros)


@dataclass(frozen=True)
class Nvfp4(FourBits):
    """E2M1 numbers, scales of each 16 inputs in a byte and float32 factors, as `jaxspec.models.nvfp4` has them."""

    bytes_each: ClassVar[float | None] = 9 / 16
    implements: ClassVar = dict.fromkeys(("plain", "few_rows", "fused_norms", "post_norms"), frozenset())

    def per_scale(self, along):
        return nvfp4.GROUP if along == "inputs" else 1

    def needs_whole(self, along):
        return True  # for the factor

    def quantise(self, rows, largest=None):
        return nvfp4.quantise(rows, largest)

    def placed(self, values, scales):
        return *nvfp4.arrange(values, scales[..., 0]), scales[..., 0, 1].astype(jnp.float32)

    def dequantise(self, values, scales, factors):
        return nvfp4.dequantise(values, scales, factors)


@dataclass(frozen=True)
class Layout:
    """How several projections' outputs stand in one weight. Like `Format`, static under jit.

    `splits` are the outputs of each projection, one after the other. With `interleave`, the two halves of them all
    alternate in runs of that many. With `grouped`, the checkpoint has outputs in groups, each of parts of these widths;
    here all groups' first parts come first, then their second ones.
    """

    splits: tuple[int, ...] = ()
    interleave: int = 0
    grouped: tuple[int, ...] = ()

    @property
    def unit(self) -> int:
        """The most outputs that can share a scale, whatever blocks of 128 they come from."""
        return math.gcd(fp8.BLOCK, *self.splits, self.interleave, *self.grouped)

    def per(self, size: int) -> Layout:
        """The layout of what there is one of for each `size` outputs, a divisor of `unit`."""
        each = lambda widths: tuple(width // size for width in widths)  # noqa: E731
        return Layout(each(self.splits), self.interleave // size, each(self.grouped))

    def pack(self, parts: Sequence[Array]) -> Array:
        """The projections' outputs, each the last axis of an array of `parts`, as they stand in the weight."""
        flat = lambda x, rank: x.reshape(*x.shape[:-rank], -1)  # noqa: E731
        whole = jnp.concatenate(parts, axis=-1)
        if self.interleave:
            halves = whole.reshape(*whole.shape[:-1], 2, -1, self.interleave)
            return flat(jnp.swapaxes(halves, -3, -2), 3)
        if not self.grouped:
            return whole
        groups = whole.reshape(*whole.shape[:-1], -1, sum(self.grouped))
        parts = jnp.split(groups, list(itertools.accumulate(self.grouped))[:-1], axis=-1)
        return jnp.concatenate([flat(part, 2) for part in parts], axis=-1)

    def unpack(self, whole: Array) -> list[Array]:
        """`pack` undone."""
        if self.interleave:
            runs = whole.reshape(*whole.shape[:-1], -1, 2, self.interleave)
            whole = jnp.swapaxes(runs, -3, -2).reshape(whole.shape)
        if self.grouped:
            groups = whole.shape[-1] // sum(self.grouped)
            parts = jnp.split(whole, [groups * end for end in itertools.accumulate(self.grouped)][:-1], axis=-1)
            parts = [part.reshape(*whole.shape[:-1], groups, -1) for part in parts]
            whole = jnp.concatenate(parts, axis=-1).reshape(whole.shape)
        return jnp.split(whole, list(itertools.accumulate(self.splits))[:-1], axis=-1)


@flax.struct.dataclass
class LowRank:
    """Changes of a weight's product by adapters (LoRA): rows with adapter s have `x @ a[:, s] @ b[s]` added.

    There are places for a fixed number of adapters, of a fixed rank p, padded with zeros. A weight fused of several
    projections has their ranks side by side in p, and each one's outputs read its own. `place`: of each request or
    block that rows belong to, equally many of each and in order, the place of its adapter; -1 for none.
    """

    a: Float[Array, "k s p"]
    b: Float[Array, "s p n"]
    place: Int[Array, " b"] | None = None


@flax.struct.dataclass
class Weight:
    """The weight of a matmul, or of many experts' matmuls.

    `format` says how to read the values, `layout` whose outputs they are. Both are static under jit. Values are
    [inputs, outputs]. Experts' are [experts, outputs, inputs], and quantised ones [outputs, inputs], as checkpoints
    have them; formats of four bits have a byte for two inputs. `scales`: of quantised values, `[outputs, inputs]` as
    well, with one for several of each; those of four bits are `[inputs, outputs]`. `factors`: one for each output,
    beside its scales. `order`: which of the rows' inputs each of the weight's is; None: they are in order. `adapters`:
    what rows' adapters add to the product; None: no row has one.
    """

    values: Float[Array, "*e a b"] | UInt8[Array, "*e a b"]
    format: Format = flax.struct.field(pytree_node=False, default=Unquantised())
    layout: Layout = flax.struct.field(pytree_node=False, default=Layout())
    scales: Float[Array, "*e c d"] | UInt8[Array, "*e c d"] | None = None
    factors: Float[Array, "*e n"] | None = None
    order: Int[Array, " k"] | None = None
    adapters: LowRank | None = None

    @property
    def quantised(self) -> bool:
        return self.format.quantised

    @property
    def _outputs_first(self) -> bool:
        return self.values.ndim == 3 or self.quantised

    @property
    def inputs(self) -> int:
        return self.values.shape[-1 if self._outputs_first else -2] * self.format.inputs_per_value

    @property
    def outputs(self) -> int:
        return self.values.shape[-2 if self._outputs_first else -1]

    @property
    def numbers(self) -> int:
        """How many numbers it stands for, those of all experts together."""
        return math.prod(self.values.shape[:-2]) * self.inputs * self.outputs

    @property
    def dtype(self) -> Any:
        """Dtype of the values as they are stored."""
        return self.values.dtype

    @property
    def raw(self) -> Array:
        """The values in a dtype that kernels can copy: those of one byte as int8."""
        return self.values if self.dtype.itemsize > 1 else jax.lax.bitcast_convert_type(self.values, jnp.int8)

    @property
    def unquantised(self) -> Float[Array, "*e k n"]:
        """The values, for kernels that take no scales. **Raises:** `TypeError` if they aren't the weight itself."""
        if self.quantised:
            raise TypeError(f"a weight in {self.format} was given to a kernel that takes unquantised ones")
        return self.values

    def dequantised(self, dtype: Any) -> Float[Array, "*e k n"]:
        """The whole weight in `dtype`, in the shape that unquantised values have."""
        if not self.quantised:
            return self.unquantised.astype(dtype)
        factors = () if self.factors is None else (self.factors,)
        whole = self.format.dequantise(self.values, self.scales, *factors).astype(dtype)
        if self.order is not None:
            whole = jnp.take(whole, jnp.argsort(self.order), axis=-1)
        return whole if whole.ndim == 3 else whole.T

    def parts(self, dtype: Any) -> list[Array]:
        """Each projection's columns in `dtype`, in the order of `layout.splits`."""
        return self.layout.unpack(self.dequantised(dtype))


Parts = tuple[tuple[int, int], ...]  # (how many units, how wide each is), one after the other


@dataclass(frozen=True)
class Split:
    """How a parameter is divided among devices; `jaxspec.parallel.sharding` does it.

    `along`: its "outputs", or its "inputs", of which an embedding has a token each. "whole": each device has all of it.
    "once": it is added to a sum over the devices, so the first has it and the others have zeros.

    `parts`: for each source, what it consists of along that axis. A unit stays together, as a head's columns do, and
    each part is divided by itself, the same number of units to each device. One unit may be repeated on several
    devices. `padded`: zeros make the units up to a multiple of the devices.

    `groups`, of experts: each group of neighbouring devices has some of the experts, whose columns its devices share.
    """

    along: Literal["outputs", "inputs", "whole", "once"]
    parts: tuple[Parts, ...] = ()
    padded: bool = False
    groups: int = 1


WHOLE, ONCE = Split("whole"), Split("once")


def by_outputs(*sources: Parts, padded: bool = False, groups: int = 1) -> Split:
    """Each source divided by its own outputs."""
    return Split("outputs", sources, padded, groups)


def by_inputs(units: int, width: int = 1, padded: bool = False, groups: int = 1) -> Split:
    """All sources divided by the inputs that they share."""
    return Split("inputs", (((units, width),),), padded, groups)


def matmul(x: Float[Array, "*b k"], weight: Weight, dtype: Any = None) -> Float[Array, "*b n"]:
    """`x @ weight` in plain jnp, in `dtype`, by default that of x. It defines what a format computes."""
    if isinstance(weight.format, Fp8) and weight.format.activations:
        out = fp8.product(x, weight.values, weight.scales, weight.format.block)
        return out.astype(dtype or x.dtype)
    return jnp.matmul(x, weight.dequantised(x.dtype), preferred_element_type=dtype)


def expert_matmul(x: Float[Array, "r k"], stack: Weight, i: Any) -> Float[Array, "r n"]:
    """Multiply x by the i-th expert's weight of a stack, in float32."""
    one = jax.tree.map(lambda array: array[i], stack)
    if stack.quantised:
        return matmul(x, one, jnp.float32)
    return jnp.einsum("rk,nk->rn", x, one.unquantised.astype(x.dtype), preferred_element_type=jnp.float32)


def formats(tree: Any) -> tuple[Format, ...]:
    """The formats of all weights of a pytree, each once."""
    weights = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Weight))
    return tuple(dict.fromkeys(weight.format for weight in weights if isinstance(weight, Weight)))


@dataclass(frozen=True)
class Param:
    """One array or weight of a params pytree: its shape, the checkpoint tensors it is made of, how to make it up.

    `sources` are Hugging Face tensor names. Each is `[out, in]` there and is transposed to `[in, out]` if `transpose`;
    several are put together along the last axis as `layout` says, whose splits are their last axes after transposing.
    A `depthwise` convolution's weight is `[out, 1, in]` there; an array has so many `unit_axes`, of length one, before
    and behind its own. `dtype` is this array's own, whatever that of the rest.

    A stack of experts' weights, `[experts, out, in]`, has one matrix or several an expert for sources, with the rows of
    `layout.splits`, one under the other; or else the tensor `whole`, which holds them all already, as
    `[experts, in, out]` if `transpose`. `apart` are matrices one by one that may stand in its place. An MXFP4 stack is
    `[experts, out, in / 32, 16]` bytes there.

    `exact`: never quantised on load. `format`: that of the weight. If it is quantised, `scales` names the tensor of
    each source's scales with its shape, or is empty: then sources are quantised as they are loaded. `order` names the
    tensor of the weight's.

    `split`: how it is divided among devices; None: nobody has decided, so a model that has it is served by one.
    `least`: columns that one of several devices has at least, of zeros behind its own. `by_output`: FP8 on load has a
    scale for each output, since devices couldn't cut blocks of them.
    """

    shape: tuple[int, ...]
    sources: tuple[str, ...]
    layout: Layout
    transpose: bool = False
    depthwise: bool = False
    dtype: str | None = None
    init: str = "normal"  # "normal" (fan-in scaled) | "ones" | "zeros", for dummy weights
    whole: str = ""
    apart: tuple[str, ...] = ()
    exact: bool = False
    format: Format = Unquantised()
    scales: tuple[tuple[str, tuple[int, ...]], ...] = ()
    order: str = ""
    split: Split | None = None
    least: int = 0
    unit_axes: tuple[int, int] = (0, 0)
    by_output: bool = False

    @property
    def stacked(self) -> bool:
        return len(self.shape) == 3

    @property
    def of_matmul(self) -> bool:
        """Whether it is a `Weight`, not an array."""
        return self.stacked or (self.transpose and not self.depthwise)

    def made(self, values: Any, scales: Any = None, factors: Any = None, order: Any = None) -> Any:
        """Value in the params for these values: an array, or a `Weight` of it."""
        return Weight(values, self.format, self.layout, scales, factors, order) if self.of_matmul else values

    def stored(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each checkpoint tensor that it is made of."""
        order = {self.order: (self.shape[0],)} if self.order else {}
        return self.stored_values() | dict(self.scales) | order

    def stored_values(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each source, without scales."""
        if self.sources == (self.whole,):
            experts, outputs, inputs = self.shape
            if isinstance(self.format, Mxfp4):
                return {self.whole: (experts, outputs, inputs // mxfp4.BLOCK, mxfp4.BLOCK // 2)}
            return {self.whole: (experts, inputs, outputs) if self.transpose else self.shape}
        splits, each = self.layout.splits, self.format.inputs_per_value if self.scales else 1
        if self.stacked:
            rows = zip(self.sources, splits * self.shape[0], strict=True)
            return {name: (count, self.shape[-1] // each) for name, count in rows}
        shapes = {name: (*self.shape[:-1], width) for name, width in zip(self.sources, splits, strict=True)}
        shapes = {name: (shape[1], shape[0] // each) if self.transpose else shape for name, shape in shapes.items()}
        before, behind = self.unit_axes
        shapes = {name: (*(1,) * before, *shape, *(1,) * behind) for name, shape in shapes.items()}
        return {name: (out, 1, taps) for name, (out, taps) in shapes.items()} if self.depthwise else shapes

    def as_found(self, names: Container[str]) -> Param:
        """Declaration made of `whole`, or of tensors `apart`, if a checkpoint with these tensors has them so; else this
        one."""
        if self.whole in names:
            return dataclasses.replace(self, sources=(self.whole,))
        if any(name in names for name in self.apart):
            return dataclasses.replace(self, sources=self.apart, apart=(), whole="", transpose=False)
        return self


def is_param(leaf: Any) -> bool:
    return isinstance(leaf, Param)


def linear(
    inputs: int,
    sources: dict[str, int],
    interleave: int = 0,
    exact: bool = False,
    split: Split | None = None,
    least: int = 0,
) -> Param:
    """A matmul weight `[inputs, sum of widths]` fused from the named `[width, inputs]` checkpoint tensors."""
    layout = Layout(tuple(sources.values()), interleave)
    options = dict(transpose=True, exact=exact, split=split, least=least)
    return Param((inputs, sum(sources.values())), tuple(sources), layout, **options)


def bias(sources: dict[str, int], interleave: int = 0, split: Split | None = None) -> Param:
    layout = Layout(tuple(sources.values()), interleave)
    return Param((sum(sources.values()),), tuple(sources), layout, init="zeros", split=split)


def norm_scale(width: int, source: str, centred: bool = False, split: Split = WHOLE) -> Param:
    """The weight of a norm: `centred`, an offset from one."""
    return Param((width,), (source,), Layout((width,)), init="zeros" if centred else "ones", split=split)


def embedding(tokens: int, width: int, source: str) -> Param:
    return Param((tokens, width), (source,), Layout((width,)), split=by_inputs(tokens, padded=True))


def table(tokens: int, width: int, source: str) -> Param:
    """Declare rows by token that are looked up for one draft after another, where an exchange for each costs more time
    than the copy on each device costs memory."""
    return Param((tokens, width), (source,), Layout((width,)), split=WHOLE)


def head(width: int, tokens: int, source: str) -> Param:
    """Declare the weight that makes logits of final hidden states; it is never quantised on load."""
    return linear(width, {source: tokens}, exact=True, split=by_outputs(((tokens, 1),), padded=True))


def expert_stack(experts: int, inputs: int, whole: str, sources: dict[str, int], split: Split | None = None) -> Param:
    """Weights `[experts, out, inputs]`, kept as checkpoints have them: `sources` are the tensors of expert `{}`."""
    names = tuple(name.format(i) for i in range(experts) for name in sources)
    shape = experts, sum(sources.values()), inputs
    return Param(shape, names, Layout(tuple(sources.values())), whole=whole, split=split)


def run_length(mlp_size: int) -> int:
    """How many columns of gate alternate with as many of up."""
    return math.gcd(mlp_size, HALF)
