"""LiLiCorr and Domino against plain PyTorch, and their checkpoints: layouts, what is borrowed, what is refused.

Expected tensors come from tests/golden/make_lilicorr_domino.py.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxspec
from jaxspec import ConfigError, EngineConfig, load_drafter
from jaxspec.checkpoint import CheckpointError
from jaxspec.drafters.blocks.domino import Domino
from jaxspec.drafters.blocks.lilicorr import LiLiCorr
from jaxspec.drafters.registry import DRAFTERS, find
from tests.support.blocks import GOLDEN, copies, golden, proposals
from tests.support.sample import rare
from tests.support.tiny import rewrite

VARIANTS = {"lilicorr": ("plain", "convolved"), "domino": ("shifted", "speculators")}
EACH = [(method, variant) for method, variants in VARIANTS.items() for variant in variants]
KINDS = {"lilicorr": LiLiCorr, "domino": Domino}


@pytest.mark.parametrize("variant", ["plain", rare("convolved")])
def test_lilicorrs_drafts_equal_those_of_plain_torch(variant, monkeypatch):
    for proposed, expected in proposals("lilicorr", variant, monkeypatch):
        ids, scores = expected["candidates"], expected["scores"]
        np.testing.assert_allclose(np.take_along_axis(proposed.logits, ids, axis=1), scores, atol=5e-4)
        np.testing.assert_array_equal(proposed.tokens, expected["tokens"])
        assert np.isfinite(proposed.logits).sum() == ids.size and proposed.count == len(ids)


@pytest.mark.parametrize("variant", ["shifted", rare("speculators")])
def test_dominos_drafts_equal_those_of_plain_torch(variant, monkeypatch):
    for proposed, expected in proposals("domino", variant, monkeypatch):
        np.testing.assert_allclose(proposed.logits, expected["logits"], atol=5e-4)
        np.testing.assert_array_equal(proposed.tokens, expected["tokens"])
        assert proposed.count == len(proposed.tokens)


def test_configs_are_read_as_published():
    plain, convolved = (golden("lilicorr", variant)[1].drafter for variant in VARIANTS["lilicorr"])
    assert (plain.taps, convolved.taps, convolved.group) == (0, 2, 8)
    assert (plain.lattice.width, plain.lattice.rows, plain.lattice.top, plain.lattice.mlp) == (32, 5, 4, 64)
    assert (convolved.lattice.width, convolved.lattice.rows, convolved.lattice.scale) == (12, 4, 7.0)
    shifted, speculators = (golden("domino", variant)[1].drafter for variant in VARIANTS["domino"])
    assert [each.first for each in (shifted, speculators)] == [0, 1]
    assert [each.num_draft_tokens for each in (shifted, speculators)] == [6, 4]
    assert (shifted.width, shifted.rank, shifted.spared) == (7, 5, 1)
    assert (speculators.width, speculators.rank, speculators.feature_layers) == (6, 4, (3,))


@pytest.mark.parametrize("method,variant", EACH)
def test_the_method_is_found_by_config(method, variant, tmp_path):
    model, kind = golden(method, variant)[0], KINDS[method]
    for prefix in (f"{method}:", "dflash:", ""):
        assert type(load_drafter(f"{prefix}{GOLDEN / method / variant}", model).drafter) is kind
    with pytest.raises(ConfigError, match=rf"is a drafter of another kind; use --draft {method}:"):
        load_drafter(f"dspark:{GOLDEN / method / variant}", model)
    if variant != "speculators":
        nameless = copies(method, tmp_path)(variant, architectures=["DFlashDraftModel"])
        assert type(load_drafter(f"dflash:{nameless}", model).drafter) is kind
    assert DRAFTERS[method] is kind and find("domino", "Qwen/Qwen3-8B").source == "Huang2020/Qwen3-8B-Domino-b16"


@pytest.mark.parametrize("method,variant", [rare("lilicorr", "plain"), rare("domino", "shifted")])
def test_a_round_of_fewer_drafts_has_the_first_of_all(method, variant):
    model, loaded, expected = golden(method, variant)
    ids, n = expected["ids_33"].tolist()[:-1], 2
    fewer = dataclasses.replace(loaded, drafter=loaded.drafter.narrowed(n))
    assert fewer.drafter.rows == loaded.drafter.rows > n + 1
    proposed = jaxspec.propose(model, fewer, ids, n)
    assert len(proposed.tokens) == n
    np.testing.assert_array_equal(proposed.tokens, expected["tokens_33"][:n])
    scores = np.sort(proposed.logits, axis=1)[:, -1]
    best = expected["scores_33"] if method == "lilicorr" else expected["logits_33"]
    np.testing.assert_allclose(scores, best.max(1)[:n], atol=5e-4)


def test_an_anchor_of_another_position_counts_as_none():
    _, loaded, _ = golden("lilicorr", "plain")
    lattice, params = loaded.drafter.lattice, loaded.params["lattice"]
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    logprobs = -jnp.sort(jnp.abs(draw(2, 5, 4)), axis=-1)
    given = draw(2, 5, 4, 32), logprobs, draw(2, 5, 32)
    anchors = draw(2, 32)
    scores = jax.jit(lattice.scores)
    known, none = (scores(params, *given, anchors, jnp.array([True, here])) for here in (True, False))
    other = scores(params, *given, anchors.at[1].set(9.0), jnp.array([True, False]))
    for a, b, c in zip(known, none, other, strict=True):
        np.testing.assert_array_equal(a[0], b[0])
        assert np.abs(a[1] - b[1]).max() > 1e-3
        np.testing.assert_array_equal(b, c)


def test_candidates_have_the_targets_embedding_whatever_the_drafters_is():
    model, own, _ = golden("lilicorr", "convolved")
    assert own.params["candidates"] is model.params["embed"] and own.params["embed"] is not model.params["embed"]
    assert "candidates" not in golden("lilicorr", "plain")[1].params


def test_tensorrts_names_mean_the_same(tmp_path):
    model, loaded, _ = golden("lilicorr", "plain")
    folder = copies("lilicorr", tmp_path)("plain")
    tensors = load_file(folder / "model.safetensors")
    theirs = {"0.": "feature_norm.", "1.": "feature_mlp.up_proj.", "3.": "feature_mlp.down_proj."}
    moved = {
        f"model.lilicorr.{name}{end}": tensors[f"lilicorr.feature_mlp.{i}{end}"]
        for i, name in theirs.items() for end in ("weight", "bias")
    }  # fmt: skip
    rewrite(folder, moved, drop=[name for name in tensors if "feature_mlp" in name])
    again = load_drafter(f"lilicorr:{folder}", model)
    jax.tree.map(np.testing.assert_array_equal, again.params["lattice"], loaded.params["lattice"])


def test_what_speculators_leaves_out_is_its_default(tmp_path):
    folder = copies("domino", tmp_path)("speculators")
    hf = json.loads((folder / "config.json").read_text())
    for key in ("sample_from_anchor", "gru_hidden_dim", "logits_correction_emb_dim", "pure_draft_prefix_len"):
        del hf[key]
    drafter = Domino.from_hf(hf, golden("domino", "speculators")[0].config)
    assert (drafter.first, drafter.width, drafter.rank, drafter.spared) == (0, 1024, 256, 1)


@pytest.mark.parametrize("method,variant", [rare(*EACH[0]), EACH[1], EACH[2], rare(*EACH[3])])
def test_random_weights_from_the_config_alone(method, variant, tmp_path):
    model, loaded, _ = golden(method, variant)
    folder = copies(method, tmp_path)(variant)
    (folder / "model.safetensors").unlink()
    made = load_drafter(f"{method}:{folder}", model, EngineConfig(draft="ngram", load_format="dummy")).params
    real = {name: loaded.params[name] for name in made}
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, real)


@pytest.mark.parametrize("method,variant,keys,words", [
    ("lilicorr", "plain", {"lilicorr_logit_scale": None}, "lilicorr_logit_scale is missing, and has no default"),
    ("lilicorr", "plain", {"lilicorr_num_layers": None}, "lilicorr_num_layers must be an integer of at least 1"),
    ("lilicorr", "plain", {"lilicorr_candidate_topk": 41}, "lilicorr_candidate_topk must be an integer from 1 to 40"),
    ("lilicorr", "plain", {"lilicorr_num_heads": 5}, "lilicorr_num_heads is 5; it must divide .*, 32"),
    ("lilicorr", "plain", {"lilicorr_vector_eps": -1}, "lilicorr_vector_eps must be a positive number, got -1"),
    ("lilicorr", "plain", {"lilicorr_enabled": False}, "lilicorr_enabled is false"),
    ("lilicorr", "plain", {"causal": True}, "is_causal is true; LiLiCorr drafts from masks alone"),
    ("lilicorr", "plain", {"conv_kernel_size": 2}, "conv_kernel_size is set alone; convolutions need conv_kernel_size"),
    ("lilicorr", "plain", {"markov_rank": 8}, "markov_rank is 8; variants of DFlash that have it are not supported"),
    ("domino", "shifted", {"gru_hidden_dim": 0}, "gru_hidden_dim must be an integer of at least 1, got 0"),
    ("domino", "shifted", {"emb_dim": None}, "emb_dim must be an integer of at least 1, got None"),
    ("domino", "shifted", {"pure_draft_prefix_len": 6}, "pure_draft_prefix_len must be an integer from 0 to 5, got 6"),
    ("domino", "shifted", {"hidden_size": 48}, "made for a model with hidden_size 48, and this one has 32"),
])  # fmt: skip
def test_configs_that_are_refused(method, variant, keys, words, tmp_path):
    hf = json.loads((GOLDEN / method / variant / "config.json").read_text())
    own = hf["dflash_config"]
    for key, value in keys.items():
        (own if key in own or key not in hf else hf)[key] = value
    with pytest.raises(ConfigError, match=words):
        KINDS[method].from_hf(hf, golden(method, variant)[0].config)


def test_a_draft_vocabulary_and_a_token_map_are_refused_by_lilicorr(tmp_path):
    model = golden("lilicorr", "plain")[0]
    folder = copies("lilicorr", tmp_path)("plain", draft_vocab_size=24)
    with pytest.raises(ConfigError, match=r"draft_vocab_size is 24; .* all of the target's 40 tokens"):
        load_drafter(f"lilicorr:{folder}", model)
    (tmp_path / "map.json").write_text("[1, 2, 3]")
    options = EngineConfig(draft=f"lilicorr:{folder}", draft_token_map=str(tmp_path / "map.json"))
    with pytest.raises(ConfigError, match=r"needs the target's whole vocabulary; .*domino"):
        load_drafter(options.draft, model, options)


@pytest.mark.parametrize("method,variant,name", [
    ("lilicorr", "plain", "lilicorr.layers.1.attn.in_proj_weight"), ("domino", "shifted", "prefix_gru.weight_hh_l0"),
])  # fmt: skip
def test_tensors_that_dont_fit_are_named(method, variant, name, tmp_path):
    folder = copies(method, tmp_path)(variant)
    rewrite(folder, drop=[name])
    with pytest.raises(CheckpointError, match=f"missing {name}"):
        load_drafter(f"{method}:{folder}", golden(method, variant)[0])
