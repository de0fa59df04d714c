"""DFlash against the `dflash` package's own generation loop; its cache under everything that the engine does.

Expected tensors come from tests/golden/make_dflash.py. A random drafter is hardly ever right about a random target, so
where a test needs rounds of several tokens, some drafts are replaced with the right ones (`Helped`).
"""

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxspec
from jaxspec import EngineConfig, SamplingParams, load_drafter, load_model
from jaxspec.cache.paged import PageLayout, Rows
from jaxspec.compiling.programs import Programs
from jaxspec.decoder.forward import forward, head_logits
from jaxspec.decoder.functions import rms_norm, rope
from jaxspec.decoder.mixer import OnlyAttention
from jaxspec.drafters.base import DraftBatch, PrefillBatch, Verified
from jaxspec.drafters.dflash import DFlash
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import Param
from jaxspec.pallas import hopper
from jaxspec.rounds import programs as rounds
from jaxspec.rounds.packing import Shapes, empty_slots, pack_blocks
from tests.engine import test_lossless as lossless
from tests.rounds import test_distribution as sampled
from tests.support import widths
from tests.support.blocks import Counting, golden, help, text_of
from tests.support.exact import slots_for
from tests.support.sample import rare
from tests.support.tiny import tiny_checkpoint, tiny_config

VARIANTS = ("full", "sliding", "window")
LENGTHS = (1, 2, 7, 16, 17, 33, 64, 150)
ROUNDS, FEWER = 5, 3  # as in make_dflash.py
SCENARIOS = "two", "preempted", "prefixes"  # whose every draft is held against a dense one
PAGE, BLOCK = 16, 32


@dataclass(frozen=True)
class Helped(DFlash):
    """Knows what plain decoding would say, `params["texts"]` i32[k, c], and says it in the first drafts of a round."""

    def propose(self, params, state, batch):
        proposal, state = super().propose(params, state, batch)
        which = text_of(params["texts"], batch)
        at = batch.length[:, None] + jnp.arange(self.num_draft_tokens)
        right = params["texts"][which[:, None], jnp.minimum(at, params["texts"].shape[1] - 1)]
        helped = jnp.arange(self.num_draft_tokens) < help(batch.length[:, None] - 1, self.block_size)
        return proposal.replace(tokens=jnp.where(helped, right, proposal.tokens)), state


# -- against the package -----------------------------------------------------------------------------------------------


class Rounds:
    """The engine's programs over the golden prompts, all at once."""

    def __init__(self, variant):
        model, loaded, self.expected = golden("dflash", variant)
        self.drafter = Helped(*(getattr(loaded.drafter, field.name) for field in dataclasses.fields(DFlash)))
        texts = np.zeros((len(LENGTHS), 256), np.int32)
        for text, n in zip(texts, LENGTHS, strict=True):
            known = [*self.expected[f"ids_{n}"], *self.expected[f"output_{n}"]]
            text[: len(known)] = known
        self.params = {**loaded.params, "texts": jnp.asarray(texts)}
        width, capacity, n = self.drafter.num_draft_tokens + 1, 224, len(LENGTHS)
        pages = capacity // PAGE
        table = np.arange(1, n * pages + 1, dtype=np.int32).reshape(n, pages)
        prompts = [self.expected[f"ids_{length}"].tolist() for length in LENGTHS]
        slots = slots_for(
            [SamplingParams(temperature=0.0)] * n, prompts, [[]] * n,
            capacity=capacity, new_tokens=60, drafts=width - 1,
        )  # fmt: skip
        blocks = [(i, at, min(BLOCK, m - at), -1, -1) for i, m in enumerate(LENGTHS) for at in range(0, m, BLOCK)]
        shapes = Shapes(
            n, capacity, pages, BLOCK, prefills=(len(blocks),), score=1, firsts=(n,), batches=(n,), seldom=(n,)
        )
        self.programs = Programs(model.config, self.drafter, shapes, model.params, self.params)
        layout = PageLayout(n * pages + 1, PAGE, "float32")
        state = rounds.empty_state(model.config, self.drafter, layout, n, capacity, "float32").replace(slots=slots)
        which = [i for i, *_ in blocks]
        blocks = pack_blocks(blocks, [prompts[i] for i in which], table[which], BLOCK)
        state = self.programs.prefill(state, blocks)
        self.packed = np.column_stack([np.arange(n), table]).astype(np.int32)
        self.state, out = self.programs.first(state, self.packed, rounds.GREEDY)
        self.first = np.asarray(out)[:, rounds.TOKENS]
        self.propose = jax.jit(self._propose)

    def _propose(self, state):
        _, batch = rounds.batch_of(state, self.packed[:, 0], self.packed[:, 1:], rounds.GREEDY)
        return DFlash.propose(self.drafter, self.params, state.draft, batch)[0]

    def next(self):
        """A round: the proposal without help, and how many tokens came out."""
        proposal = self.propose(self.state)
        self.state, out = self.programs.round(self.state, self.packed, rounds.GREEDY)
        return proposal, np.asarray(out)[:, rounds.EMITTED]


@pytest.mark.parametrize("variant", [rare("full"), rare("sliding"), rare("window")])  # layers of both kinds draft below
def test_rounds_equal_the_package(variant):
    rounds = Rounds(variant)
    expected = rounds.expected
    np.testing.assert_array_equal(rounds.first, [expected[f"output_{n}"][0] for n in LENGTHS])
    for i in range(ROUNDS):
        proposal, yielded = rounds.next()
        logits = np.stack([expected[f"logits_{n}"][i] for n in LENGTHS])
        np.testing.assert_allclose(proposal.logits, logits, atol=5e-4, err_msg=f"round {i}")
        np.testing.assert_array_equal(proposal.tokens, logits.argmax(-1))
        np.testing.assert_array_equal(yielded, [expected[f"yielded_{n}"][i] for n in LENGTHS])
    for slot, n in enumerate(LENGTHS):
        output = expected[f"output_{n}"]
        np.testing.assert_array_equal(rounds.state.slots.history[slot, n : n + len(output)], output)


@pytest.mark.parametrize("variant,length,fewer", [
    rare("full", 150, True), ("sliding", 33, True), rare("window", 16, True),
    *(pytest.param(*case, marks=pytest.mark.exhaustive)  # whole blocks are in the rounds above
      for case in [("full", 1, False), ("full", 1, True), ("full", 150, False), ("sliding", 33, False),
                   ("window", 16, False)]),
])  # fmt: skip
def test_propose_equals_the_package(variant, length, fewer):
    model, drafter, expected = golden("dflash", variant)
    n, logits = drafter.drafter.block_size - 1, expected[f"logits_{length}"][0]
    if fewer:
        n, logits = FEWER, expected[f"fewer_{length}"]
    proposed = jaxspec.propose(model, drafter, expected[f"ids_{length}"].tolist(), n)
    assert proposed.next_token == expected[f"output_{length}"][0] and proposed.count == n
    np.testing.assert_allclose(proposed.logits, logits, atol=5e-4)
    np.testing.assert_array_equal(proposed.tokens, logits.argmax(-1))


def test_the_golden_rounds_are_of_all_kinds():
    for variant in VARIANTS:
        _, drafter, expected = golden("dflash", variant)
        yielded = {int(y) for n in LENGTHS for y in expected[f"yielded_{n}"]}
        assert len(yielded) >= 4 and {1, drafter.drafter.block_size} <= yielded


def drafts_behind(drafter, params, features):
    """Logits behind a text whose `features` came in two chunks and a round of 3 tokens, of which one was accepted."""
    layout, table, t = PageLayout(8, PAGE, "float32"), jnp.arange(1, 8)[None], features[0].shape[1]
    slots, text = jnp.zeros(1, int), jnp.arange(t + 8)[None] % 30
    sampling = jax.tree.map(lambda x: x[:1], empty_slots(1, t + 8).sampling)

    def run(params, features):
        state = drafter.init_state(layout, 2)
        for start, end in ((0, 41), (41, t - 3)):
            rows, known = Rows(jnp.full(1, start), jnp.full(1, end - start), table), text[:, start:end]
            chunk = PrefillBatch(slots, known, known, rows)
            state = drafter.prefill(params, state, chunk, tuple(x[:, start:end] for x in features))
        live, last = jnp.ones(1, bool), tuple(x[:, t - 3 :] for x in features)
        batch = DraftBatch(slots, jnp.full(1, t - 2), text, table, live, sampling, greedy=True)
        state = drafter.commit(params, state, batch, Verified(text[:, :3], text[:, :3], jnp.ones(1, int), last))
        return drafter.propose(params, state, batch.replace(length=batch.length + 1))[0].logits

    return jax.jit(run)(params, features)


def test_a_window_drafts_as_a_checkpoint_of_sliding_layers_does():
    """With blocks of 8 rows, whose last one sees the whole window. One as long as the text changes nothing."""
    _, loaded, _ = golden("dflash", "full")
    replace, drafter = dataclasses.replace, loaded.drafter
    features = jax.random.normal(jax.random.key(0), (2, 1, 90, drafter.config.hidden_size))
    layers = tuple(replace(x, mixing=replace(x.mixing, window=19 + 8)) for x in drafter.config.decoder.layers)
    config = replace(drafter.config, decoder=replace(drafter.config.decoder, layers=layers))
    of = replace(drafter, window=19), replace(drafter, config=config), replace(drafter, window=88), drafter
    short, sliding, long, none = (drafts_behind(each, loaded.params, tuple(features)) for each in of)
    np.testing.assert_allclose(short, sliding, atol=1e-5)
    np.testing.assert_allclose(long, none, atol=1e-5)
    assert np.abs(short - none).max() > 0.1


def test_nan_in_a_window_is_cleared_with_its_pages():
    model, loaded, _ = golden("dflash", "full")
    drafter = dataclasses.replace(loaded.drafter, window=9)
    state = rounds.empty_state(model.config, drafter, PageLayout(4, PAGE, "float32"), 1, 32, "float32")
    state = state.replace(draft=state.draft.at[0, 0, 0].set(jnp.nan).at[0, 0, 1].set(2.0))
    cleared = rounds.clear(1, state, jnp.array([1])).draft
    assert jnp.isfinite(cleared).all() and (cleared[0, 0, 1] == 2).all()


# -- in the engine -----------------------------------------------------------------------------------------------------


@functools.cache
def drafter_folder(target_folder, seed=0, **overrides):
    """A random DFlash checkpoint for a target: two layers, the second sliding, blocks of 5."""
    hf = json.loads((Path(target_folder) / "config.json").read_text())
    settings = {"mask_token_id": hf["vocab_size"] - 1, "target_layer_ids": [hf["num_hidden_layers"] - 1, 0]}
    hf = tiny_config("qwen3", hf["vocab_size"], hidden_size=hf["hidden_size"]) | {
        "architectures": ["DFlashDraftModel"],
        "block_size": 5,
        "num_target_layers": hf["num_hidden_layers"],
        "layer_types": ["full_attention", "sliding_attention"],
        "use_sliding_window": True,
        "sliding_window": 21,
        "dflash_config": settings,
        **overrides,
    }
    folder = Path(target_folder).with_name(f"dflash-{Path(target_folder).name}-{seed}-{len(overrides)}")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    target = ModelConfig.from_hf(json.loads((Path(target_folder) / "config.json").read_text()))
    declared = DFlash.from_hf(hf, target).parameters()
    rng, tensors = np.random.default_rng(seed), {}
    for param in jax.tree.leaves(declared, is_leaf=lambda leaf: isinstance(leaf, Param)):
        for name, width in zip(param.sources, param.layout.splits, strict=True):
            shape = (width, *param.shape[:-1]) if param.transpose else (width,)
            noise = rng.standard_normal(shape, np.float32)
            tensors[name] = noise * shape[1] ** -0.5 if param.transpose else 1 + 0.2 * noise
    save_file({name: np.float32(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def drafts_everywhere(loaded, text, features):
    """Logits of the drafts behind each token of a text, f32[t, n, v], by one dense attention without pages."""
    drafter, params, c, t = loaded.drafter, loaded.params, loaded.drafter.config, len(text)
    n, m, h = drafter.num_draft_tokens, c.num_kv_heads, c.head_dim
    eps = c.decoder.norm.eps
    context = rms_norm(jnp.concatenate(list(features), -1) @ params["fc"].values, params["hidden_norm"], eps)
    position = jnp.arange(t)
    block = jnp.full((t, n + 1), drafter.mask_token).at[:, 0].set(text)
    positions = position[:, None] + jnp.arange(n + 1)

    def attention(_, layer, q, k, v, window):
        weights = jnp.stack([p["qkv"].values for p in params["layers"]])[layer][:, c.num_heads * h :]
        norm = jnp.stack([p["k_norm"] for p in params["layers"]])[layer]
        k_context, v_context = jnp.split((context @ weights).reshape(1, t, 2 * m, h), 2, axis=2)
        k_context = rope(rms_norm(k_context, norm, eps), position[None], c.decoder.attention)
        each = lambda x: jnp.broadcast_to(x, (t, t, m, h))  # noqa: E731
        keys, values = jnp.concatenate([each(k_context), k], 1), jnp.concatenate([each(v_context), v], 1)
        at = jnp.concatenate([jnp.broadcast_to(position, (t, t)), positions], 1)
        real = jnp.concatenate([position < position[:, None], jnp.ones_like(block, bool)], 1)
        row, key = positions[..., None], at[:, None]
        seen = real[:, None] & (jnp.abs(row - key) < (window or 2**30))
        seen &= (key <= row) | ~jnp.array(drafter.causal)[layer]
        keys, values = (jnp.repeat(x, c.num_heads // m, axis=2) for x in (keys, values))
        scores = jnp.einsum("btnh,bsnh->bnts", q, keys) * h**-0.5
        weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("bnts,bsnh->btnh", weights, values), None

    hidden = forward(c.decoder, params, block, positions, OnlyAttention(attention))
    return head_logits(params, hidden.last[:, 1:])


@dataclass(frozen=True)
class Watched(Counting, Helped):
    """Counts the drafts that are what they should be at that place of that text, and those that aren't."""

    @classmethod
    def load(cls, target, source, options):
        source = drafter_folder(lossless.checkpoint("llama"))
        drafter, params = super().load(target, source, options)
        return drafter, {**params, **expected_drafts()}

    def propose(self, params, state, batch):
        proposal, kv = Helped.propose(self, params, state["kv"], batch)
        drafts = jnp.argmax(proposal.logits, axis=-1)
        at = text_of(params["texts"], batch)[:, None], batch.length[:, None] - 1, jnp.arange(self.num_draft_tokens)
        known = batch.live[:, None] & params["sure"][at]
        right, wrong = (
            (known & same).sum() for same in (drafts == params["drafts"][at], drafts != params["drafts"][at])
        )
        return proposal, {"kv": kv, "right": state["right"] + right, "wrong": state["wrong"] + wrong}


@functools.cache
def expected_drafts():
    """Texts of plain decoding in each scenario, the drafts at each position, and where those aren't near-ties."""
    context = lossless.OPTIONS["context_length"]
    outs = [out for scenario in SCENARIOS for out in lossless.plain("llama", scenario)]
    known = [out.prompt_token_ids + out.token_ids for out in outs]
    texts = np.array([text + [0] * (context - len(text)) for text in known], np.int32)
    model = lossless.engine("llama", "none").engine.runner.model
    loaded = load_drafter(f"dflash:{drafter_folder(lossless.checkpoint('llama'))}", model)
    features = jaxspec.hidden_states(model, texts, loaded.drafter.feature_layers)
    top = jax.jit(lambda *text: jax.lax.top_k(drafts_everywhere(loaded, *text), 2))
    values, tokens = map(np.stack, zip(*(top(texts[i], features[:, i]) for i in range(len(texts))), strict=True))
    inside = np.arange(context) < np.array([len(text) for text in known])[:, None]
    sure = (values[..., 0] - values[..., 1] > 1e-3) & inside[..., None]
    return {"texts": jnp.asarray(texts), "drafts": jnp.asarray(tokens[..., 0]), "sure": jnp.asarray(sure)}


@functools.cache
def watched_engine():
    options = lossless.OPTIONS
    llm = widths.several(lambda: jaxspec.LLM(str(lossless.checkpoint("llama")), f"{__name__}:Watched", **options))
    llm.engine.scheduler.rounds = 1
    return llm


@pytest.mark.exhaustive  # DSpark and LiLiCorr, whose layers and cache are DFlash's, are in test_block_drafters.py
@pytest.mark.parametrize("overlap,rounds", [(True, 1), (False, 1), (True, 4)])
def test_greedy_output_equals_plain_and_every_draft_is_the_texts_own(overlap, rounds, monkeypatch):
    """Chunked prompts, prefix hits, preemption, stops: the text is plain decoding's, the drafter's cache is whole."""
    llm = watched_engine()
    before = {name: int(llm.engine.runner.state.draft[name]) for name in ("right", "wrong")}
    for scenario in SCENARIOS:
        assert llm.engine.flush_cache()
        batch, expected = lossless.scenarios("llama")[scenario], lossless.plain("llama", scenario)
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine, "config", dataclasses.replace(llm.engine.config, disable_overlap=not overlap))
            patch.setattr(llm.engine.scheduler, "rounds", rounds)
            outs = lossless.run(llm, batch)
            again = lossless.run(llm, batch) if scenario == "prefixes" else []
        for out, want in zip(outs + again, expected * (1 + bool(again)), strict=True):
            where = f"{scenario}, prompt of {len(out.prompt_token_ids)}"
            assert (out.token_ids, out.text, out.finish_reason) == (want.token_ids, want.text, want.finish_reason), (
                where
            )
        if scenario == "preempted":
            assert sum(out.metrics.preemptions for out in outs) > 0
            assert 1.5 < sum(o.metrics.verified_tokens for o in outs) / sum(o.metrics.verify_rounds for o in outs) < 4
        assert all(out.metrics.cached_tokens > 0 for out in again)
    after = {name: int(llm.engine.runner.state.draft[name]) - before[name] for name in before}
    assert after["wrong"] == 0 and after["right"] > 300, after


@pytest.mark.exhaustive
def test_drafts_are_the_texts_own_however_many_a_round_has(monkeypatch):
    llm = watched_engine()
    widths.switch(llm, monkeypatch)
    test_greedy_output_equals_plain_and_every_draft_is_the_texts_own(True, 1, monkeypatch)
    assert widths.took_turns(llm)


@pytest.mark.parametrize("sliding", [rare(0), rare(1), rare(2)])
def test_full_and_sliding_layers_take_the_kernel(sliding, monkeypatch):
    """A drafter with both kinds has a kernel of each, lowered once however many layers share it."""
    folder = tiny_checkpoint(head_dim=64)
    kinds = ("full_attention",) * (2 - sliding) + ("sliding_attention",) * sliding
    loaded = load_drafter(
        drafter_folder(folder, 10 + sliding, head_dim=64, layer_types=kinds), load_model(str(folder), dtype="bfloat16")
    )
    slots = jax.tree.map(lambda x: x[:2], empty_slots(2, 64))
    table = jnp.ones((2, 4), jnp.int32)
    batch = DraftBatch(jnp.arange(2), slots.length, slots.history, table, ~slots.done, slots.sampling, greedy=True)
    args = loaded.params, loaded.drafter.init_state(PageLayout(9, PAGE, "bfloat16"), 2), batch
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    monkeypatch.setattr(hopper, "KERNELS", hopper.Counter())
    lowered = jax.jit(loaded.drafter.propose).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert hopper.KERNELS["decode_attention"] == lowered.count("@mosaic_gpu") == len(set(kinds))


@pytest.mark.exhaustive  # DFlash 2, which draws from a distribution for each mask, too, is in test_block_drafters.py
def test_sampled_output_has_the_targets_distribution(monkeypatch):
    """Drafts drawn from each mask's own distribution, and rejection: what comes out is the target's."""
    folder = drafter_folder(sampled.checkpoint(5), 3, num_hidden_layers=1, layer_types=None, use_sliding_window=False)
    draft = f"dflash:{folder}"
    loaded = load_drafter(draft, sampled.model(), EngineConfig(draft=draft, num_draft_tokens=2))
    monkeypatch.setitem(sampled.DRAFTERS, "dflash", lambda: (loaded.drafter, loaded.params))
    lanes, samples = sampled.Lanes("dflash"), 6_000
    sampled.check_fit(lanes, samples)
    assert lanes.drafted / 20 < lanes.accepted < lanes.drafted and lanes.whole_rounds > samples / 20
