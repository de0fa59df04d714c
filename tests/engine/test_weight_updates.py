"""Weights that change under a running engine, pauses, and memory that is given back."""

import asyncio
import dataclasses
import gc
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import AsyncLLM, CheckpointError, RequestError
from jaxspec.checkpoint import locate
from jaxspec.engine import weights
from jaxspec.models.weights import Int4, Mxfp4
from jaxspec.scheduling.audit import audit
from tests.support import drawn
from tests.support.engines import SELF, SMALL, assert_own, checkpoint, engine, params, tokens
from tests.support.sample import rare
from tests.support.tiny import tiny_checkpoint

PROMPTS = [tokens(n) for n in (5, 23, 40)]


def others(llm, seed=1):
    """Other weights, of an engine's shapes, every one different from its own."""
    keys = iter(jax.random.split(jax.random.key(seed), 1000))
    change = lambda x: x + 0.3 * drawn.normal(next(keys), x.shape, x.dtype)  # noqa: E731
    return jax.tree.map(change, llm.engine.runner.model.params)


def texts(llm, settings=None, prompts=PROMPTS):
    outs = llm.generate(prompts, settings or params())
    assert_own(llm.engine.runner.model, outs)
    return [out.token_ids for out in outs]


@pytest.fixture
def restored():
    """Engines whose first weights are put back when the test ends."""
    kept = []

    def keep(llm):
        kept.append((llm, llm.engine.runner.model.params, llm.engine.runner.draft.params))
        return llm

    yield keep
    for llm, target, draft in kept:
        llm.resume_memory()
        llm.update_weights(target, draft or None)


def test_texts_are_the_new_weights_own_and_cached_pages_are_not(restored):
    llm = restored(engine("ngram"))
    before = texts(llm)
    assert texts(llm) == before
    compiled = llm.engine.runner.programs.ready
    assert llm.update_weights(others(llm), version="step 1") == "step 1"
    after = llm.generate(PROMPTS, params())
    assert_own(llm.engine.runner.model, after)
    assert [out.token_ids for out in after] != before
    assert [out.metrics.weight_version for out in after] == ["step 1"] * 3
    assert [out.metrics.cached_tokens for out in after] == [0, 0, 0]
    again = llm.generate(PROMPTS, params())
    assert again[2].metrics.cached_tokens and [out.token_ids for out in again] == [out.token_ids for out in after]
    assert llm.engine.runner.programs.ready == compiled
    audit(llm.engine.scheduler)


def test_arrays_are_taken_by_reference(restored):
    llm = restored(engine("ngram"))
    new = others(llm)
    llm.update_weights(new)
    for mine, given in zip(jax.tree.leaves(llm.engine.runner.model.params), jax.tree.leaves(new), strict=True):
        assert mine is given


def named(folder):
    """The tensors of a checkpoint by their Hugging Face names, on the device."""
    return {name: jnp.asarray(array) for name, array in locate(folder).some(locate(folder).tensors())}


def other_checkpoint():
    return str(tiny_checkpoint("qwen3", 272, 3, tokenizer=True, num_hidden_layers=1))


def test_hugging_face_names_and_folders_give_what_a_start_with_them_gives(restored):
    llm = restored(engine("ngram"))
    wanted = jaxspec.load_model(other_checkpoint()).params
    for given in (named(other_checkpoint()), other_checkpoint()):
        llm.update_weights(others(llm))
        llm.update_weights(given)
        jax.tree.map(np.testing.assert_array_equal, llm.engine.runner.model.params, wanted)


def test_some_names_change_some_weights(restored):
    llm = restored(engine("ngram"))
    before = llm.engine.runner.model.params
    llm.update_weights({"model.norm.weight": before["norm"] * 2})
    after = llm.engine.runner.model.params
    np.testing.assert_array_equal(after["norm"], before["norm"] * 2)
    assert after["embed"] is before["embed"]


def test_weights_that_do_not_fit_are_named_and_change_nothing(restored):
    llm = restored(engine("ngram"))
    before, width = llm.engine.runner.model.params, llm.engine.model_config.hidden_size
    query = "model.layers.0.self_attn.q_proj.weight"
    wrong = [
        ({"model.norm.weight": jnp.ones(width + 1)}, "model.norm.weight is"),
        ({"model.nrm.weight": jnp.ones(width)}, "the model has no model.nrm.weight, which was given$"),
        ({"a": 1, "b": 2}, "the model has no a, which was given; 1 others aren't its either$"),
        ({"model.norm.weight": "x"}, "model.norm.weight must be an array, got str"),
        (before | {"norm": "x"}, r"target\['norm'\] must be an array, got str"),
        ({query: named(other_checkpoint())[query]}, "k_proj.weight"),
        (before | {"norm": jnp.ones(width + 1)}, r"target\['norm'\] is"),
        (before | {"layers": []}, "structure"),
        (str(tiny_checkpoint("qwen3", 272, 2, tokenizer=True, num_hidden_layers=2)), "another model"),
        (None, "needs weights"),
        ({"model.norm.weight": before["norm"].at[3].set(jnp.nan)}, "model.norm.weight has numbers that aren't finite$"),
        (before | {"norm": before["norm"].at[0].set(-jnp.inf)}, "model.norm.weight has numbers that aren't finite"),
    ]
    for given, message in wrong:
        with pytest.raises(CheckpointError, match=message):
            llm.update_weights(given)
    with pytest.raises(CheckpointError, match="no weights"):
        llm.update_weights(draft={"embed": before["embed"]})
    with pytest.raises(RequestError, match="version must be a string, got 3"):
        llm.update_weights(before, version=3)
    assert llm.engine.runner.model.params is before and llm.engine.rollout.figures()["released"] == []


@pytest.mark.parametrize("how, by_name", [("fp8", True), ("int4", False), rare("fp8", False), rare("int4", True)])
def test_quantised_engines_quantise_what_they_are_given(how, by_name):
    """Compare with an engine that starts with the new weights."""
    options = SMALL | {"quantization": how}
    llm, other = (jaxspec.LLM(folder, "none", **options) for folder in (checkpoint(), other_checkpoint()))
    llm.update_weights(named(other_checkpoint()) if by_name else jaxspec.load_model(other_checkpoint()).params)
    found, wanted = llm.engine.runner.model.params, other.engine.runner.model.params
    assert any(leaf.dtype.itemsize == 1 for leaf in jax.tree.leaves(found))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_formats_that_are_not_made_while_serving_are_named():
    own = jaxspec.load_model(checkpoint()).params["layers"][0]["qkv"]
    for format in (Int4(32, zeros=True), Int4(32, ordered=True), Mxfp4()):
        with pytest.raises(CheckpointError, match=f"the engine's is {type(format).__name__}.* isn't made of"):
            weights._check_makes(dataclasses.replace(own, format=format), "x")


def test_an_engine_is_updated_while_it_sleeps(restored):
    """Its pages may be away, its weights may not; and a pause takes a drafter's update alone."""
    llm = restored(engine(SELF))
    new = others(llm)
    sent = llm.engine.rollout.prepare(new, None, None)
    llm.release_memory(["weights"])
    for late in (lambda: llm.update_weights(new), llm.engine.rollout.update(sent).result):
        with pytest.raises(RequestError, match="the weights are released; resume them before"):
            late()
    llm.resume_memory()
    llm.release_memory(["kv_cache"])
    llm.update_weights(new, version="asleep")
    llm.update_weights(draft=new)
    llm.resume_memory()
    outs = llm.generate(PROMPTS, params())
    assert_own(llm.engine.runner.model, outs)
    assert outs[1].metrics.accept_length > 3 and llm.engine.rollout.version != "asleep"


def test_a_drafter_is_updated_with_its_target_or_alone(restored):
    llm = restored(engine(SELF))
    new = others(llm)
    accepted = lambda: llm.generate(PROMPTS, params())[1].metrics.accept_length  # noqa: E731
    assert accepted() > 3
    llm.update_weights(new)
    assert accepted() < 2  # the drafter was left behind
    llm.update_weights(draft=new)
    assert accepted() > 3
    assert_own(llm.engine.runner.model, llm.generate(PROMPTS, params()))


def test_memory_is_given_back_and_texts_are_the_same():
    llm = engine(SELF)

    def live():
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    wanted, length = texts(llm), llm.generate(PROMPTS, params())[1].metrics.accept_length
    before = live()
    for turn in range(7):
        llm.release_memory(None if turn % 3 else ["kv_cache"])
        plan = llm.engine.runner.plan
        assert live() <= before - plan.kv_bytes - (plan.weight_bytes if turn % 3 else 0)
        with pytest.raises(RequestError, match="resume_memory"):
            llm.generate(PROMPTS, params())
        llm.resume_memory()
        assert abs(live() / before - 1) < 0.01
        if turn % 5 == 0:
            assert texts(llm) == wanted
    assert llm.generate(PROMPTS, params())[1].metrics.accept_length == length
    with pytest.raises(RequestError, match="tags must be a list of some of kv_cache, weights, got 'kv_cache'"):
        llm.release_memory("kv_cache")
    with pytest.raises(RequestError, match="tags must be a list of some of kv_cache, weights, got 'all'"):
        llm.release_memory(["all"])


class Callers:
    """An `AsyncLLM` over a shared engine, and requests that are begun before something happens."""

    def __init__(self, llm):
        with mock.patch("jaxspec.engine.async_llm.Engine", lambda options, **_: llm.engine):
            self.llm = AsyncLLM()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await asyncio.to_thread(self.llm.close)

    async def _run(self, prompt, begun, settings):
        out = []
        async for delta in self.llm.generate(prompt, settings):
            begun.set()
            out.append(delta)
        return [token for delta in out for token in delta.token_ids], out[-1]

    async def begin(self, prompts, wait=1, **settings):
        """Tasks of requests, of which the first `wait` have begun."""
        events = [asyncio.Event() for _ in prompts]
        settings = params(**{"max_tokens": 60} | settings)
        tasks = [asyncio.create_task(self._run(*each, settings)) for each in zip(prompts, events, strict=True)]
        await asyncio.gather(*(event.wait() for event in events[:wait]))
        return tasks


def own(model, prompt, found):
    """Whether tokens are a model's own greedy ones."""
    logits = np.asarray(jaxspec.logits(model, [[*prompt, *found]]))[0].argmax(-1)
    return found == logits[len(prompt) - 1 : -1].tolist()


@pytest.mark.parametrize("updates, at_once", [(4, 3), pytest.param(50, 64, marks=pytest.mark.exhaustive)])
async def test_no_request_is_lost_and_none_mixes_versions(updates, at_once, restored):
    async with Callers(restored(engine(SELF))) as callers:
        llm, versions = callers.llm, []
        rollout, model = llm.engine.rollout, llm.engine.runner.model
        models, before = {rollout.version: model}, rollout.figures()["updates"]
        tasks, prompts = [], [tokens(7 + i % 12, i) for i in range(updates * at_once)]
        for step in range(updates):
            versions += [list(models)[-1]] * at_once
            some = prompts[at_once * step : at_once * (step + 1)]
            tasks += await callers.begin(some, wait=not step, max_tokens=20)
            new = jax.tree.map(lambda x, step=step: x * (1.1 + step), model.params)
            asked = asyncio.create_task(llm.control("update", target=new, draft=new, version=str(step)))
            while rollout.figures()["updates"] - before <= step:
                await asyncio.sleep(0.001)
            models[str(step)] = dataclasses.replace(model, params=new)
        outs = await asyncio.gather(*tasks)
        assert (await asked)["weight_version"] == str(updates - 1)
        assert [last.metrics.weight_version for _, last in outs] == versions
        for prompt, (found, last) in zip(prompts, outs, strict=True):
            assert len(found) == 20 and own(models[last.metrics.weight_version], prompt, found)
        assert min(last.metrics.accept_length for _, last in outs) > 3, "the drafter follows"
        audit(llm.engine.scheduler)


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
async def test_requests_of_a_pause_go_on_under_the_new_weights_or_end(mode, restored):
    async with Callers(restored(engine("ngram"))) as callers:
        llm = callers.llm
        (task,) = await callers.begin(PROMPTS[:1], max_tokens=100)
        state = await llm.control("pause", mode=mode)
        assert state["paused"] == mode and state["requests"] == 1
        (later,) = await callers.begin([PROMPTS[2]], wait=0)
        old = llm.engine.runner.model
        new = jax.tree.map(lambda x: x * 1.3, old.params)
        state = await llm.control("update", target=new, version="new")
        assert state["weight_version"] == "new" and not later.done()
        if mode == "retract":
            assert await llm.flush_cache()
            await llm.control("release", tags=None)
            with pytest.raises(RequestError, match="released; resume them first"):
                await llm.control("resume")
            await llm.control("restore", tags=None)
        await llm.control("resume")
        (found, last), (other, second) = await asyncio.gather(task, later)
        assert own(llm.engine.runner.model, PROMPTS[2], other) and second.metrics.weight_version == "new"
        assert last.finish_reason == ("abort" if mode == "abort" else "length")
        if mode != "abort":
            at = next(i for i in range(len(found) + 1) if not own(old, PROMPTS[0], found[: i + 1]))
            assert 0 < at < 100 == len(found)
        if mode == "retract":
            assert own(llm.engine.runner.model, [*PROMPTS[0], *found[:at]], found[at:])
        again = await asyncio.gather(*await callers.begin([[*PROMPTS[0], *found]]))
        assert own(llm.engine.runner.model, [*PROMPTS[0], *found], again[0][0])  # no page of the old weights was found
        audit(llm.engine.scheduler)
