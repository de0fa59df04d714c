"""Prompts with pictures in the engine: greedy texts are transformers', with each drafter, cached, preempted."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec import LLM, CheckpointError, RequestError, SamplingParams
from jaxspec.cache.mixers import WholeTexts
from jaxspec.checkpoint.vision import dummy
from jaxspec.decoder.forward import forward, unembed
from jaxspec.decoder.towers import embed_pictures, places
from jaxspec.drafters.blocks.dspark import DSpark
from jaxspec.drafters.dflash import DFlash
from jaxspec.engine.pictures import MOST_PATCHES, PictureReader, tower_workspace
from jaxspec.images.picture import Picture, PlacedPicture, Prompt
from jaxspec.images.placement import Placement
from jaxspec.models.vision import QwenTower
from jaxspec.rounds.packing import PICTURE_ROW
from tests.support.blocks import write_drafter
from tests.support.exact import ALPHA, distribution, fit_p_value
from tests.support.heads import random_eagle3
from tests.support.picture_prompts import DEEP, GOLDEN, IMAGES, PROMPTS, expected, prompt
from tests.support.tiny import tiny_checkpoint


def text_model(folder, family="qwen3_5"):
    """A folder with the config of what drafters see of the model: its text."""
    hf = json.loads((GOLDEN / family / "config.json").read_text())["text_config"] | {"model_type": "llama"}
    hf = {key: value for key, value in hf.items() if key not in ("layer_types", "rope_parameters")}
    (folder / "config.json").write_text(json.dumps(hf))
    return folder


def standalone(folder):
    vocab = json.loads((text_model(folder) / "config.json").read_text())["vocab_size"]
    return f"standalone:{tiny_checkpoint('qwen3', vocab, 3)}"


# `--draft` of drafters that have weights and no picture, made in a folder.
DRAFTERS = {
    "eagle3": lambda folder: f"eagle3:{random_eagle3(text_model(folder), tuple(range(60)), (0, 1, 2))}",
    "dflash": lambda folder: f"dflash:{write_drafter(DFlash, folder / 'own', text_model(folder))}",
    "dspark": lambda folder: f"dspark:{write_drafter(DSpark, folder / 'own', text_model(folder), markov_rank=4)}",
    "standalone": standalone,
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, logit_bias={60: -100, 61: -100, 62: -100, 63: -100})
OPTIONS = {
    "context_length": 256, "page_size": 8, "chunked_prefill_size": 32, "max_running_requests": 2, "dtype": "float32",
    "skip_warmup": True, "few_programs": True, "draft_policy": "fixed",
}  # fmt: skip
SAMPLES = 4096
exhaustive = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def llm():
    return LLM(str(GOLDEN / "qwen3_5"), "mtp", num_draft_tokens=3, **OPTIONS)


def texts(llm, names, **more):
    params = dataclasses.replace(GREEDY, **more)
    return [out.token_ids for out in llm.generate([prompt(name) for name in names], params)]


def greedy(names):
    return [expected()[f"{name}_greedy"].tolist() for name in names]


def test_texts_are_transformers_and_a_picture_is_read_once(llm):
    """Five prompts in two slots, some longer than a chunk, which ends within a picture."""
    reader = llm.engine.runner.pictures
    assert texts(llm, PROMPTS) == greedy(PROMPTS)
    assert reader.encoded == 3


def test_a_videos_text_is_transformers_with_drafts_and_cached(llm):
    encoded = llm.engine.runner.pictures.encoded
    for cached in (False, True):
        (out,) = llm.generate([prompt("video")], GREEDY)
        assert out.token_ids == expected()["video_greedy"].tolist()
        assert bool(out.metrics.cached_tokens) is cached and out.metrics.accept_length > 1
    assert llm.engine.runner.pictures.encoded == encoded + 3


@pytest.mark.parametrize("known", [False, True])
def test_rounds_wait_for_a_program_of_pictures_or_of_prompts(llm, monkeypatch, known):
    """Where `--max-itl-ms` limits what is between two rounds, also while it isn't known what prompts take."""
    engine, seen = llm.engine, []
    runner, dispatch = engine.runner, engine._dispatch
    engine.flush_cache()
    runner.pictures.forget()
    engine.limit_between(50)
    monkeypatch.setattr(engine.prefill_budget, "tokens", lambda: 16 if known else None)
    monkeypatch.setattr("jaxspec.engine.pictures.BESIDE_ROUNDS", 24)

    def watched(*of):
        waiting, before = bool(engine.scheduler.running), runner.encoded
        prompts = dispatch(*of)
        if waiting:
            seen.append((prompts, runner.encoded - before))
        return prompts

    monkeypatch.setattr(engine, "_dispatch", watched)
    assert texts(llm, PROMPTS) == greedy(PROMPTS)
    assert {(prompts > 0, pictures) for prompts, pictures in seen} == {(False, 0), (True, 0), (False, 1)}
    engine.limit_between(None)


def test_the_same_picture_is_a_hit_and_another_of_its_size_is_none(llm):
    llm.engine.flush_cache()
    (cold,), (again,) = (llm.generate([prompt("long")], GREEDY) for _ in range(2))
    assert (cold.metrics.cached_tokens, again.metrics.cached_tokens) == (0, 144)
    assert cold.token_ids == again.token_ids == expected()["long_greedy"].tolist()
    given = prompt("long")
    other = Prompt(given.tokens, (PlacedPicture(prompt("other").images[0].picture, 70), given.images[1]))
    (changed,) = llm.generate([other], GREEDY)
    assert changed.metrics.cached_tokens <= 64  # pages before the picture
    scored = llm.generate([given, other], dataclasses.replace(GREEDY, max_tokens=1, prompt_logprobs=0))
    assert len({out.prompt_logprobs[-1].logprob for out in scored}) == 2


def test_a_towers_weights_are_updated_with_its_model(llm):
    """By names, some or all; pictures are read again. And they leave the device with the others."""
    runner, tensors = llm.engine.runner, load_file(GOLDEN / "qwen3_5" / "model.safetensors")
    first, reader = runner.model.tower, runner.pictures
    own = {name: array for name, array in tensors.items() if name.startswith("model.visual.")}
    before, encoded = texts(llm, ["long"]), reader.encoded
    moved = {name: 2 * array for name, array in own.items() if "merger" in name or "blocks.1." in name}
    llm.update_weights(moved)
    assert texts(llm, ["long"]) != before and reader.encoded > encoded
    one, two = (jax.device_get(each["blocks.attn.qkv.weight"]) for each in (first, runner.model.tower))
    np.testing.assert_array_equal(two, np.stack([one[0], 2 * one[1]]))
    llm.release_memory(["weights"])
    assert all(isinstance(array, np.ndarray) for array in runner.model.tower.values())
    llm.resume_memory()
    llm.update_weights(str(GOLDEN / "qwen3_5"))
    jax.tree.map(np.testing.assert_array_equal, runner.model.tower, first)
    assert texts(llm, ["long"]) == before
    for given, message in (
        ({"model.visual.no.weight": np.ones(3)}, "the vision tower has no"),
        ({"model.visual.merger.norm.weight": np.ones(3)}, "the vision tower's is"),
        ({name: array * np.nan for name, array in moved.items()}, "numbers that aren't finite"),
    ):
        with pytest.raises(CheckpointError, match=message):
            llm.update_weights(given)
    assert texts(llm, ["long"]) == before


def test_updates_that_are_read_before_others_are_applied_keep_those(llm):
    """A tower's layers and an MTP module's parameters in two chunks, the second sent before the first is applied."""
    runner, rollout = llm.engine.runner, llm.engine.rollout
    tensors = load_file(GOLDEN / "qwen3_5" / "model.safetensors")
    own = {name: 2 * array for name, array in tensors.items() if name.startswith(("model.visual.", "mtp."))}
    tower, draft = runner.model.tower, runner.draft.params
    one = {name: array for name, array in own.items() if "blocks.1." in name or "norm" in name}
    two = {name: array for name, array in own.items() if name not in one}
    for update in [rollout.prepare(each, None, None) for each in (one, two)]:
        rollout.update(update).result()
    found = runner.model.tower, runner.draft.params
    llm.update_weights(own)
    jax.tree.map(np.testing.assert_array_equal, found, (runner.model.tower, runner.draft.params))
    jax.tree.map(np.testing.assert_array_equal, found[0], jax.tree.map(lambda array: 2 * array, tower))
    assert not np.array_equal(*(jax.device_get(each["norm"]) for each in (found[1], draft)))
    llm.update_weights(str(GOLDEN / "qwen3_5"))


def test_sampled_texts_and_prompts_logprobs_are_those_of_a_cold_engine(llm):
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, prompt_logprobs=1, ignore_eos=True)
    (one,), (two,) = (llm.generate([prompt("two")], params) for _ in range(2))
    assert one.token_ids == two.token_ids
    logits = expected()["two_logits"].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = prompt("two").tokens
    told = [entry.logprob for entry in one.prompt_logprobs[1:]]
    np.testing.assert_allclose(told, logprobs[np.arange(len(ids) - 1), ids[1:]], atol=5e-4)


@exhaustive  # n-grams are in test_gemmas_pictures_are_whole_in_a_chunk, too
@pytest.mark.parametrize("draft", ["ngram", "suffix", *DRAFTERS])
def test_other_drafters_are_lossless(draft, tmp_path):
    draft = DRAFTERS[draft](tmp_path) if draft in DRAFTERS else draft
    llm = LLM(str(GOLDEN / "qwen3_5"), draft, num_draft_tokens=3, disable_overlap=True, **OPTIONS)
    names = PROMPTS[:3]
    assert texts(llm, names) == greedy(names)
    history = np.asarray(llm.engine.runner.state.slots.history)
    assert (history >= PICTURE_ROW).any() and not (history == IMAGES).any()
    assert "ngram" in draft or llm.engine.stats()["drafted_per_position"][0] > 0


@exhaustive
@pytest.mark.parametrize("draft", ["mtp", "ngram+dspark"])
def test_a_deterministic_text_is_the_same_whatever_is_read_beside_it(draft, tmp_path):
    """Pictures cached and read anew, alone and several at once, prompts in other chunks, without drafts."""
    options = OPTIONS | {"deterministic": True, "num_draft_tokens": 3, "dtype": "bfloat16", "max_total_tokens": 208}
    draft = f"ngram+{DRAFTERS['dspark'](tmp_path)}" if "dspark" in draft else draft
    llm = LLM(str(GOLDEN / "qwen3_5"), draft, **options)
    alone = [texts(llm, [name], logprobs=0)[0] for name in PROMPTS]
    assert texts(llm, PROMPTS) == alone
    assert texts(llm, PROMPTS, speculative=False) == alone
    other = LLM(str(GOLDEN / "qwen3_5"), "ngram", **options | {"chunked_prefill_size": 64, "max_total_tokens": 512})
    assert texts(other, PROMPTS) == alone


def test_a_deterministic_reader_reads_each_picture_by_itself(llm):
    """Its embeddings have the bits that they have alone, whatever the size of a program for several."""
    model = llm.engine.runner.model
    pictures = [prompt(name).images[0].picture for name in ("one", "first", "other")]
    rows = {}
    for together in ([pictures[0]], [pictures[1]], [pictures[2]], pictures):
        reader = PictureReader(model.config.tower, model.tower, 200, alone=True)
        held, places = reader.read(jax.numpy.zeros((200, model.config.tower.out), "bfloat16"), together, set())
        for picture, own in zip(together, places, strict=True):
            expected = rows.setdefault(picture.key, np.asarray(held[np.array(own)]))
            np.testing.assert_array_equal(np.asarray(held[np.array(own)]), expected)


@exhaustive
def test_sampled_tokens_after_a_picture_fit_the_models_distribution():
    """Chi-square of the first two tokens with MTP: the first comes of the prefill, the second of a verify round."""
    options = OPTIONS | {"max_running_requests": 32, "max_total_tokens": 8192}
    llm = LLM(str(GOLDEN / "qwen3_5"), "mtp", num_draft_tokens=3, **options)
    params = SamplingParams(temperature=0.7, max_tokens=4, n=32, ignore_eos=True)
    outs = [out for _ in range(SAMPLES // 32) for out in llm.generate([prompt("one")], params)]
    pairs = np.array([choice.token_ids[:2] for out in outs for choice in out.completions])
    model, given = llm.engine.runner.model, prompt("one")
    tower, vocab, length = model.config.tower, model.config.vocab_size, len(given.tokens)
    (placed,) = given.images
    pixels = placed.picture.pixels
    rows = embed_pictures(tower, model.tower, pixels, places(tower, [placed.picture.grid], len(pixels)))
    tokens = np.array([[*given.tokens, each] for each in range(vocab)])
    axes = Placement.of(given.images, tower.merge).positions(np.arange(length + 1))
    at = np.full(tokens.shape, -1)
    at[:, placed.start : placed.start + placed.picture.tokens] = np.arange(placed.picture.tokens)
    axes = np.broadcast_to(axes[:, None], (3, *tokens.shape))
    hidden = forward(model.config.decoder, model.params, tokens, axes, WholeTexts(), overrides=(rows, at)).last
    logits = np.asarray(unembed(model.params, hidden, model.config.decoder))
    first = distribution(logits[0, -2], params)
    both = np.stack([first[each] * distribution(logits[each, -1], params) for each in range(vocab)])
    assert llm.engine.stats()["accepted_per_position"][0] > SAMPLES // 50
    assert fit_p_value(pairs[:, 0], first) > ALPHA and fit_p_value(pairs, both) > ALPHA
    without = np.tile(first[:, None], vocab) * first  # what the test can tell from it
    assert fit_p_value(pairs, without / without.sum()) < ALPHA


def test_preempted_requests_go_on_where_they_were(llm):
    llm.engine.flush_cache()
    names, pool = ["long", "two"], llm.engine.scheduler.pools[0]
    held = pool.alloc(pool.free - 26)  # pages for 208 tokens are left
    try:
        outs = llm.generate([prompt(name) for name in names], GREEDY)
    finally:
        pool.release(held)
    assert [out.token_ids for out in outs] == greedy(names)
    assert any(out.metrics.preemptions for out in outs)


def test_a_reader_gives_up_the_least_recently_used(llm):
    reader, picture = llm.engine.runner.pictures, prompt("one").images[0].picture
    reader.forget()
    reader._free = list(range(10))
    held = llm.engine.runner.state.pictures
    small = prompt("first").images[0].picture
    held, (rows,) = reader.read(held, [picture], set())
    held, both = reader.read(held, [picture, small], set())
    assert both[0] == rows and not set(both[0]) & set(both[1])
    assert reader.read(held, [prompt("other").images[0].picture], {picture.key, small.key}) is None
    held, _ = reader.read(held, [prompt("other").images[0].picture], set())
    assert picture.key not in reader._held
    llm.engine.runner.state = llm.engine.runner.state.replace(pictures=held)
    llm.engine.runner.reset()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_picture_as_large_as_its_program_is_read_uncopied(llm, dtype):
    reader = llm.engine.runner.pictures
    pixels = np.random.default_rng(0).standard_normal((256, 24)).astype(dtype)
    held = jax.numpy.zeros((100, reader.tower.out))
    reader = PictureReader(reader.tower, llm.engine.runner.model.tower, 100)
    held, (rows,) = reader.read(held, [Picture(pixels, (1, 16, 16), 64, 7)], set())
    patches = places(reader.tower, [(1, 16, 16)], 256)
    wanted = embed_pictures(reader.tower, llm.engine.runner.model.tower, pixels.astype(np.float32), patches)
    np.testing.assert_allclose(np.asarray(held)[rows], wanted, atol=1e-4)


def test_the_memory_plan_has_room_for_the_towers_largest_program(llm):
    tower = llm.engine.runner.model.config.tower
    plan, _ = llm.engine.runner._plan()
    assert plan.workspace_bytes == llm.engine.runner.plan.workspace_bytes == tower_workspace(tower, 4) > 2**28


@exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_towers_workspace_is_as_estimated(dtype):
    """Qwen3.5-35B-A3B's tower but for its depth, which doesn't count."""
    tower = QwenTower(2, 1152, 16, 4304, 1536, 2048, 48, 2)
    reader = PictureReader(tower, jax.eval_shape(lambda: dummy(tower, dtype, 0)), 100)
    reader.programs.get(MOST_PATCHES, dtype)
    assert reader.workspace_bytes < tower_workspace(tower, np.dtype(dtype).itemsize) < 2 * reader.workspace_bytes


@pytest.mark.parametrize(
    "family", ["gemma4", *(pytest.param(each, marks=exhaustive) for each in ("gemma3", "gemma4_e"))]
)
def test_gemmas_pictures_are_whole_in_a_chunk(family):
    """Chunks of 32 tokens end before a picture of 16 that doesn't fit; the prefix cache may end within one."""
    names = PROMPTS
    llm = LLM(str(GOLDEN / family), "ngram", num_draft_tokens=3, **OPTIONS)
    params = dataclasses.replace(GREEDY, prompt_logprobs=1)

    def tokens(params):
        outs = llm.generate([prompt(name, family) for name in names], params)
        return outs, [out.token_ids for out in outs]

    greedy = [expected(family)[f"{name}_greedy"].tolist() for name in names]
    assert tokens(GREEDY)[1] == greedy
    again, cached = tokens(GREEDY)
    assert cached == greedy and again[names.index("long")].metrics.cached_tokens > 100
    scored, _ = tokens(params)
    for name, out in zip(names, scored, strict=True):
        logits, ids = expected(family)[f"{name}_logits"].astype(np.float64), expected(family)[f"{name}_ids"]
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        told = [entry.logprob for entry in out.prompt_logprobs[1:]]
        np.testing.assert_allclose(told, logprobs[np.arange(len(ids) - 1), ids[1:]], atol=5e-4)


@exhaustive
@pytest.mark.parametrize("family", DEEP)
def test_rows_of_deepstack_are_added_behind_the_first_layers(family, tmp_path):
    """In chunks that end within a picture, read anew or cached, with n-grams and with a drafter that reads pictures."""
    head = random_eagle3(text_model(tmp_path, family), tuple(range(60)), (0, 1, 2))
    for draft in ("ngram", f"eagle3:{head}"):
        llm = LLM(str(GOLDEN / family), draft, num_draft_tokens=3, **OPTIONS)
        wanted = [expected(family)[f"{name}_greedy"].tolist() for name in PROMPTS]
        for _ in range(2):
            outs = llm.generate([prompt(name, family) for name in PROMPTS], GREEDY)
            assert [out.token_ids for out in outs] == wanted
        assert outs[PROMPTS.index("long")].metrics.cached_tokens > 100


def test_a_chunk_too_small_for_gemmas_pictures_refuses_them(tmp_path):
    folder = shutil.copytree(GOLDEN / "gemma3", tmp_path / "model")
    hf = json.loads((folder / "config.json").read_text()) | {"mm_tokens_per_image": 64}
    (folder / "config.json").write_text(json.dumps(hf))
    llm = LLM(str(folder), **{**OPTIONS, "draft_policy": "auto"})
    with pytest.raises(RequestError, match="a picture's 64 tokens don't fit in a chunk of 32"):
        llm.generate([prompt("one", "gemma3")], GREEDY)


@exhaustive
def test_gemmas_pictures_with_eagle3_under_preemption(tmp_path):
    hf = json.loads((GOLDEN / "gemma3" / "config.json").read_text())["text_config"] | {"model_type": "llama"}
    hf = {key: value for key, value in hf.items() if key not in ("layer_types", "rope_parameters")}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    draft = f"eagle3:{random_eagle3(tmp_path, tuple(range(60)), (0, 1, 2))}"
    llm = LLM(str(GOLDEN / "gemma3"), draft, num_draft_tokens=2, max_total_tokens=256, **OPTIONS)
    names = ["long", "two"]
    outs = llm.generate([prompt(name, "gemma3") for name in names], GREEDY)
    assert [out.token_ids for out in outs] == [expected("gemma3")[f"{name}_greedy"].tolist() for name in names]
    assert any(out.metrics.preemptions for out in outs)


def changed(**fields):
    placed = prompt("one").images[0]
    return Prompt(prompt("one").tokens, (PlacedPicture(dataclasses.replace(placed.picture, **fields), placed.start),))


@pytest.mark.parametrize("given,told", [
    (changed(tokens=5), "image 0 has pixels"), (changed(grid=(1, 4, 4)), "image 0 has pixels"),
    (changed(pixels=np.zeros((24, 23), np.float32)), "image 0 has pixels"),
    (Prompt([1, 2], prompt("one").images), "image 0 takes places 5 to 10 of a prompt of 2 tokens"),
    (Prompt(prompt("one").tokens, prompt("one").images * 2), "image 1 takes places .* begin at 11"),
    (changed(pixels=np.zeros((2**14 + 4, 24), np.float32), grid=(1, 2, 2**13 + 2), tokens=2**12 + 1), "at most 16384"),
])  # fmt: skip
def test_pictures_that_arent_the_models_are_refused_by_number(llm, given, told):
    with pytest.raises(RequestError, match=told):
        llm.generate([given], GREEDY)


def test_models_without_a_tower_refuse_pictures_by_name():
    llm = LLM(str(tiny_checkpoint("qwen3", 64, 0)), **{**OPTIONS, "draft_policy": "auto"})
    with pytest.raises(RequestError, match=r"model_type qwen3\) is served as its text model"):
        llm.generate([prompt("one")], GREEDY)
