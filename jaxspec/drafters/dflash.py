"""DFlash: a whole block of drafts in one pass (https://arxiv.org/abs/2602.06036).

A few Qwen3 layers read the newest token followed by mask tokens, and fill in the masks. They know the text through the
target: the outputs of some of its layers, projected once for each position to the keys and values of every layer here.
Only those are cached, over the target's pages. A block's own keys and values are written behind them, and the next
block overwrites them. So between rounds this holds, as for the target: the keys and values of every known token but the
newest are the context's. With a `window` they are of the newest tokens alone, in pages of the request's slot
(`cache.ring`), and a prompt with a cached beginning computes the last of its tokens itself.

DSpark, DFlash 2, LiLiCorr and Domino are this with more after the layers, or in them: `dspark`, `dflash2`, `blocks`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from jaxspec.cache import ring
from jaxspec.cache.paged import KV, Rows
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.options import ConfigError, option
from jaxspec.decoder.forward import Hidden, forward, head_logits, top_tokens, write_keys_values
from jaxspec.decoder.functions import capped
from jaxspec.decoder.matmul import product
from jaxspec.drafters import dflash_checkpoint as checkpoint
from jaxspec.drafters import eagle_tree
from jaxspec.drafters.base import DraftBatch, Proposal
from jaxspec.drafters.own_weights import OwnLayers, borrowed, load_weights, own_dtype
from jaxspec.drafters.vocabulary import as_targets, id_maps, known_tokens, maps_of, rows_of
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import Layout, Weight
from jaxspec.parallel import sharding
from jaxspec.parallel.sharding import AXIS, EVERYWHERE

DERIVED = "context", "context_norm", "context_bias"  # params that `DFlash.derived` makes of others


@dataclass(frozen=True)
class DFlash(OwnLayers):
    """`config` is that of the drafter's own layers; embeddings and head are the target's, unless the file has others.

    A block is the newest token and masks, `block_size` tokens at most. Row `first` drafts the first token: row 1, the
    first mask, or row 0, the newest token's. Within a block, the rows of layer i see each other, or only what is before
    them if `causal[i]`; and nothing its window or more positions away.

    `draft_ids`: how many tokens it knows, of a drafter with a vocabulary of its own. Logits are multiplied by
    `multiplier`, then squashed below `softcap`. `padded_drafts`: drafts that a block has rows for, if
    fewer are verified.

    With `topk` above 1 drafts are a tree over a block's first `num_steps` places. All its branches come of one pass.

    With a `window`, each row sees the newest so many tokens before the block, in any layer, and few more.
    """

    mask_token: int
    block_size: int
    causal: tuple[bool, ...]
    num_draft_tokens: int
    feature_layers: tuple[int, ...] = ()
    first: int = 1
    draft_ids: int | None = None
    multiplier: float = 1.0
    softcap: float | None = None
    padded_drafts: int | None = None
    topk: int = 1
    num_steps: int | None = None
    window: int | None = option(None, "see the newest so many tokens, and keep no older keys and values", least=1)

    rests: ClassVar[bool] = True
    computes: ClassVar[frozenset[str]] = frozenset()  # which of the checkpoint's VARIANTS
    first_by_default: ClassVar[int] = 1

    def __post_init__(self):
        most, asked = self.block_size - self.first, "num-draft-tokens" if self.num_steps is None else "num-steps"
        if self.num_steps is not None:
            eagle_tree.check(self.num_steps, self.topk, self.num_draft_tokens)
        if not 1 <= self.longest <= most:
            known = "of which the first is known" if self.first else "each of which drafts the next one"
            raise ConfigError(
                f"--{asked} {self.longest}: this {type(self).__name__} drafter fills blocks of "
                f"{self.block_size} tokens, {known}, so it drafts 1 to {most}"
            )

    @property
    def longest(self):
        return self.num_draft_tokens if self.num_steps is None else self.num_steps

    @property
    def lookahead(self):
        return max(self.num_draft_tokens + 1, self.rows)

    @property
    def recent(self):
        """Positions that a row sees, its own included. A block's last row sees the whole window."""
        return self.window + self.block_size if self.window else 0

    def kv_bytes_per_token(self, dtype):
        return 0 if self.window else super().kv_bytes_per_token(dtype)

    def init_state(self, layout, num_slots):
        if not self.window:
            return super().init_state(layout, num_slots)
        return ring.empty(layout, self.config, num_slots, self.recent + self.lookahead - 1)

    @property
    def rows(self) -> int:
        """Rows of a block: those that draft, and those before them."""
        return (self.padded_drafts or self.longest) + self.first

    @classmethod
    def load(cls, target, source, options):
        """**Raises:** `ConfigError` for a config of another kind or for another model, `CheckpointError` for tensors
        that are missing or don't fit it. Both name what is wrong."""
        files = checkpoint.open_folder(source, options.load_format)
        try:
            drafter = cls.from_hf(files.hf, target.config, options.num_draft_tokens if options.topk == 1 else None)
            if options.topk > 1 and cls is DFlash:
                drafter = drafter._tree(options)
        except ConfigError as error:
            raise ConfigError(f"--draft {source} can't draft for {target.name}: {error}") from error
        made_up, offsets = options.load_format == "dummy", None
        found = {} if made_up else {checkpoint.canonical(name): name for name in files.tensors()}
        declared, dtype = drafter.parameters(found), own_dtype(target, options)
        if drafter.draft_ids is not None and not made_up:
            offsets = checkpoint.offsets(files, found, drafter.draft_ids)
        named = {"rename": checkpoint.canonical, "skip": checkpoint.MAPS}
        params = load_weights(declared, files, source, dtype, options, **named)
        params = cls._borrow(params, borrowed(target, dtype), source)
        if drafter.draft_ids is not None:
            params |= id_maps(offsets, drafter.draft_ids, drafter.config.vocab_size, source)
        return drafter, {**params, **drafter.derived(params, options.tp_size)}

    def derived(self, params, size):
        return _projected(self.config, params["layers"], size)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], target: ModelConfig, num_draft_tokens: int | None = None) -> DFlash:
        """Read a drafter's `config.json` (as a mapping), for a target of this config.

        **Raises:** `ConfigError` naming the key, its value and what would fit.
        """
        own = checkpoint.flat(hf)
        if own.get("mask_token_id") is None:
            raise ConfigError("it is no DFlash drafter: neither config.json nor its dflash_config has a mask_token_id")
        checkpoint.refuse_variants(own, cls.computes)
        config, causal = checkpoint.read_config(own, target)
        block_size = checkpoint.integer("block_size", own.get("block_size", 16), 2)
        anchored = own.get("sample_from_anchor")
        first = cls.first_by_default if anchored is None else int(not anchored)
        known = checkpoint.integer("draft_vocab_size", own.get("draft_vocab_size") or config.vocab_size, 1)
        if known > config.vocab_size:
            raise ConfigError(f"draft_vocab_size must be at most the target's {config.vocab_size}, got {known}")
        return cls(
            config=config,
            feature_layers=checkpoint.feature_layers(own.get("target_layer_ids"), config.num_layers, target.num_layers),
            mask_token=checkpoint.integer("mask_token_id", own["mask_token_id"], 0, config.vocab_size),
            block_size=block_size,
            causal=causal,
            num_draft_tokens=num_draft_tokens or block_size - first,
            first=first,
            draft_ids=known if known < config.vocab_size else None,
            multiplier=checkpoint.number(own, "output_multiplier"),
            softcap=checkpoint.number(own, "final_logit_softcapping") if own.get("final_logit_softcapping") else None,
            **cls.more(own, config),
        )

    def _tree(self, options: EngineConfig) -> DFlash:
        """This drafter with the tree that the options ask for. **Raises:** `ConfigError` for one that can't be."""
        if options.topk > (known := self.draft_ids or self.config.vocab_size):
            raise ConfigError(f"--topk {options.topk}: it knows {known} tokens; give {known} or less")
        steps, drafts = eagle_tree.shape(options, self.block_size - self.first)
        return replace(self, topk=options.topk, num_steps=steps, num_draft_tokens=drafts)

    @classmethod
    def more(cls, own: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
        """A subclass's fields, from the flat config. **Raises:** `ConfigError`."""
        return {}

    @classmethod
    def _borrow(cls, params: dict[str, Any], target: Mapping[str, Any], source: str) -> dict[str, Any]:
        return checkpoint.borrow(params, target, source)

    def parameters(self, found: Container[str] = ()) -> dict[str, Any]:
        """Declarations of a checkpoint's params, if these tensors are `found` in it."""
        return checkpoint.parameters(self.config, len(self.feature_layers), self.draft_ids, found)

    def with_token_map(self, params: Any, ids: np.ndarray) -> dict[str, Any]:
        """The params to draft these of the target's tokens alone. **Raises:** `ConfigError` if it can't be."""
        if len(ids) < self.topk:
            raise ConfigError(f"--topk {self.topk}: --draft-token-map has {len(ids)} tokens; give {len(ids)} or less")
        less, maps = rows_of(params, ids), maps_of(params, ids, self.config.vocab_size)
        head = less["head"] if "head" in less else Weight(less["embed"].T)  # all embeddings are still read for inputs
        return {**params, "head": head, **maps}

    def propose(self, params, state, batch):
        n, found = self.num_draft_tokens, None
        hidden = self._fill(params, state, batch)
        logits = self._logits(params, self._drafting(hidden.last))
        vocab = known_tokens(params, self.config.vocab_size)
        if self.topk > 1:
            return eagle_tree.of_block(logits, self.topk, n, params, batch, vocab), hidden.cache
        if batch.greedy:
            found = top_tokens(params, self.config.decoder.norm, params["norm"], hidden.unnormed)
        top = None if found is None else self._drafting(found[0])
        choose = partial(batch.choose, vocab=vocab)
        tokens, probs = jax.vmap(choose, in_axes=(1, 0, 1), out_axes=1)(logits, jnp.arange(n), top)
        tokens, probs = as_targets(params, tokens, probs)
        return Proposal(tokens, jnp.where(batch.live, n, 0), probs, logits), hidden.cache

    def narrowed(self, drafts):
        """The block stays whole, since its rows see each other: its first drafts are the same however many count."""
        if not drafts:
            return super().narrowed(0)
        return replace(self, num_draft_tokens=drafts, padded_drafts=self.padded_drafts or self.num_draft_tokens)

    def idle(self, params, state, batch):
        return state  # a block leaves nothing that is read later

    def _drafting(self, rows: Shaped[Array, "b t *d"]) -> Shaped[Array, "b n *d"]:
        """Rows of a block whose drafts are verified."""
        return rows[:, self.first : self.first + self.longest]

    def _fill(self, params: Any, state: KV, batch: DraftBatch) -> Hidden:
        """The layers over each request's newest token and masks. A mask's row is about its own position, not the next.

        A newest token's row that drafts is about the next position, as are all masks' behind it.
        """
        newest, rows = batch.tokens(-1, 1), batch.rows(-1, self.rows)
        masks = jnp.full((len(newest), self.rows - 1), self.mask_token, newest.dtype)
        block = jnp.concatenate([newest, masks], axis=1)
        kv, rows = self._pages(state, rows, batch.slots)
        hidden = self._forward(params, block, rows.marked_positions(self.rows), _Block(self, rows), kv)
        return hidden.replace(cache=hidden.cache.reshape(state.shape))

    def _pages(self, state: KV | ring.Ring, rows: Rows, slots: Int[Array, " b"]) -> tuple[KV, Rows]:
        """Pages that hold the drafter's keys and values, and the rows in them."""
        return (ring.pages(state), ring.rows_in(state, rows, slots)) if self.window else (state, rows)

    def _forward(
        self, params: Any, block: Int[Array, "b t"], positions: Int[Array, "b t"], mixer: _Block, state: KV
    ) -> Hidden:
        return forward(self.config.decoder, params, block, positions, mixer, state)

    def _logits(self, params: Any, rows: Float[Array, "b n d"]) -> Float[Array, "b n w"]:
        """Over the drafter's vocabulary, float32, of rows after the final norm."""
        logits = head_logits(params, rows)
        if self.multiplier != 1:
            logits = logits * self.multiplier
        return logits if self.softcap is None else capped(logits, self.softcap)

    def commit(self, params, state, batch, verified):
        """Write keys and values of all rows. Rejected rows' lie behind the text, where the next block is written."""
        return self._inject(params, state, batch.slots, batch.rows(-1, verified.tokens.shape[1]), verified.features)

    def prefill(self, params, state, batch, features):
        return self._inject(params, state, batch.slots, batch.rows, features)

    def _inject(self, params, state, slots, rows: Rows, features: tuple[Float[Array, "b t d"], ...]) -> KV | ring.Ring:
        """Write the keys and values that all layers here have of the target's features at these rows."""
        return self._write(params, state, slots, rows, self._context(params, features))

    def _context(self, params: Any, features: tuple[Float[Array, "b t d"], ...]) -> Float[Array, "b t d"]:
        """The target's features, projected; `hidden_norm` is still to come."""
        dtype = params["context_norm"].dtype
        return product([x.astype(dtype) for x in features], params["fc"])

    def _write(self, params, state, slots, rows: Rows, context: Float[Array, "b t d"]) -> KV | ring.Ring:
        kv, rows = self._pages(state, rows, slots)
        return write_keys_values(self.config.decoder, params, context, rows, kv).reshape(state.shape)


@dataclass(frozen=True)
class _Block:
    """A `PagedMixer` of blocks at `rows`, as far as each layer's rows see."""

    drafter: DFlash
    rows: Rows

    def only(self, asked):
        return self

    def attend(self, cache, layer, q, k, v, window):
        return self._look(self.rows.write(cache, layer, k, v), layer, q, window)

    def pages(self, cache):
        return cache

    def attend_written(self, cache, layer, t, write, window):
        q, kv = write(cache, self.rows.written(cache, t), None)
        return self._look(kv, layer, q, window)

    def _look(self, kv: KV, layer: Int[Array, ""], q: Array, window: int | None) -> tuple[Array, KV]:
        """The context and the block, as far as a row's window reaches either way. Nothing is seen of padding rows."""
        drafter, rows, (b, t) = self.drafter, self.rows, q.shape[:2]
        window = min((each for each in (window, drafter.recent) if each), default=None)
        causal, width = jnp.array(drafter.causal)[layer], drafter.rows
        mask = jnp.tril(jnp.ones((t, width), bool)) | ~causal
        if window is not None:
            mask &= abs(jnp.arange(t)[:, None] - jnp.arange(width)) < window
        return rows.look(kv, layer, q, jnp.broadcast_to(mask, (b, t, width)), window), kv


def _projected(config: ModelConfig, layers: list[dict[str, Any]], size: int) -> dict[str, Any]:
    """`context_projection` on each of so many devices."""
    mesh, make = sharding.mesh_of(size), partial(context_projection, config.on_one_of(size))
    if mesh is None:
        return make(layers)
    gives = {"context": PartitionSpec(None, AXIS), "context_norm": EVERYWHERE}
    gives |= {"context_bias": PartitionSpec(AXIS)} if config.decoder.attention.bias else {}
    return jax.jit(sharding.spread(make, mesh, (sharding.specs_of(layers),), gives))(layers)


def context_projection(config: ModelConfig, layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Projection of context to keys and values, of all layers side by side: a second copy, so that it is one matmul."""
    a = config.decoder.attention
    queries = a.heads * a.head_dim
    parts = [part for layer in layers for part in layer["qkv"].parts(layer["k_norm"].dtype)[1:]]
    layout = Layout(tuple(part.shape[1] for part in parts))
    projection = {
        "context": Weight(jnp.concatenate(parts, axis=1), layout=layout),
        "context_norm": jnp.stack([layer["k_norm"] for layer in layers]),
    }
    if a.bias:
        projection["context_bias"] = jnp.concatenate([layer["qkv_bias"][queries:] for layer in layers])
    return projection
