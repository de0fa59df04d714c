"""Helpers of the block drafters' tests: golden tensors, random checkpoints, and drafters that are watched."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import load_drafter, load_model
from jaxspec.cache.paged import PageLayout, Rows
from jaxspec.drafters.base import DraftBatch, PrefillBatch
from jaxspec.engine import functional
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import Param
from jaxspec.rounds.packing import empty_slots
from tests.support.tiny import tiny_config

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
LENGTHS = (7, 33, 150)  # of the golden prompts


@functools.cache
def golden(method, variant):
    """The target of the golden tensors, the drafter, and what its own package drafts."""
    model = load_model(str(GOLDEN / "dflash" / "target"), progress=False)
    loaded = load_drafter(f"{method}:{GOLDEN / method / variant}", model)
    return model, loaded, load_file(GOLDEN / "expected" / f"{method}-{variant}.safetensors")


def proposals(method, variant, monkeypatch):
    """By prompt length, what is drafted behind each golden prompt, by one program for all; and what is expected."""
    model, loaded, expected = golden(method, variant)
    monkeypatch.setattr(functional, "SHORTEST", 256)
    for length in LENGTHS:
        ids = expected[f"ids_{length}"].tolist()
        proposed = jaxspec.propose(model, loaded, ids[:-1], loaded.drafter.num_draft_tokens)
        assert proposed.next_token == ids[-1]
        yield (
            proposed,
            {key.removesuffix(f"_{length}"): expected[key] for key in expected if key.endswith(f"_{length}")},
        )


def write_drafter(kind, folder, target_folder, seed=0, **settings):
    """A random checkpoint of class `kind` for a target: two layers, blocks of 5, and `settings` in its config."""
    target = json.loads((Path(target_folder) / "config.json").read_text())
    hf = tiny_config("qwen3", target["vocab_size"], hidden_size=target["hidden_size"]) | {
        "block_size": 5,
        "mask_token_id": target["vocab_size"] - 1,
        "target_layer_ids": [target["num_hidden_layers"] - 1, -1],
        **settings,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    declared = kind.from_hf(hf, ModelConfig.from_hf(target)).parameters()
    rng, tensors = np.random.default_rng(seed), {}
    for param in jax.tree.leaves(declared, is_leaf=lambda leaf: isinstance(leaf, Param)):
        for name, shape in param.stored_values().items():
            noise = rng.standard_normal(shape, np.float32)
            if len(shape) > 1:
                tensors[name] = noise * shape[-1] ** (-0.5 if param.transpose else 0)
            else:
                tensors[name] = 0.3 * noise + (not name.endswith(".bias"))
    if "draft_vocab_size" in settings:
        known = np.sort(rng.permutation(target["vocab_size"])[: settings["draft_vocab_size"]])
        tensors["d2t"] = known - np.arange(len(known))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def copies(method, tmp_path):
    """Returns a function that copies a golden checkpoint of a method and changes keys of its config."""

    def copy(variant, **keys):
        folder = shutil.copytree(GOLDEN / method / variant, tmp_path / variant)
        hf = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(hf | keys))
        return folder

    return copy


def text_of(texts, batch):
    """Which of the texts i32[k, c] each request is, so far."""
    c = min(texts.shape[1], batch.history.shape[1])
    unknown = jnp.arange(c) >= batch.length[:, None]
    return jnp.argmax(((texts[None, :, :c] == batch.history[:, None, :c]) | unknown[:, None]).all(-1), axis=1)


def help(position, block_size):  # as in make_dflash.py
    return position * 37 // 8 % block_size


class Counting:
    """Counts `right` and `wrong` drafts beside a drafter's own state, `kv`. A subclass judges them."""

    def init_state(self, layout, num_slots):
        return {"kv": super().init_state(layout, num_slots), "right": jnp.zeros((), int), "wrong": jnp.zeros((), int)}

    def commit(self, params, state, batch, verified):
        return {**state, "kv": super().commit(params, state["kv"], batch, verified)}

    def prefill(self, params, state, batch, features):
        return {**state, "kv": super().prefill(params, state["kv"], batch, features)}


class Watching(Counting):
    """A drafter, made a subclass of this, whose first drafts are often replaced by what plain decoding says, so that
    rounds yield several tokens. It counts the drafts of its own that a cold start would have made, and those not.

    Params: `texts` i32[k, c], and at each of their tokens the `drafts` of a cold start i32[k, c, n], how many of them
    are `verified` i32[k, c], and which are `sure` bool[k, c, n], far from any tie.
    """

    def propose(self, params, state, batch):
        proposal, kv = super().propose(params, state["kv"], batch)
        texts, step = params["texts"], jnp.arange(self.num_draft_tokens)
        which = text_of(texts, batch)
        at = which, batch.length - 1
        same = (proposal.tokens == params["drafts"][at]) & (proposal.count == params["verified"][at])[:, None]
        sure = params["sure"][at] & batch.live[:, None]
        right, wrong = (sure & same).sum(), (sure & ~same).sum()
        after = texts[which[:, None], jnp.minimum(batch.length[:, None] + step, texts.shape[1] - 1)]
        helped = step < help(batch.length - 1, self.num_draft_tokens + 1)[:, None]
        proposal = proposal.replace(tokens=jnp.where(helped, after, proposal.tokens))
        return proposal, {"kv": kv, "right": state["right"] + right, "wrong": state["wrong"] + wrong}


def cold_drafts(model, loaded, texts, known):
    """For `Watching`: what a drafter says at each token of i32[k, c] texts, of which so many are `known`, after one
    prefill of all before it. Nothing of it has been through an engine."""
    drafter, params, page, (_, c) = loaded.drafter, loaded.params, 8, texts.shape
    pages = -(-(c + drafter.lookahead) // page)
    table = jnp.arange(1, pages + 1)[None]
    sampling = jax.tree.map(lambda x: x[:1], empty_slots(1, c).sampling)

    def drafts(text, features):
        def filled(count):
            rows = Rows(jnp.zeros(1, int), count[None], table)
            state = drafter.init_state(PageLayout(pages + 1, page, "float32"), 2)
            block = PrefillBatch(jnp.zeros(1, int), text[None], jnp.roll(text, -1)[None], rows)
            return drafter.prefill(params, state, block, tuple(features[:, None]))

        whole = filled(jnp.int32(c))

        def at(position):
            live, length = jnp.ones(1, bool), position[None] + 1
            state = filled(position) if isinstance(whole, dict) else whole  # some state is of the newest row
            batch = DraftBatch(jnp.zeros(1, int), length, text[None], table, live, sampling, greedy=True)
            proposal = drafter.propose(params, state, batch)[0]
            best = jax.lax.top_k(proposal.logits[0], 2)[0]
            sure = jnp.cumprod(best[:, 0] - best[:, 1] > 1e-3).astype(bool)
            if getattr(drafter, "confidence", None) is not None:
                sure &= (jnp.abs(proposal.confidence - drafter.confidence) > 1e-3).all()
            return proposal.tokens[0], proposal.count[0], sure

        return jax.lax.map(at, jnp.arange(c))

    features = functional._hidden_states(model.config, drafter.feature_layers, model.params, texts)
    run = jax.jit(drafts)
    made = [run(jnp.asarray(text), features[:, i]) for i, text in enumerate(texts)]
    tokens, verified, sure = (jnp.stack(each) for each in zip(*made, strict=True))
    sure &= (jnp.arange(c) < known[:, None])[..., None]
    return {"texts": jnp.asarray(texts), "drafts": tokens, "verified": verified, "sure": sure}
