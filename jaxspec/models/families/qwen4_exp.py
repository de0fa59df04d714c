"""Qwen3.8-Flash-Next: Qwen3.5's linear layers and experts over four residual streams, and attention to some blocks.

Full attention sees the tokens of blocks that an indexer selects. A layer or more has a table of n-grams. Norms stand
where streams are mixed, and nowhere else. Names are those of `Qwen4ExpForCausalLM`; public checkpoints have the text
model beside a vision tower, which isn't read, and an MTP module.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from jaxspec.config.json_values import positive, shown
from jaxspec.config.options import ConfigError
from jaxspec.models import reading
from jaxspec.models.declaring import (
    Tensors,
    attention_tensors,
    convolution,
    decoder_tensors,
    delta_rule_tensors,
    layer_tensors,
)
from jaxspec.models.description import Decoder, DeltaRule, IndexedAttention, Layer, NGrams, Norm, Streams
from jaxspec.models.families import qwen3_next
from jaxspec.models.families.qwen3_5 import separate_projections
from jaxspec.models.weights import WHOLE, Layout, Param, Split, linear, norm_scale

__all__ = ["read", "tensors"]

# What transformers' Qwen4ExpTextConfig has where a config.json is silent.
DEFAULTS = {
    "hc_count": 4,
    "hc_lowrank": 320,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "seed": 1234,
    "split_ngram_parts": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}
INDEXER = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
WORD = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's step and factors (https://doi.org/10.1145/2714064.2660195)
MIX = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)
PER_LAYER = 10007


def read(hf: reading.Config) -> Decoder:
    """**Raises:** `ConfigError` naming the key."""
    kinds = {"indexed_attention": "full_attention"}
    if isinstance(named := hf.get("layer_types"), list | tuple):
        hf = {**hf, "layer_types": [kinds.get(each, each) if isinstance(each, str) else each for each in named]}
    gate = hf.get("output_gate_type") or hf.get("hidden_act", "silu")
    if gate not in ("silu", "swish", "sigmoid"):
        raise ConfigError(
            f"output_gate_type {shown(gate)} is not supported for model_type {hf['model_type']!r}; supported: sigmoid, "
            "silu (also called swish)"
        )
    decoder = qwen3_next.read({**hf, "output_gate_type": "silu"}, reading.mixtures(hf, renormalised=True))
    _check_module(hf, decoder)
    streams = Streams(positive(hf, "hc_count"), positive(hf, "hc_lowrank"))
    if streams.count < 2:
        raise ConfigError("config.json: hc_count must be at least 2, got 1")
    linear = qwen3_next.linear_layers(hf)
    ngrams = ngrams_of(hf, decoder, streams, linear)

    def changed(i: int, layer: Layer) -> Layer:
        if linear[i]:
            mixing = dataclasses.replace(layer.mixing, gate="sigmoid" if gate == "sigmoid" else "silu")
        else:
            mixing = IndexedAttention(**vars(layer.mixing), **indexer(hf, layer.mixing))
        return dataclasses.replace(layer, mixing=mixing, pre_norm=False, ngrams=ngrams.get(i))

    layers = tuple(itertools.starmap(changed, enumerate(decoder.layers)))
    return dataclasses.replace(decoder, layers=layers, streams=streams)


def _check_module(hf: reading.Config, decoder: Decoder) -> None:
    """**Raises:** `ConfigError` for an MTP module that isn't made of what the model is."""
    module = named if isinstance(named := hf.get("mtp"), Mapping) else {}
    theta = decoder.attention.rope.theta
    for of, key, value in (
        (module, "rope_theta", theta),
        (module, "mtp_use_hidden_state_from_layer", None),
        (hf, "mtp_use_dedicated_embeddings", False),
    ):
        if (found := of.get(key)) not in (None, value):
            raise ConfigError(
                f"config.json: {key} {shown(found)} of the MTP module is not supported; {reading.allowed(value)}"
            )


def indexer(hf: reading.Config, attention: Any) -> dict[str, int]:
    """The indexer's sizes. **Raises:** `ConfigError` for a config without one, or for sizes that don't fit together."""
    heads, keys, width, budget, ratio = (positive(hf, key) for key in INDEXER)
    if keys != 1:
        raise ConfigError(f"config.json: indexer_kv_heads must be 1, got {keys}")
    if budget % ratio:
        raise ConfigError(
            f"config.json: indexer_budget ({budget}) must be a multiple of indexer_compress_ratio ({ratio})"
        )
    rotated = attention.head_dim if attention.rope.columns is None else attention.rope.columns
    if rotated > width:
        raise ConfigError(f"config.json: {rotated} columns rotate, and indexer_head_dim is {width}; it must be no less")
    return {"index_heads": heads, "index_width": width, "budget": budget, "ratio": ratio}


def ngrams_of(hf: reading.Config, decoder: Decoder, streams: Streams, linear: list[bool]) -> dict[int, NGrams]:
    """The n-grams of layers that have some. `ple_layer_ids` counts layers from one."""
    named = hf.get("ple_layer_ids") or ()
    may = [i + 1 for i, each in enumerate(linear) if each]
    if not isinstance(named, list | tuple) or any(type(each) is not int or each not in may for each in named):
        raise ConfigError(
            f"config.json: ple_layer_ids must name layers of linear attention, from one on; got {shown(named)}"
        )
    if not named:
        return {}
    ends = hf.get("eos_token_id")
    end = ends[0] if isinstance(ends, list | tuple) and ends else ends
    if type(end) is not int or end < 0:
        raise ConfigError(f"config.json: n-grams (ple_layer_ids) end at eos_token_id, got {shown(ends)}")
    longest, each = positive(hf, "ngram_size"), positive(hf, "heads_per_ngram")
    if longest < 2:
        raise ConfigError(f"config.json: ngram_size must be at least 2, got {longest}")
    heads, width = (longest - 1) * each, positive(hf, "ple_embed_dim", decoder.width)
    if width % heads:
        raise ConfigError(f"config.json: ple_embed_dim ({width}) must be a multiple of {heads}, the hashes of a token")
    primes = primes_from(positive(hf, "ngram_vocab_size_base"))
    parts, seed, out = positive(hf, "split_ngram_parts"), hf.get("seed"), {}
    if type(seed) is not int:
        raise ConfigError(f"config.json: seed must be an integer, got {shown(seed)}")
    for number, layer in enumerate(sorted({each - 1 for each in named})):
        sizes = tuple(itertools.islice(primes, heads))
        rows = padded(sum(sizes), positive(hf, "make_ngram_vocab_size_divisible_by"))
        if rows % parts or rows >= 2**31:
            raise ConfigError(
                f"config.json: a table of {rows} n-grams in split_ngram_parts {parts} is not supported; the rows must "
                f"be a multiple of the parts and fewer than 2**31"
            )
        out[layer] = NGrams(
            sizes=sizes,
            multipliers=multipliers(decoder.vocab_size, longest, number, seed),
            rows=rows,
            parts=parts,
            width=width // heads,
            taps=positive(hf, "ple_conv_kernel_size"),
            end=end,
            channels=streams.count * decoder.width,
            number=number,
        )
    return out


def padded(count: int, by: int) -> int:
    return -(-count // by) * by


def primes_from(least: int) -> Iterator[int]:
    """Primes of at least `least`, in order."""
    return (n for n in itertools.count(max(least, 2)) if all(n % by for by in range(2, math.isqrt(n) + 1)))


def multipliers(vocab_size: int, count: int, number: int, seed: int) -> tuple[int, ...]:
    """Odd numbers that a layer's hashes multiply tokens by, drawn by SplitMix64."""
    bound = max((2**63 - 1) // vocab_size // 2, 1)

    def drawn(value: int) -> int:
        for shift, factor in MIX:
            value = (value ^ value >> shift) * factor & WORD
        return value ^ value >> 31

    starts = (seed + PER_LAYER * number + GOLDEN * (i + 1) for i in range(count))
    return tuple(2 * (drawn((start + GOLDEN) & WORD) % bound) + 1 for start in starts)


def indexed_tensors(layer: Layer, d: int, prefix: str) -> Tensors:
    """Indexed attention. Each device has all of the indexer."""
    a, own = layer.mixing, prefix + "self_attn.indexer."
    columns = (a.index_heads + 1) * a.index_width
    return attention_tensors(layer, d, prefix) | {
        "index": linear(d, {own + "index_qk_proj.weight": columns}, exact=True, split=WHOLE),
        "index_q_norm": norm_scale(a.index_width, own + "q_layernorm.weight", a.qk_norm.centred),
        "index_k_norm": norm_scale(a.index_width, own + "k_layernorm.weight", a.qk_norm.centred),
    }


def stream_tensors(streams: Streams, d: int, source: str, norm: Norm, prefix: str = "") -> Tensors:
    """The gates of a mean of streams. Each device has all of them."""
    wide, small = streams.count * d, dict(exact=True, split=WHOLE)
    return {
        f"{prefix}norm": norm_scale(wide, source + "hc_norm.weight", norm.centred),
        f"{prefix}gates_in": linear(wide, {source + "input_mix_weight_down.weight": streams.rank}, **small),
        f"{prefix}gates_out": linear(streams.rank, {source + "input_mix_weight_up.weight": wide}, **small),
    }


def ngram_tensors(ngrams: NGrams, d: int, source: str, norm: Norm) -> Tensors:
    """A layer's n-grams. Devices divide the columns of the table, and have all of the rest."""
    of, wide, rows = ngrams, ngrams.channels, ngrams.rows // ngrams.parts
    small, inputs, table = (
        dict(exact=True, split=WHOLE),
        len(of.sizes) * of.width,
        source + "ple_embedding.ngram_embedding.",
    )
    return {
        "ngram_table": Param(
            (of.parts, rows, of.width),
            tuple(f"{table}shard_{i}.weight" for i in range(of.parts)),
            Layout((rows,)),
            whole=table + "weight",
            exact=True,
            split=Split("inputs", (((of.width, 1),),)),
        ),
        "ngram_key": linear(inputs, {source + "key_proj.weight": wide}, **small),
        "ngram_value": linear(inputs, {source + "value_proj.weight": d}, **small),
        "ngram_conv": convolution(of.taps, {source + "conv1d.weight": wide}, WHOLE),
        **{
            f"ngram_{name}_norm": norm_scale(wide, f"{source}norm_{name}.weight", norm.centred)
            for name in ("key", "query", "conv")
        },
    }


MIXINGS = {
    IndexedAttention: indexed_tensors,
    DeltaRule: partial(delta_rule_tensors, projections=separate_projections),
}


def tensors(decoder: Decoder) -> dict[str, Any]:
    """The params pytree as declarations."""
    tree, streams, d = decoder_tensors(decoder, MIXINGS, norms={}), decoder.streams, decoder.width
    del tree["norm"]
    tree["streams"] = stream_tensors(streams, d, "model.hyper_connection_mixer.", decoder.norm)
    for i, (layer, own) in enumerate(zip(decoder.layers, tree["layers"], strict=True)):
        own |= sub_layers(streams, layer, d, f"model.layers.{i}.")
        if layer.ngrams:
            own |= ngram_tensors(layer.ngrams, d, f"model.layers.{i}.ple.", layer.norm)
    return tree


def sub_layers(streams: Streams, layer: Layer, d: int, prefix: str) -> Tensors:
    """The gates of a layer's two sub-layers, of their inputs and of their outputs."""
    tree = {}
    for name in ("attn", "mlp"):
        source = f"{prefix}{name}_hyper_connection."
        tree |= stream_tensors(streams, d, source, layer.norm, f"{name}_")
        inject = {source + "block_inject_weight.weight": streams.count}
        tree[f"{name}_inject"] = linear(streams.count * d, inject, exact=True, split=WHOLE)
    return tree


def mtp_parameters(decoder: Decoder) -> dict[str, Any]:
    """The MTP module of a decoder of its one layer."""
    (layer,), streams, d, norm = decoder.layers, decoder.streams, decoder.width, decoder.norm
    prefix = "mtp.layers.0."
    return {
        "embed_norm": norm_scale(d, "mtp.pre_fc_norm_embedding.weight", norm.centred),
        "hidden_norm": norm_scale(streams.count * d, "mtp.pre_fc_norm_hidden.weight", norm.centred),
        **{
            f"fc_{name}": linear(d, {f"mtp.fc_{name}.weight": d}, exact=True, split=WHOLE)
            for name in ("embedding", "hidden")
        },
        "layer": layer_tensors(layer, d, prefix, MIXINGS, norms={}) | sub_layers(streams, layer, d, prefix),
        "streams": stream_tensors(streams, d, "mtp.hyper_connection_mixer.", norm),
    }
