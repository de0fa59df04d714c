"""Vision towers as pure functions: from patches of pictures to the rows that stand in a prompt.

Patches of several pictures stand one behind the other, and padding at the end. Axis letters: p patches, d width, n
heads, h their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxspec.decoder.functions import whole_float32
from jaxspec.decoder.towers import gemma4, qwen, siglip
from jaxspec.models.vision import Gemma4Tower, QwenTower, SiglipTower, Tower

Patches = qwen.Patches | gemma4.Patches
MODULES = {QwenTower: qwen, SiglipTower: siglip, Gemma4Tower: gemma4}


def places(tower: Tower, grids: Sequence[tuple[int, int, int]], size: int) -> Patches | None:
    """Make on the host what a tower must know of pictures with these grids in a program of `size` patches."""
    module = MODULES[type(tower)]
    return module.Patches.of(tower, grids, size) if hasattr(module, "Patches") else None


def embed_pictures(
    tower: Tower, params: dict[str, Any], pixels: Float[Array, "p v"], patches: Patches | None
) -> Float[Array, "t d"]:
    """The tower's rows: one for each `per_token` patches, those of padding for nobody. `patches`: as of `places`."""
    with whole_float32(jax.tree.leaves(params)[0].dtype):
        return MODULES[type(tower)].embed(tower, params, pixels, patches)
