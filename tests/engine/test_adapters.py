"""Adapters in an engine: rows of many in one batch, the prefix cache, places, hostile folders, and programs without."""

import functools
import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import LLM, CheckpointError, ConfigError, EngineConfig, RequestError
from jaxspec.checkpoint import peft
from jaxspec.decoder.low_rank import low_rank
from jaxspec.engine.adapters import within
from jaxspec.models.weights import LowRank
from jaxspec.scheduling.adapter_places import AdapterPlaces
from tests.support import lora
from tests.support.engines import OPTIONS, checkpoint, idle, params, tokens
from tests.support.hosting import host_cache
from tests.support.sample import rare

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@functools.cache
def model():
    return jaxspec.load_model(checkpoint(), dtype="float32", progress=False)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """An engine with places for two adapters, of which it has three, and their folders."""
    folders = lora.several(tmp_path_factory.mktemp("adapters"), model(), 3)
    made = LLM(model(), "ngram", lora_modules=folders, max_loras=2, enable_lora=True, **OPTIONS)
    return made, folders


def texts(outs):
    return [out.token_ids for out in outs]


@pytest.mark.parametrize("draft", [rare(f"eagle3:{GOLDEN}/eagle/specforge-eagle3"), rare("ngram")])
def test_sixteen_adapters_in_one_batch_are_each_themselves_alone(draft, tmp_path):
    own = jaxspec.load_model(str(GOLDEN / "eagle" / "target"), dtype="float32", progress=False)
    folders = lora.several(tmp_path, own, 16)
    options = {"max_running_requests": 17, "skip_warmup": True, "few_programs": True, "context_length": 128}
    llm = LLM(own, draft, lora_modules=folders, **options)
    names, drawn = [None, *folders], np.random.default_rng(0)
    prompts = [drawn.integers(0, own.config.vocab_size, n).tolist() for n in drawn.integers(1, 40, 17)]
    outs = llm.generate(prompts, params(max_tokens=12), lora=names)
    lora.assert_own(own, folders, outs, names)
    alone = [
        llm.generate(prompt, params(max_tokens=12), lora=name)[0] for prompt, name in zip(prompts, names, strict=True)
    ]
    assert texts(alone) == texts(outs)
    scored = llm.generate(prompts[1], params(max_tokens=3, prompt_logprobs=0, logprobs=0), lora=names[1])[0]
    assert scored.token_ids == outs[1].token_ids[:3]


def test_texts_are_each_adapter_s_own_whoever_has_a_place(served):
    """Three adapters share two places. One prompt is asked of all, so a page of another's would show, and so would
    pages that are found again."""
    llm, folders = served
    names, prompt = ["a0", None, "a1", "a2", "a0", "a2"], tokens(40)
    outs = llm.generate([prompt] * 6, params(max_tokens=9), lora=names)
    lora.assert_own(model(), folders, outs, names)
    assert len({tuple(out.token_ids) for out in outs}) == 4
    again = llm.generate([prompt] * 6, params(max_tokens=9), lora=names)
    assert texts(again) == texts(outs) and all(out.metrics.cached_tokens >= 24 for out in again)
    idle(llm.engine)
    assert len(llm.engine.runner.adapters.places.resident) == 2


@pytest.mark.parametrize("name, path, says", [
    (3, "a", "name must be 1 to 128 letters, digits and . _ : / . @ -, got 3"),
    ("a b", "a", "name must be 1 to 128 letters, .* got 'a b'"),
    ("y", 3, "path must be a folder's, got 3"),
])  # fmt: skip
def test_what_is_no_name_or_folder_is_refused(served, name, path, says):
    with pytest.raises(RequestError, match=f"an adapter's {says}"):
        served[0].load_adapter(name, path)


def test_a_name_with_other_weights_meets_no_page_of_the_old_ones(served, tmp_path):
    llm, folders = served
    prompt, programs = tokens(40, seed=1), llm.engine.runner.programs
    llm.load_adapter("x", folders["a0"])
    before = llm.generate(prompt, params(), lora="x")[0]
    with pytest.raises(RequestError, match="'x' is loaded already"):
        llm.load_adapter("x", folders["a1"])
    llm.load_adapter("x", folders["a1"], replace=True)
    after = llm.generate(prompt, params(), lora="x")[0]
    assert after.metrics.cached_tokens == 0 and before.token_ids != after.token_ids
    lora.assert_own(model(), folders, [before, after], ["a0", "a1"])
    ready = programs.ready  # the rounds of both texts
    llm.load_adapter("x", folders["a0"], replace=True)
    assert texts(llm.generate(prompt, params(), lora="x")) == [before.token_ids] and programs.ready == ready
    llm.update_weights({"model.norm.weight": np.asarray(model().params["norm"])})
    assert texts(llm.generate(prompt, params(), lora="x")) == [before.token_ids]  # adapters stay
    llm.unload_adapter("x")
    with pytest.raises(RequestError, match="the adapter 'x' isn't loaded; loaded: 'a0', 'a1', 'a2'"):
        llm.generate(prompt, params(), lora="x")


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_pages_of_adapters_come_back_from_the_host_as_they_left(served, tmp_path, tier):
    """One prompt is asked of the model and of two adapters, so pages that were exchanged would show. Then one name has
    other weights, and meets no page of the old ones."""
    llm, folders = served
    names, prompt = [None, "a0", "z"], tokens(97)
    llm.load_adapter("z", folders["a1"])
    ask = lambda prompt: [llm.generate(prompt, params(max_tokens=9), lora=name)[0] for name in names]  # noqa: E731
    came_back = lambda outs: [getattr(out.metrics, f"cached_on_{tier}") for out in outs]  # noqa: E731
    with host_cache(llm, *((24, tmp_path) if tier == "disk" else ())) as cache:
        cold = ask(prompt)
        lora.assert_own(model(), folders, cold, [None, "a0", "a1"])
        assert len({tuple(out.token_ids) for out in cold}) == 3
        assert not any(out.metrics.cached_tokens for out in cold)
        others = ask(tokens(97, seed=5))  # these pages drive out the first ones
        for again in (ask(prompt), ask(prompt)):
            assert texts(again) == texts(cold)
            assert came_back(again) == [96, 96, 96]
        assert texts(ask(tokens(97, seed=5))) == texts(others)
        assert bool(cache.disk_figures.read_bytes) == (tier == "disk")
        llm.load_adapter("z", folders["a2"], replace=True)
        last = ask(prompt)
        lora.assert_own(model(), folders, last, [None, "a0", "a2"])
        assert came_back(last) == [96, 96, 0] and not last[2].metrics.cached_tokens
        assert not (cache.figures.damaged_blocks or cache.figures.lost_blocks)
    llm.unload_adapter("z")


def test_an_adapter_may_be_replaced_and_unloaded_while_its_requests_run(served):
    llm, folders = served
    llm.load_adapter("y", folders["a0"])
    expected = llm.generate(tokens(20), params(), lora="y")[0].token_ids
    core = llm.engine
    core.add(core.prepare(tokens(20), params(), "first", lora="y"))
    deltas = [delta for _ in range(4) for delta in core.step()]
    llm.load_adapter("y", folders["a2"], replace=True)
    core.add(core.prepare(tokens(20), params(), "second", lora="y"))
    llm.unload_adapter("y")
    while core.busy:
        deltas += core.step()
    said = {name: [t for d in deltas if d.request_id == name for t in d.token_ids] for name in ("first", "second")}
    assert said["first"] == expected and said["second"] == llm.generate(tokens(20), params(), lora="a2")[0].token_ids
    idle(core)


def test_programs_for_requests_without_adapters_are_those_of_an_engine_without():
    """Only programs with another name know of adapters."""
    made = [LLM(model(), "ngram", enable_lora=enabled, **OPTIONS).engine.runner for enabled in (True, False)]
    for one in (("round_greedy", 3), ("prefill", 2)):
        with_, without = (each.programs._lower(*one, each.state)[0].as_text() for each in made)
        assert with_ == without
    assert made[0].programs._lower("adapted_prefill", 2, made[0].state)[0].as_text() != without


def test_few_and_many_rows_are_multiplied_alike():
    """Rows of a round pick their own out of all adapters' products; blocks of a prompt gather theirs."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    a, b, place = draw(12, 3, 5), draw(3, 5, 7), jnp.array([2, -1, 0])
    for each in (2, 20):
        x = draw(3, each, 12)
        expected = [x[i] @ a[:, p] @ b[p] if p >= 0 else jnp.zeros((each, 7)) for i, p in enumerate(place.tolist())]
        made = low_rank(x, LowRank(a, b, place))
        np.testing.assert_allclose(made, jnp.stack(expected), rtol=1e-4, atol=1e-4)
        assert not np.asarray(made[1]).any()


def test_places_are_given_to_those_that_are_used():
    places = AdapterPlaces(2, 4)
    for slot, name in enumerate("ab"):
        places.hold(name, slot)
    assert places.due == {0: "a", 1: "b"} and not places.room("c") and places.room("a") and places.room(None)
    places.hold("a", 2), places.leave("a", 0), places.leave("b", 1)
    places.hold("c", 3)  # "a" is held once more
    assert places.resident == ["a", "c"] and places.of_slot.tolist() == [-1, -1, 0, 1, -1] and places.due[1] == "c"
    places.leave("a", 2)
    assert places.room("b") and places.resident == ["a", "c"]


DAMAGED = [
    ({}, lambda t: t.pop(next(iter(t))), "comes without its other matrix"),
    ({}, lambda t: t.update({next(iter(t)): np.zeros((4, 5), np.float32)}), r"is \[4, 5\] and its B"),
    ({}, lambda t: t.update({"base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_A.weight": np.zeros((4, 4))}),
     "changes a module that isn't served. Adapters may change q_proj, k_proj"),
    ({}, lambda t: t.update({"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": np.zeros((4, 4))}),
     "changes layer 9, and the model has layers 0 to [0-9]. The adapter is for another model"),
    ({}, lambda t: t.update({"base_model.model.lm_head.lora_A.weight": np.zeros((4, 4))}), "embedding or head"),
    ({}, lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": np.zeros((4, 4))}),
     "it changes embeddings"),
    ({}, lambda t: t.update({"base_model.model.model.embed_tokens.weight": np.zeros((4, 4))}), "as for new tokens"),
    ({}, lambda t: t.update({next(iter(t)): next(iter(t.values())) * math.nan}), "numbers that aren't finite"),
    ({}, lambda t: t.clear(), "has no tensors"),
    ({"r": 8}, None, "has rank 4, and adapter_config.json says 8"),
    ({"use_dora": True}, None, "use_dora is True: DoRA"),
    ({"bias": "all"}, None, "biases aren't served"),
    ({"modules_to_save": ["lm_head"]}, None, "modules_to_save is .*: it replaces whole modules"),
    ({"target_parameters": ["mlp.experts.down_proj"]}, None, "experts' stacked weights"),
    ({"init_lora_weights": "pissa_niter_4"}, None, "changes the model's own weights"),
    ({"peft_type": "IA3"}, None, "only LORA is served"),
    ({"r": 0}, None, "r must be an integer of at least 1, got 0"),
    ({"lora_alpha": "x"}, None, "lora_alpha must be a number"),
    ({"rank_pattern": {"(": 2}}, None, "is no pattern that can be matched"),
    ({"rank_pattern": {r"(.|..)*(.|..)*(.|..)*\d{3}": 2}}, None, "is no pattern that can be matched"),
]  # fmt: skip


@pytest.mark.parametrize("config,damage,says", DAMAGED)
def test_folders_that_cant_be_served_say_why(config, damage, says, tmp_path):
    matrices = lora.matrices(model(), modules=("q_proj", "up_proj"))
    if damage is not None:
        damage(matrices)
    folder = lora.write(tmp_path, matrices, **config)
    with pytest.raises(CheckpointError, match=says):
        peft.read_adapter("bad", folder, model().family.tensors(model().config.decoder))


def test_folders_without_files_or_with_too_large_ranks_are_refused(served, tmp_path):
    llm, _ = served
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        llm.load_adapter("none", str(tmp_path))
    for path in ("a" * 300, "~nobody-has-this-name/a"):
        with pytest.raises(CheckpointError, match="can't be read as a folder"):
            llm.load_adapter("none", path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="r must be an integer"):
        llm.load_adapter("none", str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 4}))
    with pytest.raises(CheckpointError, match=r"has neither adapter_model\.safetensors nor"):
        llm.load_adapter("none", str(tmp_path))
    wide = lora.write(tmp_path / "wide", lora.matrices(model(), rank=24), r=24)
    with pytest.raises(CheckpointError, match=r"has rank 24, at most 16 is served; --max-lora-rank"):
        llm.load_adapter("none", wide)
    assert "none" not in llm.engine.adapters.loaded


def test_clients_paths_stay_in_their_folder(tmp_path):
    root, secret = tmp_path / "root", tmp_path / "secret"
    for folder in (root / "in", secret):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
    (root / "out").symlink_to(secret)
    (root / "file").mkdir()
    (root / "file" / "adapter_model.safetensors").symlink_to(secret / "adapter_config.json")
    assert within(str(root), "in") == within(str(root), str(root / "in")) == str((root / "in").resolve())
    for path in ("../secret", str(secret), "out", "file", "in/../../secret", "/etc"):
        with pytest.raises(RequestError, match="leaves the folder"):
            within(str(root), path)
    for path in ("a" * 300, "a/" * 3000, "\0", "\ud800"):
        with pytest.raises(RequestError, match="can't be read"):
            within(str(root), path)
    with pytest.raises(RequestError, match="--lora-root"):
        within(None, "in")


def test_a_scale_of_zero_by_pattern_is_zero(tmp_path):
    """PEFT takes a number of a pattern whatever it is."""
    config = {"alpha_pattern": {"q_proj": 0}, "fan_in_fan_out": True}  # which PEFT reads of no linear layer
    folder = lora.write(tmp_path, lora.matrices(model(), modules=("q_proj", "up_proj")), **config)
    made = peft.read_adapter("none", folder, model().family.tensors(model().config.decoder)).matrices
    assert {name: bool(b.any()) for name, (_, b) in made.items() if "layers.0" in name} == {
        "model.layers.0.self_attn.q_proj.weight": False, "model.layers.0.mlp.up_proj.weight": True
    }  # fmt: skip


@pytest.mark.parametrize("options,says", [
    ({"lora_modules": ["a"]}, "--lora-modules must be NAME=PATH"),
    ({"lora_modules": ["a b=c"]}, "with names of letters"),
    ({"lora_modules": ["a=b", "a=c"]}, "names a twice"),
    ({"lora_modules": ['{"name": "a"}']}, "must be NAME=PATH or"),
    ({"max_lora_rank": 128}, "--max-lora-rank must be at most 64"),
    ({"lora_modules": "a=b"}, "must be a list of texts"),
])  # fmt: skip
def test_options_that_cant_work(options, says):
    with pytest.raises(ConfigError, match=says):
        EngineConfig(**options)


def test_options_are_checked_at_the_start(tmp_path):
    narrow = lora.write(tmp_path, lora.matrices(model(), modules=("q_proj",)))
    with pytest.raises(ConfigError, match="--max-loras needs --lora-modules"):
        LLM(model(), max_loras=2, **OPTIONS)
    with pytest.raises(ConfigError, match="--lora-target-modules nothing is no module"):
        LLM(model(), enable_lora=True, lora_target_modules=["nothing"], **OPTIONS)
    llm = LLM(model(), lora_modules={"narrow": narrow}, **OPTIONS)  # with room for what it changes alone
    assert [set(layer) for layer in llm.engine.adapters.stacks] == [{"qkv"}]
    with pytest.raises(CheckpointError, match="changes o_proj, and there is room for q_proj alone"):
        llm.load_adapter("wide", lora.write(tmp_path / "w", lora.matrices(model(), modules=("q_proj", "o_proj"))))
    with pytest.raises(ConfigError, match="no room for adapters"):
        LLM(model(), **OPTIONS).load_adapter("a", narrow)
    with pytest.raises(RequestError, match="this engine serves none"):
        LLM(model(), **OPTIONS).generate(tokens(3), params(), lora="a")
