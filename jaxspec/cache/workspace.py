"""Estimate the workspace: the memory of the largest program beside its operands, before programs are compiled.

A program of a prompt's chunk holds the residual stream and the arrays of one layer; a round, or one of a prompt's
log-probabilities, holds arrays of logits. They run one after the other, so the larger one counts. The constants cover
what XLA reports for an H200 (docs/measurements/memory.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jaxspec.decoder.matmul import MOST_HEAD_ROWS
from jaxspec.models.description import Absent, Decoder, Layer, Mixture, Mlp
from jaxspec.models.memory import Recurrence
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import Weight
from jaxspec.pallas.dense.wide import MOST
from jaxspec.pallas.experts.expert_tile import PROMPT_ROWS
from jaxspec.pallas.experts.experts_mlp import ITEM_ROWS, most_items
from jaxspec.pallas.recurrence.delta_plan import WIDTH

FLOAT32 = 4  # bytes
# Float32 arrays over the vocabulary: a round's for each row, further ones if logits are capped, and for each request;
# and those of a prompt's log-probabilities for each token.
ROUND, CAPPED, REQUEST, SCORED = 5.4, 2.0, 2.0, 4.25
STREAMS = 3.5  # rows as wide as the residual stream that a layer holds beside its own arrays


@dataclass(frozen=True)
class Demand:
    """The largest sizes that programs are made for.

    - `requests`, and `rows` of each, in a round; `scored` tokens of prompts whose log-probabilities are computed.
    - `tokens` of prompts in a chunk, in blocks of `block`; `captured`: rows of each that outlive their layer.
    - `itemsize`: bytes of an activation. `devices`: how many divide the vocabulary.
    - `kernels`: whether Hopper's multiply quantised weights; XLA converts a weight first.
    - `whole_stacks`: whether it converts all experts of a layer at once, as on a CPU.
    """

    requests: int
    rows: int
    scored: int
    tokens: int
    block: int
    captured: int
    itemsize: int
    devices: int
    kernels: bool
    whole_stacks: bool


def workspace_estimate(config: ModelConfig, params: Any, demand: Demand) -> int:
    """Bytes that the largest program needs. `params`: the model's, or their shapes."""
    capped = CAPPED * (config.decoder.logit_cap is not None)
    arrays = max(((ROUND + capped) * demand.rows + REQUEST) * demand.requests, (SCORED + capped) * demand.scored)
    rows = max(demand.rows * demand.requests, demand.scored)
    logits, first = (int(FLOAT32 * config.vocab_size * each) // demand.devices for each in (arrays, rows))
    head = params.get("head")
    if head is not None and head.quantised and not (demand.kernels and (not _packed(head) or rows <= MOST_HEAD_ROWS)):
        first += head.numbers * demand.itemsize  # converted for the product, before there is more than one array
    return max(logits, first, _prompt(config.decoder, params["layers"], demand))


def _packed(weight: Weight) -> bool:
    return weight.format.inputs_per_value > 1


def _prompt(decoder: Decoder, layers: Any, demand: Demand) -> int:
    """Bytes of a program of a prompt's chunk."""
    tokens, size, held = demand.tokens, demand.itemsize, 0
    for layer, weights in zip(decoder.layers, layers, strict=True):
        numbers = max(tokens * _mixing(layer, demand), _feed(layer.feed, weights, decoder.width, demand))
        held = max(held, size * numbers + _converted(weights, demand, tokens))
    streams = decoder.streams.count if decoder.streams else 1
    columns = (STREAMS + demand.captured) * decoder.width * streams
    if decoder.layer_inputs:
        columns += 2 * len(decoder.layers) * decoder.layer_inputs.width
    return held + int(size * tokens * columns)


def _mixing(layer: Layer, demand: Demand) -> int:
    """Numbers of a token that a layer's mixing holds: its products, and the operands and results of its kernels."""
    mixing, memory = layer.mixing, layer.mixing.memory
    if not isinstance(memory, Recurrence):
        return mixing.columns + getattr(mixing, "pair_flops", 2 * mixing.columns) // 2
    wide, values = FLOAT32 // demand.itemsize, memory.value_heads * memory.value_dim
    heads = memory.value_heads * memory.key_dim + values  # keys and values of each, in float32
    fused = not memory.channel_decay and memory.key_dim == memory.value_dim == WIDTH
    states = (0 if fused else 1) if demand.kernels else 4  # of each block, as arrays
    heads += states * -(-values * memory.key_dim // demand.block)
    return mixing.columns + memory.channels * (1 + wide) + wide * heads


def _feed(feed: Mlp | Mixture | Absent, weights: dict[str, Any], width: int, demand: Demand) -> int:
    """Numbers that the second half of a layer holds: gate and up and their product; or the rows of all experts, with
    padding up to each expert's items."""
    tokens = demand.tokens
    if not isinstance(feed, Mixture):
        return 3 * tokens * feed.width
    _, rows = most_items(tokens * (feed.per_token + bool(feed.shared)), feed.experts, ITEM_ROWS[-1])
    quantised = any(weight.quantised for weight in _weights(weights) if weight.values.ndim == 3)
    # Kernels of quantised experts have gathered rows freed before results are made; other kernels are one launch.
    at_once = 1 if quantised and not demand.whole_stacks and rows > PROMPT_ROWS * feed.experts else 2
    mixed = rows * (at_once * (feed.latent or width) + feed.width)
    return max(mixed + tokens * width, _feed(feed.beside, weights, width, demand)) if feed.beside else mixed


def _converted(weights: Any, demand: Demand, rows: int) -> int:
    """Bytes of the largest weight that XLA converts to multiply `rows` by it, and of what it makes in float32: numbers
    that were packed, or products of FP8 weights' groups of inputs, which are added up."""
    size, most = FLOAT32 if demand.whole_stacks else demand.itemsize, 0
    for weight in _weights(weights):
        packed, stack = _packed(weight), weight.values.ndim == 3
        by_kernel = demand.kernels and (not packed or rows <= MOST)
        if not weight.quantised or by_kernel or (stack and not demand.whole_stacks):
            continue
        further = weight.numbers if packed else 2 * rows * weight.outputs
        most = max(most, weight.numbers * size + FLOAT32 * (0 if stack else further))
    return most


def _weights(tree: Any) -> list[Weight]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Weight))
    return [leaf for leaf in leaves if isinstance(leaf, Weight)]
