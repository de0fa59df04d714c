"""Hybrid models in the engine: every drafter leaves the text as it is, and so does every prefix that was cached.

A linear layer's state is right if each token entered it once, in order, whatever was drafted, refused, preempted,
evicted or gone on from. Texts are held against forwards over the whole of them, snapshots against states computed in
one block. What needs no linear attention is held of Qwen3-MoE too.
"""

import dataclasses
import functools
import random
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import LLM, ConfigError, EngineConfig, SamplingParams, load_drafter, load_model
from jaxspec.drafters.base import Drafter, Proposal
from jaxspec.scheduling.audit import audit
from jaxspec.scheduling.sequence import Chunk
from tests.rounds import test_distribution as distribution
from tests.support import hybrids, widths
from tests.support.engines import PAGE, SMALL
from tests.support.sample import rare
from tests.support.tiny import tiny_checkpoint

FAMILIES = (*hybrids.FAMILIES, "qwen3_moe")
GOLDEN = Path(__file__).resolve().parents[1] / "golden"
VOCAB, CAPACITY, BATCH = 64, 128, 8
OPTIONS = SMALL | {"dtype": "float32", "context_length": CAPACITY, "decode_log_interval": 0}
OPTIONS |= {"max_running_requests": 2, "max_total_tokens": 208}  # of the 2 x 128 that would never run short
OPTIONS |= {"max_state_snapshots": 10, "state_snapshot_interval": 32}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def cases(*often, drafters=("mtp", "ngram", "standalone")):
    """Every family with every drafter that it can have; `make test` runs those that are named here."""
    every = [(family, draft) for family in FAMILIES for draft in drafters if (family, draft) != ("qwen3_moe", "mtp")]
    return [pytest.param(*case, marks=() if case in often else pytest.mark.exhaustive) for case in every]


@functools.cache
def engine(family, draft, ragged=False):
    folder = tiny_checkpoint(family, VOCAB) if family == "qwen3_moe" else hybrids.checkpoint(family)
    if draft == "standalone":
        draft += f":{tiny_checkpoint('qwen3', VOCAB, 3, num_hidden_layers=1)}"
    # in a prefill of three blocks, one can start from what another request's leaves; a further size is more to compile
    three = (family, draft) == ("qwen3_5", "mtp")
    options = OPTIONS | {"chunked_prefill_size": 96, "prefill_sizes": "96"} if three else OPTIONS
    options = options | {"num_draft_tokens": 2, "num_continuous_decode_steps": 3}
    llm = widths.several(lambda: LLM(str(folder), draft, **options), ragged)
    llm.engine.scheduler.rounds = 1  # but where a test asks for more
    return llm


def check_texts(llm, outs):
    """Each token is the argmax after those before it, by forwards over whole texts: no cache, no drafts, no slots."""
    texts = [[*out.prompt_token_ids, *out.token_ids] for out in outs]
    for i in range(0, len(outs), BATCH):
        padded = np.zeros((BATCH, CAPACITY), np.int32)
        for row, text in zip(padded, texts[i : i + BATCH], strict=False):
            row[: len(text)] = text
        choices = np.asarray(jax.numpy.argmax(jaxspec.logits(llm.engine.runner.model, padded), axis=-1))
        for out, chosen in zip(outs[i : i + BATCH], choices, strict=False):
            start = len(out.prompt_token_ids) - 1
            assert out.token_ids == chosen[start : start + len(out.token_ids)].tolist(), f"after {out.prompt_token_ids}"


@pytest.mark.parametrize("family,draft", cases(("qwen3_5", "mtp")))
def test_greedy_texts_are_plain_decodings(family, draft):
    """Prompts at the edges of page, block and program; then all again, the newest first, from what is left of them."""
    llm = engine(family, draft)
    assert llm.engine.flush_cache()
    rng = np.random.default_rng(FAMILIES.index(family))
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 2, 15, 16, 17, 31, 32, 33, 63, 65, 97)]
    first = llm.generate(prompts, GREEDY)
    check_texts(llm, first)
    again = llm.generate(prompts[::-1], GREEDY)
    assert [out.token_ids for out in again[::-1]] == [out.token_ids for out in first]
    audit(llm.engine.scheduler)
    assert sum(out.metrics.cached_tokens for out in again) >= 64
    accept = np.mean([out.metrics.accept_length for out in first])
    assert 1.3 < accept < 2.9 if draft == "mtp" else accept < 2.9, "drafts are accepted now and then, and refused"


@pytest.mark.parametrize("family,draft", cases(("qwen3_5", "mtp")))
def test_texts_are_the_same_however_many_drafts_a_round_has(family, draft, monkeypatch):
    """Vary a round's drafts, so that fewer rows are replayed than there is room for."""
    widths.switch(engine(family, draft), monkeypatch)
    test_greedy_texts_are_plain_decodings(family, draft)
    assert widths.took_turns(engine(family, draft))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family,draft", cases())
def test_texts_are_the_same_where_drafts_are_shared_out(family, draft, monkeypatch):
    """Linear attention's rows are then packed with other requests', and records follow rows of another request."""
    ragged = functools.partial(engine, ragged=True)
    monkeypatch.setattr(f"{__name__}.engine", ragged)
    test_texts_are_the_same_however_many_drafts_a_round_has(family, draft, monkeypatch)


def talk(llm, seed, cases):
    """Conversations that branch, go on, are broken off, and crowd one another out; their outputs.

    A prompt is new, or a part of an earlier text or all of it (prompt and answer), and some tokens more. Some texts are
    those of prompts that come at the same time.
    """
    rng, scheduler, outs = random.Random(seed), llm.engine.scheduler, []
    texts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(20, 90))] for _ in range(4)]
    config = llm.engine.config
    with pytest.MonkeyPatch.context() as patch:
        while len(outs) < cases:
            patch.setattr(scheduler, "rounds", rng.choice((1, 3)))
            overlap = rng.random() < 0.5
            patch.setattr(llm.engine, "config", dataclasses.replace(config, disable_overlap=not overlap))
            prompts, crowded = [], rng.random() < 0.2
            for _ in range(3 if crowded else rng.randrange(1, 5)):
                base = prompts[-1] if prompts and rng.random() < 0.3 else rng.choice(texts[-12:])
                kept = rng.choice((0, len(base), rng.randrange(len(base)), rng.randrange(len(base))))
                tail = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 5, 17)))]
                prompts.append([*base[:24], *base, *tail][:44] if crowded else [*base[:kept], *tail][:100])
            if rng.random() < 0.3:
                break_off(llm.engine, prompts, steps=rng.randrange(1, 6))
            lengths = [
                dataclasses.replace(GREEDY, max_tokens=74 if crowded else rng.choice((1, 3, 9))) for _ in prompts
            ]
            new = llm.generate(prompts, lengths)
            texts += [[*out.prompt_token_ids, *out.token_ids] for out in new]
            outs += new
            audit(scheduler)
    return outs


def break_off(engine, prompts, steps):
    """Abort requests after so many steps: in the queue, in their prompts, or with rounds in flight."""
    for i, prompt in enumerate(prompts):
        engine.add(engine.prepare(prompt, GREEDY, f"broken-off-{i}"))
    for _ in range(steps):
        engine.step()
    for i in range(len(prompts)):
        engine.abort(f"broken-off-{i}")
    audit(engine.scheduler)


def check_snapshots(llm):
    """Each is the state after its prefix; how many there are."""
    states, model = llm.engine.runner.state.cache.states[0], llm.engine.runner.model
    owners = list(llm.engine.scheduler.snapshots.owners)
    for owner in owners:
        node, text = owner, []
        while node.parent:
            node, text = node.parent, [*node.key[:PAGE], *text]
        state, window = hybrids.state_after(model, text, CAPACITY)
        np.testing.assert_allclose(states.delta.state[:, owner.snapshot], state, atol=1e-4)
        np.testing.assert_allclose(states.windows[:, owner.snapshot, : window.shape[1]], window, atol=1e-4)
    return len(owners)


@pytest.mark.parametrize("family,draft,count", [
    ("qwen3_5", "mtp", 30),
    rare("qwen3_5_moe", "mtp", 50),
    *(pytest.param(family, "mtp", 400, marks=pytest.mark.exhaustive) for family in hybrids.FAMILIES),
    pytest.param("qwen3_moe", "standalone", 400, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_cached_prefixes_continue_as_cold_ones(family, draft, count):
    """So many requests: branching prefixes, multi-turn, parts of pages, eviction, preemption, aborts."""
    llm = engine(family, draft)
    assert llm.engine.flush_cache()
    outs, snapshots, seed = [], 0, count
    while len(outs) < count:
        seed += 1
        outs += talk(llm, seed, 26)
        snapshots += check_snapshots(llm) if family in hybrids.FAMILIES else 0
    check_texts(llm, outs)
    assert snapshots > count / 10 or family not in hybrids.FAMILIES
    cached = [out.metrics.cached_tokens for out in outs]
    assert sum(n > 0 for n in cached) > count / 4 and len(set(cached)) > 5
    assert sum(out.metrics.preemptions for out in outs) > count / 100


def test_pages_and_states_come_back_from_the_host(tmp_path, monkeypatch):
    """Run the tests of test_host_cache.py, which imports this file, with the engine that is here."""
    from tests.engine import test_host_cache as host

    host.test_what_comes_back_is_what_a_cold_start_computes("hybrid")
    host.test_a_later_start_finds_what_left_the_memory_drafts_and_states_included("hybrid", tmp_path)
    host.test_a_changed_bit_costs_a_page_and_nothing_else("hybrid")
    host.test_memory_is_bounded_by_the_option_and_the_oldest_go_first("hybrid", monkeypatch)


def test_a_stale_snapshot_would_show(monkeypatch):
    """Show that the test above can fail: where states aren't kept, so that slots are stale, texts go wrong."""
    llm = engine("qwen3_5", "mtp")
    assert llm.engine.flush_cache()
    blocks = Chunk.blocks
    monkeypatch.setattr(Chunk, "blocks", lambda self, size: [(*block[:3], -1) for block in blocks(self, size)])
    with pytest.raises(AssertionError, match="after"):
        check_texts(llm, talk(llm, 99, 26))
    with pytest.raises(AssertionError, match="Not equal"):
        check_snapshots(llm)
    assert llm.engine.flush_cache()


@pytest.mark.exhaustive
@pytest.mark.parametrize("draft,vocab,layers", [("eagle/specforge-eagle3", 96, 8), ("dflash/full", 40, 6)])
def test_drafters_of_other_targets_features_leave_the_text_as_it_is(draft, vocab, layers):
    """EAGLE-3 and DFlash read linear layers' outputs like any; prompts scored on the way see the same states."""
    folder = tiny_checkpoint("qwen3_5", vocab, num_hidden_layers=layers)
    llm = LLM(str(folder), str(GOLDEN / draft), num_draft_tokens=2, **OPTIONS)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab, n).tolist() for n in (1, 16, 31, 33, 97)]
    first = llm.generate(prompts, GREEDY)
    check_texts(llm, first)
    scored = llm.generate(prompts[::-1], dataclasses.replace(GREEDY, prompt_logprobs=0))[::-1]
    assert [out.token_ids for out in scored] == [out.token_ids for out in first]
    padded = np.zeros((len(prompts), CAPACITY), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    logprobs = np.asarray(jax.nn.log_softmax(jaxspec.logits(llm.engine.runner.model, padded)))
    for prompt, out, expected in zip(prompts, scored, logprobs, strict=True):
        told = [entry.logprob for entry in out.prompt_logprobs[1:]]
        np.testing.assert_allclose(told, [expected[i, token] for i, token in enumerate(prompt[1:])], atol=1e-3)


@dataclass(frozen=True)
class Undeclared(Drafter):
    """Drafts trees and doesn't say so."""

    num_draft_tokens: int = 2

    def propose(self, params, state, batch):
        tokens = jnp.zeros((len(batch.length), 2), jnp.int32)
        return Proposal(tokens, jnp.where(batch.live, 2, 0), parents=tokens), state


def test_trees_and_hybrid_draft_models_are_refused():
    folder = str(hybrids.checkpoint("qwen3_5"))
    with pytest.raises(ConfigError, match=r"--topk 12: .* has linear attention.*must be a chain"):
        LLM(folder, "tests.rounds.test_trees:Wild", topk=2, **OPTIONS)
    undeclared = LLM(folder, "tests.engine.test_hybrid:Undeclared", **OPTIONS).engine
    with pytest.raises(ConfigError, match=r"Undeclared drafts a tree .*qwen3_5 has linear attention.*must draft a cha"):
        undeclared.runner.round([0], undeclared.scheduler.table, "greedy")
    model = load_model(folder, progress=False)
    with pytest.raises(ConfigError, match=r"qwen3_5 has linear attention.*can't take a draft back"):
        load_drafter(f"standalone:{folder}", model)


def test_without_room_for_snapshots_the_prefix_cache_is_off(caplog):
    with caplog.at_level("INFO", logger="jaxspec"):
        llm = LLM(str(hybrids.checkpoint("qwen3_5")), **{**OPTIONS, "max_state_snapshots": 0})
    assert "the prefix cache is off" in caplog.text
    assert "0 snapshots" in caplog.text and "a copy for each verified row" in caplog.text
    assert not llm.engine.scheduler.prefix_cache


def test_states_can_be_bfloat16():
    plans = {}
    for dtype in ("float32", "bfloat16"):
        llm = LLM(str(hybrids.checkpoint("qwen3_5")), "mtp", state_dtype=dtype, **OPTIONS)
        assert llm.engine.runner.state.cache.states[0].delta.state.dtype == dtype
        plans[dtype] = llm.engine.runner.plan.states
    state = 4 * 4 * 12 * 8  # bytes: of 4 heads, 12 x 8
    assert plans["float32"].bytes - plans["bfloat16"].bytes == state // 2
    assert plans["float32"].copies == 2 * plans["bfloat16"].copies == 2 * 4 * state  # 2 requests, 4 rows
    with pytest.raises(ConfigError, match="--state-dtype must be one of float32, bfloat16, got 'float16'"):
        EngineConfig(state_dtype="float16")


class Lanes(distribution.Lanes):
    """Lanes whose runs all go on from the same states, too, which rounds don't leave as they were."""

    def __init__(self, name, **more):
        super().__init__(name, **more)
        self.kept = jax.tree.map(np.asarray, (self.state.cache.states, self.state.replay))

    def decode(self, run):
        states, replay = jax.device_put(self.kept)
        self.state = self.state.replace(cache=self.state.cache.replace(states=states), replay=replay)
        return super().decode(run)


@pytest.mark.exhaustive  # states go by how many drafts are accepted, as greedy texts show; chains draw as EAGLE-3's do
@pytest.mark.parametrize("family,draft", cases())
def test_rounds_sample_the_target(family, draft, monkeypatch):
    """Run the test of tests/rounds/test_distribution.py, with fewer samples."""
    if family == "qwen3_moe":
        folder = tiny_checkpoint(family, distribution.VOCAB, 2)  # one that often says what it said before
    else:
        folder = hybrids.checkpoint(family, distribution.VOCAB, 5)
        monkeypatch.setattr(distribution, "Lanes", Lanes)
    model = load_model(str(folder), dtype="float32", progress=False)
    if draft == "standalone":
        draft = f"standalone:{distribution.checkpoint(3)}"
    loaded = load_drafter(draft, model, EngineConfig(draft=draft, num_draft_tokens=2))
    monkeypatch.setattr(distribution, "SAMPLES", 2_500)
    monkeypatch.setattr(distribution, "LANES", 128)  # states of more slots take longer to make than to decode
    monkeypatch.setattr(distribution, "model", lambda: model)
    monkeypatch.setitem(distribution.DRAFTERS, draft, lambda: (loaded.drafter, loaded.params))
    distribution.test_round_samples_the_target(draft)


@pytest.mark.exhaustive
def test_rounds_sample_the_target_where_drafts_are_shared_out(monkeypatch):
    shared = functools.partial(Lanes, fewer=(0, 1), ragged=True)
    monkeypatch.setattr(f"{__name__}.Lanes", shared)
    test_rounds_sample_the_target("qwen3_5", "mtp", monkeypatch)
