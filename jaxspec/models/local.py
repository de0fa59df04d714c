"""Describe the part of a decoder that each of several devices computes: its heads, columns and experts."""

from __future__ import annotations

import dataclasses

from jaxspec.config.options import ConfigError
from jaxspec.models.description import Decoder, Layer, Mixture, Mlp


def local(decoder: Decoder, size: int) -> Decoder:
    """One device's share of a decoder among `size`. Its vocabulary is still the whole one.

    **Raises:** `ConfigError` naming what can't be divided.
    """
    if size == 1:
        return decoder
    parts = {layer: _local_layer(layer, size) for layer in dict.fromkeys(decoder.layers)}
    return dataclasses.replace(decoder, layers=tuple(parts[layer] for layer in decoder.layers))


def in_groups(decoder: Decoder, size: int, groups: int) -> Decoder:
    """A decoder whose experts are divided among so many groups of the `size` devices (`--ep-size`).

    **Raises:** `ConfigError` where they can't be.
    """
    if groups == 1:
        return decoder
    if size % groups:
        raise ConfigError(f"--ep-size {groups} must divide --tp-size, got --tp-size {size}")
    if decoder.mixture is None:
        raise ConfigError(f"--ep-size {groups} divides experts, and this model has none; drop it")
    if decoder.mixture.experts % groups:
        raise ConfigError(f"--ep-size {groups} must divide the model's {decoder.mixture.experts} experts evenly")

    def grouped(layer: Layer) -> Layer:
        feed = layer.feed
        feed = dataclasses.replace(feed, groups=groups) if isinstance(feed, Mixture) else feed
        return dataclasses.replace(layer, feed=feed)

    return dataclasses.replace(decoder, layers=tuple(map(grouped, decoder.layers)))


def by_request(decoder: Decoder, size: int) -> Decoder:
    """A decoder whose layers with latent attention divide requests among `size` devices (`--dp-attention`).

    **Raises:** `ConfigError` where there is nothing to divide so.
    """
    if size == 1:
        raise ConfigError(
            "--dp-attention divides requests among the GPUs of one model, and there is one. Add --tp-size N, or drop it"
        )
    divides = lambda layer: hasattr(layer.mixing, "by_request")  # noqa: E731
    if not any(map(divides, decoder.layers)):
        raise ConfigError(
            "--dp-attention divides the latents of requests, and this model has none: its KV heads are divided by "
            "--tp-size alone. Drop it; --dp-size N repeats whole engines"
        )

    def own(layer: Layer) -> Layer:
        mixing = dataclasses.replace(layer.mixing, by_request=size) if divides(layer) else layer.mixing
        return dataclasses.replace(layer, mixing=mixing)

    return dataclasses.replace(decoder, layers=tuple(map(own, decoder.layers)))


def _local_layer(layer: Layer, size: int) -> Layer:
    tp_size = size

    def share(what: str, count: int, repeated: bool = False, size: int = size) -> int:
        if count % size and not (repeated and size % count == 0):
            allowed = [n for n in range(1, count + 1) if count % n == 0]
            more = f", and multiples of {count}," if repeated else ""
            raise ConfigError(
                f"--tp-size {tp_size}: {count} {what} can't be divided among {size} devices; "
                f"{', '.join(map(str, allowed[:12]))}{', ...' if len(allowed) > 12 else ''}{more} are possible for them"
            )
        return max(count // size, 1)

    mixing = layer.mixing.divided(share)
    width = {}
    match layer.feed:
        case Mlp(width):
            width = {"width": share("columns of an MLP", width)}
        case Mixture(width=width, shared=shared, groups=groups, beside=beside):
            width = {"width": share("columns of an expert", width, size=size // groups)}
            width |= {"shared": share("columns of the shared expert", shared)} if shared else {}
            if beside:
                width |= {"beside": dataclasses.replace(beside, width=share("columns of an MLP", beside.width))}
    replace = dataclasses.replace
    return replace(layer, mixing=mixing, feed=replace(layer.feed, **width))
