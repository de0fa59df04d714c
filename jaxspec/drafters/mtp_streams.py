"""The MTP module of a model with several residual streams: Qwen3.8-Flash-Next's.

It pairs all streams behind the target's last layer with the token that follows. One norm is over all streams at once.
Each stream is projected, and the token's projection is added to each: these are the streams of the module's layer. A
gated mean of those behind it makes the row that the head takes; they themselves go on to the next draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from jaxspec.cache.mixers import AttentionRows, Cache
from jaxspec.decoder.forward import head_logits, overridden, run_layer
from jaxspec.decoder.functions import normed
from jaxspec.decoder.matmul import project, valid_count
from jaxspec.decoder.streams import gated_mean
from jaxspec.drafters.mtp import Mtp
from jaxspec.parallel.sharding import embed


@dataclass(frozen=True)
class MtpStreams(Mtp):
    """`config` is the target's, of one layer with indexed attention. Hidden states are streams side by side."""

    def init_state(self, layout, num_slots):
        decoder = self.config.decoder
        hidden = jnp.zeros((num_slots, decoder.streams.count * decoder.width), self.dtype)
        return {"kv": Cache(layout.groups(self.config)), "hidden": hidden}

    def _layer(self, params, kv, tokens, hidden, rows, requested=None, overrides=None):
        decoder, (b, t, wide) = self.config.decoder, hidden.shape
        count, positions = decoder.streams.count, rows.marked_positions(t)
        embedded = overridden(embed(params["embed"], tokens), overrides)
        embedded = normed(embedded, params["embed_norm"], decoder.norm)
        streams = normed(hidden, params["hidden_norm"], decoder.norm).reshape(b, t * count, -1)
        valid = valid_count(positions)
        added = project(embedded, params["fc_embedding"], valid)
        x = project(streams, params["fc_hidden"], valid * count).reshape(b, t, count, -1) + added[:, :, None]
        of = x.reshape(b, t, wide), positions, AttentionRows(rows), kv
        return run_layer(decoder, params["layer"], *of, requested=requested)

    def _feedback(self, params, out):
        return out

    def _logits(self, params, out):
        decoder, rows = self.config.decoder, out.reshape(1, -1, out.shape[-1])
        valid = jnp.full((1,), rows.shape[1], jnp.int32)
        row = gated_mean(params["streams"], "", rows, decoder.streams.count, decoder.norm, valid)
        return head_logits(params["head"], row.reshape(*out.shape[:-1], decoder.width))
