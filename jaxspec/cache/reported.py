"""Rows that requests may ask for beside their text, kept beside every token's keys and values.

A row stands in the KV slot of its token, so it is shared, reused and freed with the page: a prompt that was found in
the prefix cache has its rows, too. Only rows that were accepted are written by a round.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.cache.paged import PageLayout, Rows
from jaxspec.models.model_config import ModelConfig

AT_ONCE = 16  # pages whose rows are read at once


@flax.struct.dataclass
class Reported:
    """Rows by page and slot: `hidden`, the final norm's output; `experts`, the numbers of those that each mixture of
    the model chose. None: they aren't kept."""

    hidden: Float[Array, "p s d"] | None = None
    experts: Int[Array, "p s l k"] | None = None

    @property
    def kept(self) -> bool:
        """Whether anything is kept."""
        return self.hidden is not None or self.experts is not None

    def of(self, hidden: Any) -> tuple[Array, ...]:
        """A forward's rows of what is kept, [b, t, ...] each. `hidden`: its `decoder.forward.Hidden`."""
        pairs = (self.hidden, hidden.last), (self.experts, hidden.experts)
        return tuple(rows for kept, rows in pairs if kept is not None)

    def write(self, rows: Rows, values: tuple[Array, ...]) -> Reported:
        """Put what `of` gave into these rows' slots; nothing, if that is empty."""
        left = list(values)
        put = lambda pages: pages if pages is None or not left else rows.put(pages, left.pop(0))  # noqa: E731
        return Reported(put(self.hidden), put(self.experts))

    def read(self, pages: list[int], count: int) -> list[np.ndarray | None]:
        """Rows of the first `count` tokens in these pages, of what is kept: hidden states f32[t, d], experts
        i32[t, l, k]. It waits for the device."""
        kept, parts = ((self.hidden, np.float32), (self.experts, np.int32)), []
        size = next(each.shape[1] for each, _ in kept if each is not None)
        pages = pages[: -(-count // size)]
        for start in range(0, max(len(pages), 1), AT_ONCE):
            packed = np.zeros(AT_ONCE, np.int32)  # the dummy page where there are fewer
            packed[: len(pages) - start] = pages[start : start + AT_ONCE]
            parts.append(_rows(self, packed))
        whole = lambda *parts: np.concatenate(parts)[:count]  # noqa: E731
        rows = jax.tree.map(whole, *parts)
        return [
            each if each is None else each.astype(dtype)
            for each, (_, dtype) in zip((rows.hidden, rows.experts), kept, strict=True)
        ]


@jax.jit
def _rows(reported: Reported, pages: Int[Array, " n"]) -> Reported:
    """The rows of these pages, one behind the other."""
    return jax.tree.map(lambda kept: kept[pages].reshape(-1, *kept.shape[2:]), reported)


def empty_reported(config: ModelConfig, layout: PageLayout, dtype: str, hidden: bool) -> Reported:
    """Pages for the final hidden states, if they are `hidden`, and for experts, if the decoder reports them."""
    pages, decoder = (layout.num_pages, layout.page_size), config.decoder
    return Reported(
        jnp.zeros((*pages, config.hidden_size), dtype) if hidden else None,
        jnp.zeros((*pages, *decoder.routing), jnp.int16) if decoder.reports_experts else None,
    )
