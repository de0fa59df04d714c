"""Descriptions of vision towers: what they compute, and what their tensors are called.

A tower takes patches of pictures to embeddings that stand in a prompt: Qwen3-VL's, which Qwen3.5 has without deepstack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.config.json_values import positive, shown
from jaxspec.config.options import ConfigError

PREFIX = "model.visual."
PER_LAYER = "blocks."  # whose parameters have a leading axis of layers


@dataclass(frozen=True)
class Tower:
    """A transformer over patches, and a merger that makes one token of `merge` x `merge` of them.

    `patch`: values of one. `side`: of the square of learnt positions, which is resampled to a picture's grid. `mlp`:
    the width of its MLPs. `out`: the width of embeddings.
    """

    layers: int
    width: int
    heads: int
    mlp: int
    patch: int
    side: int
    merge: int
    out: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameters by name, as a checkpoint has them behind `PREFIX`; those of a layer without its number."""
        d, merged = self.width, self.width * self.merge**2
        matrices = {
            "patch_embed.proj": (d, self.patch),
            f"{PER_LAYER}attn.qkv": (3 * d, d),
            f"{PER_LAYER}attn.proj": (d, d),
            f"{PER_LAYER}mlp.linear_fc1": (self.mlp, d),
            f"{PER_LAYER}mlp.linear_fc2": (d, self.mlp),
            "merger.linear_fc1": (merged, merged),
            "merger.linear_fc2": (self.out, merged),
        }
        norms = {name: (d,) for name in (f"{PER_LAYER}norm1", f"{PER_LAYER}norm2", "merger.norm")}
        shapes = {"pos_embed.weight": (self.side**2, d)}
        for name, shape in (matrices | norms).items():
            shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        return shapes

    @property
    def numbers(self) -> int:
        """Numbers in all of its parameters."""
        d, merged = self.width, self.width * self.merge**2
        layer = 4 * d * d + 2 * d * self.mlp + 9 * d + self.mlp
        ends = d * (self.patch + 3 + self.side**2) + merged * (merged + 1) + self.out * (merged + 1)
        return self.layers * layer + ends


def tower(hf: Any, width: int) -> Tower | None:
    """Read a `vision_config`; None for one without sizes. `width`: of the text model.

    **Raises:** `ConfigError` naming the key.
    """
    if not isinstance(hf, Mapping) or "depth" not in hf:
        return None
    if (activation := hf.get("hidden_act", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
        raise ConfigError(f"vision_config: hidden_act {shown(activation)} is not supported; it is gelu_pytorch_tanh")
    if hf.get("deepstack_visual_indexes"):
        raise ConfigError("vision_config: deepstack_visual_indexes is not supported for this model; remove the key")
    heads, d, table = positive(hf, "num_heads", 16), positive(hf, "hidden_size"), "num_position_embeddings"
    if d % (4 * heads):
        raise ConfigError(f"vision_config: hidden_size ({d}) must be a multiple of four times num_heads ({heads})")
    side = round(positive(hf, table, 2304) ** 0.5)
    if side**2 != positive(hf, table, 2304):
        raise ConfigError(f"vision_config: {table} must be a square number, got {shown(hf[table])}")
    if (out := positive(hf, "out_hidden_size", width)) != width:
        raise ConfigError(f"vision_config: out_hidden_size ({out}) must be the text model's hidden_size ({width})")
    patch = (
        positive(hf, "in_channels", 3) * positive(hf, "temporal_patch_size", 2) * positive(hf, "patch_size", 16) ** 2
    )
    sizes = positive(hf, "depth"), d, heads, positive(hf, "intermediate_size"), patch, side
    return Tower(*sizes, positive(hf, "spatial_merge_size", 2), out)
