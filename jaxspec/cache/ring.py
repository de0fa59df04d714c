"""Pages of each request's newest tokens alone: a few for each slot, used in turn.

Layout `[layer, slot, page, stream, head, page_slot, width]`. Page i of a text is kept in page i modulo their number, as
long as it is one of the newest. As `paged.KV`, the last slot's pages come first: it is the dummy, as page 0 is there.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.paged import KV, PageLayout, Rows
from jaxspec.models.model_config import ModelConfig

Ring = Float[Array, "l r c k m s h"]


def empty(layout: PageLayout, config: ModelConfig, num_slots: int, tokens: int) -> Ring:
    """Pages for any `tokens` positions in a row of each slot, wherever in a page they begin."""
    each = (tokens - 2) // layout.page_size + 2
    kv = replace(layout, num_pages=num_slots * each).kv(config)
    return kv.reshape(len(kv), num_slots, each, *kv.shape[2:])


def pages(ring: Ring) -> KV:
    """View a ring as the pages of all slots side by side."""
    return ring.reshape(len(ring), -1, *ring.shape[3:])


def rows_in(ring: Ring, rows: Rows, slots: Int[Array, " b"]) -> Rows:
    """Put rows into the pages of their slots. The newest pages end with a slot's last row; older rows are dropped."""
    num_slots, each, page_size = ring.shape[1], ring.shape[2], ring.shape[5]
    ends = jnp.where(slots[:, None] == slots, rows.start + rows.count, 0).max(axis=1)
    newest, page = (ends - 1)[:, None] // page_size, jnp.arange(rows.table.shape[1])
    own = ((slots + 1) % num_slots * each)[:, None] + page % each
    return rows.replace(table=jnp.where((page > newest - each) & (page <= newest), own, 0))
