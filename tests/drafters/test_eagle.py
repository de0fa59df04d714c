"""EAGLE drafters against their own implementations, and what the engine must hold of them: exact text, right caches."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import ConfigError, EngineConfig, SamplingParams, load_drafter, load_model
from jaxspec.cache.paged import PageLayout, Rows
from jaxspec.checkpoint import CheckpointError
from jaxspec.drafters.base import PrefillBatch
from jaxspec.drafters.eagle import Eagle, Eagle3
from jaxspec.drafters.registry import KNOWN, Known
from jaxspec.scheduling.prefix_cache import PagePool, PrefixTree
from tests.engine import test_lossless as lossless
from tests.rounds import test_distribution as distribution
from tests.support import heads, widths
from tests.support.heads import LAYER_IDS
from tests.support.sample import rare
from tests.support.tiny import tiny_checkpoint

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "eagle"
DRAFTERS = ("safeailab-eagle", "safeailab-eagle3", "specforge-eagle3", "speculators-eagle3")


@functools.cache
def target():
    return load_model(str(GOLDEN / "target"), dtype="float32", progress=False)


def load(folder, model=None, **options):
    return load_drafter(f"{folder}", model or target(), EngineConfig(draft=f"{folder}", **options))


# -- against the originals ---------------------------------------------------------------------------------------------


# The first one's trees are in test_eagle_trees.py, `random_eagle3` writes checkpoints as the second, and the third's
# tensors are read back in ../train/test_continued.py. The second draft is the first from the drafter's own output.
@pytest.mark.parametrize("name,length,drafts", [
    ("safeailab-eagle", 150, 2), *(rare(name, length, 4) for name in DRAFTERS for length in (1, 150)),
    rare("safeailab-eagle", 17, 4), rare("safeailab-eagle3", 2, 4),
])  # fmt: skip
def test_chains_are_those_of_the_original(name, length, drafts):
    drafter, golden = load(GOLDEN / name), np.load(GOLDEN / f"{name}.npz")
    row = golden["lengths"].tolist().index(length)
    prop = jaxspec.propose(target(), drafter, golden["ids"][:length].tolist(), drafts)
    assert prop.next_token == golden["next"][row] and prop.count == drafts
    assert prop.tokens.tolist() == golden["tokens"][row][:drafts].tolist()
    np.testing.assert_allclose(prop.logits, golden["logits"][row][:drafts], atol=5e-4)


def test_the_golden_chains_tell_drafts_and_prompts_apart():
    for name in DRAFTERS:
        golden = np.load(GOLDEN / f"{name}.npz")
        assert len(np.unique(golden["tokens"])) > 5
        assert (np.abs(np.diff(golden["logits"], axis=1)).max(-1) > 0.1).all()


# -- layouts -----------------------------------------------------------------------------------------------------------


def variant(name, tmp_path, config=(), rename=str, drop=(), **tensors):
    """A golden drafter with some of its config, names and tensors changed; a config value of ... is left out."""
    folder = tmp_path / "drafter"
    shutil.copytree(GOLDEN / name, folder)
    held = load_file(folder / "model.safetensors")
    held = {rename(k): v for k, v in held.items() if k not in drop} | tensors
    save_file(held, folder / "model.safetensors")
    hf = {**json.loads((folder / "config.json").read_text()), **dict(config)}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in hf.items() if v is not ...}))
    return folder


def same_params(one, other):
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
    assert one.drafter == other.drafter


@pytest.mark.parametrize("name,rename", [
    ("safeailab-eagle3", lambda name: name.replace("midlayer.", "layers.0.")),
    ("safeailab-eagle3", lambda name: "model." + name),
    ("safeailab-eagle", lambda name: "model." + name),
    ("specforge-eagle3", lambda name: {
        "fc_norm.0.weight": "aux_norm_low.weight", "fc_norm.1.weight": "aux_norm_mid.weight",
        "fc_norm.2.weight": "aux_norm_high.weight"}.get(name, name)),
    ("speculators-eagle3", lambda name: name.replace("layers.0.", "midlayer.")),
])  # fmt: skip
def test_names_of_every_layout(name, rename, tmp_path):
    same_params(load(variant(name, tmp_path, rename=rename)), load(GOLDEN / name))


@pytest.mark.parametrize("name,architectures,cls", [
    ("safeailab-eagle", ["LlamaForCausalLM"], Eagle),  # the target's: its tensors tell
    ("safeailab-eagle", ["LlamaForCausalLMEagle"], Eagle),
    ("safeailab-eagle3", ["LlamaForCausalLM"], Eagle3),  # draft_vocab_size tells
    ("safeailab-eagle3", ["LlamaForCausalLMEagle3"], Eagle3),
    ("safeailab-eagle3", ["Eagle3Speculator"], Eagle3),
])  # fmt: skip
def test_a_path_alone_is_recognised(name, architectures, cls, tmp_path):
    drafter = load(variant(name, tmp_path, {"architectures": architectures})).drafter
    assert type(drafter) is cls


def test_layer_ids_mean_outputs_in_one_place_and_inputs_in_the_other(tmp_path):
    key = "eagle_aux_hidden_state_layer_ids"
    layers = lambda i, config: load(variant("safeailab-eagle3", tmp_path / i, config)).drafter.feature_layers  # noqa: E731
    assert layers("a", {}) == (1, 3, 4)  # of 8 layers, 1, 8 / 2 - 1, 8 - 4
    assert layers("b", {"eagle_config": {key: [0, 3, 7]}}) == (0, 3, 7)
    assert layers("c", {key: [1, 4, 8]}) == (0, 3, 7)


def test_options_and_defaults(tmp_path):
    folder = GOLDEN / "safeailab-eagle3"
    assert load(folder).drafter.num_draft_tokens == 3
    assert load(folder, num_draft_tokens=5).drafter.num_draft_tokens == 5
    assert load_drafter(f"eagle3:{folder}", target()).drafter == load(folder).drafter
    model = load_model(str(GOLDEN / "target"), dtype="bfloat16", progress=False)
    loaded = load(folder, model)
    kinds = {x.dtype.name for x in jax.tree.leaves(loaded.params)}
    assert kinds == {"bfloat16", "int32"} and loaded.drafter.dtype == "bfloat16"


def test_what_is_the_targets_is_shared(tmp_path):
    """No second copy of embedding and head, also where the checkpoint brings one that is the same."""
    embed, head = target().params["embed"], target().params["head"]
    loaded = load(GOLDEN / "safeailab-eagle").params
    assert loaded["embed"] is embed and loaded["head"]["head"] is head
    assert load(GOLDEN / "safeailab-eagle3").params["embed"] is embed
    copy = np.asarray(embed, np.float32)
    assert load(variant("safeailab-eagle3", tmp_path, **{"embed_tokens.weight": copy})).params["embed"] is embed
    assert load(GOLDEN / "specforge-eagle3").params["embed"] is not embed


def test_without_a_vocabulary_of_its_own_the_head_is_the_targets(tmp_path):
    drop = ("lm_head.weight", "d2t", "t2d")
    config = {"draft_vocab_size": None, "architectures": ["Eagle3Speculator"]}
    loaded = load(variant("safeailab-eagle3", tmp_path, config, drop=drop))
    assert loaded.params["head"]["head"] is target().params["head"] and "target_ids" not in loaded.params
    assert jax.eval_shape(loaded.drafter._logits, loaded.params, jnp.zeros((2, 32))).shape == (2, 96)


@pytest.mark.parametrize("d2t,t2d", [
    (np.int32, np.uint8), (np.uint16, np.bool_), (np.uint64, np.int8), rare(np.int16, np.int64),
])  # fmt: skip
def test_maps_of_tokens_may_be_of_any_integer_type(tmp_path, d2t, t2d):
    stored = load_file(GOLDEN / "safeailab-eagle3" / "model.safetensors")
    changes = {"d2t": stored["d2t"].astype(d2t), "t2d": stored["t2d"].astype(t2d)}
    ids = load(variant("safeailab-eagle3", tmp_path, **changes)).params["target_ids"]
    assert ids.tolist() == (np.arange(40) + stored["d2t"]).tolist()


def test_norm_output_is_what_is_fed_back(tmp_path):
    """Compare two chains: the first drafts agree, since the head's norm is always there, and the second don't."""
    golden = np.load(GOLDEN / "safeailab-eagle3.npz")
    plain = golden["logits"][golden["lengths"].tolist().index(2)]
    folder = variant("safeailab-eagle3", tmp_path, {"norm_output": True})
    normed = jaxspec.propose(target(), load(folder), golden["ids"][:2].tolist(), 2)
    np.testing.assert_allclose(normed.logits[0], plain[0], atol=5e-4)
    assert np.abs(normed.logits[1] - plain[1]).max() > 0.1


def test_a_drafter_of_another_width_than_its_target(tmp_path):
    """Such a one has its own embedding and head, and may have biases anywhere."""
    rng, d, f, v, n, m = np.random.default_rng(0), 16, 24, 96, 16, 8
    draw = lambda *shape: rng.standard_normal(shape, np.float32) * np.float32(0.3)  # noqa: E731
    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    tensors = {
        "fc.weight": draw(d, 96), "fc.bias": draw(d), "norm.weight": draw(d), "lm_head.weight": draw(v, d),
        "embed_tokens.weight": draw(v, d), "midlayer.hidden_norm.weight": draw(d),
        "midlayer.input_layernorm.weight": draw(d), "midlayer.post_attention_layernorm.weight": draw(d),
        **{f"{attention}{k}_proj.weight": draw(w, 2 * d) for k, w in (("q", n), ("k", m), ("v", m))},
        **{f"{attention}{k}_proj.bias": draw(w) for k, w in (("q", n), ("k", m), ("v", m), ("o", d))},
        f"{attention}o_proj.weight": draw(d, n), f"{mlp}gate_proj.weight": draw(f, d),
        f"{mlp}up_proj.weight": draw(f, d), f"{mlp}down_proj.weight": draw(d, f),
    }  # fmt: skip
    hf = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": d, "intermediate_size": f,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": v,
        "target_hidden_size": 32, LAYER_IDS: [1, 1, 1],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(hf))
    save_file(tensors, tmp_path / "model.safetensors")
    small = load_model(str(tiny_checkpoint(vocab=v, num_hidden_layers=2)), progress=False)
    loaded = load(tmp_path, small)
    assert loaded.params["fc_bias"].shape == (d,) and loaded.drafter.config.decoder.attention.bias
    assert jaxspec.propose(small, loaded, [1, 2], 2).logits.shape == (2, v)


def test_dummy_weights_need_a_config_alone(tmp_path):
    shutil.copy(GOLDEN / "specforge-eagle3" / "config.json", tmp_path)
    options = EngineConfig(draft="eagle3", load_format="dummy", seed=3)
    loaded = load_drafter(f"eagle3:{tmp_path}", target(), options)
    ids = np.asarray(loaded.params["target_ids"])
    assert len(ids) == len(set(ids)) == 40 and ids.max() < 96
    stored = load(GOLDEN / "specforge-eagle3")
    assert loaded.drafter == stored.drafter
    assert jax.tree.map(jnp.shape, loaded.params) == jax.tree.map(jnp.shape, stored.params)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name,change,words", [
    ("safeailab-eagle3", {"config": {"hidden_size": 64}}, ["another model", "hidden size is 64", "target's 32"]),
    ("safeailab-eagle3", {"config": {"target_hidden_size": 48}}, ["another model", "hidden size is 48"]),
    ("safeailab-eagle", {"config": {"hidden_size": 64}}, ["another model", "hidden size is 64", "target's 32"]),
    ("safeailab-eagle3", {"config": {"vocab_size": 128}}, ["another model", "vocab_size is 128", "target's 96"]),
    ("specforge-eagle3", {"config": {"eagle_config": {LAYER_IDS: [1, 4, 8]}}}, ["[1, 4, 8]", "8 layers", "not 8"]),
    ("safeailab-eagle3", {"config": {LAYER_IDS: [0, 4, 8]}}, ["[0, 4, 8]", "1 to 8", "not 0"]),
    ("safeailab-eagle3", {"config": {LAYER_IDS: "all"}}, [LAYER_IDS, "'all'"]),
    ("specforge-eagle3", {"config": {"eagle_config": {"use_aux_hidden_state": False}}}, ["use_aux_hidden_state"]),
    ("safeailab-eagle3", {"config": {"num_hidden_layers": 2}}, ["num_hidden_layers is 2"]),
    ("safeailab-eagle3", {"config": {"draft_vocab_size": 97}}, ["draft_vocab_size", "1 to 96", "97"]),
    ("safeailab-eagle3", {"config": {"rope_scaling": {"rope_type": "dynamic"}}}, ["drafter", "rope_type 'dynamic'"]),
    ("safeailab-eagle3", {"drop": ["fc.weight"]}, ["missing fc.weight [32, 96]"]),
    ("safeailab-eagle3", {"drop": ["midlayer.mlp.up_proj.weight"]}, ["missing layers.0.mlp.up_proj.weight"]),
    ("safeailab-eagle3", {"drop": ["d2t"]}, ["missing d2t", "40 of 96"]),
    ("safeailab-eagle3", {"d2t": np.zeros(39, np.int64)}, ["d2t has shape [39]", "40"]),
    ("safeailab-eagle3", {"d2t": np.zeros(40, np.float32)}, ["d2t is stored as F32; supported: I64, I32"]),
    ("safeailab-eagle3", {"d2t": np.zeros(40, np.bool_)}, ["d2t is stored as bool; it must be whole numbers"]),
    ("safeailab-eagle3", {"d2t": np.full(40, 57)}, ["draft token 39 to 96", "96 tokens"]),
    ("safeailab-eagle3", {"d2t": -np.arange(40)}, ["draft tokens 0 and 39 to the same token, 0"]),
    ("safeailab-eagle3", {"lm_head.weight": np.zeros((96, 32), np.float32)}, ["misshapen lm_head.weight"]),
    ("safeailab-eagle3", {"other.weight": np.zeros((2, 2), np.float32)}, ["unexpected other.weight"]),
    ("safeailab-eagle", {"drop": ["fc.bias"]}, ["missing fc.bias"]),
    ("safeailab-eagle", {"config": {"bias": False}}, ["unexpected fc.bias"]),
])  # fmt: skip
def test_what_is_refused(name, change, words, tmp_path):
    change = dict(change)
    folder = variant(name, tmp_path, change.pop("config", ()), drop=change.pop("drop", ()), **change)
    method = "eagle" if name.endswith("eagle") else "eagle3"
    with pytest.raises((ConfigError, CheckpointError)) as error:
        load_drafter(f"{method}:{folder}", target())
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("given,name,words", [
    ("eagle", "safeailab-eagle3", "is an EAGLE-3 checkpoint; use --draft eagle3:"),
    ("eagle", "speculators-eagle3", "is an EAGLE-3 checkpoint; use --draft eagle3:"),
    ("eagle3", "safeailab-eagle", "is an EAGLE checkpoint, not EAGLE-3; use --draft eagle:"),
])  # fmt: skip
def test_a_checkpoint_of_the_other_method_is_named(given, name, words):
    with pytest.raises(ConfigError, match=f"--draft {given}:{GOLDEN / name} {words}{GOLDEN / name}"):
        load(f"{given}:{GOLDEN / name}")


def test_a_target_with_too_few_layers_is_named():
    small = load_model(str(tiny_checkpoint(vocab=96)), progress=False)
    with pytest.raises(ConfigError, match=r"default layers are \[1, 0, -2\].*2 layers.*0 to 1, not -2"):
        load(GOLDEN / "safeailab-eagle3", small)


def test_a_method_alone_takes_the_known_drafter(monkeypatch):
    monkeypatch.setitem(KNOWN["eagle3"], "acme/big", Known(str(GOLDEN / "safeailab-eagle3")))
    assert isinstance(load_drafter("eagle3", dataclasses.replace(target(), name="Acme/Big")).drafter, Eagle3)
    with pytest.raises(ConfigError, match=r"no drafter is known for Acme/Other.*eagle3:PATH_OR_ID.*qwen/qwen3-8b"):
        load_drafter("eagle3", dataclasses.replace(target(), name="Acme/Other"))
    with pytest.raises(ConfigError, match=r"eagle:PATH_OR_ID.*Known targets: meta-llama"):
        load_drafter("eagle", target())


# -- in the engine -----------------------------------------------------------------------------------------------------


KINDS = [  # the test of rounds that have now so many drafts, now others, calls both of these tests
    rare(kind, overlap, rounds) for kind in ("eagle", "eagle3") for overlap in (True, False) for rounds in (1, 4)
]


@pytest.mark.parametrize("kind,overlap,rounds", KINDS)
def test_greedy_output_equals_plain(kind, overlap, rounds, monkeypatch):
    """Run the test of tests/engine/test_lossless.py: chunked prompts, prefix hits, preemption, stops."""
    lossless.test_greedy_output_equals_plain("qwen3", f"{heads.folder_for(kind)}", overlap, rounds, monkeypatch)


@pytest.mark.parametrize("kind,low,high", [rare("eagle", 2.0, 3.9), ("eagle3", 1.03, 2.0)])
def test_the_drafters_are_as_good_as_the_cases_need(kind, low, high):
    lossless.test_the_drafters_are_as_good_as_the_cases_need("qwen3", f"{heads.folder_for(kind)}", low, high)


PAGE, CONTEXT = 8, 192


def cold(model, loaded, text):
    """The drafter's keys and values f32[positions, 2, m, h] of a text computed in one piece, and the last output."""
    known, padded = len(text) - 1, text + [0] * (CONTEXT + 1 - len(text))
    features = _features(model, loaded.drafter.feature_layers, padded[:-1])
    pages = CONTEXT // PAGE
    rows = Rows(jnp.zeros(1, jnp.int32), jnp.array([known]), 1 + jnp.arange(pages)[None])
    state = loaded.drafter.init_state(PageLayout(pages + 1, PAGE, "float32"), 1)
    batch = PrefillBatch(jnp.zeros(1, jnp.int32), jnp.array([padded[:-1]]), jnp.array([padded[1:]]), rows)
    state = _prefill(loaded.drafter, loaded.params, state, batch, features)
    kv = np.moveaxis(np.asarray(state["kv"][0, 1:]), 3, 1)
    return kv.reshape(CONTEXT, *kv.shape[2:])[:known], np.asarray(state["hidden"][0])


@functools.partial(jax.jit, static_argnums=0)
def _prefill(drafter, *args):
    return drafter.prefill(*args)


def _features(model, layers, tokens):
    return tuple(jaxspec.hidden_states(model, [tokens], layers))


@pytest.mark.parametrize("kind", ["eagle", rare("eagle3")])
def test_blocks_of_a_prompt_make_what_the_whole_makes(kind):
    """In whatever order they come, and beside those of another request; what is kept by slot is the last one's."""
    model = lossless.engine("qwen3", "none").engine.runner.model
    loaded = load(heads.folder_for(kind), model)
    texts = np.random.default_rng(2).integers(0, 256, (2, CONTEXT + 1))
    blocks = [(1, 8, 5), (0, 16, 8), (0, 0, 8), (1, 0, 8), (0, 24, 3), (0, 8, 8), (1, 0, 0)]  # request, start, count
    which, start, count = np.array(blocks, np.int32).T
    at = start[:, None] + np.arange(8)
    table = 1 + np.arange(16).reshape(2, 8)
    rows = Rows(jnp.asarray(start), jnp.asarray(count), jnp.asarray(table[which]))
    tokens, following = texts[which[:, None], at], texts[which[:, None], at + 1]
    features = [_features(model, loaded.drafter.feature_layers, text[:-1].tolist()) for text in texts]
    features = tuple(np.asarray(layers)[which[:, None], 0, at] for layers in zip(*features, strict=True))
    state = loaded.drafter.init_state(PageLayout(17, PAGE, "float32"), 3)
    batch = PrefillBatch(jnp.asarray(2 - which), jnp.asarray(tokens), jnp.asarray(following), rows)
    state = _prefill(loaded.drafter, loaded.params, state, batch, features)
    kv = np.moveaxis(np.asarray(state["kv"][0]), 3, 1)
    for i, known in ((0, 27), (1, 13)):
        expected, hidden = cold(model, loaded, texts[i, : known + 1].tolist())
        np.testing.assert_allclose(kv[table[i]].reshape(-1, *expected.shape[1:])[:known], expected, atol=1e-4)
        np.testing.assert_allclose(state["hidden"][2 - i], hidden, atol=1e-4)
    assert not np.asarray(state["hidden"][0]).any()


def check_caches(llm):
    """Every page that the prefix tree holds is what a cold prefill of its tokens, and the next one, makes of it."""
    tree, runner = llm.engine.scheduler.trees[0], llm.engine.runner
    kv = np.moveaxis(np.asarray(runner.state.draft["kv"][0]), 3, 1)  # [page, slot, 2, m, h]
    seen = [node for node in tree.nodes() if node.drafter_seen == node.depth]
    leaves = [node for node in seen if not any(child in seen for child in node.children.values())]
    assert leaves
    for node in leaves:
        pages, text = [], list(node.key[PAGE:])
        while node.parent:
            pages, text, node = [node.page, *pages], [*node.key[:PAGE], *text], node.parent
        expected, _ = cold(runner.model, runner.draft, text)
        np.testing.assert_allclose(kv[pages].reshape(expected.shape), expected, atol=1e-4)


@pytest.mark.parametrize("kind,overlap,rounds", KINDS)
def test_caches_are_those_of_a_cold_prefill(kind, overlap, rounds, monkeypatch):
    """Whatever made them: chunks of prompt, rounds with and without rejections, prefix hits, preemption."""
    llm = lossless.engine("qwen3", f"{heads.folder_for(kind)}")
    runner = llm.engine.runner
    config = dataclasses.replace(llm.engine.config, disable_overlap=not overlap)
    monkeypatch.setattr(llm.engine, "config", config)
    monkeypatch.setattr(llm.engine.scheduler, "rounds", rounds)
    rng = np.random.default_rng(0)
    prompt = lambda n: rng.integers(0, 256, n).tolist()  # noqa: E731
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=20)
    shared = prompt(3 * PAGE)
    # The same three pages, and then another token each: of the third page, the last row differs.
    forks = [[*shared, token, *prompt(9)] for token in (1, 2, 3)]
    for batch in ([prompt(1), prompt(65)], [prompt(129)], forks[:1], forks[1:], [[*shared, 1, 2, 3]]):
        outs = llm.generate(batch, greedy)
        check_caches(llm)
        for out in outs:  # each slot holds the output of its request's last row still
            _, expected = cold(runner.model, runner.draft, out.prompt_token_ids + out.token_ids)
            held = np.asarray(runner.state.draft["hidden"])
            assert np.abs(held - expected).max(axis=1).min() < 1e-4
        if batch == forks[1:]:
            assert [out.metrics.cached_tokens for out in outs] == [2 * PAGE] * 2
    assert outs[0].metrics.cached_tokens == 3 * PAGE
    assert llm.engine.flush_cache()
    outs = llm.generate([prompt(n) for n in (29, 40, 41, 50)], dataclasses.replace(greedy, max_tokens=64))
    assert sum(out.metrics.preemptions for out in outs) > 0
    check_caches(llm)
    assert llm.engine.flush_cache()


@pytest.mark.parametrize("kind", [pytest.param("eagle", marks=pytest.mark.exhaustive), "eagle3"])
def test_text_and_caches_are_the_same_however_many_drafts_a_round_has(kind, monkeypatch):
    llm = lossless.engine("qwen3", f"{heads.folder_for(kind)}")
    widths.switch(llm, monkeypatch)
    test_caches_are_those_of_a_cold_prefill(kind, True, 1, monkeypatch)
    test_greedy_output_equals_plain(kind, False, 1, monkeypatch)
    assert widths.took_turns(llm)


@pytest.mark.parametrize("kind", [rare("eagle"), "eagle3"])  # EAGLE drafts trees in test_eagle_trees.py
def test_interrupted_requests_draft_on_as_if_nothing_had_happened(kind):
    """Rounds and accepted drafts of each request are the same after preemption, a prefix hit, and in chunks."""
    llm = lossless.engine("qwen3", f"{heads.folder_for(kind)}")
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 256, n).tolist() for n in (29, 40, 70, 50)]
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=64)
    counts = lambda outs: [(o.metrics.verify_rounds, o.metrics.verified_tokens) for o in outs]  # noqa: E731
    alone = []
    for tokens in prompts:
        assert llm.engine.flush_cache()
        alone += llm.generate([tokens], greedy)
    text = prompts[-1] + alone[-1].token_ids
    again = llm.generate([text[:-40]], dataclasses.replace(greedy, max_tokens=40))
    assert llm.engine.flush_cache()
    fresh = llm.generate([text[:-40]], dataclasses.replace(greedy, max_tokens=40))
    assert again[0].metrics.cached_tokens > 64 and counts(again) == counts(fresh)
    assert llm.engine.flush_cache()
    together = llm.generate(prompts, greedy)
    assert sum(out.metrics.preemptions for out in together) > 0
    assert counts(together) == counts(alone)


def test_rounds_that_rest_leave_text_and_caches_as_they_are(monkeypatch):
    """Run tests of tests/scheduling/test_skipped_drafts.py, which imports this file, with the engine that is here."""
    from tests.scheduling import test_skipped_drafts as skipped

    with monkeypatch.context() as patch:
        skipped.test_text_is_plain_and_no_drafts_follow_what_the_drafter_missed("eagle3", True, patch)
    skipped.test_a_next_turn_continues_from_what_the_drafter_missed_only_while_rounds_rest(monkeypatch)


# -- sampling ----------------------------------------------------------------------------------------------------------


def sampled(kind):
    """A drafter for the target of test_distribution, with two drafts; EAGLE-3's knows 7 of the 12 tokens."""
    checkpoint = Path(distribution.checkpoint(5))
    folder = (
        heads.mimic(checkpoint)
        if kind == "eagle"
        else heads.random_eagle3(checkpoint, (0, 2, 3, 5, 7, 9, 11), (0, 0, 0), 1)
    )
    loaded = load(folder, distribution.model(), num_draft_tokens=2)
    return loaded.drafter, loaded.params


@pytest.mark.exhaustive  # part of a vocabulary is DFlash 2's with a map (test_block_drafters.py)
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_rounds_sample_the_target(kind, monkeypatch):
    """Run the test of tests/rounds/test_distribution.py, with fewer samples."""
    monkeypatch.setattr(distribution, "SAMPLES", 6_000)
    monkeypatch.setitem(distribution.DRAFTERS, kind, lambda: sampled(kind))
    distribution.test_round_samples_the_target(kind)


# -- pages -------------------------------------------------------------------------------------------------------------


def test_with_reach_a_page_is_found_if_the_token_after_it_matches():
    pool = PagePool(8)
    pool.alloc(7)
    tree = PrefixTree(pool, page_size=2, reach=1)
    tree.insert([1, 2, 3, 4, 5], [5, 6], limit=5)
    assert tree.num_pages == 2
    found = lambda tokens: tree.match(tokens, len(tokens))[0]  # noqa: E731
    assert found([1, 2, 3, 4, 5, 6]) == [5, 6] and found([1, 2, 3, 4, 6]) == [5]
    assert found([1, 2, 3, 4]) == [5] and found([1, 2, 9]) == found([1, 2]) == found([1]) == []
    tree.insert([1, 2, 3, 4, 6], [5, 7], limit=4)  # the same page but for what comes after: a page of its own
    assert found([1, 2, 3, 4, 6]) == [5, 7] and found([1, 2, 3, 4, 5]) == [5, 6]
    tree.insert([8, 9], [4], limit=2)  # what comes after isn't known yet
    assert tree.num_pages == 3
