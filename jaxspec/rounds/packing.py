"""The packed int32 arrays that travel between host and device, one into each program and one out, and their shapes.

`Slots` is everything about a request that lives on the device, indexed by request slot. The host writes a slot once,
when it admits a request; from then on it only names slots and pages. The last slot is the dummy of padding rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.config.request import MAX_LOGPROBS, SamplingParams, TokenLogprobs
from jaxspec.images.placement import Placement
from jaxspec.sampling.sampling import SETTINGS, Sampled, Sampling


@flax.struct.dataclass
class Slots:
    """Per-slot state, r = request slots + 1. `history[i, :length[i]]` are the tokens known; `limit` ends it."""

    history: Int[Array, "r c"]
    length: Int[Array, " r"]
    prompt: Int[Array, " r"]
    limit: Int[Array, " r"]
    drafts: Int[Array, " r"]  # most drafts to verify in a round
    tried: Float[Array, " r"]  # drafts that were judged in rounds so far, and those that stood, the latest counting
    stood: Float[Array, " r"]  # most: see `ragged_verification`
    done: Bool[Array, " r"]
    sampling: Sampling
    shift: Int[Array, " r"] | None = None  # of positions behind a prompt's pictures; None: the model reads none


# A history's entry for a row of a picture is this and its place: no token, and equal to no other row of the text. So
# drafters that look for repeated text find none there.
PICTURE_ROW = 2**30


def empty_slots(num_slots: int, capacity: int, pictures: bool = False) -> Slots:
    """Slots with no request in them, histories of `capacity` tokens. `pictures`: whether prompts may have some."""
    r = num_slots + 1
    zeros = lambda *shape, dtype=jnp.int32: jnp.zeros((r, *shape), dtype)  # noqa: E731
    return Slots(
        history=zeros(capacity),
        length=jnp.ones((r,), jnp.int32),
        prompt=zeros(),
        limit=zeros(),
        drafts=zeros(),
        tried=zeros(dtype=jnp.float32),
        stood=zeros(dtype=jnp.float32),
        done=jnp.ones((r,), bool),
        sampling=Sampling(**{name: jnp.full((r, *s.shape), s.off, s.dtype) for name, s in SETTINGS.items()}),
        shift=zeros() if pictures else None,
    )


# The packed admission: these numbers, the settings of `SETTINGS` by their bits, then the history.
_NUMBERS = "slot", "length", "prompt", "limit", "drafts", "shift"
_SIZES = [math.prod(setting.shape) for setting in SETTINGS.values()]
_STARTS = [*itertools.accumulate(_SIZES, initial=len(_NUMBERS))]
_HISTORY = _STARTS[-1]
_SETTINGS = {name: slice(*ends) for name, ends in zip(SETTINGS, itertools.pairwise(_STARTS), strict=True)}


def pack_admission(
    slot: int,
    tokens: list[int],
    prompt: int,
    limit: int,
    drafts: int,
    seed: int,
    stop_ids: list[int],
    params: SamplingParams,
    capacity: int,
    placement: Placement | None = None,
) -> np.ndarray:
    """A request's slot as int32[_HISTORY + capacity]. `stop_ids` are all tokens that end it, `seed` has 64 bits.

    `placement`: of the pictures in its prompt.
    """
    packed = np.zeros(admission_size(capacity), np.int32)
    packed[: len(_NUMBERS)] = slot, len(tokens), prompt, limit, drafts, placement.shift if placement else 0
    request = Sampled(params, prompt, seed, stop_ids)
    for name, setting in SETTINGS.items():
        place, given = packed[_SETTINGS[name]].view(setting.dtype), setting.of(request)
        place[:] = setting.off
        place[: np.size(given)] = given
    packed[_HISTORY : _HISTORY + len(tokens)] = tokens
    if placement:
        rows = np.fromiter(placement.keys, np.int32)
        packed[_HISTORY + rows] = PICTURE_ROW + rows
    return packed


def admit(slots: Slots, packed: Int[Array, " k"]) -> Slots:
    """Write a packed admission into its slot."""
    new = {name: packed[i] for i, name in enumerate(_NUMBERS)}
    slot = new.pop("slot")
    if slots.shift is None:
        del new["shift"]
    new |= {"history": packed[_HISTORY:], "tried": jnp.float32(0), "stood": jnp.float32(0), "done": jnp.bool_(False)}
    put = lambda array, value: array.at[slot].set(value)  # noqa: E731
    given = {
        name: jax.lax.bitcast_convert_type(packed[_SETTINGS[name]], setting.dtype).reshape(setting.shape)
        for name, setting in SETTINGS.items()
    }
    sampling = Sampling(**{name: put(getattr(slots.sampling, name), value) for name, value in given.items()})
    return slots.replace(sampling=sampling, **{name: put(getattr(slots, name), value) for name, value in new.items()})


def admission_size(capacity: int) -> int:
    """Length of a packed admission for histories of `capacity` tokens."""
    return _HISTORY + capacity


# The packed block of a prefill: its slot, where it starts, how many tokens it has, the state slots to go on from and to
# keep a snapshot in, and whether its last token is the newest known; then its tokens and the one after them, then the
# page table of its slot. The tokens are the slot's, but a prefill needn't wait for the admission that puts them there.
_BLOCK = 6


def block_columns(block: int, pictures: bool = False) -> int:
    """Columns of a packed block of up to `block` tokens, before the page table.

    With `pictures`, those of the tokens are followed by their positions on three axes, by the last KV slots that they
    see, and by the rows of pictures that stand in for their embeddings, the one's after them too; -1 where none does.
    """
    return _BLOCK + block + 1 + (5 * block + 1 if pictures else 0)


def pack_blocks(
    blocks: list[tuple[int, int, int, int, int]],
    texts: list[list[int]],
    tables: np.ndarray,
    block: int,
    pictures: list[PictureRows | None] | None = None,
) -> np.ndarray:
    """Blocks of known tokens as int32[n, block_columns(block) + pages].

    Of each, `blocks` has slot, start, count, source and keep, `texts` all the tokens known of its slot, `tables` the
    pages. Padding has the dummy slot, no tokens and the dummy page. `pictures`: those of each text, of a model
    that reads some.
    """
    columns = block_columns(block, pictures is not None)
    packed = np.zeros((len(blocks), columns + tables.shape[1]), np.int32)
    packed[:, columns:] = tables
    for row, one, text in zip(packed, blocks, texts, strict=True):
        _, start, count, *_ = one
        known = text[start : start + block + 1]
        row[:_BLOCK] = *one, 0 < count == len(text) - start
        row[_BLOCK : _BLOCK + len(known)] = known
    for row, (_, start, *_), placed in zip(packed, blocks, pictures or [], strict=bool(pictures)):
        row[_BLOCK + block + 1 : columns] = placed_columns(start, block, placed)
    return packed


class PictureRows(NamedTuple):
    """Pictures of a prompt: their placement, and by place in it the row of `State.pictures` that stands in there."""

    placement: Placement
    rows: dict[int, int]


def placed_columns(start: int, block: int, placed: PictureRows | None) -> np.ndarray:
    """The columns of a block that begins at `start`, behind those of its tokens: see `block_columns`."""
    place = np.arange(start, start + block + 1)
    if placed is None:
        return np.concatenate([*[place[:block]] * 4, np.full(block + 1, -1)])
    rows = [placed.rows.get(at, -1) for at in place.tolist()]
    own, placement = place[:block], placed.placement
    return np.concatenate([*placement.positions(own), placement.last_seen(own), rows])


def unpack_blocks(
    packed: Int[Array, "b k"], block: int, pictures: bool = False
) -> tuple[Int[Array, "6 b"], Int[Array, "b t+1"], Int[Array, "b p"]]:
    """Split packed blocks into: slot, start, count, source, keep and whether they end with the newest token; their
    tokens and the one after them; their page tables."""
    tokens, columns = block_columns(block), block_columns(block, pictures)
    return packed[:, :_BLOCK].T, packed[:, _BLOCK:tokens], packed[:, columns:]


def unpack_pictures(
    packed: Int[Array, "b k"], block: int
) -> tuple[Int[Array, "3 b t"], Int[Array, "b t"], Int[Array, "b t+1"]]:
    """Positions on three axes, last KV slots that are seen, and rows that stand in for embeddings, of packed blocks
    that have such columns."""
    columns = packed[:, block_columns(block) : block_columns(block, True)]
    places, rows = columns[:, : 4 * block], columns[:, 4 * block :]
    *axes, seen = jnp.moveaxis(places.reshape(-1, 4, block), 1, 0)
    return jnp.stack(axes), seen, rows


def put_adapters(packed: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Packed requests or blocks, with the places of their adapters in a last column; -1 for none, and for padding."""
    return np.concatenate([packed, places[:, None]], axis=1)


def take_adapters(params: Any, packed: Int[Array, "b k"]) -> tuple[Int[Array, "b _"], Int[Array, " b"] | None]:
    """Undo `put_adapters`, where the weights have adapters."""
    return (packed[:, :-1], packed[:, -1]) if "adapters" in params else (packed, None)


def unpack_logprobs(rows: np.ndarray, tokens: Iterable[int], wanted: int) -> list[TokenLogprobs]:
    """Unpack `programs._pack_logprobs`: one row of int32 bits per token. `wanted`: how many of the top entries to
    return."""
    values = rows.view(np.float32)
    entries = []
    for row, value, token in zip(rows, values, tokens, strict=True):
        ids, tops = row[1 : 1 + MAX_LOGPROBS], value[1 + MAX_LOGPROBS :]
        top = tuple((int(i), float(v)) for i, v in zip(ids[:wanted], tops[:wanted], strict=True) if i >= 0)
        entries.append(TokenLogprobs(token, float(value[0]), top))
    return entries


def ladder(limit: int) -> tuple[int, ...]:
    """Sizes that programs are compiled for: powers of two below `limit`, and `limit`. They are few, since each takes
    long to compile; kernels skip most of the padding."""
    return (*(1 << i for i in range((limit - 1).bit_length())), limit)


def fit(size: int, steps: tuple[int, ...]) -> int:
    """The smallest step of a ladder that holds `size`."""
    return next(step for step in steps if step >= size)


@dataclass(frozen=True)
class Shapes:
    """The static shapes of an engine, all that its programs are compiled for."""

    num_slots: int
    capacity: int  # tokens of history per slot
    pages_per_seq: int
    block: int  # prompt tokens in one row of a prefill batch
    prefills: tuple[int, ...]  # blocks in a prefill
    score: int  # blocks in a prefill that also reports prompt logprobs
    firsts: tuple[int, ...]  # requests that get their first token at once
    batches: tuple[int, ...]  # requests in a round
    seldom: tuple[int, ...]  # those of `batches` that rounds with log-probabilities or under a grammar are compiled for
    rounds: int = 1  # rounds in a program that runs several; 1: there is none
    rounds_for: int | None = None  # the most requests that such a program is for; None: any number
    structured: bool = False  # programs for requests whose text a grammar constrains
    # rounds with fewer drafts than the drafter's: how many, ascending, and the numbers of requests in them
    narrower: tuple[tuple[int, tuple[int, ...]], ...] = ()
    # of those numbers, the ones that a request has on average, shared out; and the most that one request has
    ragged: tuple[tuple[int, int], ...] = ()
    pictures: int = 0  # rows for embeddings of pictures' tokens; 0: the model reads no pictures
    adapters: int = 0  # places for adapters; 0: there are no programs for requests that have one
    always_adapted: bool = False  # those programs serve requests without adapters, too
    processed: bool = False  # log-probabilities are those of the distribution drawn from

    @property
    def chunk(self) -> int:
        """Most prompt tokens of a prefill."""
        return self.prefills[-1] * self.block

    def several(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Sizes, in requests, that have programs of several rounds."""
        most = max(sizes, default=0) if self.rounds_for is None else self.rounds_for
        return tuple(size for size in sizes if self.rounds > 1 and size <= most)
