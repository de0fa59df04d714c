"""Rotary positions as a config.json has them, read as transformers reads them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxspec.config.json_values import positive, positive_float, shown
from jaxspec.config.options import ConfigError
from jaxspec.models.description import Decoder
from jaxspec.models.positions import Chunks, ScaleByPosition
from jaxspec.models.rope_scaling import LinearScaling, LongRope, Proportional, Rope, RopeScaling, Yarn

Config = Mapping[str, Any]


def rope(hf: Config, head_dim: int, rotated: float | None = None) -> Rope:
    """Base, scaling and rotated columns from transformers 5's `rope_parameters` and the older
    `rope_theta`/`rope_scaling`, which wins as it does there.

    `rotated`: the share of columns that rotate, where the config is silent; None: of a family whose heads rotate whole.
    """
    settings, kind = rope_settings(hf)
    theta = positive_float(settings if "rope_theta" in settings else hf, "rope_theta", 10_000.0)
    share = "partial_rotary_factor"
    fraction = positive_float(settings if share in settings else hf, share, rotated or 1.0)
    if kind == "proportional":
        pairs = int(head_dim * fraction) // 2
        if not 0 < pairs <= head_dim // 2:
            raise ConfigError(f"{share} {fraction:g} of head_dim {head_dim} is {pairs} pairs, not 1 to {head_dim // 2}")
        return Rope(theta, Proportional(pairs, positive_float(settings, "factor", 1.0)))
    if rotated is None and fraction != 1:
        raise ConfigError(
            f"{share} must be 1 for model_type {hf['model_type']!r}, all of whose columns rotate; got {fraction:g}"
        )
    if (columns := int(head_dim * fraction)) % 2 or not 0 < columns <= head_dim:
        raise ConfigError(
            f"{share} {fraction:g} of head_dim {head_dim} is {columns}, not an even number from 2 to {head_dim}"
        )
    return Rope(theta, _scaling(settings, kind, hf, columns // 2), None if columns == head_dim else columns)


def score_scale(hf: Config) -> float:
    """Multiplier of latent attention's scores beside the root of a head's width: `mscale_all_dim`'s, squared."""
    settings, kind = rope_settings(hf)
    if kind == "default" or not settings.get("mscale_all_dim"):
        return 1.0
    return _mscale(positive_float(settings, "factor"), positive_float(settings, "mscale_all_dim")) ** 2


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def rope_settings(hf: Config) -> tuple[dict[str, Any], Any]:
    """A config's settings of its rope, and the type of its scaling."""
    parts = [hf.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
    for part in parts:
        if not isinstance(part, Mapping):
            raise ConfigError(f"config.json: rope_parameters and rope_scaling are mappings, got {shown(part)}")
        if nested := next((key for key, value in part.items() if isinstance(value, Mapping)), None):
            raise ConfigError(f"config.json: rope_parameters by kind of layer ({nested}) are not supported")
    settings = {**parts[0], **parts[1]}  # what a user has added as rope_scaling counts beside what was saved
    named = (part.get(key) for part in reversed(parts) for key in ("rope_type", "type"))
    kind = next(filter(None, named), "default")
    early = kind == "su" or (kind == "yarn" and "short_factor" in settings)  # names in early configs of Phi-3
    return settings, "longrope" if early else kind


def of_context(decoder: Decoder, length: int) -> Decoder:
    """The decoder of an engine whose texts have at most so many tokens: it decides between LongRoPE's divisors, and
    drops scales of queries that would all be one, and chunks of which there would be one."""
    layers = []
    for layer in decoder.layers:
        rope = getattr(layer.mixing, "rope", None)
        if rope is not None and isinstance(scaling := rope.scaling, LongRope):
            scaling = dataclasses.replace(scaling, extended=length > scaling.original_max_position)
            mixing = dataclasses.replace(layer.mixing, rope=dataclasses.replace(rope, scaling=scaling))
            layer = dataclasses.replace(layer, mixing=mixing)
        if (scale := getattr(layer.mixing, "position_scale", None)) and length + scale.offset <= scale.period:
            layer = dataclasses.replace(layer, mixing=dataclasses.replace(layer.mixing, position_scale=None))
        if isinstance(window := getattr(layer.mixing, "window", None), Chunks) and length <= window.size:
            layer = dataclasses.replace(layer, mixing=dataclasses.replace(layer.mixing, window=None))
        layers.append(layer)
    return dataclasses.replace(decoder, layers=tuple(layers))


def position_scale(hf: Config) -> ScaleByPosition | None:
    """Read the factor of queries, under the name that Mistral's configs have for it."""
    settings, _ = rope_settings(hf)
    if not settings.get("llama_4_scaling_beta"):
        return None
    _need(settings, "yarn", "original_max_position_embeddings")
    period = positive(settings, "original_max_position_embeddings")
    return ScaleByPosition(positive_float(settings, "llama_4_scaling_beta"), period)


def _scaling(
    settings: Config, kind: Any, hf: Config, pairs: int
) -> RopeScaling | LinearScaling | Yarn | LongRope | None:
    match kind:
        case "default":
            return None
        case "linear":
            _need(settings, kind, "factor")
            return LinearScaling(positive_float(settings, "factor"))
        case "llama3":
            return _llama3(settings)
        case "yarn":
            return _yarn(settings, hf)
        case "longrope":
            return _longrope(settings, hf, pairs)
    known = "default, linear, llama3, yarn, longrope, proportional"
    raise ConfigError(f"rope_type {shown(kind)} is not supported; supported: {known}")


def _need(settings: Config, kind: str, *keys: str) -> None:
    if missing := [key for key in keys if key not in settings]:
        raise ConfigError(f"config.json: rope_scaling of type {kind} lacks {', '.join(missing)}")


def _llama3(settings: Config) -> RopeScaling:
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    _need(settings, "llama3", *keys)
    factor, low, high, original = (positive_float(settings, key) for key in keys)
    if low > high:
        raise ConfigError(f"rope_scaling: low_freq_factor ({low:g}) must not exceed high_freq_factor ({high:g})")
    return RopeScaling(factor, low, high, int(original))


def _yarn(settings: Config, hf: Config) -> Yarn:
    """Where the config doesn't give an attention factor, the paper's, as transformers computes it, times `attn_factor`,
    which vLLM and SGLang read (DeepSeek-R1-0528-Qwen3-8B has it)."""
    _need(settings, "yarn", "factor")
    given = {key: value for key, value in settings.items() if value is not None}
    longest = positive_float(hf, "max_position_embeddings", 2048.0)
    original = positive_float(given, "original_max_position_embeddings", longest)
    factor = positive_float(given, "factor", longest / original)
    mscale, of_all = given.get("mscale"), given.get("mscale_all_dim")
    default = _mscale(factor, mscale) / _mscale(factor, of_all) if mscale and of_all else _mscale(factor, 1)
    default *= positive_float(given, "attn_factor", 1.0)
    return Yarn(
        factor=factor,
        original_max_position=int(original),
        attention_factor=positive_float(given, "attention_factor", default),
        beta_fast=positive_float(given, "beta_fast", 32.0),
        beta_slow=positive_float(given, "beta_slow", 1.0),
        truncate=bool(given.get("truncate", True)),
    )


def _longrope(settings: Config, hf: Config, pairs: int) -> LongRope:
    """The original context stands beside the rope's settings in Phi-3's configs, and counts before theirs."""
    _need(settings, "longrope", "short_factor", "long_factor")
    if scale := next((key for key in ("short_mscale", "long_mscale") if settings.get(key) is not None), None):
        raise ConfigError(f"rope_scaling: {scale} is not supported; attention_factor is, for all lengths of a context")
    short, long = (_divisors(settings, key, pairs) for key in ("short_factor", "long_factor"))
    key, given = "original_max_position_embeddings", {k: v for k, v in settings.items() if v is not None}
    longest = positive(hf, "max_position_embeddings", 2048)
    original = positive(hf if hf.get(key) is not None else given, key, longest)
    if original < 2:
        raise ConfigError(f"config.json: {key} must be at least 2 for rope_type longrope, got {original}")
    factor = positive_float(given, "factor", longest / original)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRope(short, long, original, positive_float(given, "attention_factor", default), longest > original)


def _divisors(settings: Config, key: str, pairs: int) -> tuple[float, ...]:
    given = settings[key]
    if not isinstance(given, list | tuple) or len(given) != pairs:
        raise ConfigError(
            f"rope_scaling: {key} must be a list of {pairs} numbers, one for each pair of columns that rotates, "
            f"got {shown(given)}"
        )
    return tuple(positive_float({f"{key}[{i}]": each}, f"{key}[{i}]") for i, each in enumerate(given))
