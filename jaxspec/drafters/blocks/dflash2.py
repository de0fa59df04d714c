"""DFlash 2: DFlash's block with short convolutions in its layers, and a selector among each row's likeliest tokens.

The selector keeps each row's `top` likeliest tokens. It goes through the rows in order, adds to each candidate how well
it follows the draft before, and draws one. Where the drafter has a vocabulary of its own, candidates are of it; from
there on they go by the target's ids, which the selector knows.

Formats: z-lab's `dflash` 0.1.0, speculators; see `dflash_checkpoint`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from jaxspec.config.options import ConfigError
from jaxspec.drafters import dflash_checkpoint as checkpoint
from jaxspec.drafters.blocks.candidates import largest, walk
from jaxspec.drafters.blocks.convolutions import ConvolvedBlock
from jaxspec.drafters.vocabulary import as_targets, known_tokens
from jaxspec.models.weights import WHOLE, linear, matmul, table
from jaxspec.parallel.sharding import top_logprobs


@dataclass(frozen=True)
class DFlash2(ConvolvedBlock):
    """Choose among `top` candidates a row, scored by products of `rank`."""

    rank: int = 256
    top: int = 16

    computes: ClassVar[frozenset[str]] = frozenset({"selector_rank", "conv_kernel_size"})

    @classmethod
    def more(cls, own, config):
        if own.get("sample_from_anchor"):
            raise ConfigError("sample_from_anchor is true; DFlash 2 drafts from its masks alone")
        return super().more(own, config) | {
            "rank": checkpoint.integer("selector_rank", own.get("selector_rank"), 1),
            "top": checkpoint.integer("selector_top_k", own.get("selector_top_k"), 1, config.vocab_size + 1),
        }

    def parameters(self, found=()):
        declared, d, v = super().parameters(found), self.config.hidden_size, self.config.vocab_size
        books = {"before": "predecessor", "after": "successor"}
        for name, book in books.items():
            declared[name] = table(v, self.rank, f"candidate_selector.{book}_codebook")
        selector = linear(d, {"candidate_selector.hidden_projection.weight": self.rank}, exact=True, split=WHOLE)
        return {**declared, "selector": selector}

    def with_token_map(self, params, ids):
        if len(ids) < self.top:
            raise ConfigError(
                f"--draft-token-map has {len(ids)} tokens; this drafter chooses among {self.top} in each row"
            )
        return super().with_token_map(params, ids)

    def propose(self, params, state, batch):
        hidden = self._fill(params, state, batch)
        rows = self._drafting(hidden.last)
        alone = self._logits(params, rows)
        best, ids, _ = top_logprobs(alone, self.top, known_tokens(params, self.config.vocab_size), largest)
        ids = as_targets(params, ids, None)[0]
        by_row, after = matmul(rows, params["selector"]), params["after"][ids]

        def score(step, token, place):
            before = params["before"][token] * by_row[:, step]
            follows = jnp.einsum("br,bkr->bk", before, after[:, step], preferred_element_type=jnp.float32)
            return best[:, step] + follows

        return walk(batch, ids, score, self.config.vocab_size), hidden.cache
