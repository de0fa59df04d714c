"""The least time that the hardware needs: bytes over bandwidth or operations over arithmetic, whichever is longer.

A floor counts the target model's own work: its weights once, the cached keys and values, its multiplications, and the
states of linear attention, read and written once a round. The embedding table counts only if it is also the head.
Experts count if some token chose them, their number as expected with all equally likely; real text has preferences and
reads fewer. A drafter's work isn't counted, so a round's ratio shows it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache.paged import kv_bytes_per_token
from jaxspec.cache.recurrent import state_bytes
from jaxspec.checkpoint import Model
from jaxspec.config.flags import above_zero
from jaxspec.models.memory import PagedRows
from jaxspec.models.positions import Chunks, Window, most_seen
from jaxspec.models.weights import Weight
from jaxspec.pallas.experts.experts_mlp import expected_experts

LATENT_WEIGHTS = ("latents", "queries", "keys_values", "out")


@dataclass(frozen=True)
class Ceilings:
    """Rates a device can reach: bytes a second from its memory, operations a second in matrix multiplications."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, size: float, flops: float) -> float:
        return max(size / self.bytes_per_s, flops / self.flops_per_s)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the floor")
    help_text = "what a copy reaches, reads and writes counted (default: %(default)s, measured on an H200)"
    group.add_argument("--bandwidth", type=above_zero, default=4.3, metavar="TB/S", help=help_text)
    help_text = "what a large bf16 matmul reaches (default: %(default)s, measured on an H200)"
    group.add_argument("--flops", type=above_zero, default=780.0, metavar="TFLOP/S", help=help_text)


def ceilings(args: argparse.Namespace) -> Ceilings:
    return Ceilings(args.bandwidth * 1e12, args.flops * 1e12)


@dataclass(frozen=True)
class Attends:
    """A layer's attention: which positions a row sees (None: all), and for each, the bytes that a request's rows read
    together and the operations of a row. `devices`: those that requests are divided among."""

    window: Window | None
    token_bytes: int
    pair_flops: int
    devices: int = 1

    def of(self, requests: int) -> int:
        """How many of so many requests are one device's."""
        return -(-requests // self.devices)

    def seen(self, context: float) -> float:
        """Positions that the last row of a text sees; of several chunks, on average."""
        if isinstance(self.window, Chunks) and context > self.window.size:
            return (self.window.size + 1) / 2
        return context if self.window is None else min(context, most_seen(self.window))

    def pairs(self, tokens: int) -> float:
        """Positions that all rows of a prompt see."""
        near = tokens if self.window is None else min(tokens, most_seen(self.window))
        return tokens * (near + 1) / 2 if isinstance(self.window, Chunks) else near * (tokens - (near - 1) / 2)


@dataclass(frozen=True)
class ModelCost:
    """Bytes and operations of a model's forward. Operations count a multiply-add as two."""

    weight_bytes: int  # read by a forward that unembeds, all experts included
    layer_flops: int  # per row, attention's scores and sums not included
    head_flops: int  # per row that is unembedded
    attends: tuple[Attends, ...]  # the layers that do
    kv_bytes: int  # per token, in the cache
    state_bytes: int = 0  # of a request's states, the same at any length
    expert_bytes: int = 0  # of weight_bytes, those of experts that a token may choose or not
    num_experts: int = 1
    experts_per_token: int = 1

    @classmethod
    def of(cls, model: Model, kv_dtype: str, state_dtype: str = "float32") -> ModelCost:
        config, mixture = model.config, model.config.decoder.mixture
        tied, experts = config.decoder.tied, mixture.experts if mixture else 1
        layers, looked_up = model.params["layers"], ["layer_embed"] if tied else ["embed", "layer_embed"]
        names = "experts_gate_up", "experts_up", "experts_down"
        stacks = [layer[name] for layer in layers for name in names if name in layer]
        chosen, routed = mixture.per_token if mixture else 1, sum(x.numbers for x in stacks)
        matrices = sum(x.numbers for x in weights_of(layers)) - routed
        matrices += routed * chosen // experts
        for layer, weights in zip(config.decoder.layers, layers, strict=True):  # of which a row is on one device alone
            if (devices := getattr(layer.mixing, "by_request", 1)) > 1:
                own = [each for name, each in weights.items() if name in LATENT_WEIGHTS]
                matrices -= sum(x.numbers for x in weights_of(own)) * (devices - 1) // devices
        mixings = [each.mixing for each in config.decoder.layers if isinstance(each.mixing.memory, PagedRows)]
        size = jnp.dtype(kv_dtype).itemsize
        states = state_bytes(config, 1, kv_dtype, state_dtype)[1]
        numbers = states // jnp.dtype(state_dtype).itemsize
        head = model.params["embed"].size if tied else model.params["head"].numbers
        return cls(
            weight_bytes=bytes_of(model.params) - bytes_of([model.params.get(name, ()) for name in looked_up]),
            layer_flops=2 * matrices + 3 * 2 * numbers,  # a state is read twice and added to, for each token
            head_flops=2 * head,
            attends=tuple(
                Attends(
                    getattr(each, "window", None), each.memory.numbers * size, each.pair_flops, each.memory.by_request
                )
                for each in mixings
            ),
            kv_bytes=kv_bytes_per_token(config, kv_dtype),
            state_bytes=states,
            expert_bytes=bytes_of(stacks),
            num_experts=experts,
            experts_per_token=chosen,
        )

    def weights_read(self, tokens: float) -> float:
        """Bytes of weights that a forward over so many tokens must read."""
        chosen = expected_experts(tokens, self.experts_per_token, self.num_experts) / self.num_experts
        return self.weight_bytes - (1 - chosen) * self.expert_bytes

    def round(self, requests: int, width: int, context: float) -> tuple[float, float]:
        """Bytes and operations of verifying `width` rows for each of `requests` with `context` tokens on average."""
        rows = requests * width
        seen = [each.of(requests) * each.seen(context) for each in self.attends]
        attention = sum(each.pair_flops * tokens for each, tokens in zip(self.attends, seen, strict=True))
        cached = sum(each.token_bytes * tokens for each, tokens in zip(self.attends, seen, strict=True))
        flops = rows * (self.layer_flops + self.head_flops) + width * attention
        return self.weights_read(rows) + cached + 2 * requests * self.state_bytes, flops

    def prefill(self, tokens: int) -> tuple[float, float]:
        """Bytes and operations of a prompt up to its first token: only the last row is unembedded."""
        pairs = [each.pairs(tokens) for each in self.attends]
        attention = sum(each.pair_flops * count for each, count in zip(self.attends, pairs, strict=True))
        flops = tokens * self.layer_flops + self.head_flops + attention
        return self.weights_read(tokens) + tokens * self.kv_bytes + self.state_bytes, flops


def weights_of(tree: Any) -> list[Weight]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Weight))
    return [leaf for leaf in leaves if isinstance(leaf, Weight)]


def bytes_of(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
