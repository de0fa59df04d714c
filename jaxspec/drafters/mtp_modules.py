"""Several MTP modules in a chain, each of which guesses one token further ahead, as DeepSeek-V3's do.

Module 0 pairs the target's final hidden state at position p with the token at p + 1. Module j pairs what module j - 1
made at p with the token at p + j + 1, and predicts the one after that (https://arxiv.org/abs/2412.19437, 2.2).
MiMo-V2's aren't `chained`: module j pairs the target's hidden state at p, as SGLang runs them. Draft j is module j's.
If more are wanted, the last module goes on from its own outputs, as EAGLE does. Each module has keys and values of its
own for all of the text. Projection and norms are common to all in Qwen's layout, where layers are `mtp.layers.0`,
`mtp.layers.1` and so on; in others each module has its own (`separate`).

Between rounds, of a request with tokens x_0 .. x_(N-1), module j has rows of the positions up to N - 2 - j. Of its last
row, `hidden[j + 1]` is what it hands to the next module: its output, or the target's hidden state. `hidden[0]` is the
first module's output. Commit computes the rows for the tokens that have come: those of module j
stand j places further back than the first's. A round pairs its drafts in the same way, and the next commit overwrites
what it wrote.

A page depends on as many tokens after it as there are modules (`reach`). So where a request begins behind pages that it
shares, all rows in them are right, and every module's own rows begin at that position, `begun`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache.paged import Rows
from jaxspec.decoder.functions import row_of
from jaxspec.drafters.mtp import Mtp
from jaxspec.drafters.mtp_streams import MtpStreams
from jaxspec.drafters.vocabulary import Chained


class _Blocks(NamedTuple):
    """New tokens of each block, and the first module's rows for them. Rows before `begun` are another request's.

    `before[i]` is the block of the same call that ends where block i begins, -1 if there is none.
    """

    slots: Int[Array, " b"]
    tokens: Int[Array, "b t"]
    rows: Rows
    begun: Int[Array, " b"]
    before: Int[Array, " b"]


@dataclass(frozen=True)
class MtpModules(Mtp):
    """`config` is that of one module's layer."""

    modules: int = 2
    separate: bool = False
    chained: bool = True

    @classmethod
    def made_of(cls, modules, *fields):
        """A chain of one's own outputs, if that is all there is, takes less."""
        if modules.count > 1:
            return cls(*fields, *modules)
        config, *_ = fields
        return (MtpStreams if config.decoder.streams else Mtp)(*fields)

    @property
    def reach(self):
        return self.modules

    def kv_bytes_per_token(self, dtype):
        return self.modules * super().kv_bytes_per_token(dtype)

    def init_state(self, layout, num_slots):
        """`behind[slot]` is the position after the first module's last row."""
        hidden = tuple(jnp.zeros((num_slots, self.config.hidden_size), self.dtype) for _ in range(self.modules))
        kv = tuple(layout.kv(self.config) for _ in range(self.modules))
        positions = {name: jnp.full((num_slots,), -1, jnp.int32) for name in ("behind", "begun")}
        return {"kv": kv, "hidden": hidden, **positions}

    def propose(self, params, state, batch):
        kept, begun = [hidden[batch.slots] for hidden in state["hidden"]], state["begun"][batch.slots]
        kv, out, last = list(state["kv"]), kept[0][:, None], self.modules - 1
        handed, newest, drafts = out, out, Chained(params, batch, self.config.vocab_size)
        for step in range(self.num_draft_tokens):
            own = self._own(params, min(step, last))
            if 0 < step <= last:  # this module's rows of all drafts so far
                made = handed if step > 1 else handed[:, :0]
                known, start = jnp.stack(drafts.tokens, axis=1), batch.length - 1
                missing, known, paired = _paired(step, begun, start, known, kept[step], made)
                paired = self._taken(params, step, paired)
                rows = batch.rows(-step - 1, step)
                rows = rows.replace(start=rows.start + missing, count=jnp.maximum(rows.count - missing, 0))
                out, kv[step] = self._layer(own, kv[step], known, paired, rows)
                out = out[:, :step]
                handed = out if self.chained else paired
                newest = row_of(out, step - 1 - missing)
            elif step:
                paired, rows = self._feedback(own, newest), batch.rows(step - last - 2, 1)
                newest, kv[last] = self._layer(own, kv[last], drafts.tokens[-1][:, None], paired, rows)
            drafts.draw(self._logits(own, newest[:, 0]), self._top(own, newest) if batch.greedy else None)
        return drafts.proposal(self.num_draft_tokens), {**state, "kv": tuple(kv)}

    def commit(self, params, state, batch, verified):
        rows, slots = Rows(batch.length - 1, verified.accepted, batch.table), batch.slots
        begun = jnp.where(state["behind"][slots] == rows.start, state["begun"][slots], rows.start)
        blocks = _Blocks(slots, verified.outputs, rows, begun, jnp.full_like(slots, -1))
        return self._advance(params, state, blocks, verified.features, rows.count > 0)

    def prefill(self, params, state, batch, features):
        """Several blocks of one request follow one another."""
        slots, rows = batch.slots, batch.rows
        real, start = rows.count > 0, rows.start
        mine = (slots[:, None] == slots) & real
        follows = mine & (start + rows.count == start[:, None])
        before = jnp.where(follows.any(axis=1), jnp.argmax(follows, axis=1), -1)
        earliest = jnp.min(jnp.where(mine, start, jnp.iinfo(jnp.int32).max), axis=1)
        begun = jnp.where(state["behind"][slots] == earliest, state["begun"][slots], earliest)
        keep = real & ~(mine & (start[:, None] < start)).any(axis=1)
        blocks = _Blocks(slots, batch.next_tokens, rows, begun, before)
        return self._advance(params, state, blocks, features, keep)

    def _advance(
        self,
        params: Any,
        state: dict[str, Any],
        blocks: _Blocks,
        features: tuple[Float[Array, "b t d"], ...],
        keep: Bool[Array, " b"],
    ) -> dict[str, Any]:
        """Compute all modules' rows for these tokens, and where `keep`, note the last ones' outputs."""
        slots, rows, begun, t = blocks.slots, blocks.rows, blocks.begun, blocks.tokens.shape[1]
        into = jnp.where(keep, slots, len(state["behind"]))  # out of range for all others, which are dropped
        paired = self._fuse(params, [x.astype(self.dtype) for x in features])
        mine, tokens, kv, kept, handed, ending = rows, blocks.tokens, [], [], None, None
        for j in range(self.modules):
            if j:
                known = jnp.where(blocks.before[:, None] < 0, state["hidden"][j][slots], ending[blocks.before])
                missing, tokens, paired = _paired(j, begun, rows.start, blocks.tokens, known, handed)
                paired = self._taken(params, j, paired)
                mine = rows.replace(start=rows.start - j + missing, count=jnp.maximum(rows.count - missing, 0))
            out, written = self._layer(self._own(params, j), state["kv"][j], tokens, paired, mine)
            out, last = out[:, :t], jnp.maximum(mine.count - 1, 0)
            handed = out if self.chained else paired
            ending = row_of(handed, last)[:, 0]
            kv.append(written)
            kept += [ending] if j else [row_of(out, last)[:, 0], ending]
        hidden = [old.at[into].set(new, mode="drop") for old, new in zip(state["hidden"], kept, strict=False)]
        note = lambda name, value: state[name].at[into].set(value, mode="drop")  # noqa: E731
        positions = {"behind": note("behind", rows.start + rows.count), "begun": note("begun", begun)}
        return {"kv": tuple(kv), "hidden": tuple(hidden), **positions}

    def _own(self, params: Any, j: int) -> dict[str, Any]:
        """The params of module j, as those of one alone."""
        return {**params, **(params["layers"][j] if self.separate else {"layer": params["layers"][j]})}

    def _taken(self, params: Any, j: int, handed: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """The hidden states that module j pairs with tokens, from what module j - 1 handed on."""
        return self._feedback(self._own(params, j - 1), handed) if self.chained else handed


def _paired(
    j: int,
    begun: Int[Array, " b"],
    start: Int[Array, " b"],
    tokens: Int[Array, "b t"],
    kept: Float[Array, "b d"],
    out: Float[Array, "b _ d"],
) -> tuple[Int[Array, " b"], Int[Array, "b t"], Float[Array, "b t d"]]:
    """Inputs of module j's rows, for tokens that the first module's rows from `start` on take.

    `out` are the rows of module j - 1 for the same tokens, `kept` the one before them. Returns how many rows are
    missing at the beginning, because they would come before `begun`, and tokens and outputs of the others.
    """
    missing = lambda j: jnp.clip(begun + j - start, 0, j)  # noqa: E731
    shift, at = missing(j) - missing(j - 1), jnp.arange(tokens.shape[1])
    known = jnp.concatenate([kept[:, None], out], axis=1)
    pick = lambda x, positions: jnp.minimum(at + positions[:, None], x.shape[1] - 1)  # noqa: E731
    tokens = jnp.take_along_axis(tokens, pick(tokens, missing(j)), axis=1)
    return missing(j), tokens, jnp.take_along_axis(known, pick(known, shift)[..., None], axis=1)
