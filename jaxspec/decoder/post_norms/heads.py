"""Attention at few rows by `write_heads`, of wider heads and with more norms than other paths give it.

The steps `ops` have rope tables (`ops.tables`) and positions (`ops.valid`) of padded rows.
"""

from __future__ import annotations

import jax

from jaxspec.decoder.mixings import mixing_of
from jaxspec.decoder.mixings.attention import HEADS_WRITTEN, sinks
from jaxspec.decoder.mixings.kind import Weights
from jaxspec.decoder.stack import Ops
from jaxspec.models.description import Attention, Layer, Norm, beyond
from jaxspec.pallas.attention import write_heads
from jaxspec.pallas.operation import ANY, HOPPER, Implementation, nothing

WRITTEN = {
    **HEADS_WRITTEN, Norm: frozenset({"eps", "centred"}),
    Attention: HEADS_WRITTEN[Attention] | {"scale", "v_norm", "k_is_v"},
}  # fmt: skip


def _not_written(ops: Ops, layer: Layer, weights: Weights, i, made, cache) -> str | None:
    """Why `write_heads` can't take a projection's rows to pages, or None if it can."""
    a = layer.mixing
    if reason := beyond(a, WRITTEN):
        return reason
    if odd := [norm for norm in (a.qk_norm, a.v_norm) if norm not in (None, layer.norm)]:
        return f"norms of heads that aren't the layer's, {odd[0]}"
    if (pages := ops.mixer.pages(cache)) is None:
        return "no pages to write to"
    norms = [weights[name].dtype for name in ("q_norm", "k_norm") if a.qk_norm]
    heads = a.heads, a.kv_heads, a.head_dim, a.head_dim
    return write_heads.supported(*heads, pages.dtype, made.dtype, *norms, few=True)


@jax.named_scope("attention")
def _mix_written(ops: Ops, layer: Layer, weights: Weights, i, made, cache):
    a, b = layer.mixing, len(ops.positions)
    made = made + weights["qkv_bias"] if a.bias else made
    norms = [weights["q_norm"], weights["k_norm"]] if a.qk_norm else []
    scale = 1.0 if a.scale is None else a.scale * a.head_dim**0.5
    named = dict(centred=layer.norm.centred, query_scale=scale, normed_values=a.v_norm is not None, k_is_v=a.k_is_v)

    def write(pages, kv_slots, inverse_scales):
        of = made[None], *dict(ops.tables)[a], pages, i, kv_slots.reshape(-1), norms, inverse_scales
        q, pages = write_heads.write_heads(*of, eps=layer.norm.eps, **named)
        return q.reshape(b, -1, a.heads, a.head_dim), pages

    out, cache = ops.mixer.attend_written(cache, i, len(made) // b, write, a.window, **sinks(a, weights))
    return out.reshape(len(made), -1), cache


def _mix_in_steps(ops: Ops, layer: Layer, weights: Weights, i, made, cache):
    """Mix as plain layers do, padding rows, too: cutting them off and adding them would be kernels of their own."""
    positions = ops.valid[0].reshape(len(ops.positions), -1)
    mixed, cache = mixing_of(layer).mix(layer, weights, i, [ops.batched(made)], positions, ops.mixer, cache)
    return mixed.reshape(len(made), -1), cache


HEADS = (
    Implementation("write_heads", HOPPER, _not_written, _mix_written),
    Implementation("plain", ANY, nothing, _mix_in_steps),
)
