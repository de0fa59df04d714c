"""Kinds of mixing, a file each: `MIXINGS` has the equations for each type of description that a layer's mixing is."""

from jaxspec.decoder.mixings import attention, delta_rule, indexed, kimi_delta, latent, mamba2
from jaxspec.decoder.mixings.kind import Mixing
from jaxspec.models.description import Attention, DeltaRule, IndexedAttention, KimiDelta, LatentAttention, Layer, Mamba2

MIXINGS: dict[type, Mixing] = {
    Attention: attention.ATTENTION,
    IndexedAttention: indexed.INDEXED_ATTENTION,
    LatentAttention: latent.LATENT_ATTENTION,
    DeltaRule: delta_rule.DELTA_RULE,
    KimiDelta: kimi_delta.KIMI_DELTA,
    Mamba2: mamba2.MAMBA2,
}


def mixing_of(layer: Layer) -> Mixing:
    return MIXINGS[type(layer.mixing)]
