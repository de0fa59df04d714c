"""The host's memory behind the page pool: what comes back is what a cold start computes, drafts and states included."""

import jax
import numpy as np
import pytest

from jaxspec import LLM, ConfigError, SamplingParams
from jaxspec.engine import host_cache as module
from jaxspec.parallel.hosts import Leader
from tests.drafters import test_dflash as dflash
from tests.engine import test_hybrid as hybrid
from tests.engine import test_lossless as lossless
from tests.support import engines, heads
from tests.support.hosting import check, host_cache
from tests.support.tiny import tiny_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LENGTHS = (97, 90, 80, 65, 64, 41, 33)  # more than twice the pool's pages


def engine(draft):
    if draft == "hybrid":
        return hybrid.engine("qwen3_5", "mtp"), hybrid.VOCAB
    if draft == "eagle3":
        return lossless.engine("qwen3", str(heads.folder_for(draft))), 256
    if draft == "dflash":
        return dflash.watched_engine(), 256
    return engines.engine(draft), 256


def conversations(vocab, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).tolist() for n in LENGTHS]


def said(outs):
    return [(out.token_ids, out.metrics.verify_rounds) for out in outs]


def alone(llm, prompts, settings=GREEDY):
    return [out for prompt in prompts for out in llm.generate([prompt], settings)]


@pytest.mark.parametrize("draft", ["ngram", "eagle3", "hybrid", pytest.param("dflash", marks=pytest.mark.exhaustive)])
def test_what_comes_back_is_what_a_cold_start_computes(draft):
    """Rounds are compared too: a drafter whose cache didn't come back would draft worse. Then many at once."""
    llm, vocab = engine(draft)
    prompts = conversations(vocab)
    with host_cache(llm) as cache:
        cold = alone(llm, prompts)
        assert not any(out.metrics.cached_on_host for out in cold)
        assert sum(len(prompt) for prompt in prompts) > 2 * 208
        warm = alone(llm, prompts)
        assert said(warm) == said(cold)
        page = llm.engine.config.page_size
        for out in warm:
            whole = (len(out.prompt_token_ids) - 1) // page * page
            assert out.metrics.cached_tokens == whole, "no page is lost to drafts or states"
        assert sum(out.metrics.cached_on_host for out in warm) > 208
        following = [prompt + out.token_ids + [7] for prompt, out in zip(prompts, cold, strict=True)]
        turned = llm.generate(following, GREEDY)  # together: loads, prompts and rounds in the same steps
        assert sum(out.metrics.cached_on_host for out in turned) > 208
        figures = cache.figures
        assert figures.loaded_blocks and not (figures.lost_blocks or figures.failed_loads or figures.damaged_blocks)
    assert [out.token_ids for out in alone(llm, following)] == [out.token_ids for out in turned]


def test_preempted_and_aborted_requests_leave_the_tiers_whole(monkeypatch):
    llm, vocab = engine("ngram")
    prompts = conversations(vocab)
    with host_cache(llm) as cache:
        alone(llm, prompts[:3])
        monkeypatch.setattr(llm.engine.scheduler, "waiting", type(llm.engine.scheduler.waiting)())
        for prompt in prompts[:3]:
            llm.engine.add(llm.engine.prepare(prompt, GREEDY))
        llm.engine.step()
        loading = llm.engine.scheduler.loading[:]
        assert loading
        llm.engine.scheduler.preempt(loading[0])
        llm.engine.abort(loading[-1].owner.request.id)
        while llm.engine.busy:
            llm.engine.step()
        check(cache)
    long = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    together = llm.generate(prompts[3:], long)
    with host_cache(llm):
        again = llm.generate(prompts[3:], long)
        assert [out.token_ids for out in again] == [out.token_ids for out in together]
        assert sum(out.metrics.preemptions for out in again)


def flipped(block):
    words = np.array(block.data)
    words[3] ^= 1 << 7
    block.data = jax.device_put(words, block.data.sharding)


@pytest.mark.parametrize("draft", ["ngram", "hybrid"])
def test_a_changed_bit_costs_a_page_and_nothing_else(draft):
    llm, vocab = engine(draft)
    prompts = conversations(vocab)
    with host_cache(llm) as cache:
        cold = alone(llm, prompts)
        for block in list(cache.tier._blocks.values())[::5]:
            flipped(block)
        assert said(alone(llm, prompts)) == said(cold)
        assert cache.figures.damaged_blocks and cache.figures.failed_loads
        assert said(alone(llm, prompts)) == said(cold), "they are copied anew"


@pytest.mark.parametrize("to_host", [True, False], ids=["store", "load"])
@pytest.mark.parametrize(
    "error", [jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED"), MemoryError()], ids=["jax", "host"]
)
def test_a_copy_that_fails_loses_cached_pages_alone(to_host, error, monkeypatch):
    llm, vocab = engine("ngram")
    prompts, put, calls = conversations(vocab)[:4], jax.device_put, []

    def failing(x, to=None, **kwargs):
        if isinstance(to, list) and (to[0].memory_kind == "pinned_host") == to_host:
            calls.append(to)
            if len(calls) % 3:
                raise error
        return put(x, to, **kwargs)

    with host_cache(llm) as cache:
        cold = alone(llm, prompts)
        with monkeypatch.context() as patch:
            patch.setattr(module.jax, "device_put", failing)
            assert said(alone(llm, prompts)) == said(cold)
            other = alone(llm, conversations(vocab, 1)[:4])
            assert said(alone(llm, prompts)) == said(cold)
        assert cache.figures.lost_blocks and calls
        assert said(alone(llm, conversations(vocab, 1)[:4])) == said(other)


@pytest.mark.parametrize("draft", ["ngram", "hybrid"])
def test_memory_is_bounded_by_the_option_and_the_oldest_go_first(draft, monkeypatch):
    llm, vocab = engine(draft)
    prompts, most = conversations(vocab), []
    with host_cache(llm, pages=20) as cache:
        free, step = cache.tier.make_room, llm.engine.step
        monkeypatch.setattr(cache.tier, "make_room", lambda size: most.append(cache.tier.used) or free(size))
        monkeypatch.setattr(llm.engine, "step", lambda: most.append(cache.tier.used) or step())
        cold = alone(llm, prompts)
        assert said(alone(llm, prompts)) == said(cold)
        assert cache.tier.capacity // 2 < max(most) <= cache.tier.capacity and cache.tier.evicted
        newest = alone(llm, prompts[-2:-1])
        assert newest[0].metrics.cached_tokens


def test_a_flush_and_new_weights_leave_nothing_on_the_host():
    llm, vocab = engine("ngram")
    prompts = conversations(vocab)[:4]
    with host_cache(llm) as cache:
        alone(llm, prompts)
        assert len(cache.tier)
        assert llm.engine.flush_cache() and not len(cache.tier) and not cache.tier.used
        assert not any(out.metrics.cached_tokens for out in alone(llm, prompts))
        llm.engine.scheduler.change_version(0)
        assert not len(cache.tier)
        alone(llm, prompts[2:])
        kept = len(cache.tier)
        alone(llm, conversations(vocab, 2)[:3])
        assert len(cache.tier) > kept


def test_no_reload_that_takes_longer_than_computing(monkeypatch):
    llm, vocab = engine("ngram")
    prompts = conversations(vocab)[:5]
    with host_cache(llm) as cache:
        cold = alone(llm, prompts)
        monkeypatch.setattr(cache.tier, "speed", 1.0)
        monkeypatch.setattr(type(llm.engine.prefill_budget), "token", 1e-6)
        slow = alone(llm, prompts)
        assert said(slow) == said(cold) and not any(out.metrics.cached_on_host for out in slow)
        assert cache.tier.declined >= len(prompts) - 2
        monkeypatch.setattr(type(llm.engine.prefill_budget), "token", 1e3)
        assert any(out.metrics.cached_on_host for out in alone(llm, prompts))


def test_a_size_that_cannot_be_is_refused_with_words(monkeypatch):
    runner = engines.engine("ngram").engine.runner
    with pytest.raises(ConfigError, match=r"--host-kv-gb \S+: one page of 8 tokens takes"):
        module.HostCache(runner, 1074)
    with pytest.raises(ConfigError, match="more than this machine has"):
        module.HostCache(runner, 2**50)
    monkeypatch.setattr(runner, "hosts", object.__new__(Leader))
    with pytest.raises(ConfigError, match="several hosts"):
        module.HostCache(runner, 2**30)


def test_the_option_gives_an_engine_its_cache(caplog):
    llm = LLM(engines.checkpoint(), "ngram", **engines.SMALL | {"host_kv_gb": 0.25})
    cache = llm.engine.host_cache
    assert llm.engine.stats()["host_cache_bytes"] == 2**28 and llm.engine.scheduler.host is cache.tier
    with caplog.at_level("INFO", "jaxspec"):
        cache._warm_up()
    assert cache.tier.speed and "which come back at" in caplog.text
    llm = LLM(engines.checkpoint(), "ngram", **engines.SMALL | {"host_kv_gb": 0.25, "disable_prefix_cache": True})
    assert llm.engine.host_cache is None


def neighbour(name):
    """An engine whose pages are of another kind."""
    changes = {"fp8": {"kv_cache_dtype": "fp8"}, "deterministic": {"deterministic": True, "dtype": "bfloat16"}}
    model = str(tiny_checkpoint("deepseek_v3", 256, 2)) if name == "latent" else engines.checkpoint()
    return LLM(model, "ngram", num_draft_tokens=3, **engines.CROWDED | changes.get(name, {}))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["fp8", "latent", "deterministic"])
def test_pages_of_other_kinds_come_back_as_they_were(name):
    llm, prompts = neighbour(name), conversations(256)
    with host_cache(llm) as cache:
        cold = alone(llm, prompts)
        assert said(alone(llm, prompts)) == said(cold)
        assert cache.figures.loaded_blocks and not cache.figures.damaged_blocks
