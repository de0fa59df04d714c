"""EAGLE's trees: SafeAILab's, node by node, and in the engine exact text, whole caches, the target's distribution."""

import dataclasses
import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import LLM, ConfigError, EngineConfig, SamplingParams, load_drafter, load_model
from jaxspec.drafters.base import NoDrafter
from jaxspec.sampling.acceptance import Tree
from tests.drafters import test_eagle as eagle
from tests.engine import test_lossless as lossless
from tests.rounds import test_distribution as distribution
from tests.support import heads
from tests.support.sample import rare
from tests.support.trees import Session

GOLDEN = eagle.GOLDEN


def load(folder, model, topk, steps, drafts):
    options = EngineConfig(draft=f"{folder}", topk=topk, num_steps=steps, num_draft_tokens=drafts)
    return load_drafter(options.draft, model, options)


# -- against the original ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name,topk,steps,drafts,length", [
    rare("safeailab-eagle", 2, 3, 6, 1),
    pytest.param("safeailab-eagle", 4, 5, 8, 150, marks=pytest.mark.exhaustive),
    rare("safeailab-eagle", 8, 6, 59, 17),
    rare("safeailab-eagle3", 4, 1, 3, 2),
    ("safeailab-eagle3", 4, 2, 20, 64),
    rare("safeailab-eagle3", 8, 6, 59, 150),
])  # fmt: skip
def test_trees_are_those_of_the_original(name, topk, steps, drafts, length):
    """Tokens, positions and mask; and of each draft, logits that it is the likeliest of but for its older siblings."""
    chains, golden = np.load(GOLDEN / f"{name}.npz"), np.load(GOLDEN / f"{name}-trees.npz")
    row, size = chains["lengths"].tolist().index(length), f"{topk}x{steps}_{drafts}"
    loaded = load(GOLDEN / name, eagle.target(), topk, steps, drafts)
    prop = jaxspec.propose(eagle.target(), loaded, chains["ids"][:length].tolist(), drafts)
    assert prop.next_token == chains["next"][row] and prop.count == drafts
    tree = Tree.of(jnp.asarray(prop.parents)[None], steps)
    np.testing.assert_array_equal(prop.tokens, golden[f"tokens_{size}"][row])
    np.testing.assert_array_equal(tree.depth[0], golden[f"depth_{size}"][row])
    np.testing.assert_array_equal(tree.follows[0], golden[f"mask_{size}"][row])
    ids = np.asarray(loaded.params.get("target_ids", np.arange(prop.logits.shape[1])))
    seen = {}
    for parent, token, logits in zip(prop.parents.tolist(), prop.tokens, prop.logits, strict=True):
        rank = seen[parent] = seen.get(parent, -1) + 1
        assert ids[np.argsort(-logits)[rank]] == token


def test_the_golden_trees_are_deep_and_wide():
    golden = np.load(GOLDEN / "safeailab-eagle-trees.npz")
    assert golden["depth_8x6_59"].max() == 6 and golden["depth_4x5_8"].max() >= 3
    assert (np.bincount(golden["depth_8x6_59"][0])[1:] > 1).sum() >= 3


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given,steps,drafts,longest,lookahead", [
    (dict(), None, 3, 3, 4),
    (dict(num_steps=5), None, 5, 5, 6),
    (dict(num_draft_tokens=2), None, 2, 2, 3),
    (dict(topk=4), 5, 8, 5, 16),
    (dict(topk=2, num_steps=2), 2, 6, 2, 7),  # as many as two steps find
    (dict(topk=8, num_steps=1), 1, 8, 1, 9),
    (dict(topk=4, num_steps=10), 10, 10, 10, 36),
    (dict(topk=4, num_draft_tokens=3), 3, 3, 3, 8),
    (dict(topk=2, num_draft_tokens=18), 5, 18, 5, 19),
])  # fmt: skip
def test_what_is_left_out_is_chosen(given, steps, drafts, longest, lookahead):
    loaded = load_drafter(f"eagle:{GOLDEN / 'safeailab-eagle'}", eagle.target(), EngineConfig(draft="eagle", **given))
    d = loaded.drafter
    assert (d.num_steps, d.num_draft_tokens, d.topk) == (steps, drafts, given.get("topk", 1))
    assert (d.longest, d.lookahead) == (longest, lookahead)


@pytest.mark.parametrize("given,words", [
    (dict(topk=2, num_steps=2, num_draft_tokens=7), ["--num-draft-tokens 7", "finds 6 candidates", "2 x 2"]),
    (dict(topk=2, num_steps=4, num_draft_tokens=3), ["--num-steps 4", "--num-draft-tokens 3", "a draft for each"]),
    (dict(topk=41), ["--topk 41", "knows 40 tokens"]),
])  # fmt: skip
def test_trees_that_cannot_be(given, words):
    with pytest.raises(ConfigError) as error:
        load_drafter(f"eagle3:{GOLDEN / 'safeailab-eagle3'}", eagle.target(), EngineConfig(draft="eagle3", **given))
    for word in words:
        assert word in str(error.value)


# -- through the programs ----------------------------------------------------------------------------------------------

EDGES = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in range(1, 19)]  # of pages of 16, and one block


@functools.cache
def target():
    return load_model(str(lossless.checkpoint("qwen3")), dtype="float32", progress=False)


@functools.cache
def plain():
    return Session(target(), NoDrafter(), {}, EDGES)


@pytest.mark.parametrize("kind,topk,steps,drafts", [
    pytest.param("eagle", 2, 2, 6, marks=pytest.mark.exhaustive),
    pytest.param("eagle", 2, 3, 7, marks=pytest.mark.exhaustive),
    pytest.param("eagle", 2, 5, 18, marks=pytest.mark.exhaustive),
    pytest.param("eagle", 4, 2, 8, marks=pytest.mark.exhaustive),
    rare("eagle", 4, 3, 12),
    pytest.param("eagle", 4, 5, 40, marks=pytest.mark.exhaustive),
    rare("eagle3", 4, 3, 36),  # caches and texts at page edges are below, in the engine
])  # fmt: skip
def test_greedy_text_is_plain_decodings_at_every_page_edge(kind, topk, steps, drafts):
    loaded = load(heads.folder_for(kind), target(), topk, steps, drafts)
    session, expected = Session(target(), loaded.drafter, loaded.params, EDGES), plain()
    assert session.texts == expected.texts
    for i in range(0, len(EDGES), 5):
        np.testing.assert_allclose(session.kv(i), expected.kv(i), atol=1e-4)
    lengths = np.concatenate(session.accepted)
    if kind == "eagle":
        assert lengths.mean() > 2.2 and lengths.max() > min(steps, 3)
    else:
        assert lengths.mean() > 1.1
    assert max(map(max, session.drafted)) == steps


# -- in the engine -----------------------------------------------------------------------------------------------------

SHAPES = {"eagle": (3, 3, 12), "eagle3": (4, 3, 4)}  # drafting the second takes more places than verifying it
_engine = lossless.engine


@functools.cache
def engine(family, draft):
    """Engine of test_lossless, with trees if it drafts at all."""
    if draft == "none":
        return _engine(family, draft)
    topk, steps, drafts = SHAPES["eagle" if draft == f"{heads.folder_for('eagle')}" else "eagle3"]
    llm = LLM(
        str(lossless.checkpoint(family)), draft, **lossless.OPTIONS, topk=topk, num_steps=steps, num_draft_tokens=drafts
    )
    llm.engine.scheduler.rounds = 1
    return llm


@pytest.fixture(autouse=True)
def trees(monkeypatch):
    monkeypatch.setattr(lossless, "engine", engine)


@pytest.mark.parametrize("kind,overlap,rounds", [rare("eagle", True, 1), rare("eagle", False, 1)])
def test_greedy_output_equals_plain(kind, overlap, rounds, monkeypatch):
    """Chunked prompts, prefix hits, preemption, stops, requests without speculation."""
    lossless.test_greedy_output_equals_plain("qwen3", f"{heads.folder_for(kind)}", overlap, rounds, monkeypatch)


@pytest.mark.parametrize("kind,overlap,rounds", [
    ("eagle", True, 1), pytest.param("eagle3", True, 4, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_caches_are_those_of_a_cold_prefill(kind, overlap, rounds, monkeypatch):
    eagle.test_caches_are_those_of_a_cold_prefill(kind, overlap, rounds, monkeypatch)


def test_interrupted_requests_draft_on_as_if_nothing_had_happened():
    eagle.test_interrupted_requests_draft_on_as_if_nothing_had_happened("eagle")


def test_figures_are_of_depths_and_rows_of_the_tree():
    llm = engine("qwen3", f"{heads.folder_for('eagle')}")
    stats, runner, config = llm.engine.stats(), llm.engine.runner, llm.engine.config
    assert (runner.width, runner.yields, llm.engine.scheduler.lookahead) == (13, 4, 13)
    assert (config.topk, config.num_steps, config.num_draft_tokens) == SHAPES["eagle"]
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=24))
    drafted, accepted = llm.engine.stats()["drafted_per_position"], llm.engine.stats()["accepted_per_position"]
    assert len(drafted) == len(accepted) == 3 and stats["drafted_per_position"] != drafted
    assert all(a <= d for a, d in zip(accepted, drafted, strict=True)) and accepted[2] > 0


ASKED = [
    dict(temperature=0.9, logprobs=3),
    dict(temperature=1.1, top_k=9, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3, logprobs=1),
    dict(temperature=0.0, repetition_penalty=1.5, min_tokens=9, logprobs=0),
    dict(temperature=0.7, top_p=0.8, logit_bias={65: 3.0, 66: -2.0}, min_tokens=12, logprobs=2),
]


@pytest.mark.exhaustive  # tests/rounds/test_trees.py draws on trees of any shape, with log-probabilities
def test_a_seed_gives_the_text_of_plain_decoding():
    """And what changes it, and log-probabilities, mean the same. Some stop at a token of their own text."""
    prompts = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (3, 30, 16, 41)]
    params = [SamplingParams(seed=i, max_tokens=24, ignore_eos=True, **more) for i, more in enumerate(ASKED)]
    none, llm = engine("qwen3", "none"), engine("qwen3", f"{heads.folder_for('eagle')}")
    lengths = set()
    for prompt, asked in zip(prompts, params, strict=True):  # one at a time: fewer programs to compile
        said = none.generate([prompt], asked)[0].token_ids
        for each in (asked, dataclasses.replace(asked, stop_token_ids=said[3::7])):
            (out,), (want,) = llm.generate([prompt], each), none.generate([prompt], each)
            assert (out.token_ids, out.finish_reason) == (want.token_ids, want.finish_reason)
            for entry, expected in zip(out.logprobs, want.logprobs, strict=True):
                assert entry.logprob == pytest.approx(expected.logprob, abs=1e-4)
                assert [i for i, _ in entry.top] == [i for i, _ in expected.top]
            lengths.add(len(out.token_ids))
    assert len(lengths) > 2


def test_other_drafters_draw_no_trees():
    for draft in ("ngram", f"standalone:{lossless.checkpoint('qwen3')}", "tests.engine.test_lossless:Guess"):
        with pytest.raises(
            ConfigError, match=r"--topk 2: --draft .* drafts chains, not trees; eagle, eagle3 and dflash"
        ):
            load_drafter(draft, target(), EngineConfig(draft=draft, topk=2))


def test_the_log_says_how_trees_sample(caplog):
    caplog.set_level("INFO", "jaxspec")
    folder = f"{heads.folder_for('eagle')}"
    LLM(str(lossless.checkpoint("qwen3")), folder, topk=2, num_steps=1, skip_warmup=True, max_total_tokens=64)
    (line,) = (r.getMessage() for r in caplog.records if "trees of" in r.getMessage())
    assert "trees of 2 tokens, up to 1 deep" in line and "target-only sampling" in line


# -- sampling ----------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_rounds_sample_the_target(monkeypatch):
    """Judge samples as tests/rounds/test_distribution.py does, but fewer; and they are plain decoding's own."""
    monkeypatch.setattr(distribution, "PAGE", 32)
    monkeypatch.setattr(distribution, "LANES", 256)
    folder = heads.random_eagle3(Path(distribution.checkpoint(5)), (0, 2, 3, 5, 7, 9, 11), (0, 0, 0), 1)
    loaded = load(folder, distribution.model(), topk=3, steps=2, drafts=5)
    monkeypatch.setitem(distribution.DRAFTERS, "tree", lambda: (loaded.drafter, loaded.params))
    lanes, none, samples = distribution.Lanes("tree"), distribution.Lanes("none"), 8_000
    none.number = lanes.number
    pairs = distribution.check_fit(lanes, samples)
    first = np.concatenate([each[: distribution.LANES] for each in pairs.values()])
    np.testing.assert_array_equal(first, none.decode(0))
    assert lanes.accepted > lanes.drafted / 20 and lanes.whole_rounds > samples / 10
