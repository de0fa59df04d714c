"""Descriptions of vision towers: what they compute, and what their tensors are called.

A tower takes patches of pictures to embeddings that stand in a prompt: Qwen3-VL's, which Qwen3.5 has without deepstack,
SigLIP with Gemma 3's projector, or Gemma 4's. With deepstack, rows also have what is added behind the decoder's first
layers.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxspec.config.json_values import positive, positive_float, shown
from jaxspec.config.options import ConfigError

# Before a parameter's name, in files of transformers and those that were published before it put all under `model`.
PREFIXES = re.compile(r"(model\.)?(visual|vision_tower(\.vision_model)?|multi_modal_projector|embed_vision)\.")


@dataclass(frozen=True)
class Tower(ABC):
    """A transformer over patches, and what makes a token of some of them.

    `patch`: values of one. `mlp`: the width of its MLPs. `out`: the width of embeddings.
    """

    layers: int
    width: int
    heads: int
    mlp: int
    patch: int
    out: int

    per_layer: ClassVar[str]  # before names of parameters that have a leading axis of layers
    at_once: ClassVar[int] = 1  # a picture's tokens that the text model computes together
    mutual_in_windows: ClassVar[bool] = False  # whether layers without a window see no later rows of a picture

    @property
    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameters by name, as a checkpoint has them behind `PREFIXES`; those of a layer without its number."""

    @property
    @abstractmethod
    def per_token(self) -> int:
        """Patches of a token."""

    @property
    def mutual(self) -> bool:
        """Whether the text model's rows of a picture see all of it."""
        return self.at_once > 1

    @property
    def columns(self) -> int:
        """The width of its rows: an embedding, and what is added to the residual stream behind each of some layers."""
        return self.out

    @property
    def merge(self) -> int | None:
        """Patches on each side of a token, where positions have three axes; None: a token's place is its position."""
        return None

    @abstractmethod
    def sizes(self, most: int) -> tuple[int, ...]:
        """Patches that programs are made for, ascending, up to `most`."""

    @property
    def numbers(self) -> int:
        """Numbers in all of its parameters."""
        times = lambda name: self.layers if name.startswith(self.per_layer) else 1  # noqa: E731
        return sum(times(name) * math.prod(shape) for name, shape in self.shapes.items())

    def parameter(self, tensor: str) -> tuple[str, int] | None:
        """The parameter, and its layer, that a checkpoint's tensor is; None for one of another part."""
        if (prefix := PREFIXES.match(tensor)) is None:
            return None
        name, layer = tensor[prefix.end() :], 0
        if numbered := re.match(re.escape(self.per_layer) + r"(\d+)\.", name):
            name, layer = self.per_layer + name[numbered.end() :], int(numbered[1])
        return (name, layer) if name in self.shapes and layer < self.layers else None


@dataclass(frozen=True)
class QwenTower(Tower):
    """Qwen3-VL's: `side` of the square of learnt positions, which is resampled to a picture's grid, and a merger that
    makes one token of `merged` x `merged` patches. `deepstack`: layers behind which there are mergers of their own."""

    side: int
    merged: int
    deepstack: tuple[int, ...] = ()

    per_layer = "blocks."

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        d, merged = self.width, self.width * self.merged**2
        matrices = {
            "patch_embed.proj": (d, self.patch),
            "blocks.attn.qkv": (3 * d, d),
            "blocks.attn.proj": (d, d),
            "blocks.mlp.linear_fc1": (self.mlp, d),
            "blocks.mlp.linear_fc2": (d, self.mlp),
            "merger.linear_fc1": (merged, merged),
            "merger.linear_fc2": (self.out, merged),
        }
        norms = {name: (d,) for name in ("blocks.norm1", "blocks.norm2", "merger.norm")}
        for name in map(deepstack_merger, range(len(self.deepstack))):
            matrices |= {f"{name}.linear_fc1": (merged, merged), f"{name}.linear_fc2": (self.out, merged)}
            norms[f"{name}.norm"] = (merged,)
        return {"pos_embed.weight": (self.side**2, d)} | _with_biases(matrices | norms)

    @property
    def per_token(self) -> int:
        return self.merged**2

    @property
    def columns(self) -> int:
        return self.out * (1 + len(self.deepstack))

    @property
    def merge(self) -> int:
        return self.merged

    def sizes(self, most: int) -> tuple[int, ...]:
        return tuple(1 << i for i in range(8, most.bit_length()))


@dataclass(frozen=True)
class SiglipTower(Tower):
    """SigLIP and Gemma 3's projector: pictures of `side` x `side` patches, tokens of `pooled` x `pooled`."""

    side: int
    pooled: int
    eps: float

    per_layer = "encoder.layers."

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        d, layer = self.width, self.per_layer
        matrices = {"embeddings.patch_embedding": (d, self.patch)}
        matrices |= {f"{layer}self_attn.{name}_proj": (d, d) for name in ("q", "k", "v", "out")}
        matrices |= {f"{layer}mlp.fc1": (self.mlp, d), f"{layer}mlp.fc2": (d, self.mlp)}
        norms = {name: (d,) for name in (f"{layer}layer_norm1", f"{layer}layer_norm2", "post_layernorm")}
        return _with_biases(matrices | norms) | {
            "embeddings.position_embedding.weight": (self.side**2, d),
            "mm_soft_emb_norm.weight": (d,),
            "mm_input_projection_weight": (d, self.out),
        }

    @property
    def per_token(self) -> int:
        return self.pooled**2

    @property
    def at_once(self) -> int:
        return self.side**2 // self.pooled**2

    def sizes(self, most: int) -> tuple[int, ...]:
        """Whole pictures: one, two, four and so on."""
        one = self.side**2
        return tuple(one << i for i in range((most // one).bit_length()))


@dataclass(frozen=True)
class Gemma4Tower(Tower):
    """Gemma 4's: pictures of any grid, with learnt positions of `positions` columns and rows, and rotary ones of
    `theta`. Tokens are means of `pooled` x `pooled` patches, with a learnt shift and scale if `standardised`. With
    `clipped`, each product of a layer has least and largest inputs and outputs. `together`: tokens of a picture, at
    most, where its rows see all of it; otherwise 1."""

    positions: int
    pooled: int
    eps: float
    theta: float
    clipped: bool
    standardised: bool
    together: int

    per_layer = "encoder.layers."
    mutual_in_windows = True

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        d, layer, h = self.width, self.per_layer, self.width // self.heads
        shapes = {
            "patch_embedder.input_proj.weight": (d, self.patch),
            "patch_embedder.position_embedding_table": (2, self.positions, d),
            "embedding_projection.weight": (self.out, d),
        }
        matrices = {f"{layer}self_attn.{name}_proj": (d, d) for name in "qkvo"}
        matrices |= {f"{layer}mlp.{name}_proj": (self.mlp, d) for name in ("gate", "up")}
        matrices[f"{layer}mlp.down_proj"] = (d, self.mlp)
        for name, shape in matrices.items():
            shapes[f"{name}.linear.weight"] = shape
            if self.clipped:
                shapes |= {f"{name}.{side}_{bound}": () for side in ("input", "output") for bound in ("min", "max")}
        norms = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
        shapes |= {f"{layer}{name}.weight": (d,) for name in norms}
        shapes |= {f"{layer}self_attn.{name}_norm.weight": (h,) for name in "qk"}
        return shapes | ({"std_bias": (d,), "std_scale": (d,)} if self.standardised else {})

    @property
    def per_token(self) -> int:
        return self.pooled**2

    @property
    def at_once(self) -> int:
        return self.together

    def sizes(self, most: int) -> tuple[int, ...]:
        return tuple(1 << i for i in range(8, most.bit_length()))


def deepstack_merger(i: int) -> str:
    """Prefix of the parameters of the i-th merger behind a layer."""
    return f"deepstack_merger_list.{i}"


def _with_biases(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    weights = {f"{name}.weight": shape for name, shape in shapes.items()}
    return weights | {f"{name}.bias": shape[:1] for name, shape in shapes.items()}


def qwen_tower(hf: Mapping[str, Any], width: int, deepstack: tuple[int, ...] | None = None) -> Tower | None:
    """Read Qwen3-VL's `vision_config` of a config.json; None for one without sizes. `width`: of the text model.
    `deepstack`: the layers of the tower where a config is silent; None: the text model takes none.

    **Raises:** `ConfigError` naming the key.
    """
    if (vision := _vision(hf, "depth")) is None:
        return None
    key, depth = "deepstack_visual_indexes", positive(vision, "depth")
    if deepstack is None and vision.get(key):
        raise ConfigError(f"vision_config: {key} is not supported for this model; remove the key")
    if deepstack is not None:
        deepstack = vision.get(key, deepstack)
        numbers = isinstance(deepstack, list | tuple) and all(type(each) is int for each in deepstack)
        if not numbers or list(deepstack) != sorted({*deepstack} & {*range(depth)}):
            raise ConfigError(f"vision_config: {key} must be layers of {depth}, ascending, got {shown(deepstack)}")
        if len(deepstack) >= (layers := positive(hf.get("text_config", hf), "num_hidden_layers")):
            raise ConfigError(f"vision_config: {key} has {len(deepstack)} layers; the text model has {layers}")
    heads, d, table = positive(vision, "num_heads", 16), positive(vision, "hidden_size"), "num_position_embeddings"
    if d % (4 * heads):
        raise ConfigError(f"vision_config: hidden_size ({d}) must be a multiple of four times num_heads ({heads})")
    side = round(positive(vision, table, 2304) ** 0.5)
    if side**2 != positive(vision, table, 2304):
        raise ConfigError(f"vision_config: {table} must be a square number, got {shown(vision[table])}")
    if (out := positive(vision, "out_hidden_size", width)) != width:
        raise ConfigError(f"vision_config: out_hidden_size ({out}) must be the text model's hidden_size ({width})")
    frames = positive(vision, "in_channels", 3) * positive(vision, "temporal_patch_size", 2)
    patch = frames * positive(vision, "patch_size", 16) ** 2
    sizes = depth, d, heads, positive(vision, "intermediate_size"), patch, out
    return QwenTower(*sizes, side, positive(vision, "spatial_merge_size", 2), tuple(deepstack or ()))


def siglip_tower(hf: Mapping[str, Any], width: int) -> Tower | None:
    """Read SigLIP's `vision_config` of a Gemma 3's config.json; otherwise as `qwen_tower`."""
    if (vision := _vision(hf, "num_hidden_layers")) is None:
        return None
    heads, d = positive(vision, "num_attention_heads", 12), positive(vision, "hidden_size", 768)
    if d % heads:
        raise ConfigError(f"vision_config: hidden_size ({d}) must be a multiple of num_attention_heads ({heads})")
    image, patch = positive(vision, "image_size", 224), positive(vision, "patch_size", 16)
    fills = positive(hf, "mm_tokens_per_image", 256)
    side, tokens = image // patch, math.isqrt(fills)
    if image % patch or tokens**2 != fills or side % tokens:
        raise ConfigError(
            f"config.json: pictures of {image} x {image} pixels in patches of {patch} can't be pooled to "
            f"mm_tokens_per_image, {fills}: it must be the square of a number that divides {side}"
        )
    channels, layers = positive(vision, "num_channels", 3), positive(vision, "num_hidden_layers")
    sizes = layers, d, heads, positive(vision, "intermediate_size", 3072), channels * patch**2, width
    return SiglipTower(*sizes, side, side // tokens, positive_float(vision, "layer_norm_eps", 1e-6))


def gemma4_tower(hf: Mapping[str, Any], width: int) -> Tower | None:
    """Read the `vision_config` of a Gemma 4's config.json; otherwise as `qwen_tower`."""
    if (vision := _vision(hf, "num_hidden_layers", "hidden_activation")) is None:
        return None
    heads, d, h = (positive(vision, key, default) for key, default in (
        ("num_attention_heads", 12), ("hidden_size", 768), ("head_dim", 64)
    ))  # fmt: skip
    if heads * h != d or h % 4 or positive(vision, "num_key_value_heads", heads) != heads:
        raise ConfigError(
            f"vision_config: hidden_size ({d}) must be num_attention_heads ({heads}) times head_dim ({h}), which four "
            f"divides, with as many num_key_value_heads, got {shown(vision.get('num_key_value_heads'))}"
        )
    rope = vision.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or rope.get("rope_type", "axial") != "axial" or vision.get("attention_bias"):
        raise ConfigError("vision_config: rope_parameters must be of rope_type axial, and attention_bias false")
    mutual = (hf.get("text_config") or {}).get("use_bidirectional_attention") == "vision"
    patch, layers = 3 * positive(vision, "patch_size", 16) ** 2, positive(vision, "num_hidden_layers")
    sizes = layers, d, heads, positive(vision, "intermediate_size", 3072), patch, width
    return Gemma4Tower(
        *sizes,
        positions=positive(vision, "position_embedding_size", 10240),
        pooled=positive(vision, "pooling_kernel_size", 3),
        eps=positive_float(vision, "rms_norm_eps", 1e-6),
        theta=positive_float(rope, "rope_theta", 100.0),
        clipped=bool(vision.get("use_clipped_linears")),
        standardised=bool(vision.get("standardize")),
        together=positive(hf, "vision_soft_tokens_per_image", 280) if mutual else 1,
    )


def _vision(hf: Mapping[str, Any], layers: str, activation: str = "hidden_act") -> Mapping[str, Any] | None:
    vision = hf.get("vision_config")
    if not isinstance(vision, Mapping) or layers not in vision:
        return None
    if (given := vision.get(activation, "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
        raise ConfigError(f"vision_config: {activation} {shown(given)} is not supported; it is gelu_pytorch_tanh")
    return vision
