"""Short convolutions in a block's layers: DFlash 2 has them always, LiLiCorr in some checkpoints.

Around each attention and each MLP, a row takes in the rows before it in the block: a causal convolution of a few taps,
whose kernels are partly the layer's, partly made of the row by groups of columns. The context isn't convolved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.config.options import ConfigError
from jaxspec.decoder import stack
from jaxspec.decoder.feed import add_product, mlp
from jaxspec.decoder.forward import Hidden
from jaxspec.decoder.functions import normed
from jaxspec.decoder.matmul import valid_count
from jaxspec.decoder.plain import Plain
from jaxspec.drafters import dflash_checkpoint as checkpoint
from jaxspec.drafters.dflash import DFlash
from jaxspec.models.description import Layer
from jaxspec.models.weights import WHOLE, Layout, Param, linear, matmul
from jaxspec.parallel.sharding import embed, total


@dataclass(frozen=True)
class ConvolvedBlock(DFlash):
    """Convolutions of `taps` rows, whose kernels are made for `group` columns together. No taps: plain layers."""

    taps: int = 0
    group: int = 1

    @classmethod
    def more(cls, own, config):
        group = checkpoint.integer("conv_group_size", own.get("conv_group_size"), 1)
        if config.hidden_size % group:
            raise ConfigError(f"conv_group_size is {group}; it must divide hidden_size, {config.hidden_size}")
        return {"taps": checkpoint.integer("conv_kernel_size", own.get("conv_kernel_size"), 1), "group": group}

    def parameters(self, found=()):
        declared, d = super().parameters(found), self.config.hidden_size
        for i, layer in enumerate(declared["layers"] if self.taps else ()):
            for name in ("attention_conv", "mlp_conv"):
                base, made = (f"layers.{i}.{name}.{tensor}" for tensor in ("base_kernel", "kernel_projection.weight"))
                layer[name] = Param((2, self.taps, d), (base,), Layout((d,)), whole=base, exact=True, split=WHOLE)
                layer[name + "_made"] = linear(d, {made: 2 * self.taps * (d // self.group)}, exact=True, split=WHOLE)
        return declared

    def _forward(self, params, block, positions, mixer, state):
        if not self.taps:
            return super()._forward(params, block, positions, mixer, state)
        decoder, x = self.config.decoder, embed(params["embed"], block)
        x = x * jnp.asarray(decoder.embed_scale, x.dtype)
        ops = Convolved(positions, mixer, self.taps, self.group)
        outputs, state, _ = stack.run(ops, decoder, params["layers"], x, state)
        return Hidden(normed(outputs[-1], params["norm"], decoder.norm), (), state)


@dataclass(frozen=True, eq=False)
class Convolved(Plain):
    """Plain layers whose sub-layers have a convolution before them and one behind them, with kernels that both take
    from the normed rows. Beside what was mixed goes the kernel behind it."""

    taps: int
    group: int

    compacts = False

    def mix(self, layer, weights, i, x, given, cache):
        rows, kernel = self._convolved(layer, weights, "attn_norm", "attention_conv", x)
        mixed, cache = super().mix(layer, weights, i, x, rows, cache)
        return (mixed, kernel), cache

    def add(self, layer, weights, x, mixed):
        mixed, kernel = mixed
        return x + convolve(total(add_product(None, mixed, weights, "out", valid_count(self.positions))), kernel), None

    def feed(self, layer, weights, after, x, given):
        rows, kernel = self._convolved(layer, weights, "mlp_norm", "mlp_conv", x)
        return x + convolve(total(mlp(layer.feed, weights, None, rows, valid_count(self.positions))), kernel), None

    def _convolved(
        self, layer: Layer, weights: Any, norm: str, name: str, x: Float[Array, "b t d"]
    ) -> tuple[Float[Array, "b t d"], Float[Array, "b t w d"]]:
        """A sub-layer's normed input after its convolution, and the kernels of the one behind the sub-layer."""
        rows = normed(x, weights[norm], layer.norm)
        made = matmul(rows, weights[name + "_made"]).reshape(*rows.shape[:2], 2, self.taps, -1)
        kernels = weights[name].unquantised + jnp.repeat(made, self.group, axis=-1)
        return convolve(rows, kernels[:, :, 0]), kernels[:, :, 1]


def convolve(x: Float[Array, "b t d"], kernels: Float[Array, "b t w d"]) -> Float[Array, "b t d"]:
    """Each column's sum over w taps of a kernel times the row so many rows before, 0 before the first."""
    t, out = x.shape[1], jnp.zeros(x.shape, jnp.float32)
    for tap in range(kernels.shape[2]):
        out += kernels[:, :, tap].astype(jnp.float32) * jnp.pad(x, ((0, 0), (tap, 0), (0, 0)))[:, :t]
    return out.astype(x.dtype)
