"""DSpark against SpecForge and speculators, and its checkpoints: layouts, what is borrowed, what is refused.

Expected tensors come from tests/golden/make_dspark.py.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxspec
from jaxspec import ConfigError, EngineConfig, load_drafter
from jaxspec.checkpoint import CheckpointError
from jaxspec.drafters.blocks import dspark
from jaxspec.drafters.blocks.dspark import DSpark
from jaxspec.drafters.registry import DRAFTERS, KNOWN
from jaxspec.pallas.dense import markov_chain
from tests.support.blocks import GOLDEN, copies, golden, proposals
from tests.support.sample import rare
from tests.support.tiny import rewrite

VARIANTS = ("deepspec", "specforge", "speculators", "masks")


@pytest.mark.parametrize("variant", [VARIANTS[0], *map(rare, VARIANTS[1:])])
def test_drafts_equal_the_packages(variant, monkeypatch):
    for proposed, expected in proposals("dspark", variant, monkeypatch):
        np.testing.assert_allclose(proposed.logits, expected["logits"], atol=5e-4)
        np.testing.assert_array_equal(proposed.tokens, expected["tokens"])
        assert proposed.count == len(proposed.tokens)
        if variant == "masks":
            assert proposed.confidence is None
        else:
            np.testing.assert_allclose(proposed.confidence, expected["confidence"], atol=1e-4)


def test_a_chain_that_is_had_at_once_is_the_same(monkeypatch):
    """Where a kernel gives the tokens, confidence and logits follow from them."""
    monkeypatch.setattr(dspark, "greedy_chain", lambda base, newest, before, after: markov_chain.reference(
        base, before[newest], before, after.unquantised
    ))  # fmt: skip
    model, loaded, expected = golden("dspark", "deepspec")
    fresh = dataclasses.replace(loaded, drafter=dataclasses.replace(loaded.drafter, padded_drafts=5))  # traced anew
    proposed = jaxspec.propose(model, fresh, expected["ids_33"].tolist()[:-1], 5)
    np.testing.assert_array_equal(proposed.tokens, expected["tokens_33"])
    np.testing.assert_allclose(proposed.logits, expected["logits_33"], atol=5e-4)
    np.testing.assert_allclose(proposed.confidence, expected["confidence_33"], atol=1e-4)


def test_the_golden_heads_are_of_all_kinds():
    drafters = [golden("dspark", variant)[1].drafter for variant in VARIANTS]
    assert all(isinstance(drafter, DSpark) for drafter in drafters)
    assert {drafter.head for drafter in drafters} == {"vanilla", "gated", "rnn"}
    assert [drafter.first for drafter in drafters] == [0, 0, 0, 1]
    assert [drafter.num_draft_tokens for drafter in drafters] == [5, 5, 5, 4]
    assert [drafter.feature_layers for drafter in drafters] == [(-1, 2, 4), (4, 1), (0, 3), (1,)]
    assert [drafter.guesses_by_draft for drafter in drafters] == [True, False, True, False]
    assert [drafter.draft_ids for drafter in drafters] == [None, None, 24, None]


@pytest.mark.exhaustive  # the package's shorter blocks are in test_dflash.py
def test_fewer_drafts_come_from_shorter_blocks():
    model, loaded, expected = golden("dspark", "deepspec")
    short = jaxspec.propose(model, loaded, expected["ids_7"].tolist()[:-1], 2)
    assert short.count == 2 and len(short.tokens) == 2
    assert np.abs(short.logits[0] - expected["logits_7"][0]).max() > 1e-3  # rows see the rows behind them


def test_more_drafts_than_a_block_has_are_refused():
    model, loaded, expected = golden("dspark", "deepspec")
    ids = expected["ids_7"].tolist()[:-1]
    with pytest.raises(ConfigError, match=r"--num-draft-tokens 6: this DSpark .* blocks of 5 .* drafts 1 to 5"):
        jaxspec.propose(model, loaded, ids, 6)


@pytest.mark.parametrize("method,variant", [rare("dspark", "deepspec"), rare("dflash2", "sliding")])
def test_a_round_of_fewer_drafts_has_the_first_of_all(method, variant):
    model, loaded, expected = golden(method, variant)
    ids, n = expected["ids_33"].tolist()[:-1], 2
    fewer = dataclasses.replace(loaded, drafter=loaded.drafter.narrowed(n))
    assert fewer.drafter.rows == loaded.drafter.rows > n + 1
    proposed = jaxspec.propose(model, fewer, ids, n)
    np.testing.assert_array_equal(proposed.tokens, expected["tokens_33"][:n])


def test_confidence_ends_drafts_before_the_first_doubt():
    model, _, expected = golden("dspark", "deepspec")
    confidence = expected["confidence_33"]
    for threshold in (0.01, *(float(c) + sign * 1e-3 for c in confidence for sign in (1, -1))):
        cut = load_drafter(f"dspark:{GOLDEN / 'dspark' / 'deepspec'}?confidence={threshold}", model)
        expected_count = np.cumprod(confidence >= threshold).sum()
        assert cut.drafter.confidence == threshold
        assert cut.drafter.standing(jnp.asarray(confidence)[None]).tolist() == [expected_count]
    threshold = float(confidence[3]) + 1e-3
    cut = load_drafter(f"dspark:{GOLDEN / 'dspark' / 'deepspec'}?confidence={threshold}", model)
    proposed = jaxspec.propose(model, cut, expected["ids_150"].tolist()[:-1], 5)
    assert proposed.count == np.cumprod(expected["confidence_150"] >= threshold).sum() > 2
    np.testing.assert_array_equal(proposed.tokens, expected["tokens_150"])


@pytest.fixture
def pair(tmp_path):
    """The golden target, and a copy of a golden drafter in each layout with what rewrites its config."""
    return golden("dspark", "deepspec")[0], copies("dspark", tmp_path)


def test_the_method_is_found_by_config(pair):
    model, copy = pair
    for variant in VARIANTS:
        for prefix in ("dspark:", "dflash:", ""):
            assert type(load_drafter(f"{prefix}{GOLDEN / 'dspark' / variant}", model).drafter) is DSpark
    folder = copy("deepspec", architectures=["DFlashDraftModel"])  # with a Markov head it is a DSpark drafter
    assert type(load_drafter(f"dflash:{folder}", model).drafter) is DSpark
    with pytest.raises(ConfigError, match=r"dspark:\S+ is a drafter of another kind; use --draft dflash:"):
        load_drafter(f"dspark:{GOLDEN / 'dflash' / 'full'}", model)
    assert set(KNOWN["dspark"]) >= {"qwen/qwen3-4b", "qwen/qwen3-8b", "qwen/qwen3-14b"}
    assert DRAFTERS["dspark"] is DSpark


def test_copies_of_the_targets_embedding_and_head_are_shared(pair):
    model, copy = pair
    folder = copy("deepspec")
    loaded = load_drafter(f"dspark:{folder}", model)
    assert loaded.params["embed"] is not model.params["embed"]  # the golden drafter's are its own
    theirs = load_file(GOLDEN / "dflash" / "target" / "model.safetensors")
    same = {"embed_tokens.weight": theirs["model.embed_tokens.weight"], "lm_head.weight": theirs["lm_head.weight"]}
    rewrite(folder, same)
    loaded = load_drafter(f"dspark:{folder}", model)
    assert loaded.params["embed"] is model.params["embed"] and loaded.params["head"] is model.params["head"]


def test_another_embedding_needs_a_head_where_the_targets_is_tied(pair):
    model, copy = pair
    folder = copy("deepspec")
    tied = jaxspec.checkpoint.Model(
        model.config, {key: value for key, value in model.params.items() if key != "head"}, model.dtype, model.name,
        model.path, None, {},
    )  # fmt: skip
    rewrite(folder, drop=["lm_head.weight"])
    with pytest.raises(CheckpointError, match=r"lm_head\.weight must come with it"):
        load_drafter(f"dspark:{folder}", tied)


def test_random_weights_from_the_config_alone(pair):
    model, copy = pair
    for variant in VARIANTS:
        folder = copy(variant)
        (folder / "model.safetensors").unlink()
        loaded = load_drafter(f"dspark:{folder}", model, EngineConfig(draft="ngram", load_format="dummy"))
        assert loaded.params["embed"] is model.params["embed"] and loaded.params["markov_before"].shape[0] == 40
        own = loaded.drafter.draft_ids
        assert (loaded.params["head"] is model.params["head"]) == (own is None)
        assert loaded.params["markov_after"].outputs == (own or 40)
        assert ("target_ids" in loaded.params) == (own is not None)


@pytest.mark.parametrize("keys,words", [
    ({"markov_head_type": "lstm"}, "markov_head_type must be one of vanilla, gated, rnn, got 'lstm'"),
    ({"markov_rank": 0}, "confidence_head_with_markov is true, and markov_rank is 0"),
    ({"markov_rank": -1}, "markov_rank must be an integer of at least 0, got -1"),
    ({"projector_type": "hydra"}, "projector_type is 'hydra'; variants of DFlash that have it are not supported"),
    ({"hidden_size": 48}, "made for a model with hidden_size 48, and this one has 32"),
    ({"draft_vocab_size": 41}, "draft_vocab_size must be at most the target's 40, got 41"),
])  # fmt: skip
def test_configs_that_are_refused(pair, keys, words):
    model, copy = pair
    with pytest.raises(ConfigError, match=words):
        load_drafter(f"dspark:{copy('deepspec', **keys)}", model)


def test_confidence_needs_its_head():
    model, *_ = golden("dspark", "masks")
    folder = GOLDEN / "dspark" / "masks"
    with pytest.raises(ConfigError, match=r"confidence: .* has no confidence head; leave the option out"):
        load_drafter(f"dspark:{folder}?confidence=0.5", model)
    with pytest.raises(ConfigError, match=r"confidence must be between 0 and 1, got 1\.0"):
        load_drafter(f"dspark:{GOLDEN / 'dspark' / 'deepspec'}?confidence=1", model)


def test_a_vocabulary_of_its_own_needs_its_map(pair):
    model, copy = pair
    folder = copy("speculators")
    assert load_file(folder / "model.safetensors")["d2t"].shape == (24,)
    rewrite(folder, drop=["d2t"])
    with pytest.raises(CheckpointError, match=r"missing d2t: the drafter knows 24 tokens \(draft_vocab_size\)"):
        load_drafter(f"dspark:{folder}", model)


def test_tensors_that_dont_fit_are_named(pair):
    model, copy = pair
    folder = copy("specforge")
    rewrite(folder, drop=["markov_head.gate_proj.bias"])
    with pytest.raises(CheckpointError, match=r"missing markov_head.gate_proj.bias \[4\]"):
        load_drafter(f"dspark:{folder}", model)
