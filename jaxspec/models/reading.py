"""The keys of a config.json that families share, as transformers names them. Each reader raises `ConfigError`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.config.json_values import positive, positive_float, shown
from jaxspec.config.options import ConfigError
from jaxspec.models.description import Attention, Decoder, Layer, Mixture, Mlp, Norm
from jaxspec.models.rope import rope
from jaxspec.models.rope_scaling import NoRotation, Rope

Config = Mapping[str, Any]


def decoder(hf: Config, layers: list[Layer], norm: Norm) -> Decoder:
    """The decoder around these layers."""
    return Decoder(
        vocab_size=positive(hf, "vocab_size"),
        width=positive(hf, "hidden_size"),
        layers=tuple(layers),
        norm=norm,
        tied=bool(hf.get("tie_word_embeddings", False)),
    )


def norm(hf: Config, centred: bool = False) -> Norm:
    return Norm(positive_float(hf, "rms_norm_eps", 1e-6), centred)


def attention(hf: Config, rotated: float | None = None, interleaved: bool = False, **more: Any) -> Attention:
    """Grouped attention, with `more` of the description's fields.

    `rotated`: as in `rope`. `interleaved`: as in `Rope`.
    """
    heads = positive(hf, "num_attention_heads")
    kv_heads = positive(hf, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
    head_dim = positive(hf, "head_dim", positive(hf, "hidden_size") // heads)
    if head_dim % 2:
        raise ConfigError(f"head_dim must be even for rotary embeddings, got {head_dim}")
    rotary = dataclasses.replace(rope(hf, head_dim, rotated), interleaved=interleaved)
    return Attention(heads, kv_heads, head_dim, rotary, **more)


def only(hf: Config, values: Mapping[str, Any]) -> None:
    """Refuse a config in which one of these keys has another value than this one."""
    for key, value in values.items():
        if (found := hf.get(key)) not in (None, value):
            raise ConfigError(
                f"{key} {shown(found)} is not supported for model_type {hf['model_type']!r}; {allowed(value)}"
            )


def allowed(value: Any) -> str:
    """Say in an error the only value that a key may have."""
    return "leave it out" if value is None else f"supported: {shown(value)}"


def kinds(hf: Config, key: str, known: tuple[str, ...], default: Callable[[int], str]) -> list[str]:
    """The kind of each layer, as the config names them, or by `default` where it is silent."""
    count, named = positive(hf, "num_hidden_layers"), hf.get(key)
    if named is None:
        return [default(i) for i in range(count)]
    if not isinstance(named, list | tuple) or len(named) != count or any(kind not in known for kind in named):
        raise ConfigError(f"config.json: {key} must name {count} layers, each {' or '.join(known)}; got {shown(named)}")
    return list(named)


def each_layer(hf: Config, key: str, default: Callable[[int], bool]) -> list[bool]:
    """A 0 or 1 of each layer, or `default` where the config is silent."""
    count, named = positive(hf, "num_hidden_layers"), hf.get(key)
    if named is None:
        return [default(i) for i in range(count)]
    if not isinstance(named, list | tuple) or len(named) != count or any(each not in (0, 1) for each in named):
        raise ConfigError(f"config.json: {key} must have a 0 or a 1 for each of {count} layers, got {shown(named)}")
    return [bool(each) for each in named]


def experts(hf: Config, key: str, per_token: str = "num_experts_per_tok") -> tuple[int, int]:
    """How many experts there are, and how many of them a token has, by these keys."""
    count, chosen = positive(hf, key), positive(hf, per_token)
    if chosen > count:
        raise ConfigError(f"config.json: {per_token} ({chosen}) must not exceed {key} ({count})")
    return count, chosen


def full_attention_only(hf: Config) -> None:
    """Refuse a config in which some layer doesn't attend to all tokens."""
    no_windows(hf)
    if other := set(hf.get("layer_types") or ()) - {"full_attention"}:
        raise ConfigError(
            f"layer_types: {min(other)!r} is not supported for model_type {hf['model_type']!r}; "
            "supported: full_attention"
        )


def no_windows(hf: Config) -> None:
    """**Raises:** `ConfigError` if a layer has a sliding window, for families that are served without."""
    kinds = hf.get("layer_types") or ()
    if not isinstance(kinds, list | tuple) or not all(isinstance(kind, str) for kind in kinds):
        raise ConfigError(f"config.json: layer_types must be a list of names, got {shown(kinds)}")
    if hf.get("use_sliding_window") or "sliding_attention" in kinds:
        raise ConfigError(
            "use_sliding_window or layer_types: sliding-window attention is not supported for model_type "
            f"{hf['model_type']!r}; every layer attends to the whole context"
        )


def windows(hf: Config, window: int | None, sliding: Callable[[int], bool]) -> list[int | None]:
    """How many positions each layer sees; None: all.

    `window`: of layers that slide, None if there is none. `sliding`: whether a layer does, where `layer_types` is
    silent.
    """
    known = ("full_attention", "sliding_attention")
    named = kinds(hf, "layer_types", known, lambda i: known[window is not None and sliding(i)])
    if window is None and "sliding_attention" in named:
        raise ConfigError(
            "config.json: layer_types names sliding_attention, and sliding_window or use_sliding_window says that no "
            "layer slides; change either"
        )
    return [window if kind == "sliding_attention" else None for kind in named]


def with_rope(hf: Config, kind: str, thetas: Mapping[str, tuple[str, float]]) -> dict[str, Any]:
    """The config with the rope of one kind of layer: of `rope_parameters`, or in the keys that came before it.

    `thetas`: of each kind, that key of its base, and the base where the config is silent. A `rope_scaling` is of layers
    that see all of the text.
    """
    named, scaling = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}
    if not isinstance(named, Mapping) or not named.keys() <= thetas.keys():
        kinds = " and ".join(thetas)
        raise ConfigError(f"config.json: rope_parameters are by kind of layer, {kinds}; got {shown(named)}")
    for each, settings in (*named.items(), ("rope_scaling", scaling)):
        if not isinstance(settings or {}, Mapping):
            raise ConfigError(f"config.json: rope_parameters of {each} must be a mapping, got {shown(settings)}")
    key, theta = thetas[kind]
    settings = {"rope_theta": hf.get(key, theta), **(named.get(kind) or {})}
    return {**hf, "rope_parameters": settings, "rope_scaling": scaling if kind == "full_attention" else None}


def unrotated(rope: Rope) -> Rope:
    """The rope of layers whose queries and keys don't rotate."""
    return dataclasses.replace(rope, scaling=NoRotation())


def layers(attention: Attention, feeds: list[Mlp | Mixture], norm: Norm, windows: list[int | None]) -> list[Layer]:
    """Layers that differ in their windows and MLPs alone."""
    return [
        Layer(dataclasses.replace(attention, window=window), feed, norm)
        for feed, window in zip(feeds, windows, strict=True)
    ]


def layer_number(hf: Config, key: str) -> int:
    """A count of layers, which may be none."""
    value = hf.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"config.json: {key} must be an integer of at least 0, got {shown(value)}")
    return value


def activation(hf: Config, key: str = "hidden_act") -> str:
    """An MLP's activation as `description.Mlp` names it. **Raises:** `ConfigError` for one that isn't supported."""
    known = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    name = hf.get(key, "silu")
    if not isinstance(name, str) or name not in known:
        raise ConfigError(f"{key} {shown(name)} is not supported; supported: {', '.join(known)}")
    return known[name]


def silu_experts(hf: Config) -> None:
    """**Raises:** `ConfigError` for experts that aren't gated by SiLU, for families that are served with no others."""
    if activation(hf) != "silu":
        raise ConfigError(f"hidden_act {shown(hf['hidden_act'])} is not supported for experts; supported: silu")


def mlps(hf: Config) -> list[Mlp | Mixture]:
    """A dense MLP in every layer."""
    mlp = Mlp(positive(hf, "intermediate_size"), bool(hf.get("mlp_bias", False)), activation(hf))
    return [mlp] * positive(hf, "num_hidden_layers")


def dense_mlp(decoder: Decoder) -> Mlp:
    """The dense MLP of some layer, which an MTP module's equals. **Raises:** `ConfigError` if none has one."""
    if mlp := next((layer.feed for layer in decoder.layers if isinstance(layer.feed, Mlp)), None):
        return mlp
    raise ConfigError("--draft mtp: this model's MTP modules have a dense MLP, and no layer says how wide it is")


def mixtures(hf: Config, renormalised: bool) -> list[Mlp | Mixture]:
    """Each layer's experts, or its MLP if it has none. `renormalised`: the family's default for `norm_topk_prob`.

    Keys as in transformers' Qwen3-MoE and Qwen3-Next: layer i has experts if it isn't in `mlp_only_layers` and i + 1 is
    a multiple of `decoder_sparse_step`. Version 5 of transformers saves `num_experts` as `num_local_experts`.
    """
    silu_experts(hf)
    key = "num_experts" if "num_experts" in hf else "num_local_experts"
    count, chosen = experts(hf, key)
    layers, sparse_step = positive(hf, "num_hidden_layers"), positive(hf, "decoder_sparse_step", 1)
    named = hf.get("mlp_only_layers") or ()
    if not isinstance(named, list | tuple) or any(i not in range(layers) for i in named):
        raise ConfigError(
            f"config.json: mlp_only_layers must be a list of layers, 0 to {layers - 1}, got {shown(named)}"
        )
    shared = hf.get("shared_expert_intermediate_size") or 0
    mixture = Mixture(
        experts=count,
        per_token=chosen,
        width=positive(hf, "moe_intermediate_size"),
        renormalised=bool(hf.get("norm_topk_prob", renormalised)),
        shared=positive(hf, "shared_expert_intermediate_size") if shared else 0,
    )
    dense = [i in named or bool((i + 1) % sparse_step) for i in range(layers)]
    mlp = Mlp(positive(hf, "intermediate_size"), bool(hf.get("mlp_bias", False))) if any(dense) else None
    return [mlp if each else mixture for each in dense]
