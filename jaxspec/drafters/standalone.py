"""Standalone drafting: any smaller model with the target's vocabulary, decoding ahead token by token.

Its keys and values live in a cache of its own over the target's pages. After a prompt, that cache lacks the prompt's
last token; after a round in which every draft was accepted, the last of those. So the first forward of a round always
runs the two newest tokens: one of them is usually known already, and rewriting it changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import jax.numpy as jnp

from jaxspec.cache.mixers import AttentionRows, Cache
from jaxspec.cache.paged import Rows
from jaxspec.checkpoint import Model, Source, load_model, resolve
from jaxspec.config.options import ConfigError
from jaxspec.decoder.forward import forward, unembed
from jaxspec.drafters.own_weights import OwnLayers
from jaxspec.drafters.vocabulary import Chained


@dataclass(frozen=True)
class Standalone(OwnLayers):
    """`config` is the draft model's. Drafts are drawn as each request samples; rejection uses their probabilities."""

    num_draft_tokens: int = 4
    steps: ClassVar[bool] = True
    rests: ClassVar[bool] = True

    @classmethod
    def load(cls, target, source, options):
        check(target, source, options.load_format)
        model = load_model(
            source,
            options.draft_dtype or options.dtype,
            load_format=options.load_format,
            seed=options.seed or 0,
            quantization=options.draft_quantization,
            fp8_activations=options.quantises_activations,
            tp_size=options.tp_size,
            context_length=options.context_length,
            allow_longer_context=True,
            load_threads=options.load_threads,
        )
        return cls(model.config, options.num_draft_tokens or 4), model.params

    def init_state(self, layout, num_slots):
        return Cache(layout.groups(self.config))

    def propose(self, params, state, batch):
        drafts, current, first = Chained(params, batch, self.config.vocab_size), batch.tokens(-2, 2), -2
        for step in range(self.num_draft_tokens):
            hidden, state = self._forward(params, state, current, batch.rows(first, current.shape[1]))
            current, first = drafts.draw(unembed(params, hidden[:, -1], self.config.decoder))[:, None], step
        return drafts.proposal(self.num_draft_tokens), state

    def narrowed(self, drafts):
        return replace(self, num_draft_tokens=drafts) if drafts else super().narrowed(0)

    def idle(self, params, state, batch):
        """The token before the newest may be missing; of a round without drafts, the newest then is the one before."""
        return self._forward(params, state, batch.tokens(-2, 1), batch.rows(-2, 1))[1]

    def commit_others(self, params, state, batch, verified):
        rows = Rows(batch.length - 1, verified.accepted, batch.table)
        return self._forward(params, state, verified.tokens, rows)[1]

    def prefill(self, params, state, batch, features):
        return self._forward(params, state, batch.tokens, batch.rows)[1]

    def _forward(self, params, state, tokens, rows):
        tokens = jnp.minimum(tokens, self.config.vocab_size - 1)  # a history may have rows of pictures
        positions = rows.marked_positions(tokens.shape[1])
        hidden = forward(self.config.decoder, params, tokens, positions, AttentionRows(rows), state)
        return hidden.last, hidden.cache


def check(target: Model | Source, source: str, load_format: str) -> None:
    """**Raises:** `ConfigError` for a draft model that can't draft for this target, by both configs."""
    config = resolve(source, load_format=load_format).config
    if config.vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"--draft {source}: the draft model's vocabulary has {config.vocab_size} tokens, the target's "
            f"({target.name}) has {target.config.vocab_size}. A standalone drafter must share it"
        )
    if config.recurrent:
        raise ConfigError(
            f"--draft {source}: {config.model_type} has linear attention, whose state can't take a draft back; a "
            "standalone drafter must have full attention only, as llama and qwen3 do"
        )
