"""Session for the tests of trees: the engine's programs over many requests at once, and a drafter of wild trees.

A session needs no scheduler: every request has its pages from the start, and rounds run until all have reached their
limit. So one compilation serves prompts that end at every edge of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import SamplingParams
from jaxspec.cache.paged import PageLayout
from jaxspec.checkpoint import Model
from jaxspec.compiling.programs import Programs
from jaxspec.drafters.base import Drafter, Proposal
from jaxspec.rounds import programs as rounds
from jaxspec.rounds.packing import Shapes, pack_blocks
from jaxspec.rounds.programs import ACCEPTED, DRAFTED, EMITTED, LOGPROB_WIDTH, LOGPROBS, TOKENS
from jaxspec.sampling.acceptance import Tree
from tests.support.exact import slots_for

PAGE, BLOCK, SPARE = 16, 32, 64


class Session:
    """Requests that decode together, `new_tokens` each.

    `texts` are their prompts and what came of them, `accepted` and `drafted` one list for each with an entry a round,
    `logprobs` f32[tokens] for each in that mode.
    """

    def __init__(
        self,
        model: Model,
        drafter: Drafter,
        draft_params: Any,
        prompts: Sequence[Sequence[int]],
        settings: Sequence[SamplingParams] = (SamplingParams(temperature=0.0),),
        new_tokens: int = 24,
        mode: str = rounds.GREEDY,
    ):
        n, capacity = len(prompts), max(map(len, prompts)) + new_tokens
        pages = -(-(capacity + SPARE) // PAGE)
        self.table = np.arange(1, n * pages + 1, dtype=np.int32).reshape(n, pages)
        settings = [settings[i % len(settings)] for i in range(n)]
        slots = slots_for(
            settings, prompts, [[]] * n, capacity=capacity, new_tokens=new_tokens, drafts=drafter.num_draft_tokens,
            stop_ids=[each.stop_token_ids for each in settings],
        )  # fmt: skip
        blocks = [
            (i, at, min(BLOCK, len(prompt) - at), i if at else -1, -1)
            for i, prompt in enumerate(prompts)
            for at in range(0, len(prompt), BLOCK)
        ]
        shapes = Shapes(
            n, capacity, pages, BLOCK, prefills=(len(blocks),), score=1, firsts=(n,), batches=(n,), seldom=(n,)
        )
        run = Programs(model.config, drafter, shapes, model.params, draft_params)
        dtype = model.dtype
        layout = PageLayout(n * pages + 1, PAGE, dtype)
        state = rounds.empty_state(model.config, drafter, layout, n, capacity, dtype).replace(slots=slots)
        which = [i for i, *_ in blocks]
        state = run.prefill(state, pack_blocks(blocks, [prompts[i] for i in which], self.table[which], BLOCK))
        self.texts = [list(prompt) for prompt in prompts]
        self.logprobs: list[list[float]] = [[] for _ in prompts]
        packed = np.column_stack([np.arange(n), self.table]).astype(np.int32)
        state, out = run.first(state, packed, mode)
        self._take(np.asarray(out), 1, mode)
        self.accepted, self.drafted = [[] for _ in prompts], [[] for _ in prompts]
        while not np.asarray(state.slots.done)[:n].all():
            state, out = run.round(state, packed, mode)
            out = np.asarray(out)
            for i in np.flatnonzero(out[:, ACCEPTED]):
                self.accepted[i].append(int(out[i, ACCEPTED]))
                self.drafted[i].append(int(out[i, DRAFTED]))
            self._take(out, drafter.longest + 1, mode)
        self.state = state

    def _take(self, out: np.ndarray, yields: int, mode: str) -> None:
        for text, logprobs, row in zip(self.texts, self.logprobs, out, strict=True):
            text += row[TOKENS : TOKENS + row[EMITTED]].tolist()
            if mode == LOGPROBS:
                packed = row[TOKENS + yields :].view(np.float32).reshape(yields, LOGPROB_WIDTH)
                logprobs += packed[: row[EMITTED], 0].tolist()

    def kv(self, i: int) -> np.ndarray:
        """The target's keys and values of what request i has committed, f32[l, 2, positions, m, h]."""
        (pages,) = self.state.cache.kv
        kv = np.moveaxis(np.asarray(pages[:, self.table[i]], np.float32), 2, 1)  # [l, 2, pages, m, s, h]
        kv = np.moveaxis(kv, 4, 3)
        return kv.reshape(*kv.shape[:2], -1, *kv.shape[4:])[:, :, : len(self.texts[i]) - 1]


class Notes:
    """A drafter's state: by slot and position which token came next, the features it was shown with, and how often it
    was shown."""

    noted, width = SPARE, 32  # positions, and the features' width

    def init_state(self, layout, num_slots):
        shape, features = (num_slots, self.noted), (len(self.feature_layers), self.width)
        return {"next": jnp.zeros(shape, jnp.int32), "times": jnp.zeros(shape, jnp.int32),
                "features": jnp.zeros((*shape, *features))}  # fmt: skip

    def commit(self, params, state, batch, verified):
        return self._note(state, batch.slots, batch.length - 1, verified.accepted, verified.outputs, verified.features)

    def prefill(self, params, state, batch, features):
        return self._note(state, batch.slots, batch.rows.start, batch.rows.count, batch.next_tokens, features)

    def _note(self, state, slots, start, count, tokens, features):
        row = jnp.arange(tokens.shape[1])
        at = slots[:, None], jnp.where(row < count[:, None], start[:, None] + row, self.noted)
        return {
            "next": state["next"].at[at].set(tokens, mode="drop"),
            "times": state["times"].at[at].add(1, mode="drop"),
            "features": state["features"].at[at].set(jnp.stack(features, axis=2), mode="drop"),
        }


def assert_noted(state, slot: int, text: Sequence[int], features) -> None:
    """Check that each token of a text was shown once, with features f32[layers, t, d] of the token before it."""
    noted, known = {name: np.asarray(kept[slot]) for name, kept in state.items()}, len(text) - 1
    np.testing.assert_array_equal(noted["times"][:known], 1)
    np.testing.assert_array_equal(noted["times"][known:], 0)
    np.testing.assert_array_equal(noted["next"][:known], text[1:])
    np.testing.assert_allclose(noted["features"][:known].swapaxes(0, 1), features, atol=1e-4)


@dataclass(frozen=True)
class Wild(Notes, Drafter):
    """Trees of any shape, another one each time, some deeper than it promised. It knows `params["texts"]` i32[slot, c],
    what will be said: about half of the drafts are right where they stand."""

    num_draft_tokens: int = 12
    topk: int = 12
    deep: int = 4
    feature_layers: tuple[int, ...] = (1, 0)
    vocab: int = 64

    @property
    def longest(self):
        return self.deep

    def propose(self, params, state, batch):
        d, b = self.num_draft_tokens, len(batch.length)

        def numbers(slot, length):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), slot), length)
            return jax.random.uniform(key, (3, d)), jax.random.randint(key, (), 0, d + 1)

        (up, luck, other), count = jax.vmap(numbers, out_axes=((1), 0))(batch.slots, batch.length)
        rows = jnp.arange(d)
        # some hang from the draft before them, so that there are long branches
        parents = jnp.where(up < 0.4, rows, (up * 7919 % 1 * (rows + 1)).astype(jnp.int32))
        depth = Tree.of(parents, d).depth[:, 1:]
        at = jnp.minimum(batch.length[:, None] + depth - 1, params["texts"].shape[1] - 1)
        right = params["texts"][batch.slots[:, None], at]
        tokens = jnp.where(luck < 0.55, right, (other * self.vocab).astype(jnp.int32))
        assert tokens.shape == (b, d)
        return Proposal(tokens, jnp.where(batch.live, count, 0), parents=parents), state


def padded(texts: Sequence[Sequence[int]], slots: int = 1) -> jnp.ndarray:
    """Texts as i32[requests + 1, longest], the last row the dummy slot's."""
    width = max(map(len, texts))
    return jnp.asarray([[*text, *[0] * (width - len(text))] for text in [*texts, *[[]] * slots]], jnp.int32)
