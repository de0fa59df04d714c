"""DFlash 2: DFlash's block with short convolutions in its layers, and a selector among each row's likeliest tokens.

Around each attention and each MLP, a row takes in the rows before it in the block: a causal convolution of a few taps,
whose kernels are partly the layer's, partly made of the row by groups of columns. The context isn't convolved.

The selector keeps each row's `top` likeliest tokens. It goes through the rows in order, adds to each candidate how well
it follows the draft before, and draws one. A draft's probabilities are therefore those among its row's candidates, zero
elsewhere, and rejection sampling takes them as they are. Where the drafter has a vocabulary of its own, candidates are
of it; from there on they go by the target's ids, which the selector knows.

Formats: z-lab's `dflash` 0.1.0, speculators; see `dflash_checkpoint`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.config.options import ConfigError
from jaxspec.decoder import stack
from jaxspec.decoder.feed import add_product, mlp
from jaxspec.decoder.forward import Hidden
from jaxspec.decoder.functions import normed
from jaxspec.decoder.matmul import valid_count
from jaxspec.decoder.plain import Plain
from jaxspec.drafters import dflash_checkpoint as checkpoint
from jaxspec.drafters.base import Proposal
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.vocabulary import as_targets, known_tokens
from jaxspec.models.description import Layer
from jaxspec.models.weights import WHOLE, Layout, Param, linear, matmul, table
from jaxspec.parallel.sharding import embed, my_requests, top_logprobs, total

CHUNK = 128  # tokens whose largest logit stands for all of them


@dataclass(frozen=True)
class DFlash2(DFlash):
    """Convolutions of `taps` rows, whose kernels are made for `group` columns together; `top` candidates a row, scored
    by products of `rank`."""

    taps: int = 2
    group: int = 16
    rank: int = 256
    top: int = 16

    computes: ClassVar[frozenset[str]] = frozenset({"selector_rank", "conv_kernel_size"})

    @classmethod
    def more(cls, own, config):
        if own.get("sample_from_anchor"):
            raise ConfigError("sample_from_anchor is true; DFlash 2 drafts from its masks alone")
        group = checkpoint.integer("conv_group_size", own.get("conv_group_size"), 1)
        if config.hidden_size % group:
            raise ConfigError(f"conv_group_size is {group}; it must divide hidden_size, {config.hidden_size}")
        return {
            "taps": checkpoint.integer("conv_kernel_size", own.get("conv_kernel_size"), 1),
            "group": group,
            "rank": checkpoint.integer("selector_rank", own.get("selector_rank"), 1),
            "top": checkpoint.integer("selector_top_k", own.get("selector_top_k"), 1, config.vocab_size + 1),
        }

    def parameters(self, found=()):
        declared, d, v = super().parameters(found), self.config.hidden_size, self.config.vocab_size
        for i, layer in enumerate(declared["layers"]):
            for name in ("attention_conv", "mlp_conv"):
                base, made = (f"layers.{i}.{name}.{tensor}" for tensor in ("base_kernel", "kernel_projection.weight"))
                layer[name] = Param((2, self.taps, d), (base,), Layout((d,)), whole=base, exact=True, split=WHOLE)
                layer[name + "_made"] = linear(d, {made: 2 * self.taps * (d // self.group)}, exact=True, split=WHOLE)
        books = {"before": "predecessor", "after": "successor"}
        for name, book in books.items():
            declared[name] = table(v, self.rank, f"candidate_selector.{book}_codebook")
        selector = linear(d, {"candidate_selector.hidden_projection.weight": self.rank}, exact=True, split=WHOLE)
        return {**declared, "selector": selector}

    def with_token_map(self, params, ids):
        if len(ids) < self.top:
            raise ConfigError(
                f"--draft-token-map has {len(ids)} tokens; this drafter chooses among {self.top} in each row"
            )
        return super().with_token_map(params, ids)

    def propose(self, params, state, batch):
        hidden, n = self._fill(params, state, batch), self.num_draft_tokens
        rows, token = self._drafting(hidden.last), batch.tokens(-1, 1)[:, 0]
        alone = self._logits(params, rows)
        best, ids, _ = top_logprobs(alone, self.top, known_tokens(params, self.config.vocab_size), largest)
        ids = as_targets(params, ids, None)[0]
        by_row, after, each = matmul(rows, params["selector"]), params["after"][ids], jnp.arange(len(token))
        tokens, probs, scores = [], [], []
        for step in range(n):
            before = params["before"][token] * by_row[:, step]
            follows = jnp.einsum("br,bkr->bk", before, after[:, step], preferred_element_type=jnp.float32)
            scores.append(best[:, step] + follows)
            choice, p = batch.choose(scores[-1], step)
            token = ids[each, step, choice]
            tokens.append(token)
            probs.append(p)
        spread = partial(_spread, size=self.config.vocab_size)
        q = None if batch.greedy else spread(jnp.stack(probs, axis=1), my_requests(ids), fill=0.0)
        logits = spread(jnp.stack(scores, axis=1), ids, fill=-jnp.inf)
        return Proposal(jnp.stack(tokens, axis=1), jnp.where(batch.live, n, 0), q, logits), hidden.cache

    def _forward(self, params, block, positions, mixer, state):
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


def largest(x: Float[Array, "b n v"], k: int) -> tuple[Float[Array, "b n k"], Int[Array, "b n k"]]:
    """Find the k largest like `jax.lax.top_k`, but sort far fewer: they are in the k chunks with the largest maxima."""
    b, n, v = x.shape
    if v < 4 * k * CHUNK:
        return jax.lax.top_k(x, k)
    chunks = jnp.pad(x, ((0, 0), (0, 0), (0, -v % CHUNK)), constant_values=-jnp.inf).reshape(b, n, -1, CHUNK)
    which = jnp.sort(jax.lax.top_k(chunks.max(-1), k)[1], axis=-1)
    near = jnp.take_along_axis(chunks, which[..., None], axis=2).reshape(b, n, k * CHUNK)
    values, at = jax.lax.top_k(near, k)
    return values, jnp.take_along_axis(which, at // CHUNK, axis=-1) * CHUNK + at % CHUNK


def _spread(values: Float[Array, "b n k"], ids: Int[Array, "b n k"], size: int, fill: float) -> Float[Array, "b n v"]:
    """The values at their ids, `fill` elsewhere."""
    b, n, _ = values.shape
    at = jnp.arange(b)[:, None, None], jnp.arange(n)[:, None], ids
    return jnp.full((b, n, size), fill, values.dtype).at[at].set(values)
